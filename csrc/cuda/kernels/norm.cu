// Launchers of rms_norm, layer_norm and group_norm; the kernels of rows are in norm_kernels.cuh.
#include "norm.h"

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "norm_kernels.cuh"

namespace anychip::cuda {
namespace {

// Shared memory that the backward has besides what depends on the call.
constexpr int64_t kOwnSharedBytes = 8 * 1024;

// Adds the blocks' sums in their order, those of each group. Without blocks the sums are 0.
cudaError_t sum_blocks(const NormBackward& args, const float* partials, int64_t blocks,
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

bool is_width(int hidden) { return hidden >= 0 && hidden <= kMostColumns; }

// Whether all arrays, of which those that are not there are nullptr, can be read by vectors.
bool are_vectorizable(std::initializer_list<const void*> arrays, int64_t row_bytes) {
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
cudaError_t forward(const NormForward& args, const Rule& rule, const Parameters& parameters,
                    const Place& place) {
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
cudaError_t backward(const NormBackward& args, const Rule& rule, const Parameters& parameters,
                     const NormScratch& scratch, const Place& place) {
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

// A thread loads this many vectors of a channel before it adds the first.
constexpr int kChannelVectors = 4;

// Sums over a group's channels, of which each is several columns: of grad * n to `partials`, of
// grad behind them, each (parts, channels of all groups). As many threads as `lanes` have a
// channel, and take every parts-th piece of all that it has in the batch. The sum of a piece is
// added to the thread's own, so that none is long.
template <class T, int N>
__global__ void __launch_bounds__(kTileThreads)
    channel_sums_kernel(NormBackward args, OwnChannels groups, int lanes, int64_t parts,
                        unsigned tiles, float* __restrict__ partials) {
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t part = blockIdx.x / tiles;
  const int64_t channel = (int64_t{blockIdx.x % tiles} * kTileThreads + threadIdx.x) / lanes;
  const int64_t channels = int64_t{groups.count} * groups.channels;
  const int spatial = static_cast<int>(groups.spatial);
  const int piece = lanes * N * kChannelVectors;
  const int64_t pieces = (spatial + piece - 1) / piece;
  const int64_t end = channel < channels ? args.rows / groups.count * pieces : 0;
  float sums[2] = {};
  for (int64_t at = part; at < end; at += parts) {
    const int64_t entry = at / pieces;
    const int first = static_cast<int>(at - entry * pieces) * piece + lane * N;
    const int64_t start = (entry * channels + channel) * spatial;
    const Statistics row = load_statistics(args, entry * groups.count + channel / groups.channels);
    Adjacent<N, T> grad[kChannelVectors], v[kChannelVectors];
#pragma unroll
    for (int i = 0; i < kChannelVectors; ++i) {
      const int column = first + i * lanes * N;
      const bool is_inside = column < spatial;
      grad[i] = is_inside ? load_at<N, T>(args.grad, start + column) : Adjacent<N, T>{};
      v[i] = is_inside ? load_at<N, T>(args.v, start + column) : Adjacent<N, T>{};
    }
    float own[2] = {};
#pragma unroll
    for (int i = 0; i < kChannelVectors; ++i) {
#pragma unroll
      for (int each = 0; each < N; ++each) {
        own[0] = fmaf(grad[i][each], (v[i][each] - row.mean) * row.rstd, own[0]);
        own[1] += grad[i][each];
      }
    }
    sums[0] += own[0];
    sums[1] += own[1];
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    sums[0] += __shfl_xor_sync(kAllLanes, sums[0], distance);
    sums[1] += __shfl_xor_sync(kAllLanes, sums[1], distance);
  }
  if (lane > 0 || channel >= channels) return;
  partials[part * channels + channel] = sums[0];
  partials[(parts + part) * channels + channel] = sums[1];
}

cudaError_t channel_sums(const NormBackward& args, const OwnChannels& groups,
                         const GroupScratch& scratch, const Place& place) {
  if (scratch.partials == nullptr || scratch.parts < 1) return cudaErrorInvalidValue;
  const int64_t channels = int64_t{groups.count} * groups.channels;
  const cudaError_t status = visit_dtype(args.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t row_bytes = groups.spatial * static_cast<int64_t>(sizeof(T));
    return visit_width<T>(are_vectorizable({args.grad, args.v}, row_bytes), [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int lanes = lanes_for(groups.spatial / N);
      const int64_t tiles = ceil_div(channels * lanes, kTileThreads);
      const dim3 grid(static_cast<unsigned>(tiles * scratch.parts));
      return launch(channel_sums_kernel<T, N>, grid, dim3(kTileThreads), 0, place.stream, args,
                    groups, lanes, scratch.parts, tiles, scratch.partials);
    });
  });
  if (status != cudaSuccess) return status;
  const float* partials = scratch.partials;
  for (void* out : {args.dweight, args.dbias}) {
    if (out != nullptr) {
      const cudaError_t summed =
          sum_parts(partials, out, args.weight_dtype, scratch.parts, channels, place);
      if (summed != cudaSuccess) return summed;
    }
    partials += scratch.parts * channels;
  }
  return cudaSuccess;
}

// Whether rows are the groups of a batch that has elements, in numbers that the kernels count in.
bool is_valid(const Groups& groups, int64_t rows, int64_t hidden) {
  return groups.count > 0 && groups.count <= INT32_MAX && groups.channels > 0 &&
         groups.spatial > 0 && rows > 0 && rows <= INT32_MAX && rows % groups.count == 0 &&
         groups.channels <= kMostColumns && groups.spatial <= kMostColumns &&
         groups.channels * groups.spatial == hidden && hidden <= kMostColumns;
}

OwnChannels channels_of(const Groups& groups) {
  return {static_cast<unsigned>(groups.count), static_cast<int>(groups.channels),
          static_cast<unsigned>(groups.spatial)};
}

}  // namespace

cudaError_t norm_forward(const NormForward& args, Place place) {
  return forward(args, KeepAll{}, OwnColumns{}, place);
}

cudaError_t dropout_add_norm_forward(const NormForward& args, const Drop& drop, Place place) {
  // What has no elements has no address.
  const bool has_elements = args.rows > 0 && args.hidden > 0;
  if (!is_valid(drop) || (has_elements && args.residual == nullptr)) return cudaErrorInvalidValue;
  return forward(args, DropRule(drop), OwnColumns{}, place);
}

cudaError_t norm_backward(const NormBackward& args, const NormScratch& scratch, Place place) {
  return backward(args, KeepAll{}, OwnColumns{}, scratch, place);
}

cudaError_t dropout_add_norm_backward(const NormBackward& args, const Drop& drop,
                                      const NormScratch& scratch, Place place) {
  if (!is_valid(drop)) return cudaErrorInvalidValue;
  return backward(args, DropRule(drop), OwnColumns{}, scratch, place);
}

cudaError_t group_norm_forward(const NormForward& args, const Groups& groups, Place place) {
  if (!is_valid(groups, args.rows, args.hidden)) return cudaErrorInvalidValue;
  return forward(args, KeepAll{}, channels_of(groups), place);
}

cudaError_t group_norm_backward(const NormBackward& args, const Groups& groups,
                                const GroupScratch& scratch, Place place) {
  if (!is_valid(groups, args.rows, args.hidden)) return cudaErrorInvalidValue;
  const OwnChannels channels = channels_of(groups);
  if (groups.spatial == 1) {
    return backward(args, KeepAll{}, channels, {scratch.partials, scratch.blocks}, place);
  }
  // A sum over many columns is none of the kernel for rows.
  NormBackward rows = args;
  rows.dweight = rows.dbias = nullptr;
  if (args.dx != nullptr) {
    const cudaError_t status =
        backward(rows, KeepAll{}, channels, {nullptr, scratch.blocks}, place);
    if (status != cudaSuccess) return status;
  }
  if (args.dweight == nullptr && args.dbias == nullptr) return cudaSuccess;
  return channel_sums(args, channels, scratch, place);
}

}  // namespace anychip::cuda
