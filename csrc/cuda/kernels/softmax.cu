// softmax and its gradients.
//
// Note: Three ways to hold a row
//   A warp has a row of up to 1,024 keys, a block one of up to 16,384, in registers: each element
//   is read once. (Half of both for rows that cannot be read in vectors, and for float32
//   gradients.) A longer row is read twice, the second time mostly from the second-level cache: the
//   forward pass joins maximum and sum in the first reading (Milakov and Gimelshein 2018). Keys
//   that causality hides are not read.
#include "softmax.h"

#include "softmax_rows.cuh"

namespace anychip::cuda {
namespace {

// Elements of a row that a thread holds: as float32 values, or two packed ones for the gradient. A
// row that is read one by one has an address for each.
template <int N>
constexpr int kHeld = N == 1 ? 16 : 32;
template <class T, int N>
constexpr int kHeldGradients = N == 1 || sizeof(T) == 4 ? 16 : 32;
constexpr int kAhead = 2;  // vectors of a long row that are loaded before the first is used

template <class T, int N, int kVectors, bool kWarp>
__global__ void __launch_bounds__(kWarp ? kWarpRows * 32 : kRowThreads)
    forward_kernel(const T* __restrict__ x, T* __restrict__ y, Softmax call) {
  ANYCHIP_SHARED(float, scratch, kMaxWarps);
  const RowThreads<kWarp> threads;
  if (threads.row >= call.rows) return;  // a warp as a whole
  const int64_t visible = visible_keys(call, threads.row);
  const int64_t first = threads.row * call.keys;
  Adjacent<N, T> raw[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t key = int64_t{v * threads.count + threads.lane} * N;
    raw[v] = key < visible ? load_adjacent<N>(x + first + key) : Adjacent<N, T>{};
  }
  const RowExtras<T> extras(call, threads.row);
  float weights[kVectors][N];
  float largest = -INFINITY;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t key = int64_t{v * threads.count + threads.lane} * N;
#pragma unroll
    for (int i = 0; i < N; ++i) weights[v][i] = -INFINITY;
    if (key < visible) extras.scores(call, raw[v], key, visible, weights[v]);
#pragma unroll
    for (int i = 0; i < N; ++i) largest = fmaxf(largest, weights[v][i]);
  }
  const float base = base_of(threads.reduce(largest, scratch, Larger{}));
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      weights[v][i] = expf(weights[v][i] - base);
      sum += weights[v][i];
    }
  }
  const float inverse = inverse_of(threads.reduce(sum, scratch, Sum{}));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t key = int64_t{v * threads.count + threads.lane} * N;
    if (key >= call.keys) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) weights[v][i] *= inverse;
    store(y + first + key, weights[v]);
  }
}

// Scores of vector number `vector` of a row, -INFINITY behind what is visible.
template <class T, int N>
__device__ __forceinline__ void scores_at(const Softmax& call, const RowExtras<T>& extras,
                                          const Adjacent<N, T>& raw, int64_t key, int64_t visible,
                                          float (&scores)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) scores[i] = -INFINITY;
  if (key < visible) extras.scores(call, raw, key, visible, scores);
}

template <class T, int N>
__global__ void __launch_bounds__(kLongThreads)
    long_forward_kernel(const T* __restrict__ x, T* __restrict__ y, Softmax call) {
  ANYCHIP_SHARED(float, scratch, kMaxWarps);
  const RowThreads<false> threads;
  const int64_t visible = visible_keys(call, threads.row);
  const int64_t first = threads.row * call.keys;
  const int64_t step = int64_t{threads.count} * N;
  const RowExtras<T> extras(call, threads.row);
  float largest = -INFINITY;
  float sum = 0.0f;  // of exp(score - base_of(largest))
  for (int64_t begin = int64_t{threads.lane} * N; begin < visible; begin += kAhead * step) {
    Adjacent<N, T> raw[kAhead];
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int64_t key = begin + ahead * step;
      raw[ahead] = key < visible ? load_adjacent<N>(x + first + key) : Adjacent<N, T>{};
    }
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      float scores[N];
      scores_at<T, N>(call, extras, raw[ahead], begin + ahead * step, visible, scores);
      float larger = largest;
#pragma unroll
      for (int i = 0; i < N; ++i) larger = fmaxf(larger, scores[i]);
      const float base = base_of(larger);
      sum *= expf(largest - base);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += expf(scores[i] - base);
      largest = larger;
    }
  }
  const float base = base_of(threads.reduce(largest, scratch, Larger{}));
  const float inverse = inverse_of(threads.reduce(sum * expf(largest - base), scratch, Sum{}));
  for (int64_t key = int64_t{threads.lane} * N; key < call.keys; key += step) {
    const Adjacent<N, T> raw = key < visible ? load_adjacent<N>(x + first + key) : Adjacent<N, T>{};
    float weights[N];
    scores_at<T, N>(call, extras, raw, key, visible, weights);
#pragma unroll
    for (int i = 0; i < N; ++i) weights[i] = expf(weights[i] - base) * inverse;
    store(y + first + key, weights);
  }
}

// ds of N elements, added to sum; dx is stored unless it is not wanted.
template <class T, int N>
__device__ __forceinline__ void store_gradient(T* dx, int64_t at, const Adjacent<N, T>& grad,
                                               const Adjacent<N, T>& y, float inner, float scale,
                                               float& sum) {
  float results[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float score = y[i] * (grad[i] - inner);
    sum += score;
    results[i] = score * scale;
  }
  if (dx != nullptr) store(dx + at, results);
}

template <class T, int N, int kVectors, bool kWarp>
__global__ void __launch_bounds__(kWarp ? kWarpRows * 32 : kRowThreads)
    backward_kernel(const T* __restrict__ grad, const T* __restrict__ y, SoftmaxGradients wanted,
                    Softmax call) {
  ANYCHIP_SHARED(float, scratch, kMaxWarps);
  const RowThreads<kWarp> threads;
  if (threads.row >= call.rows) return;  // a warp as a whole
  const int64_t visible = visible_keys(call, threads.row);
  const int64_t first = threads.row * call.keys;
  Adjacent<N, T> grads[kVectors];
  Adjacent<N, T> ys[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t key = int64_t{v * threads.count + threads.lane} * N;
    const bool is_visible = key < visible;
    grads[v] = is_visible ? load_adjacent<N>(grad + first + key) : Adjacent<N, T>{};
    ys[v] = is_visible ? load_adjacent<N>(y + first + key) : Adjacent<N, T>{};
  }
  float products = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < N; ++i) products += grads[v][i] * ys[v][i];
  }
  const float inner = threads.reduce(products, scratch, Sum{});
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t key = int64_t{v * threads.count + threads.lane} * N;
    if (key >= call.keys) continue;
    store_gradient(static_cast<T*>(wanted.dx), first + key, grads[v], ys[v], inner, call.scale,
                   sum);
  }
  if (wanted.row_sums != nullptr) sum = threads.reduce(sum, scratch, Sum{});
  if (threads.lane != 0) return;
  if (wanted.inner != nullptr) wanted.inner[threads.row] = inner;
  if (wanted.row_sums != nullptr) wanted.row_sums[threads.row] = sum;
}

template <class T, int N>
__global__ void __launch_bounds__(kLongThreads)
    long_backward_kernel(const T* __restrict__ grad, const T* __restrict__ y,
                         SoftmaxGradients wanted, Softmax call) {
  ANYCHIP_SHARED(float, scratch, kMaxWarps);
  const RowThreads<false> threads;
  const int64_t visible = visible_keys(call, threads.row);
  const int64_t first = threads.row * call.keys;
  const int64_t step = int64_t{threads.count} * N;
  float products = 0.0f;
#pragma unroll kAhead
  for (int64_t key = int64_t{threads.lane} * N; key < visible; key += step) {
    const Adjacent<N, T> own_grad = load_adjacent<N>(grad + first + key);
    const Adjacent<N, T> own_y = load_adjacent<N>(y + first + key);
#pragma unroll
    for (int i = 0; i < N; ++i) products += own_grad[i] * own_y[i];
  }
  const float inner = threads.reduce(products, scratch, Sum{});
  float sum = 0.0f;
  for (int64_t key = int64_t{threads.lane} * N; key < call.keys; key += step) {
    const bool is_visible = key < visible;
    const Adjacent<N, T> own_grad =
        is_visible ? load_adjacent<N>(grad + first + key) : Adjacent<N, T>{};
    const Adjacent<N, T> own_y = is_visible ? load_adjacent<N>(y + first + key) : Adjacent<N, T>{};
    store_gradient(static_cast<T*>(wanted.dx), first + key, own_grad, own_y, inner, call.scale,
                   sum);
  }
  if (wanted.row_sums != nullptr) sum = threads.reduce(sum, scratch, Sum{});
  if (threads.lane != 0) return;
  if (wanted.inner != nullptr) wanted.inner[threads.row] = inner;
  if (wanted.row_sums != nullptr) wanted.row_sums[threads.row] = sum;
}

// A thread has N keys of an entry's row, and walks over the rows of its part that share it.
template <class T, int N>
__global__ void __launch_bounds__(kTileThreads)
    bias_kernel(const T* __restrict__ grad, const T* __restrict__ y,
                const float* __restrict__ inner, SharedRows shared, int64_t keys, unsigned vectors,
                unsigned tiles, int64_t reduced, int64_t rows_per_part,
                float* __restrict__ partial) {
  const unsigned index = blockIdx.x % tiles * kTileThreads + threadIdx.x;
  const int64_t part = blockIdx.x / tiles;
  const unsigned per_row = static_cast<unsigned>(keys / N);
  if (index >= vectors) return;
  const int64_t entry = index / per_row;
  const int64_t key = int64_t{index % per_row} * N;
  const int64_t own = offset_of(entry, shared.sizes, shared.strides);
  const int64_t end = min((part + 1) * rows_per_part, reduced);
  float sums[N] = {};
#pragma unroll kAhead
  for (int64_t r = part * rows_per_part; r < end; ++r) {
    const int64_t row = own + offset_of(r, shared.reduced_sizes, shared.reduced_strides);
    const Adjacent<N, T> ys = load_adjacent<N>(y + row * keys + key);
    if (grad == nullptr) {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i] += ys[i];
      continue;
    }
    const Adjacent<N, T> grads = load_adjacent<N>(grad + row * keys + key);
    const float common = inner[row];
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += ys[i] * (grads[i] - common);
  }
  const int64_t entries = int64_t{vectors} * N;
#pragma unroll
  for (int i = 0; i < N; ++i) partial[part * entries + entry * keys + key + i] = sums[i];
}

// How a row is held, by its length.
enum class Hold { kShort, kWarp, kBlock, kLong };

constexpr int kShortKeys = 8 * 32;

Hold hold_of(int64_t keys, int held) {
  if (keys <= kShortKeys) return Hold::kShort;
  if (keys <= int64_t{held} * 32) return Hold::kWarp;
  return keys <= int64_t{held} * kRowThreads ? Hold::kBlock : Hold::kLong;
}

// Grid and block for rows of `keys`, of which a thread of a block holds `held`.
struct Shape {
  dim3 grid;
  dim3 block;
};

Shape shape_of(Hold hold, const Softmax& call, int held) {
  if (hold == Hold::kShort || hold == Hold::kWarp) {
    return {dim3(static_cast<unsigned>(ceil_div(call.rows, kWarpRows))), dim3(kWarpRows * 32)};
  }
  const int64_t warps = ceil_div(call.keys, int64_t{held} * 32);
  const int64_t threads = hold == Hold::kLong ? kLongThreads : warps * 32;
  return {dim3(static_cast<unsigned>(call.rows)), dim3(static_cast<unsigned>(threads))};
}

bool is_valid(const Softmax& call) {
  // Rows and queries are divided in 32 bits.
  return call.rows >= 0 && call.rows <= INT32_MAX && call.keys >= 0 &&
         (!call.causal || (call.queries > 0 && call.rows % call.queries == 0));
}

constexpr int at_least_one(int count) { return count < 1 ? 1 : count; }

template <class T, int N>
cudaError_t launch_forward(const T* x, T* y, const Softmax& call, const Place& place) {
  constexpr int kShortVectors = at_least_one(8 / N);
  constexpr int kVectors = kHeld<N> / N;
  const Hold hold = hold_of(call.keys, kHeld<N>);
  const auto [grid, block] = shape_of(hold, call, kHeld<N>);
  switch (hold) {
    case Hold::kShort:
      return launch(forward_kernel<T, N, kShortVectors, true>, grid, block, 0, place.stream, x, y,
                    call);
    case Hold::kWarp:
      return launch(forward_kernel<T, N, kVectors, true>, grid, block, 0, place.stream, x, y, call);
    case Hold::kBlock:
      return launch(forward_kernel<T, N, kVectors, false>, grid, block, 0, place.stream, x, y,
                    call);
    case Hold::kLong:
      return launch(long_forward_kernel<T, N>, grid, block, 0, place.stream, x, y, call);
  }
  return cudaErrorInvalidValue;
}

template <class T, int N>
cudaError_t launch_backward(const T* grad, const T* y, const SoftmaxGradients& wanted,
                            const Softmax& call, const Place& place) {
  constexpr int kShortVectors = at_least_one(8 / N);
  constexpr int kVectors = kHeldGradients<T, N> / N;
  const Hold hold = hold_of(call.keys, kHeldGradients<T, N>);
  const auto [grid, block] = shape_of(hold, call, kHeldGradients<T, N>);
  switch (hold) {
    case Hold::kShort:
      return launch(backward_kernel<T, N, kShortVectors, true>, grid, block, 0, place.stream, grad,
                    y, wanted, call);
    case Hold::kWarp:
      return launch(backward_kernel<T, N, kVectors, true>, grid, block, 0, place.stream, grad, y,
                    wanted, call);
    case Hold::kBlock:
      return launch(backward_kernel<T, N, kVectors, false>, grid, block, 0, place.stream, grad, y,
                    wanted, call);
    case Hold::kLong:
      return launch(long_backward_kernel<T, N>, grid, block, 0, place.stream, grad, y, wanted,
                    call);
  }
  return cudaErrorInvalidValue;
}

int64_t product(const int64_t (&sizes)[kRowDims]) {
  int64_t found = 1;
  for (const int64_t size : sizes) found *= size;
  return found;
}

}  // namespace

cudaError_t softmax_forward(const void* x, void* y, const Softmax& call, Place place) {
  if (!is_valid(call)) return cudaErrorInvalidValue;
  if (call.bias.values != nullptr && call.bias_dtype != call.dtype &&
      call.bias_dtype != DType::kFloat32) {
    return cudaErrorInvalidValue;
  }
  if (call.rows * call.keys == 0) return cudaSuccess;
  return visit_dtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const bool aligned =
        is_vectorizable(x, call.keys * static_cast<int64_t>(sizeof(T))) && is_vectorizable(y);
    return visit_width<T>(aligned, [&](auto width) {
      return launch_forward<T, decltype(width)::value>(static_cast<const T*>(x), static_cast<T*>(y),
                                                       call, place);
    });
  });
}

cudaError_t softmax_backward(const void* grad, const void* y, const SoftmaxGradients& wanted,
                             const Softmax& call, Place place) {
  if (!is_valid(call)) return cudaErrorInvalidValue;
  if (call.rows * call.keys == 0) return cudaSuccess;
  return visit_dtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const bool aligned = is_vectorizable(grad, call.keys * static_cast<int64_t>(sizeof(T))) &&
                         is_vectorizable(y) && is_vectorizable(wanted.dx);
    return visit_width<T>(aligned, [&](auto width) {
      return launch_backward<T, decltype(width)::value>(
          static_cast<const T*>(grad), static_cast<const T*>(y), wanted, call, place);
    });
  });
}

cudaError_t softmax_bias_gradient(const void* grad, const void* y, const float* inner,
                                  const SharedRows& shared, int64_t keys, float* partial,
                                  int64_t parts, void* dbias, DType dtype, DType bias_dtype,
                                  Place place) {
  const int64_t entries = product(shared.sizes) * keys;
  const int64_t reduced = product(shared.reduced_sizes);
  if (parts < 1 || keys < 0 || product(shared.sizes) > INT32_MAX || reduced > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (entries == 0) return cudaSuccess;
  const cudaError_t status =
      visit_dtype(grad == nullptr ? DType::kFloat32 : dtype, [&](auto element) {
        using T = decltype(element);
        const bool aligned =
            is_vectorizable(grad, keys * static_cast<int64_t>(sizeof(T))) && is_vectorizable(y);
        return visit_width<T>(aligned, [&](auto width) {
          constexpr int N = decltype(width)::value;
          const int64_t vectors = entries / N;
          if (vectors > INT32_MAX) return cudaErrorInvalidValue;
          const int64_t tiles = ceil_div(vectors, kTileThreads);
          const dim3 grid(static_cast<unsigned>(tiles * parts));
          return launch(bias_kernel<T, N>, grid, dim3(kTileThreads), 0, place.stream,
                        static_cast<const T*>(grad), static_cast<const T*>(y), inner, shared, keys,
                        vectors, tiles, reduced, ceil_div(reduced, parts), partial);
        });
      });
  if (status != cudaSuccess) return status;
  return sum_parts(partial, dbias, bias_dtype, parts, entries, place);
}

}  // namespace anychip::cuda
