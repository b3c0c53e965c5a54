// Activations, one pass: each element is read once and written once.
#include "activation.h"

#include "columns.cuh"
#include "elementwise.cuh"
#include "gelu.cuh"

namespace anychip::cuda {
namespace {

struct Gelu {
  bool tanh;
  __device__ __forceinline__ void operator()(const float (&in)[1], float (&out)[1]) const {
    out[0] = gelu_of(in[0], tanh);
  }
};

struct GeluSlope {
  bool tanh;
  __device__ __forceinline__ void operator()(const float (&in)[2], float (&out)[1]) const {
    out[0] = in[0] * gelu_slope(in[1], tanh);
  }
};

struct Swiglu {
  __device__ __forceinline__ void operator()(const float (&in)[2], float (&out)[1]) const {
    out[0] = in[0] * Sigmoid(in[0]).value * in[1];
  }
};

// silu'(g) = s + g s (1 - s).
struct SwigluSlopes {
  __device__ __forceinline__ void operator()(const float (&in)[3], float (&out)[2]) const {
    const auto [grad, gate, up] = in;
    const Sigmoid s(gate);
    const float silu = gate * s.value;
    out[0] = grad * up * (s.value + silu * s.complement);
    out[1] = grad * silu;
  }
};

struct Geglu {
  bool tanh;
  __device__ __forceinline__ void operator()(const float (&in)[2], float (&out)[1]) const {
    out[0] = gelu_of(in[0], tanh) * in[1];
  }
};

struct GegluSlopes {
  bool tanh;
  __device__ __forceinline__ void operator()(const float (&in)[3], float (&out)[2]) const {
    const auto [grad, gate, up] = in;
    out[0] = grad * up * gelu_slope(gate, tanh);
    out[1] = grad * gelu_of(gate, tanh);
  }
};

template <class T>
struct BiasGelu : OfOneArray<T> {
  T* y;
  bool tanh;

  template <int N>
  __device__ __forceinline__ void apply(NoContext, int64_t first,
                                        const typename OfOneArray<T>::template Inputs<N>& inputs,
                                        const float (&bias)[N], float (&)[N]) const {
    float results[N];
#pragma unroll
    for (int i = 0; i < N; ++i) results[i] = gelu_of(inputs.x[i] + bias[i], tanh);
    store(y + first, results);
  }
};

template <class T>
struct BiasGeluSlope {
  const T* grad;
  const T* x;
  T* dx;
  bool tanh;

  template <int N>
  struct Inputs {
    Adjacent<N, T> grad;
    Adjacent<N, T> x;
  };
  __device__ __forceinline__ NoContext begin() const { return {}; }
  template <int N>
  __device__ __forceinline__ void load(int64_t first, Inputs<N>& inputs) const {
    inputs.grad = load_adjacent<N>(grad + first);
    inputs.x = load_adjacent<N>(x + first);
  }
  template <int N>
  __device__ __forceinline__ void apply(NoContext, int64_t first, const Inputs<N>& inputs,
                                        const float (&bias)[N], float (&sums)[N]) const {
    float results[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      results[i] = inputs.grad[i] * gelu_slope(inputs.x[i] + bias[i], tanh);
      // Of the float32 value, not of what is stored.
      sums[i] += results[i];
    }
    if (dx != nullptr) store(dx + first, results);
  }
};

template <class T, int kInputs, int kOutputs, class Function>
cudaError_t map_to(const void* const (&inputs)[kInputs], void* const (&outputs)[kOutputs],
                   int64_t numel, const Function& function, const Place& place) {
  if (numel < 0) return cudaErrorInvalidValue;
  Arrays<T, kInputs, kOutputs> arrays;
  for (int i = 0; i < kInputs; ++i) arrays.inputs[i] = static_cast<const T*>(inputs[i]);
  for (int i = 0; i < kOutputs; ++i) arrays.outputs[i] = static_cast<T*>(outputs[i]);
  return map(arrays, numel, function, place);
}

bool is_valid(const BiasedRows& input) {
  return input.rows >= 0 && input.hidden >= 0 && (input.rows * input.hidden == 0 || input.bias);
}

int64_t row_bytes(const BiasedRows& input, size_t element) {
  return input.hidden * static_cast<int64_t>(element);
}

}  // namespace

cudaError_t gelu_forward(const void* x, void* y, int64_t numel, bool tanh, DType dtype,
                         Place place) {
  return visit_dtype(dtype, [&](auto element) {
    return map_to<decltype(element), 1, 1>({x}, {y}, numel, Gelu{tanh}, place);
  });
}

cudaError_t gelu_backward(const void* grad, const void* x, void* dx, int64_t numel, bool tanh,
                          DType dtype, Place place) {
  return visit_dtype(dtype, [&](auto element) {
    return map_to<decltype(element), 2, 1>({grad, x}, {dx}, numel, GeluSlope{tanh}, place);
  });
}

cudaError_t bias_gelu_forward(const BiasedRows& input, void* y, bool tanh, Place place) {
  if (!is_valid(input)) return cudaErrorInvalidValue;
  if (input.rows * input.hidden == 0) return cudaSuccess;
  return visit_dtype(input.dtype, [&](auto element) {
    using T = decltype(element);
    const BiasGelu<T> function{{static_cast<const T*>(input.x)}, static_cast<T*>(y), tanh};
    const bool aligned =
        is_vectorizable(input.x, row_bytes(input, sizeof(T))) && is_vectorizable(y);
    return visit_width<T>(aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      return map_columns<N, false>(function, {input.bias, input.bias_dtype}, input.rows,
                                   input.hidden, short_parts(input.rows, input.hidden, N), nullptr,
                                   place);
    });
  });
}

cudaError_t bias_gelu_backward(const void* grad, const BiasedRows& input, void* dx, void* dbias,
                               float* partial, int64_t parts, bool tanh, Place place) {
  if (!is_valid(input) || parts < 1) return cudaErrorInvalidValue;
  if (input.hidden == 0 || (input.rows == 0 && partial == nullptr)) return cudaSuccess;
  const cudaError_t status = visit_dtype(input.dtype, [&](auto element) {
    using T = decltype(element);
    const BiasGeluSlope<T> function{static_cast<const T*>(grad), static_cast<const T*>(input.x),
                                    static_cast<T*>(dx), tanh};
    const bool aligned = is_vectorizable(input.x, row_bytes(input, sizeof(T))) &&
                         is_vectorizable(grad) && is_vectorizable(dx);
    return visit_width<T>(aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int64_t blocks = partial == nullptr ? short_parts(input.rows, input.hidden, N) : parts;
      return map_columns<N, true>(function, {input.bias, input.bias_dtype}, input.rows,
                                  input.hidden, blocks, partial, place);
    });
  });
  if (status != cudaSuccess || dbias == nullptr) return status;
  return sum_parts(partial, dbias, input.bias_dtype, parts, input.hidden, place);
}

cudaError_t swiglu_forward(const void* gate, const void* up, void* y, int64_t numel, DType dtype,
                           Place place) {
  return visit_dtype(dtype, [&](auto element) {
    return map_to<decltype(element), 2, 1>({gate, up}, {y}, numel, Swiglu{}, place);
  });
}

cudaError_t swiglu_backward(const void* grad, const void* gate, const void* up, void* dgate,
                            void* dup, int64_t numel, DType dtype, Place place) {
  return visit_dtype(dtype, [&](auto element) {
    return map_to<decltype(element), 3, 2>({grad, gate, up}, {dgate, dup}, numel, SwigluSlopes{},
                                           place);
  });
}

cudaError_t geglu_forward(const void* gate, const void* up, void* y, int64_t numel, bool tanh,
                          DType dtype, Place place) {
  return visit_dtype(dtype, [&](auto element) {
    return map_to<decltype(element), 2, 1>({gate, up}, {y}, numel, Geglu{tanh}, place);
  });
}

cudaError_t geglu_backward(const void* grad, const void* gate, const void* up, void* dgate,
                           void* dup, int64_t numel, bool tanh, DType dtype, Place place) {
  return visit_dtype(dtype, [&](auto element) {
    return map_to<decltype(element), 3, 2>({grad, gate, up}, {dgate, dup}, numel, GegluSlopes{tanh},
                                           place);
  });
}

}  // namespace anychip::cuda
