// dropout and bias_dropout_add, one pass; one Philox block serves four elements.
#include "dropout.h"

#include "columns.cuh"
#include "drop_rule.cuh"

namespace anychip::cuda {
namespace {

// y = [residual +] dropout(x [+ bias]) from dtype X to dtype R.
template <class X, class R>
struct DropAdd {
  const X* x;
  const R* residual;  // nullptr: none
  R* y;
  DropRule rule;

  template <int N>
  struct Inputs {
    Adjacent<N, X> x;
    Adjacent<N, R> residual;
  };
  __device__ __forceinline__ PhiloxStream begin() const { return rule.begin(); }
  template <int N>
  __device__ __forceinline__ void load(int64_t first, Inputs<N>& inputs) const {
    inputs.x = load_adjacent<N>(x + first);
    inputs.residual = residual == nullptr ? Adjacent<N, R>{} : load_adjacent<N>(residual + first);
  }
  template <int N>
  __device__ __forceinline__ void apply(const PhiloxStream& stream, int64_t first,
                                        const Inputs<N>& inputs, const float (&bias)[N],
                                        float (&)[N]) const {
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = inputs.x[i] + bias[i];
    rule.apply(stream, first, values);
    if (residual != nullptr) {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] += inputs.residual[i];
    }
    store(y + first, values);
  }
};

template <class T>
struct DropGradient {
  const T* grad;
  T* dx;
  T* dresidual;
  DropRule rule;

  template <int N>
  struct Inputs {
    Adjacent<N, T> grad;
  };
  __device__ __forceinline__ PhiloxStream begin() const { return rule.begin(); }
  template <int N>
  __device__ __forceinline__ void load(int64_t first, Inputs<N>& inputs) const {
    inputs.grad = load_adjacent<N>(grad + first);
  }
  template <int N>
  __device__ __forceinline__ void apply(const PhiloxStream& stream, int64_t first,
                                        const Inputs<N>& inputs, const float (&)[N],
                                        float (&sums)[N]) const {
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = inputs.grad[i];
    if (dresidual != nullptr) store(dresidual + first, values);
    rule.apply(stream, first, values);
    if (dx != nullptr) store(dx + first, values);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += values[i];
  }
};

// One block of words per thread. A row begins within a block, so that the four elements of one are
// no aligned vector.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    rows_kernel(const T* x, T* y, RowsOfWhole part, int64_t blocks, DropRule rule) {
  const int64_t thread = int64_t{blockIdx.x} * kTileThreads + threadIdx.x;
  const int64_t row = thread / blocks, number = thread % blocks;
  if (row >= part.rows) return;
  const uint64_t word = static_cast<uint64_t>(part.at[row]) * static_cast<uint64_t>(part.width) +
                        static_cast<uint64_t>(part.column);
  const int64_t first = number * 4 - static_cast<int64_t>(word % 4);
  const int64_t block = (static_cast<int64_t>(word) >> 2) + number;
  const uint4 words = philox_block(rule.begin(), static_cast<uint64_t>(block));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t column = first + i;
    if (column < 0 || column >= part.columns) continue;
    const int64_t element = row * part.columns + column;
    y[element] = from_float<T>(rule.dropped(word_of(words, i), to_float(x[element])));
  }
}

// visit(X{}, R{}): the stream is of x's type, or float32.
template <class Visit>
cudaError_t visit_stream(DType dtype, DType stream_dtype, Visit&& visit) {
  if (dtype != stream_dtype && stream_dtype != DType::kFloat32) return cudaErrorInvalidValue;
  return visit_dtype(
      dtype, [&](auto x) { return dtype == stream_dtype ? visit(x, x) : visit(x, float{}); });
}

}  // namespace

cudaError_t dropout(const void* x, void* y, int64_t numel, const Drop& drop, DType dtype,
                    Place place) {
  return bias_dropout_add_forward(x, nullptr, nullptr, y, 1, numel, drop, dtype, dtype, dtype,
                                  place);
}

cudaError_t dropout_rows(const void* x, void* y, const RowsOfWhole& part, const Drop& drop,
                         DType dtype, Place place) {
  if (part.rows < 0 || part.columns < 0 || !is_valid(drop)) return cudaErrorInvalidValue;
  if (part.rows * part.columns == 0) return cudaSuccess;
  // From the last word of a block on, as many as may be begun.
  const int64_t blocks = (part.columns + 6) / 4;
  const int64_t grid = ceil_div(part.rows * blocks, int64_t{kTileThreads});
  if (part.at == nullptr || grid > 0x7fffffff) return cudaErrorInvalidValue;
  return visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return launch(rows_kernel<T>, dim3(static_cast<unsigned>(grid)), dim3(kTileThreads), 0,
                  place.stream, static_cast<const T*>(x), static_cast<T*>(y), part, blocks,
                  DropRule(drop));
  });
}

cudaError_t bias_dropout_add_forward(const void* x, const void* residual, const void* bias, void* y,
                                     int64_t rows, int64_t hidden, const Drop& drop, DType dtype,
                                     DType stream_dtype, DType bias_dtype, Place place) {
  if (rows < 0 || hidden < 0 || !is_valid(drop)) return cudaErrorInvalidValue;
  if (rows * hidden == 0) return cudaSuccess;
  return visit_stream(dtype, stream_dtype, [&](auto own, auto stream) {
    using X = decltype(own);
    using R = decltype(stream);
    const DropAdd<X, R> function{static_cast<const X*>(x), static_cast<const R*>(residual),
                                 static_cast<R*>(y), DropRule(drop)};
    const bool is_flat = bias == nullptr;
    // Rows count only where columns do: without a bias the array is one, with a tail.
    const int64_t row_bytes = is_flat ? kAccessBytes : hidden * static_cast<int64_t>(sizeof(X));
    const bool aligned =
        is_vectorizable(x, row_bytes) && is_vectorizable(residual) && is_vectorizable(y);
    return visit_width<X>(aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      if (is_flat) return map_flat<N>(function, rows * hidden, place);
      return map_columns<N, false>(function, {bias, bias_dtype}, rows, hidden,
                                   short_parts(rows, hidden, N), nullptr, place);
    });
  });
}

cudaError_t bias_dropout_add_backward(const void* grad, void* dx, void* dresidual, float* dbias,
                                      float* partial, int64_t rows, int64_t hidden, int64_t parts,
                                      const Drop& drop, DType dtype, Place place) {
  if (rows < 0 || hidden < 0 || parts < 1 || !is_valid(drop)) return cudaErrorInvalidValue;
  if (hidden == 0) return cudaSuccess;
  const cudaError_t status = visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const DropGradient<T> function{static_cast<const T*>(grad), static_cast<T*>(dx),
                                   static_cast<T*>(dresidual), DropRule(drop)};
    const bool is_flat = dbias == nullptr;
    const int64_t row_bytes = is_flat ? kAccessBytes : hidden * static_cast<int64_t>(sizeof(T));
    const bool aligned =
        is_vectorizable(grad, row_bytes) && is_vectorizable(dx) && is_vectorizable(dresidual);
    return visit_width<T>(aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      if (is_flat) return rows == 0 ? cudaSuccess : map_flat<N>(function, rows * hidden, place);
      return map_columns<N, true>(function, {nullptr, dtype}, rows, hidden, parts, partial, place);
    });
  });
  if (status != cudaSuccess || dbias == nullptr) return status;
  return sum_parts(partial, dbias, DType::kFloat32, parts, hidden, place);
}

}  // namespace anychip::cuda
