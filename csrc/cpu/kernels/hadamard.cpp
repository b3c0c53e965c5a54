// Hadamard transform of blocks of n numbers, n a power of two, in Sylvester's order: sums and
// differences of numbers at a distance of 1, then 2, then 4 ... in float32, as the reference has
// them, bit for bit; then a factor of 1 / sqrt(n). A number passes log2 n + 1 roundings, and that
// to its type.
//
// Distances within a vector are shuffles; of the others two are done at a time, in the first cache.
#include "loops.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

template <int kDistance>
struct OtherAt {
  static constexpr int source(int k) { return k ^ kDistance; }
};
template <int kDistance>
ANYCHIP_INLINE RegisterF swap_at(RegisterF v) {
  return shuffle<OtherAt<kDistance>>(v, v);
}
template <int kDistance, class H>
ANYCHIP_INLINE Pair<H> swap_at(Pair<H> v) {
  if constexpr (kDistance * sizeof(float) == sizeof(H)) {
    return {v.high, v.low};
  } else {
    return {swap_at<kDistance>(v.low), swap_at<kDistance>(v.high)};
  }
}

// The lower lane of two gets their sum, the upper one lower - upper.
template <int kDistance>
ANYCHIP_INLINE F32 within(F32 v, U32 lane) {
  constexpr uint32_t kShift = kDistance == 1 ? 31 : kDistance == 2 ? 30 : kDistance == 4 ? 29 : 28;
  const U32 sign = (lane << kShift) & 0x80000000u;
  return swap_at<kDistance>(v) + float_of(bits_of(v) ^ sign);
}

ANYCHIP_INLINE F32 within_vector(F32 v, U32 lane, int64_t block) {
  if (block > 1) v = within<1>(v, lane);
  if (block > 2) v = within<2>(v, lane);
  if (block > 4) v = within<4>(v, lane);
  if (block > 8) v = within<8>(v, lane);
  return v;
}

// Of a whole block: the distances from a vector's width on.
ANYCHIP_INLINE void across_vectors(float* values, int64_t block) {
  const AllLanes all;
  int64_t distance = kLanes;
  for (; 4 * distance <= block; distance *= 4) {
    for (int64_t first = 0; first < block; first += 4 * distance) {
      for (int64_t i = first; i < first + distance; i += kLanes) {
        float* const at[4] = {values + i, values + i + distance, values + i + 2 * distance,
                              values + i + 3 * distance};
        const F32 a = load(at[0], all), b = load(at[1], all);
        const F32 c = load(at[2], all), d = load(at[3], all);
        const F32 ab = a + b, cd = c + d, a_b = a - b, c_d = c - d;
        store(at[0], ab + cd, all), store(at[1], a_b + c_d, all);
        store(at[2], ab - cd, all), store(at[3], a_b - c_d, all);
      }
    }
  }
  for (int64_t i = 0; 2 * distance <= block && i < distance; i += kLanes) {
    const F32 a = load(values + i, all), b = load(values + i + distance, all);
    store(values + i, a + b, all), store(values + i + distance, a - b, all);
  }
}

template <class T>
[[gnu::flatten]] void transform(const Hadamard& args, float* scratch, Range elements) {
  const T* x = static_cast<const T*>(args.x) + elements.begin;
  T* y = static_cast<T*>(args.y) + elements.begin;
  const int64_t n = elements.end - elements.begin;
  const float factor = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(args.block)));
  U32 lane;
  count_lanes(lane, 0);
  for_each_vector(0, n, [&](int64_t i, auto lanes) {
    store(scratch + i, within_vector(load_ahead(x + i, lanes), lane, args.block), lanes);
  });
  for (int64_t i = 0; args.block > kLanes && i < n; i += args.block) {
    across_vectors(scratch + i, args.block);
  }
  for_each_vector(
      0, n, [&](int64_t i, auto lanes) { store(y + i, load(scratch + i, lanes) * factor, lanes); });
}

}  // namespace

void hadamard(const Hadamard& args, float* scratch, Range elements) {
  visit_dtype(args.dtype, [&](auto t) { transform<decltype(t)>(args, scratch, elements); });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
