// Rotary position embedding (Su et al. 2021): pairs of a head are rotated by the angle of their
// position. Half layout pairs i with i + D / 2, interleaved layout 2 i with 2 i + 1.
//
// Rounding: two products and one sum, then the rounding to the tensor's type:
// |error| <= 1.5 * 2^-24 * (|x1 cos| + |x2 sin|) in float32.
#include "loops.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

// One tensor's heads at one position.
template <class T>
struct Heads {
  const T* x;
  T* y;
  int64_t count, dim;
  bool past;
};

struct EvenOfTwo {
  static constexpr int source(int k) { return 2 * k; }
};
struct OddOfTwo {
  static constexpr int source(int k) { return 2 * k + 1; }
};

// Of bfloat16 by even and odd angles, as long as there are two vectors of them; returns how many.
template <class T>
ANYCHIP_INLINE int64_t rotate_two_vectors(const Heads<T>& heads, const float* cos, const float* sin,
                                          float direction) {
  const int64_t half = heads.dim / 2;
  int64_t i = 0;
  if constexpr (kHasTwoVectors<T>) {
    if (heads.past && half % (2 * kLanes) != 0) return 0;  // those stores are to whole registers
    const auto split = [](const float* p, float factor) {
      const auto low = load(p, AllLanes{}) * factor, high = load(p + kLanes, AllLanes{}) * factor;
      return joined(shuffle<EvenOfTwo>(low, high), shuffle<OddOfTwo>(low, high));
    };
    for (; i + 2 * kLanes <= half; i += 2 * kLanes) {
      const auto c = split(cos + i, 1.0f), s = split(sin + i, direction);
      for (int64_t head = 0; head < heads.count; ++head) {
        const T* x = heads.x + head * heads.dim + i;
        T* y = heads.y + head * heads.dim + i;
        const auto x1 = joined(load_ahead(x, EvenLanes{}), load(x, OddLanes{}));
        const auto x2 = joined(load_ahead(x + half, EvenLanes{}), load(x + half, OddLanes{}));
        store(y, x1 * c - x2 * s, TwoVectors{}, heads.past);
        store(y + half, x2 * c + x1 * s, TwoVectors{}, heads.past);
      }
    }
  }
  return i;
}

template <class T>
ANYCHIP_INLINE void rotate_halves(const Heads<T>& heads, const float* cos, const float* sin,
                                  float direction) {
  const int64_t half = heads.dim / 2, whole = half / kLanes * kLanes;
  const int64_t done = rotate_two_vectors(heads, cos, sin, direction);
  if (done == half) return;
  const auto rotate = [&](int64_t head, int64_t i, F32 c, F32 s, auto lanes) {
    const T* x = heads.x + head * heads.dim + i;
    T* y = heads.y + head * heads.dim + i;
    const F32 x1 = load_ahead(x, lanes);
    const F32 x2 = load_ahead(x + half, lanes);
    store(y, x1 * c - x2 * s, lanes, heads.past);
    store(y + half, x2 * c + x1 * s, lanes, heads.past);
  };
  // Head by head, as they lie in memory; of what fills no vector the angles are taken once.
  for (int64_t head = 0; head < heads.count; ++head) {
    for_each_vector(done, whole, [&](int64_t i, auto lanes) {
      rotate(head, i, load(cos + i, lanes), load(sin + i, lanes) * direction, lanes);
    });
  }
  if (whole == half) return;
  const FirstLanes rest{half - whole};
  const F32 c = load(cos + whole, rest), s = load(sin + whole, rest) * direction;
  for (int64_t head = 0; head < heads.count; ++head) rotate(head, whole, c, s, rest);
}

// Sixteen lanes are eight pairs: y = x * (c, c) + (x2, x1) * (-s, s).
template <class T>
ANYCHIP_INLINE void rotate_neighbours(const Heads<T>& heads, const float* cos, const float* sin,
                                      float direction) {
  for_each_vector(0, heads.dim, [&](int64_t i, auto lanes) {
    float c_lanes[kLanes] = {}, s_lanes[kLanes] = {};
    const int64_t pairs = heads.dim - i < kLanes ? (heads.dim - i) / 2 : kLanes / 2;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      c_lanes[2 * pair] = c_lanes[2 * pair + 1] = cos[i / 2 + pair];
      s_lanes[2 * pair + 1] = sin[i / 2 + pair] * direction;
      s_lanes[2 * pair] = -s_lanes[2 * pair + 1];
    }
    const F32 c = load(c_lanes, AllLanes{});
    const F32 s = load(s_lanes, AllLanes{});
    for (int64_t head = 0; head < heads.count; ++head) {
      const F32 x = load(heads.x + head * heads.dim + i, lanes);
      store(heads.y + head * heads.dim + i, x * c + swap_neighbours(x) * s, lanes, heads.past);
    }
  });
}

template <class T>
[[gnu::flatten]] void rotate_position(const Rope& args, const Heads<T>& heads, int64_t position) {
  const int64_t angle = position % args.seq * (args.head_dim / 2);
  const float direction = args.inverse ? -1.0f : 1.0f;
  if (args.interleaved) {
    rotate_neighbours(heads, args.cos + angle, args.sin + angle, direction);
  } else {
    rotate_halves(heads, args.cos + angle, args.sin + angle, direction);
  }
}

template <class T>
void rotate_range(const Rope& args, const void* x, void* y, int64_t count, bool past,
                  Range positions) {
  if (!x) return;
  for (int64_t position = positions.begin; position < positions.end; ++position) {
    const int64_t at = position * count * args.head_dim;
    rotate_position<T>(
        args, {static_cast<const T*>(x) + at, static_cast<T*>(y) + at, count, args.head_dim, past},
        position);
  }
}

}  // namespace

void rope(const Rope& args, bool past, Range positions) {
  visit_dtype(args.dtype, [&](auto t) {
    using T = decltype(t);
    rotate_range<T>(args, args.q, args.q_out, args.heads, past, positions);
    rotate_range<T>(args, args.k, args.k_out, args.kv_heads, past, positions);
  });
  finish_stores(past);
}

}  // namespace anychip::cpu::ANYCHIP_ISA
