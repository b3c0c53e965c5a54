// Update rules, one range of one tensor at a time: AdamW, SGD, Lion, LAMB.
//
// Each is one pass: what is read is read once, what is written is written once. Float32 throughout.
// Parameters and gradients of 16 bits, and the copies, pass through tiles that stay in the first
// cache, so that every rule is compiled for float32 alone.
//
// AdamW takes its factors in float64 and rounds them once. SGD, Lion and LAMB round where their
// references (anychip.operators) round, in the same order, and give the same bits; but for LAMB's
// square root, which is the nearest number here, and only close to it in torch.
#include "codes.h"
#include "squares.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

constexpr int64_t kTile = 1024;
constexpr int64_t kAhead = 512;  // bytes, of each stream of AdamW, Lion and LAMB

ANYCHIP_INLINE char* element(const TensorRef& tensor, int64_t i) {
  return static_cast<char*>(tensor.data) + i * element_size(tensor.dtype);
}

// n elements from `begin` on: themselves, or converted into `tile`.
ANYCHIP_INLINE float* as_floats(const TensorRef& tensor, int64_t begin, int64_t n, float* tile) {
  char* data = element(tensor, begin);
  if (tensor.dtype == DType::kFloat32) return reinterpret_cast<float*>(data);
  to_float(tensor.dtype, data, tile, n);
  return tile;
}

// body(p, g, m, v, n) for consecutive tiles; m and v are null where the rule has no such state.
template <class Body>
ANYCHIP_INLINE void for_each_tile(const UpdateTensor& tensor, Range elements, const Body& body) {
  alignas(64) float p_tile[kTile], g_tile[kTile];
  for (int64_t begin = elements.begin; begin < elements.end; begin += kTile) {
    const int64_t n = begin + kTile < elements.end ? kTile : elements.end - begin;
    float* p = as_floats(tensor.param, begin, n, p_tile);
    const float* g = as_floats(tensor.grad, begin, n, g_tile);
    const auto state = [&](int number) {
      auto* values = static_cast<float*>(tensor.states[number]);
      return values ? values + begin : nullptr;
    };
    body(p, g, state(0), state(1), n);
  }
}

// The same, where body leaves the new parameter in p, for it and its copy.
template <class Body>
ANYCHIP_INLINE void update_tiles(const UpdateTensor& tensor, Range elements, const Body& body) {
  const TensorRef& param = tensor.param;
  const TensorRef& low = tensor.low_precision;
  int64_t begin = elements.begin;
  for_each_tile(tensor, elements, [&](float* p, const float* g, float* m, float* v, int64_t n) {
    body(p, g, m, v, n);
    if (param.dtype != DType::kFloat32) {
      from_float(param.dtype, p, element(param, begin), n);
      if (low.data) to_float(param.dtype, element(param, begin), p, n);
    }
    if (low.data) from_float(low.dtype, p, element(low, begin), n);
    begin += n;
  });
}

// The gradient without its loss scale, clipped. A division by 1 would change nothing.
ANYCHIP_INLINE F32 scaled(F32 grad, const GradFactors& f) {
  return (f.scale == 1.0f ? grad : grad / f.scale) * f.clip;
}

struct Moved {
  F32 average, square, step;
};

// LAMB's moments after this step, and its step before the trust ratio and the learning rate.
ANYCHIP_INLINE Moved moved(F32 param, F32 grad, F32 average, F32 square, const LambFactors& f) {
  const F32 first = average * f.beta1 + grad * f.one_minus_beta1;
  const F32 second = square * f.beta2 + (grad * grad) * f.one_minus_beta2;
  const F32 adam = (first / f.correction1) / (sqrt(second / f.correction2) + f.eps);
  return {first, second, adam + param * f.weight_decay};
}

// The averages of adamw_8bit in codes, as its reference has them, bit for bit.
struct SignedState {
  using Sizes = SmallFloat<3, 15>;
  static constexpr float kLargest = 1.875f;
  ANYCHIP_INLINE static U32 encode(F32 x, F32 ratio) {
    const U32 code = Sizes::encode(ratio);
    return select(code > 0u, code | ((bits_of(x) >> 24) & 0x80u), code);
  }
  ANYCHIP_INLINE static F32 decode(U32 code) {
    return float_of(bits_of(Sizes::decode(code & 0x7fu)) | ((code & 0x80u) << 24));
  }
};
struct UnsignedState {
  using Sizes = SmallFloat<4, 15>;
  static constexpr float kLargest = 1.9375f;
  // A square above 0 keeps the smallest code.
  ANYCHIP_INLINE static U32 encode(F32 x, F32 ratio) {
    return larger(Sizes::encode(ratio), select(x > 0.0f, fill<U32>(1), U32{}));
  }
  ANYCHIP_INLINE static F32 decode(U32 code) { return Sizes::decode(code); }
};

// body(first element, length, scale) for the blocks of n elements.
template <class Body>
ANYCHIP_INLINE void for_each_state_block(float* scales, int64_t n, const Body& body) {
  for (int64_t at = 0; at < n; at += kStateBlock, ++scales) {
    body(at, at + kStateBlock < n ? kStateBlock : n - at, *scales);
  }
}

template <class State>
ANYCHIP_INLINE void decode_state(const uint8_t* codes, float* scales, int64_t n, float* values) {
  for_each_state_block(scales, n, [&](int64_t at, int64_t length, float scale) {
    for_each_vector(at, at + length, [&](int64_t i, auto lanes) {
      store(values + i, State::decode(load_bytes(codes + i, lanes)) * scale, lanes);
    });
  });
}

template <class State>
ANYCHIP_INLINE void encode_state(const float* values, int64_t n, uint8_t* codes, float* scales) {
  for_each_state_block(scales, n, [&](int64_t at, int64_t length, float& scale) {
    const BlockScale made = block_scale(largest_magnitude(values + at, length), State::kLargest);
    scale = made.scale;
    for_each_vector(at, at + length, [&](int64_t i, auto lanes) {
      if (made.factor == 0.0f) return store_bytes(codes + i, U32{}, lanes);
      const F32 x = load(values + i, lanes);
      const F32 ratio = minimum(abs(x) / made.factor, fill<F32>(State::kLargest));
      store_bytes(codes + i, State::encode(x, ratio), lanes);
    });
  });
}

ANYCHIP_INLINE F32 sign(F32 v) {
  const F32 one = fill<F32>(1.0f);
  return select(v > 0.0f, one, F32{}) - select(v < 0.0f, one, F32{});
}

}  // namespace

// Loshchilov and Hutter 2019. Roundings: g 1; m 3; v 4; the update 5 beyond m and v; p 2 more.
[[gnu::flatten]] void adamw(const UpdateTensor& tensor, const AdamWFactors& f, Range elements) {
  update_tiles(tensor, elements, [&](float* p, const float* g, float* m, float* v, int64_t n) {
    for_each_vector(0, n, [&](int64_t i, auto lanes) {
      const F32 grad = load_ahead<kAhead>(g + i, lanes) * f.grad;
      const F32 average = load_ahead<kAhead>(m + i, lanes) * f.beta1 + grad * f.one_minus_beta1;
      const F32 square =
          load_ahead<kAhead>(v + i, lanes) * f.beta2 + (grad * grad) * f.one_minus_beta2;
      const F32 step = (average * f.update) / (sqrt(square) * f.inverse_root + f.eps);
      const F32 param = load_ahead<kAhead>(p + i, lanes) * f.decay - step;
      store(m + i, average, lanes);
      store(v + i, square, lanes);
      store(p + i, param, lanes);
    });
  });
}

// The same step of averages that were decoded, and are encoded again, while they are in the cache.
[[gnu::flatten]] void adamw_8bit(const UpdateTensor& tensor, const AdamWFactors& f,
                                 Range elements) {
  static_assert(kTile % kStateBlock == 0, "a tile is whole blocks");
  alignas(64) float first[kTile], second[kTile];
  for (int64_t begin = elements.begin; begin < elements.end; begin += kTile) {
    const int64_t n = begin + kTile < elements.end ? kTile : elements.end - begin;
    auto* first_codes = static_cast<uint8_t*>(tensor.states[0]) + begin;
    auto* second_codes = static_cast<uint8_t*>(tensor.states[1]) + begin;
    float* first_scales = tensor.scales[0] + begin / kStateBlock;
    float* second_scales = tensor.scales[1] + begin / kStateBlock;
    decode_state<SignedState>(first_codes, first_scales, n, first);
    decode_state<UnsignedState>(second_codes, second_scales, n, second);
    const auto part = [&](const TensorRef& whole) -> TensorRef {
      return {whole.data ? element(whole, begin) : nullptr, n, whole.dtype};
    };
    adamw({part(tensor.param), part(tensor.grad), {first, second}, part(tensor.low_precision)}, f,
          {0, n});
    encode_state<SignedState>(first, n, first_codes, first_scales);
    encode_state<UnsignedState>(second, n, second_codes, second_scales);
  }
}

// Sutskever et al. 2013. Roundings: g 2 and the decay 2; the buffer 2; nesterov 2; p 2 more.
// The factors are copied: a store might change those of the caller, for all that the compiler
// knows, and they would be read anew for every vector. To ask for five streams ahead takes longer
// here.
[[gnu::flatten]] void sgd(const UpdateTensor& tensor, const SgdFactors& factors, Range elements) {
  const SgdFactors f = factors;
  update_tiles(tensor, elements, [&](float* p, const float* g, float* b, float*, int64_t n) {
    for_each_vector(0, n, [&](int64_t i, auto lanes) {
      F32 param = load(p + i, lanes);
      F32 step = scaled(load(g + i, lanes), f.grad);
      if (f.decoupled) {
        param = param * f.decay;
      } else {
        step = step + param * f.weight_decay;
      }
      if (b) {
        const F32 buffer = load(b + i, lanes) * f.momentum + step;
        store(b + i, buffer, lanes);
        step = f.nesterov ? step + buffer * f.momentum : buffer;
      }
      store(p + i, param - step * f.lr, lanes);
    });
  });
}

// Chen et al. 2023. Roundings: g 2; m 3 more; p 3, and a step that is exact but for its sign.
[[gnu::flatten]] void lion(const UpdateTensor& tensor, const LionFactors& f, Range elements) {
  update_tiles(tensor, elements, [&](float* p, const float* g, float* m, float*, int64_t n) {
    for_each_vector(0, n, [&](int64_t i, auto lanes) {
      const F32 grad = scaled(load_ahead<kAhead>(g + i, lanes), f.grad);
      const F32 average = load_ahead<kAhead>(m + i, lanes);
      const F32 step = sign(average * f.beta1 + grad * f.one_minus_beta1);
      store(m + i, average * f.beta2 + grad * f.one_minus_beta2, lanes);
      store(p + i, load_ahead<kAhead>(p + i, lanes) * f.decay - step * f.lr, lanes);
    });
  });
}

// You et al. 2019; rate is lr * trust. Roundings: g 2; m 3 and v 4 more; the step 7; p 3 more.
[[gnu::flatten]] void lamb(const UpdateTensor& tensor, const LambFactors& f, float rate,
                           Range elements) {
  update_tiles(tensor, elements, [&](float* p, const float* g, float* m, float* v, int64_t n) {
    for_each_vector(0, n, [&](int64_t i, auto lanes) {
      const F32 param = load_ahead<kAhead>(p + i, lanes);
      const F32 grad = scaled(load_ahead<kAhead>(g + i, lanes), f.grad);
      const Moved next =
          moved(param, grad, load_ahead<kAhead>(m + i, lanes), load_ahead<kAhead>(v + i, lanes), f);
      store(m + i, next.average, lanes);
      store(v + i, next.square, lanes);
      store(p + i, param - next.step * rate, lanes);
    });
  });
}

[[gnu::flatten]] void add_lamb_squares(const UpdateTensor& tensor, const LambFactors& f,
                                       Range elements, int64_t* weights, int64_t* steps) {
  static_assert(kTile <= kSquaresTile, "squares are added by the tile");
  alignas(64) float tile[kTile];
  for_each_tile(tensor, elements, [&](float* p, const float* g, float* m, float* v, int64_t n) {
    for_each_vector(0, n, [&](int64_t i, auto lanes) {
      const Moved next = moved(load_ahead(p + i, lanes), scaled(load_ahead(g + i, lanes), f.grad),
                               load_ahead(m + i, lanes), load_ahead(v + i, lanes), f);
      store(tile + i, next.step, lanes);
    });
    add_squares_of(p, n, weights);
    add_squares_of(tile, n, steps);
  });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
