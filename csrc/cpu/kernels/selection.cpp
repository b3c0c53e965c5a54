// The large numbers of a row, for top_k: which they are and how large, in the order of the row.
#include "loops.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

// Bit k is set where lane k is.
ANYCHIP_INLINE uint32_t set_lanes(RegisterI mask) {
#if defined(__AVX512F__)
  return static_cast<uint32_t>(_mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(mask)));
#else
  uint32_t set = 0;
  for (int k = 0; k < kRegisterLanes; ++k) set |= (static_cast<uint32_t>(mask[k]) & 1u) << k;
  return set;
#endif
}
template <class H>
ANYCHIP_INLINE uint32_t set_lanes(Pair<H> mask) {
  return set_lanes(mask.low) | set_lanes(mask.high) << (sizeof(H) / 4);
}

ANYCHIP_INLINE uint32_t present(AllLanes) { return 0xffffu; }
ANYCHIP_INLINE uint32_t present(FirstLanes lanes) { return (1u << lanes.count) - 1u; }

// Bits of a magnitude are in the order of the magnitudes; every NaN is as large as another.
template <class T>
[[gnu::flatten]] int64_t find(const T* x, int64_t n, uint32_t smallest, uint64_t* found) {
  uint64_t* next = found;
  for_each_vector(0, n, [&](int64_t i, auto lanes) {
    const U32 bits = bits_of(load(x + i, lanes)) & 0x7fffffffu;
    const U32 size = select(bits > 0x7f800000u, fill<U32>(kLargestSize), bits);
    uint32_t set = set_lanes(size >= smallest) & present(lanes);
    if (set == 0) return;
    uint32_t sizes[kLanes];
    write(sizes, size);
    for (; set != 0; set &= set - 1) {
      const int lane = __builtin_ctz(set);
      *next++ = place_of(sizes[lane], static_cast<uint32_t>(i) + static_cast<uint32_t>(lane));
    }
  });
  return next - found;
}

}  // namespace

int64_t find_large(DType dtype, const void* x, int64_t n, uint32_t smallest, uint64_t* found) {
  int64_t count = 0;
  visit_dtype(
      dtype, [&](auto t) { count = find(static_cast<const decltype(t)*>(x), n, smallest, found); });
  return count;
}

}  // namespace anychip::cpu::ANYCHIP_ISA
