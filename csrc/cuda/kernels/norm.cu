// rms_norm and layer_norm: each element of a row of up to 8,192 (float32) or 16,384 (16-bit types)
// columns is read once and written once, forward and backward. Layout of rows: norm_rows.cuh.
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
#include "norm.h"

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "columns.cuh"
#include "drop_rule.cuh"
#include "norm_rows.cuh"

namespace anychip::cuda {
namespace {

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
// Most shared memory that any device gives to a block, less what the backward has by itself.
constexpr int64_t kMostSharedBytes = (227 - 8) * 1024;
// What every device gives without being asked, less the same.
constexpr int64_t kFreeSharedBytes = (48 - 8) * 1024;

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

template <class T, class R, int N, int V>
__device__ __forceinline__ void store_tile(const NormForward& args, int64_t start, int tile,
                                           const Statistics& row, const Adjacent<N, R> (&held)[V]) {
  for_each_vector<N, V>(tile, args.hidden, [&](int v, int column) {
    float values[N], parameters[N];
    unpack(held[v], values);
    load_parameter(args.weight, args.weight_dtype, column, parameters);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = (values[i] - row.mean) * row.rstd * parameters[i];
    if (args.bias != nullptr) {
      load_parameter(args.bias, args.bias_dtype, column, parameters);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] += parameters[i];
    }
    store(static_cast<T*>(args.y) + start + column, values);
  });
}

template <class T, class R, int N, int V, class Rule>
__global__ void __launch_bounds__(kForwardThreads, 1)
    norm_forward_kernel(NormForward args, Rule rule) {
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
    store_tile<T>(args, start, tile, found, held);
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
template <class T, class R, int N, int V>
__device__ __forceinline__ void project_tile(const NormBackward& args,
                                             const BackwardTile<T, R, N, V>& held, int tile,
                                             const Statistics& row, float (&sums)[2]) {
  for_each_vector<N, V>(tile, args.hidden, [&](int i, int column) {
    float grads[N], normed[N], weight[N];
    held.unpack_at(i, row, grads, normed);
    load_parameter(args.weight, args.weight_dtype, column, weight);
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
template <class T, class R, int N, class Rule>
__device__ __forceinline__ void store_gradient(const NormBackward& args, const Rule& rule,
                                               int64_t row, int column,
                                               const Statistics& statistics,
                                               const float (&means)[2], float (&grads)[N],
                                               float (&normed)[N], const Adjacent<N, R>& dtotal) {
  float weight[N];
  load_parameter(args.weight, args.weight_dtype, column, weight);
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
template <class T, class R, int N, int V, class Rule>
__device__ __forceinline__ void finish_tile(const NormBackward& args, const Rule& rule,
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
      store_gradient<T>(args, rule, row, column, statistics, means, grads, normed, added);
      const int later = column + kAhead<V> * static_cast<int>(blockDim.x) * N;
      if (i + kAhead<V> < V && args.dtotal != nullptr && later < args.hidden) {
        added = load_at<N, R>(args.dtotal, row * args.hidden + later);
      }
    }
  });
}

// Adds what the rows of this block have in shared memory, in their order, to one sum in scratch.
template <int N, int V>
__device__ __forceinline__ void store_sums(const NormBackward& args, const SumsPlace& place,
                                           float* shared, int tiles) {
  __syncthreads();
  if (threadIdx.y > 0) return;
  const int64_t left = args.rows - int64_t{blockIdx.x} * blockDim.y;
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
// barriers are for all threads; a row behind the last one does nothing between them.
template <class T, class R, int N, int V, class Rule>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    norm_backward_kernel(NormBackward args, SumsPlace place, Rule rule) {
  ANYCHIP_SHARED(float, scratch, kBackwardThreads / kWarp * 2 * kMaxWarps);
  ANYCHIP_DYNAMIC_SHARED(float, shared);
  const int tiles = tiles_of_row<N, V>(args.hidden, blockDim.x);
  const float count = static_cast<float>(args.hidden);
  const bool has_dx = args.dx != nullptr || args.dresidual != nullptr;
  const RowSums<N> sums = sums_of_row<N>(args, place, shared);

  // The rows that the blocks take in one step; in the first, sums begin.
  const int stride = static_cast<int>(gridDim.x * blockDim.y);
  BackwardTile<T, R, N, V> next;
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row < args.rows) next.load(args, row, 0);
  for (; row - threadIdx.y < args.rows; row += stride) {
    const bool is_row = row < args.rows;
    BackwardTile<T, R, N, V> held = next;
    Statistics statistics{0.0f, 0.0f};
    if (is_row) statistics = load_statistics(args, row);
    Adjacent<N, R> dtotal[kAhead<V>];
    float means[2] = {0.0f, 0.0f};
    if (is_row && has_dx) {
      for (int tile = 0; tile < tiles; ++tile) {
        if (tile > 0) held.load(args, row, tile);
        project_tile(args, held, tile, statistics, means);
      }
      if (tiles == 1) load_dtotal<N, V>(args, row, 0, dtotal);
    }
    if (row + stride < args.rows) next.load(args, row + stride, 0);
    if (has_dx) block_sum(means, scratch + threadIdx.y * 2 * kMaxWarps);
    means[0] = args.mean == nullptr ? 0.0f : means[0] / count;
    means[1] /= count;
    if (!is_row) continue;
    for (int tile = 0; tile < tiles; ++tile) {
      if (tiles > 1) {
        held.load(args, row, tile);
        if (has_dx) load_dtotal<N, V>(args, row, tile, dtotal);
      }
      finish_tile(args, rule, held, dtotal, row, tile, statistics, means, sums, row < stride);
    }
  }
  if (place.shared_columns > 0) store_sums<N, V>(args, place, shared, tiles);
}

// Adds the blocks' sums in their order. Without blocks the sums are 0.
cudaError_t sum_blocks(const NormBackward& args, const float* partials, int64_t blocks,
                       const Place& place) {
  for (void* out : {args.dweight, args.dbias}) {
    if (out == nullptr) continue;
    const cudaError_t status =
        sum_parts(partials, out, args.weight_dtype, blocks, args.hidden, place);
    if (status != cudaSuccess) return status;
    partials += blocks * args.hidden;
  }
  return cudaSuccess;
}

// visit(T{}, R{}): the element types of x and of the residual.
template <class Visit>
cudaError_t visit_types(DType dtype, DType residual_dtype, Visit&& visit) {
  return visit_dtype(dtype, [&](auto element) -> cudaError_t {
    if (residual_dtype == dtype) return visit(element, element);
    if (residual_dtype == DType::kFloat32) return visit(element, float{});
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

// Lets a kernel have `bytes` of dynamic shared memory, or says that the device has not got them.
template <class... Parameters>
bool allow_shared(void (*kernel)(Parameters...), int64_t bytes) {
  if (bytes <= kFreeSharedBytes) return true;
  if (bytes > kMostSharedBytes) return false;
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (cudaFuncSetAttribute(kernel, attribute, static_cast<int>(bytes)) == cudaSuccess) return true;
  cudaGetLastError();  // it is answered here, and not for the next launch to find
  return false;
}

template <class T, class R, int N, int V, class Rule>
cudaError_t launch_backward(const NormBackward& args, const Rule& rule, const NormScratch& scratch,
                            const Place& place) {
  const auto kernel = norm_backward_kernel<T, R, N, V, Rule>;
  const int threads = threads_of_row<N, V>(args.hidden, kBackwardThreads);
  const int columns = tiles_of_row<N, V>(args.hidden, threads) * tile_columns<N, V>(threads);
  const int wanted = (args.dweight != nullptr) + (args.dbias != nullptr);
  const int64_t bytes = wanted * columns * static_cast<int64_t>(sizeof(float));
  // As many rows at a time as there are threads for, but no fewer blocks than could run.
  int64_t rows = std::min<int64_t>(kBackwardThreads / threads, ceil_div(args.rows, scratch.blocks));
  while (rows > 1 && !allow_shared(kernel, rows * bytes)) --rows;
  const bool is_shared = allow_shared(kernel, rows * bytes);
  const int64_t blocks = std::min<int64_t>(scratch.blocks, ceil_div(args.rows, rows));
  const cudaError_t status =
      launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads, static_cast<int>(rows)),
             is_shared ? static_cast<size_t>(rows * bytes) : 0, place.stream, args,
             SumsPlace{scratch.partials, wanted, is_shared ? columns : 0}, rule);
  if (status != cudaSuccess) return status;
  return sum_blocks(args, scratch.partials, blocks, place);
}

template <class Rule>
cudaError_t forward(const NormForward& args, const Rule& rule, const Place& place) {
  const bool has_rows = args.x != nullptr && args.weight != nullptr && args.y != nullptr;
  if (args.rows < 0 || !is_width(args.hidden)) return cudaErrorInvalidValue;
  if (args.rows == 0) return cudaSuccess;
  if (args.rstd == nullptr || (args.hidden > 0 && !has_rows)) return cudaErrorInvalidValue;
  if ((args.residual == nullptr) != (args.total == nullptr)) return cudaErrorInvalidValue;
  return visit_types(args.dtype, args.residual_dtype, [&](auto element, auto wide) {
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
      return launch(norm_forward_kernel<T, R, N, V, Rule>, grid, dim3(threads, rows), 0,
                    place.stream, args, rule);
    });
  });
}

template <class Rule>
cudaError_t backward(const NormBackward& args, const Rule& rule, const NormScratch& scratch,
                     const Place& place) {
  const bool has_rows = args.grad != nullptr && args.v != nullptr && args.weight != nullptr;
  const bool has_sums = args.dweight != nullptr || args.dbias != nullptr;
  if (args.rows < 0 || !is_width(args.hidden)) return cudaErrorInvalidValue;
  if (args.rows == 0 || args.hidden == 0) return sum_blocks(args, nullptr, 0, place);
  if (!has_rows || args.rstd == nullptr) return cudaErrorInvalidValue;
  if (scratch.blocks < 1 || (has_sums && scratch.partials == nullptr)) return cudaErrorInvalidValue;
  return visit_types(args.dtype, args.residual_dtype, [&](auto element, auto wide) {
    using T = decltype(element);
    using R = decltype(wide);
    const bool aligned = are_vectorizable(
        {args.grad, args.v, args.dtotal, args.weight, args.dx, args.dresidual, scratch.partials},
        args.hidden * static_cast<int64_t>(sizeof(T)));
    return visit_layout<T, kRuleVectors<T, R, Rule>>(aligned, args.hidden, [&](auto layout) {
      return launch_backward<T, R, layout.width, layout.vectors>(args, rule, scratch, place);
    });
  });
}

}  // namespace

cudaError_t norm_forward(const NormForward& args, Place place) {
  return forward(args, KeepAll{}, place);
}

cudaError_t dropout_add_norm_forward(const NormForward& args, const Drop& drop, Place place) {
  // What has no elements has no address.
  const bool has_elements = args.rows > 0 && args.hidden > 0;
  if (!is_valid(drop) || (has_elements && args.residual == nullptr)) return cudaErrorInvalidValue;
  return forward(args, DropRule(drop), place);
}

cudaError_t norm_backward(const NormBackward& args, const NormScratch& scratch, Place place) {
  return backward(args, KeepAll{}, scratch, place);
}

cudaError_t dropout_add_norm_backward(const NormBackward& args, const Drop& drop,
                                      const NormScratch& scratch, Place place) {
  if (!is_valid(drop)) return cudaErrorInvalidValue;
  return backward(args, DropRule(drop), scratch, place);
}

}  // namespace anychip::cuda
