// Launchers of the kernels of norm_kernels.cuh, for the three files that make code of them: as one,
// nvcc would take minutes for it.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "norm_kernels.cuh"

namespace anychip::cuda {

// Shared memory that the backward has besides what depends on the call.
constexpr int64_t kOwnSharedBytes = 8 * 1024;

// Adds the blocks' sums in their order, those of each group. Without blocks the sums are 0.
inline cudaError_t sum_blocks(const NormBackward& args, const float* partials, int64_t blocks,
                              int64_t groups, const Place& place) {
  for (void* out : {args.dweight, args.dbias}) {
    if (out == nullptr) continue;
    const cudaError_t status =
        sum_parts(partials, out, args.weight_dtype, blocks / groups, args.hidden * groups, place);
    if (status != cudaSuccess) return status;
    partials += blocks * args.hidden;
  }
  return cudaSuccess;
}

// visit(T{}, R{}): the element types of x and of the residual, the same without one.
template <bool kIsAlone, class Visit>
cudaError_t visit_types(DType dtype, DType residual_dtype, Visit&& visit) {
  return visit_dtype(dtype, [&](auto element) -> cudaError_t {
    if (residual_dtype == dtype) return visit(element, element);
    if constexpr (!kIsAlone) {
      if (residual_dtype == DType::kFloat32) return visit(element, float{});
    }
    return cudaErrorInvalidValue;
  });
}

// Elements per vector, and vectors per thread.
template <int N, int V>
struct Layout {
  static constexpr int width = N;
  static constexpr int vectors = V;
};

// visit(Layout<N, V>{}); rows of one warp have a layout of their own, which needs few registers.
template <class T, int V, class Visit>
cudaError_t visit_layout(bool aligned, int hidden, Visit&& visit) {
  if (!aligned) return visit(Layout<1, kScalars>{});
  if (hidden <= kWarp * kWidth<T>) return visit(Layout<kWidth<T>, 1>{});
  return visit(Layout<kWidth<T>, V>{});
}

// Vectors of a thread: what a rule computes takes registers, too.
template <class T, class R, class Rule>
constexpr int kRuleVectors =
    std::is_same_v<Rule, KeepAll> ? kMostVectors<T, R> : kMostVectors<T, R> / 2;

inline bool is_width(int hidden) { return hidden >= 0 && hidden <= kMostColumns; }

// Whether all arrays, of which those that are not there are nullptr, can be read by vectors.
inline bool are_vectorizable(std::initializer_list<const void*> arrays, int64_t row_bytes) {
  for (const void* array : arrays) {
    if (!is_vectorizable(array, row_bytes)) return false;
  }
  return true;
}

template <class T, class R, int N, int V, class Rule, class Parameters>
cudaError_t launch_backward(const NormBackward& args, const Rule& rule,
                            const Parameters& parameters, const NormScratch& scratch,
                            const Place& place) {
  const auto kernel = norm_backward_kernel<T, R, N, V, Rule, Parameters>;
  const int64_t groups = parameters.groups();
  const int threads = threads_of_row<N, V>(args.hidden, kBackwardThreads);
  const int columns = tiles_of_row<N, V>(args.hidden, threads) * tile_columns<N, V>(threads);
  const int wanted = (args.dweight != nullptr) + (args.dbias != nullptr);
  const int64_t bytes = wanted * columns * static_cast<int64_t>(sizeof(float));
  // As many rows at a time as there are threads for, but no fewer blocks than could run.
  int64_t rows = std::min<int64_t>(kBackwardThreads / threads, ceil_div(args.rows, scratch.blocks));
  while (rows > 1 && !allow_shared(kernel, rows * bytes, kOwnSharedBytes)) --rows;
  const bool is_shared = allow_shared(kernel, rows * bytes, kOwnSharedBytes);
  const int64_t blocks =
      groups * std::min<int64_t>(scratch.blocks / groups, ceil_div(args.rows / groups, rows));
  const cudaError_t status =
      launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads, static_cast<int>(rows)),
             is_shared ? static_cast<size_t>(rows * bytes) : 0, place.stream, args,
             SumsPlace{scratch.partials, wanted, is_shared ? columns : 0}, rule, parameters);
  if (status != cudaSuccess) return status;
  return sum_blocks(args, scratch.partials, blocks, groups, place);
}

template <class Rule, class Parameters>
cudaError_t launch_norm_forward(const NormForward& args, const Rule& rule,
                                const Parameters& parameters, const Place& place) {
  const bool has_rows = args.x != nullptr && args.weight != nullptr && args.y != nullptr;
  if (args.rows < 0 || !is_width(args.hidden)) return cudaErrorInvalidValue;
  if (args.rows == 0) return cudaSuccess;
  if (args.rstd == nullptr || (args.hidden > 0 && !has_rows)) return cudaErrorInvalidValue;
  if ((args.residual == nullptr) != (args.total == nullptr)) return cudaErrorInvalidValue;
  return visit_types<Parameters::kIsAlone>(
      args.dtype, args.residual_dtype, [&](auto element, auto wide) {
        using T = decltype(element);
        using R = decltype(wide);
        const bool aligned =
            are_vectorizable({args.x, args.residual, args.weight, args.bias, args.y, args.total},
                             args.hidden * static_cast<int64_t>(sizeof(T)));
        return visit_layout<T, kRuleVectors<T, R, Rule>>(aligned, args.hidden, [&](auto layout) {
          constexpr int N = layout.width, V = layout.vectors;
          const int threads = threads_of_row<N, V>(args.hidden, kForwardThreads);
          const int rows = threads == kWarp ? kWarpRows : 1;
          const dim3 grid(static_cast<unsigned>(ceil_div(args.rows, rows)));
          return launch(norm_forward_kernel<T, R, N, V, Rule, Parameters>, grid,
                        dim3(threads, rows), 0, place.stream, args, rule, parameters);
        });
      });
}

template <class Rule, class Parameters>
cudaError_t launch_norm_backward(const NormBackward& args, const Rule& rule,
                                 const Parameters& parameters, const NormScratch& scratch,
                                 const Place& place) {
  const bool has_rows = args.grad != nullptr && args.v != nullptr && args.weight != nullptr;
  const bool has_sums = args.dweight != nullptr || args.dbias != nullptr;
  if (args.rows < 0 || !is_width(args.hidden)) return cudaErrorInvalidValue;
  if (args.rows == 0 || args.hidden == 0) {
    return sum_blocks(args, nullptr, 0, parameters.groups(), place);
  }
  if (!has_rows || args.rstd == nullptr) return cudaErrorInvalidValue;
  if (scratch.blocks < parameters.groups()) return cudaErrorInvalidValue;
  if (has_sums && scratch.partials == nullptr) return cudaErrorInvalidValue;
  return visit_types<Parameters::kIsAlone>(
      args.dtype, args.residual_dtype, [&](auto element, auto wide) {
        using T = decltype(element);
        using R = decltype(wide);
        const bool aligned = are_vectorizable({args.grad, args.v, args.dtotal, args.weight, args.dx,
                                               args.dresidual, scratch.partials},
                                              args.hidden * static_cast<int64_t>(sizeof(T)));
        return visit_layout<T, kRuleVectors<T, R, Rule>>(aligned, args.hidden, [&](auto layout) {
          return launch_backward<T, R, layout.width, layout.vectors>(args, rule, parameters,
                                                                     scratch, place);
        });
      });
}

}  // namespace anychip::cuda
