// Sums down the columns of a matrix: the gradient of a bias.
#include "columns.cuh"

namespace anychip::cuda {
namespace {

template <class T>
struct Summands : OfOneArray<T> {
  template <int N>
  __device__ __forceinline__ void apply(NoContext, int64_t,
                                        const typename OfOneArray<T>::template Inputs<N>& inputs,
                                        const float (&)[N], float (&sums)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += inputs.x[i];
  }
};

}  // namespace

cudaError_t column_sums(const void* x, void* sums, float* partial, int64_t rows, int64_t hidden,
                        int64_t parts, DType dtype, DType sums_dtype, Place place) {
  if (rows < 0 || hidden < 0 || parts < 1) return cudaErrorInvalidValue;
  if (hidden == 0) return cudaSuccess;
  const cudaError_t status = visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const Summands<T> function{{static_cast<const T*>(x)}};
    const bool aligned = is_vectorizable(x, hidden * static_cast<int64_t>(sizeof(T)));
    return visit_width<T>(aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      return map_columns<N, true>(function, {nullptr, dtype}, rows, hidden, parts, partial, place);
    });
  });
  if (status != cudaSuccess) return status;
  return sum_parts(partial, sums, sums_dtype, parts, hidden, place);
}

}  // namespace anychip::cuda
