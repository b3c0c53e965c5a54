// rms_norm, layer_norm and group_norm: each element of a row of up to 8,192 (float32) or 16,384
// (16-bit types) columns is read once and written once, forward and backward. Layout of rows:
// norm_rows.cuh.
//
// Note [One pass over the columns]: the gradients of weight and bias are sums over the rows, and
// those of the rows are sums over the columns; to read grad and v once, both are made in one pass.
// As many blocks as the device runs at a time walk over the rows, and each keeps the sums of all
// columns: in shared memory, since registers hold the row and the next one, which is loaded while
// this one is reduced. A column's sum belongs to one thread (per row of the block), so nothing
// waits for another. At the end every block writes its sums to scratch, and a second kernel adds
// those of the blocks in their order: same inputs and same number of blocks, same bits.
//
// Note [Same bits whatever is wanted]: nvcc makes copies of a loop by what is wanted, and joins a
// product and a sum to one rounding in some and not in others. In the backward it is said which.
//
// Parameters (OwnColumns, OwnChannels) say which of weight and bias belong to a row's elements.
#pragma once

#include "columns.cuh"
#include "drop_rule.cuh"
#include "norm.h"
#include "norm_rows.cuh"

namespace anychip::cuda {

// A thread holds four vectors of 16 bytes, or two where a residual in float32 doubles that.
constexpr int kVectors = 4;
template <class T, class R>
constexpr int kMostVectors = sizeof(R) > sizeof(T) ? kVectors / 2 : kVectors;
// Threads of a block, by registers: 64 each in the forward, 128 in the backward.
constexpr int kForwardThreads = 1024;
constexpr int kBackwardThreads = 512;
// What is not 16-byte aligned goes element by element.
constexpr int kScalars = 8;
// Rows of one warp share a block in the forward, so that blocks are not too many to be scheduled.
constexpr int kWarpRows = 4;

// Instead of a DropRule where nothing is dropped.
struct KeepAll {
  __device__ __forceinline__ PhiloxStream begin() const { return {}; }
  template <int N>
  __device__ __forceinline__ void apply(const PhiloxStream&, int64_t, float (&)[N]) const {}
};

// A row's statistics, the same in all its threads.
struct Statistics {
  float mean;
  float rstd;
};

// v of one tile: x, or x + residual as it is stored, which a first look computes and stores, with x
// dropped as the rule says. It stays packed: conversions are cheap, and blocks that share a
// multiprocessor need registers.
template <class T, class R, int N, int V, class Rule>
__device__ __forceinline__ void load_tile(const NormForward& args, const Rule& rule, int64_t start,
                                          int tile, bool first_look, Adjacent<N, R> (&held)[V]) {
  if (args.residual == nullptr || !first_look) {
    // Without a residual R is T.
    const void* v_array = args.residual == nullptr ? args.x : args.total;
    for_each_vector<N, V>(tile, args.hidden, [&](int v, int column) {
      held[v] = load_at<N, R>(v_array, start + column);
    });
    return;
  }
  Adjacent<N, T> x[V];
  for_each_vector<N, V>(tile, args.hidden, [&](int v, int column) {
    x[v] = load_at<N, T>(args.x, start + column);
    held[v] = load_at<N, R>(args.residual, start + column);
  });
  for_each_vector<N, V>(tile, args.hidden, [&](int v, int column) {
    float values[N], added[N];
    unpack(x[v], values);
    rule.apply(rule.begin(), start + column, values);
    unpack(held[v], added);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += added[i];
    held[v] = pack<N, R>(values);
    store_adjacent(static_cast<R*>(args.total) + start + column, held[v]);
  });
}

// The sum of the tile's values, or of the squares of their differences from `mean`, is added.
template <class R, int N, int V>
__device__ __forceinline__ void add_tile(const Adjacent<N, R> (&held)[V], int tile, int hidden,
                                         bool squared, float mean, float& sum) {
  for_each_vector<N, V>(tile, hidden, [&](int v, int) {
    float values[N];
    unpack(held[v], values);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float difference = values[i] - mean;
      sum += squared ? difference * difference : difference;
    }
  });
}

template <class T, class R, int N, int V, class Parameters>
__device__ __forceinline__ void store_tile(const NormForward& args, const Parameters& own,
                                           int64_t start, int tile, const Statistics& row,
                                           const Adjacent<N, R> (&held)[V]) {
  for_each_vector<N, V>(tile, args.hidden, [&](int v, int column) {
    float values[N], parameters[N];
    unpack(held[v], values);
    own.load(args.weight, args.weight_dtype, column, parameters);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = (values[i] - row.mean) * row.rstd * parameters[i];
    if (args.bias != nullptr) {
      own.load(args.bias, args.bias_dtype, column, parameters);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] += parameters[i];
    }
    store(static_cast<T*>(args.y) + start + column, values);
  });
}

template <class T, class R, int N, int V, class Rule, class Parameters>
__global__ void __launch_bounds__(kForwardThreads, 1)
    norm_forward_kernel(NormForward args, Rule rule, Parameters parameters) {
  if constexpr (Parameters::kIsAlone) args.residual = args.total = nullptr;
  ANYCHIP_SHARED(float, scratch, kMaxWarps);
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  // Only rows of one warp share a block, and these meet at no barrier.
  if (row >= args.rows) return;
  const int64_t start = row * args.hidden;
  const int tiles = tiles_of_row<N, V>(args.hidden, blockDim.x);
  const bool centred = args.mean != nullptr;
  const float count = static_cast<float>(args.hidden);

  Adjacent<N, R> held[V];
  float sum[1] = {0.0f};
  for (int tile = 0; tile < tiles; ++tile) {
    load_tile<T, R>(args, rule, start, tile, true, held);
    add_tile(held, tile, args.hidden, !centred, 0.0f, sum[0]);
  }
  block_sum(sum, scratch);

  Statistics found{0.0f, 0.0f};
  if (centred) {
    // The mean square of differences: the mean square of v less the square of the mean loses all
    // digits of rows that are far from 0.
    found.mean = sum[0] / count;
    sum[0] = 0.0f;
    for (int tile = 0; tile < tiles; ++tile) {
      if (tiles > 1) load_tile<T, R>(args, rule, start, tile, false, held);
      add_tile(held, tile, args.hidden, true, found.mean, sum[0]);
    }
    block_sum(sum, scratch);
  }
  found.rstd = rsqrtf(sum[0] / count + args.eps);
  if (threadIdx.x == 0) {
    if (centred) args.mean[row] = found.mean;
    args.rstd[row] = found.rstd;
  }
  for (int tile = 0; tile < tiles; ++tile) {
    if (tiles > 1) load_tile<T, R>(args, rule, start, tile, false, held);
    store_tile<T>(args, parameters.of(row), start, tile, found, held);
  }
}

// The sums over rows that one thread keeps: of its columns, and nobody else's.
//
// In shared memory the columns are in an order that spreads the 16-byte accesses of a warp over all
// banks; in scratch they are in their own.
template <int N>
class ColumnSums {
 public:
  __device__ __forceinline__ ColumnSums(float* sums, bool shared)
      : own_(sums + threadIdx.x * (shared ? kChunk : N)),
        step_(shared ? static_cast<int>(blockDim.x) * kChunk : kChunk) {}

  // The sums of the vector whose warp's first column is `first` += values, or = values.
  __device__ __forceinline__ void add(int first, bool is_first, float (&values)[N]) const {
#pragma unroll
    for (int at = 0; at < N / kChunk; ++at) {
      float* sums = own_ + first + at * step_;
      float chunk[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) chunk[i] = values[at * kChunk + i];
      if (!is_first) {
        float before[kChunk];
        load(sums, before);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) chunk[i] += before[i];
      }
      // Not store(), which is for global memory alone.
      store_adjacent(sums, pack<kChunk, float>(chunk));
    }
  }
  __device__ __forceinline__ void read(int first, float (&values)[N]) const {
#pragma unroll
    for (int at = 0; at < N / kChunk; ++at) {
      float chunk[kChunk];
      load(own_ + first + at * step_, chunk);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[at * kChunk + i] = chunk[i];
    }
  }

 private:
  static constexpr int kChunk = N == 1 ? 1 : kWidth<float>;
  float* own_;
  int step_;
};

// What a thread holds of a row in the backward.
template <class T, class R, int N, int V>
struct BackwardTile {
  Adjacent<N, T> grad[V];
  Adjacent<N, R> v[V];

  __device__ __forceinline__ void load(const NormBackward& args, int64_t row, int tile) {
    for_each_vector<N, V>(tile, args.hidden, [&](int i, int column) {
      grad[i] = load_at<N, T>(args.grad, row * args.hidden + column);
      v[i] = load_at<N, R>(args.v, row * args.hidden + column);
    });
  }
  // The gradient, and v less its mean over its deviation.
  __device__ __forceinline__ void unpack_at(int i, const Statistics& row, float (&grads)[N],
                                            float (&normed)[N]) const {
    unpack(grad[i], grads);
    unpack(v[i], normed);
#pragma unroll
    for (int at = 0; at < N; ++at) normed[at] = __fmul_rn(normed[at] - row.mean, row.rstd);
  }
};

// How many vectors of dtotal are loaded before they are used: all would be too many registers.
template <int V>
constexpr int kAhead = V < 2 ? V : 2;

// The first vectors of dtotal in a tile; the others follow as these are used up.
template <int N, int V, class R>
__device__ __forceinline__ void load_dtotal(const NormBackward& args, int64_t row, int tile,
                                            Adjacent<N, R> (&dtotal)[kAhead<V>]) {
  if (args.dtotal == nullptr) return;
  for_each_vector<N, V>(tile, args.hidden, [&](int i, int column) {
    if (i < kAhead<V>) dtotal[i] = load_at<N, R>(args.dtotal, row * args.hidden + column);
  });
}

__device__ __forceinline__ Statistics load_statistics(const NormBackward& args, int64_t row) {
  return {args.mean == nullptr ? 0.0f : args.mean[row], args.rstd[row]};
}

// sums += the tile's part of sum(a), sum(a n) with a = grad * weight.
template <class T, class R, int N, int V, class Parameters>
__device__ __forceinline__ void project_tile(const NormBackward& args, const Parameters& own,
                                             const BackwardTile<T, R, N, V>& held, int tile,
                                             const Statistics& row, float (&sums)[2]) {
  for_each_vector<N, V>(tile, args.hidden, [&](int i, int column) {
    float grads[N], normed[N], weight[N];
    held.unpack_at(i, row, grads, normed);
    own.load(args.weight, args.weight_dtype, column, weight);
#pragma unroll
    for (int at = 0; at < N; ++at) {
      const float scaled = __fmul_rn(grads[at], weight[at]);
      sums[0] += scaled;
      sums[1] = __fmaf_rn(scaled, normed[at], sums[1]);
    }
  });
}

// Stores dresidual and dx, which the rule drops, of one vector; means: of a and of a n. grads and
// normed are used up.
template <class T, class R, int N, class Rule, class Parameters>
__device__ __forceinline__ void store_gradient(const NormBackward& args, const Rule& rule,
                                               const Parameters& own, int64_t row, int column,
                                               const Statistics& statistics,
                                               const float (&means)[2], float (&grads)[N],
                                               float (&normed)[N], const Adjacent<N, R>& dtotal) {
  float weight[N];
  own.load(args.weight, args.weight_dtype, column, weight);
#pragma unroll
  for (int at = 0; at < N; ++at) {
    const float centred = __fmaf_rn(grads[at], weight[at], -means[0]);
    grads[at] = __fmul_rn(__fmaf_rn(-normed[at], means[1], centred), statistics.rstd);
  }
  if (args.dtotal != nullptr) {
    unpack(dtotal, normed);
#pragma unroll
    for (int at = 0; at < N; ++at) grads[at] += normed[at];
  }
  const int64_t place = row * args.hidden + column;
  if (args.dresidual != nullptr) store(static_cast<R*>(args.dresidual) + place, grads);
  if (args.dx == nullptr) return;
  rule.apply(rule.begin(), place, grads);
  store(static_cast<T*>(args.dx) + place, grads);
}

// Where a block keeps its sums over rows: dweight's, then dbias's, as far as they are wanted.
struct SumsPlace {
  float* partials;         // of all blocks: (wanted, blocks, hidden)
  int wanted;              // how many sums there are per column: 0, 1 or 2
  int64_t shared_columns;  // of one sum in shared memory; 0: the sums are kept in partials
};

// The sums of one row of a block.
template <int N>
struct RowSums {
  ColumnSums<N> dweight, dbias;
};

template <int N>
__device__ __forceinline__ RowSums<N> sums_of_row(const NormBackward& args, const SumsPlace& place,
                                                  float* shared) {
  const bool is_shared = place.shared_columns > 0;
  int64_t pitch = is_shared ? place.shared_columns : int64_t{gridDim.x} * args.hidden;
  float* sums = is_shared ? shared + threadIdx.y * place.wanted * pitch
                          : place.partials + int64_t{blockIdx.x} * args.hidden;
  // One that is wanted alone has the first place, whichever it is.
  if (place.wanted < 2) pitch = 0;
  return {ColumnSums<N>(sums, is_shared), ColumnSums<N>(sums + pitch, is_shared)};
}

// The second look at a tile: adds it to the sums over rows, which begin with it or go on, and
// stores its gradients.
template <class T, class R, int N, int V, class Rule, class Parameters>
__device__ __forceinline__ void finish_tile(const NormBackward& args, const Rule& rule,
                                            const Parameters& own,
                                            const BackwardTile<T, R, N, V>& held,
                                            Adjacent<N, R> (&dtotal)[kAhead<V>], int64_t row,
                                            int tile, const Statistics& statistics,
                                            const float (&means)[2], const RowSums<N>& sums,
                                            bool begins) {
  for_each_vector<N, V>(tile, args.hidden, [&](int i, int column) {
    float grads[N], normed[N];
    held.unpack_at(i, statistics, grads, normed);
    const int place_of_warp = column - static_cast<int>(threadIdx.x) * N;
    if (args.dbias != nullptr) sums.dbias.add(place_of_warp, begins, grads);
    if (args.dweight != nullptr) {
      float products[N];
#pragma unroll
      for (int at = 0; at < N; ++at) products[at] = __fmul_rn(grads[at], normed[at]);
      sums.dweight.add(place_of_warp, begins, products);
    }
    if (args.dx != nullptr || args.dresidual != nullptr) {
      Adjacent<N, R>& added = dtotal[i % kAhead<V>];
      store_gradient<T>(args, rule, own, row, column, statistics, means, grads, normed, added);
      const int later = column + kAhead<V> * static_cast<int>(blockDim.x) * N;
      if (i + kAhead<V> < V && args.dtotal != nullptr && later < args.hidden) {
        added = load_at<N, R>(args.dtotal, row * args.hidden + later);
      }
    }
  });
}

// Adds what the rows of this block have in shared memory, in their order, to one sum in scratch;
// `left` are the rows from its first one on.
template <int N, int V>
__device__ __forceinline__ void store_sums(const NormBackward& args, const SumsPlace& place,
                                           float* shared, int tiles, int64_t left) {
  __syncthreads();
  if (threadIdx.y > 0) return;
  const int kept = static_cast<int>(left < blockDim.y ? left : blockDim.y);
  for (int which = 0; which < place.wanted; ++which) {
    float* out = place.partials + (int64_t{gridDim.x} * which + blockIdx.x) * args.hidden;
    for (int tile = 0; tile < tiles; ++tile) {
      for_each_vector<N, V>(tile, args.hidden, [&](int, int column) {
        float total[N] = {};
        for (int row = 0; row < kept; ++row) {
          float* sums = shared + (row * place.wanted + which) * place.shared_columns;
          float part[N];
          ColumnSums<N>(sums, true).read(column - static_cast<int>(threadIdx.x) * N, part);
#pragma unroll
          for (int i = 0; i < N; ++i) total[i] += part[i];
        }
        store(out + column, total);
      });
    }
  }
}

// Note [One pass over the columns]. All rows of a block take the same number of steps, since its
// barriers are for all threads; a row behind the last one does nothing between them. The sums of a
// block are of one group's columns: it has the rows of one group alone, an entry of the batch each.
template <class T, class R, int N, int V, class Rule, class Parameters>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    norm_backward_kernel(NormBackward args, SumsPlace place, Rule rule, Parameters parameters) {
  ANYCHIP_SHARED(float, scratch, kBackwardThreads / kWarp * 2 * kMaxWarps);
  ANYCHIP_DYNAMIC_SHARED(float, shared);
  // What a group has not: registers that the compiler need not keep.
  if constexpr (Parameters::kIsAlone) args.dtotal = args.dresidual = nullptr;
  const int tiles = tiles_of_row<N, V>(args.hidden, blockDim.x);
  const float count = static_cast<float>(args.hidden);
  const bool has_dx = args.dx != nullptr || args.dresidual != nullptr;
  const RowSums<N> sums = sums_of_row<N>(args, place, shared);

  const unsigned groups = parameters.groups();
  const int64_t entries = args.rows / groups;
  const int64_t begin = int64_t{blockIdx.x / groups} * blockDim.y;
  // The entries that a group's blocks take in one step; in the first, sums begin.
  const int stride = static_cast<int>(gridDim.x / groups * blockDim.y);
  BackwardTile<T, R, N, V> next;
  int64_t entry = begin + threadIdx.y;
  int64_t row = entry * groups + blockIdx.x % groups;
  if (entry < entries) next.load(args, row, 0);
  for (; entry - threadIdx.y < entries; entry += stride, row += int64_t{stride} * groups) {
    const bool is_row = entry < entries;
    const auto own = parameters.of(row);
    BackwardTile<T, R, N, V> held = next;
    Statistics statistics{0.0f, 0.0f};
    if (is_row) statistics = load_statistics(args, row);
    Adjacent<N, R> dtotal[kAhead<V>];
    float means[2] = {0.0f, 0.0f};
    if (is_row && has_dx) {
      for (int tile = 0; tile < tiles; ++tile) {
        if (tile > 0) held.load(args, row, tile);
        project_tile(args, own, held, tile, statistics, means);
      }
      if (tiles == 1) load_dtotal<N, V>(args, row, 0, dtotal);
    }
    if (entry + stride < entries) next.load(args, row + int64_t{stride} * groups, 0);
    if (has_dx) block_sum(means, scratch + threadIdx.y * 2 * kMaxWarps);
    means[0] = args.mean == nullptr ? 0.0f : means[0] / count;
    means[1] /= count;
    if (!is_row) continue;
    for (int tile = 0; tile < tiles; ++tile) {
      if (tiles > 1) {
        held.load(args, row, tile);
        if (has_dx) load_dtotal<N, V>(args, row, tile, dtotal);
      }
      finish_tile(args, rule, own, held, dtotal, row, tile, statistics, means, sums,
                  entry < stride);
    }
  }
  if (place.shared_columns > 0) store_sums<N, V>(args, place, shared, tiles, entries - begin);
}

}  // namespace anychip::cuda
