// Launchers of group_norm, and the kernel for the gradients of its channels.
#include "norm.h"
#include "norm_launch.cuh"

namespace anychip::cuda {
namespace {

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

cudaError_t group_norm_forward(const NormForward& args, const Groups& groups, Place place) {
  if (!is_valid(groups, args.rows, args.hidden)) return cudaErrorInvalidValue;
  return launch_norm_forward(args, KeepAll{}, channels_of(groups), place);
}

cudaError_t group_norm_backward(const NormBackward& args, const Groups& groups,
                                const GroupScratch& scratch, Place place) {
  if (!is_valid(groups, args.rows, args.hidden)) return cudaErrorInvalidValue;
  const OwnChannels channels = channels_of(groups);
  if (groups.spatial == 1) {
    return launch_norm_backward(args, KeepAll{}, channels, {scratch.partials, scratch.blocks},
                                place);
  }
  // A sum over many columns is none of the kernel for rows.
  NormBackward rows = args;
  rows.dweight = rows.dbias = nullptr;
  if (args.dx != nullptr) {
    const cudaError_t status =
        launch_norm_backward(rows, KeepAll{}, channels, {nullptr, scratch.blocks}, place);
    if (status != cudaSuccess) return status;
  }
  if (args.dweight == nullptr && args.dbias == nullptr) return cudaSuccess;
  return channel_sums(args, channels, scratch, place);
}

}  // namespace anychip::cuda
