// softmax and its gradients.
//
// Note: Three ways to hold a row
//   A warp has a row of up to 1,024 keys, a block one of up to 16,384, in registers: each element
//   is read once. (Half of both for rows that cannot be read in vectors, and for float32
//   gradients.) A longer row is copied to shared memory, as it lies: vectors, but for the elements
//   in front of its first 16-byte boundary and behind its last. One that does not fit is read
//   twice, the second time mostly from the second-level cache: the forward pass joins maximum and
//   sum in the first look at it (Milakov and Gimelshein 2018). Keys that causality hides are not
//   read.
//
// Note: The same sums wherever a row lies
//   What a thread adds of a long row depends on no address: vectors that are no access are put
//   together from two. Where results alone are made, the accesses decide who makes them.
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
constexpr int kAhead = 2;  // vectors of a long row that are looked at together

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

// With kOnce shared memory has room for the row.
template <class T, bool kOnce>
__global__ void __launch_bounds__(kLongThreads)
    long_forward_kernel(const T* __restrict__ x, T* __restrict__ y, Softmax call) {
  constexpr int N = kWidth<T>;
  ANYCHIP_SHARED(float, scratch, kMaxWarps);
  ANYCHIP_DYNAMIC_SHARED(T, room);
  const RowThreads<false> threads;
  const int64_t visible = visible_keys(call, threads.row);
  const int64_t first = threads.row * call.keys;
  const int64_t step = int64_t{threads.count} * N;
  const int before = elements_before(x + first);
  const T* row = kOnce ? room + before : x + first;
  if constexpr (kOnce) {
    copy_row(threads, x + first, room + before, visible);
    __syncthreads();
  }
  const RowExtras<T> extras(call, threads.row);
  float largest = -INFINITY;
  float sum = 0.0f;  // of exp(score - base_of(largest))
  for (int64_t begin = int64_t{threads.lane} * N; begin < visible; begin += kAhead * step) {
    float scores[kAhead][N];
    float larger = largest;
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int64_t key = begin + ahead * step;
      const Adjacent<N, T> raw =
          key < visible ? load_within<N>(row, key, visible, before) : Adjacent<N, T>{};
      scores_at<T, N>(call, extras, raw, key, visible, scores[ahead]);
#pragma unroll
      for (int i = 0; i < N; ++i) larger = fmaxf(larger, scores[ahead][i]);
    }
    const float base = base_of(larger);
    sum *= expf(largest - base);
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum += expf(scores[ahead][i] - base);
    }
    largest = larger;
  }
  const float base = base_of(threads.reduce(largest, scratch, Larger{}));
  const float inverse = inverse_of(threads.reduce(sum * expf(largest - base), scratch, Sum{}));
  const bool alike = elements_before(y + first) == before;
  for_each_access<N, 1>(
      threads, alike ? (N - before) % N : call.keys, call.keys, [&](auto width, int64_t key) {
        constexpr int M = decltype(width)::value;
        float weights[M];
        const Adjacent<M, T> raw = key < visible ? load_adjacent<M>(row + key) : Adjacent<M, T>{};
        scores_at<T, M>(call, extras, raw, key, visible, weights);
#pragma unroll
        for (int i = 0; i < M; ++i) weights[i] = expf(weights[i] - base) * inverse;
        store(y + first + key, weights);
      });
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

// With kOnce shared memory has room for both rows, each of `room_keys` elements.
template <class T, bool kOnce>
__global__ void __launch_bounds__(kLongThreads)
    long_backward_kernel(const T* __restrict__ grad, const T* __restrict__ y,
                         SoftmaxGradients wanted, Softmax call, int64_t room_keys) {
  constexpr int N = kWidth<T>;
  ANYCHIP_SHARED(float, scratch, kMaxWarps);
  ANYCHIP_DYNAMIC_SHARED(T, room);
  const RowThreads<false> threads;
  const int64_t visible = visible_keys(call, threads.row);
  const int64_t first = threads.row * call.keys;
  const int64_t step = int64_t{threads.count} * N;
  const int before_grad = elements_before(grad + first);
  const int before_y = elements_before(y + first);
  const T* grad_row = kOnce ? room + before_grad : grad + first;
  const T* y_row = kOnce ? room + room_keys + before_y : y + first;
  if constexpr (kOnce) {
    // A vector ends up to N elements behind what is visible.
    const int64_t end = min(visible + N, call.keys);
    copy_row(threads, grad + first, room + before_grad, end);
    copy_row(threads, y + first, room + room_keys + before_y, end);
    __syncthreads();
  }
  float products = 0.0f;
#pragma unroll kAhead
  for (int64_t key = int64_t{threads.lane} * N; key < visible; key += step) {
    const Adjacent<N, T> own_grad = load_within<N>(grad_row, key, visible, before_grad);
    const Adjacent<N, T> own_y = load_within<N>(y_row, key, visible, before_y);
#pragma unroll
    for (int i = 0; i < N; ++i) products += own_grad[i] * own_y[i];
  }
  const float inner = threads.reduce(products, scratch, Sum{});
  if (threads.lane == 0 && wanted.inner != nullptr) wanted.inner[threads.row] = inner;
  T* const dx = static_cast<T*>(wanted.dx);
  float sum = 0.0f;
  if (dx != nullptr) {
    const bool alike = before_y == before_grad && elements_before(dx + first) == before_grad;
    for_each_access<N, 1>(
        threads, alike ? (N - before_y) % N : call.keys, call.keys, [&](auto width, int64_t key) {
          constexpr int M = decltype(width)::value;
          Adjacent<M, T> own_grad{}, own_y{};
          if (key < visible) {
            own_grad = load_adjacent<M>(grad_row + key);
            own_y = load_adjacent<M>(y_row + key);
          }
          store_gradient(dx, first + key, own_grad, own_y, inner, call.scale, sum);
        });
  }
  if (wanted.row_sums == nullptr) return;
  // In an order that depends on no address.
  sum = 0.0f;
  for (int64_t key = int64_t{threads.lane} * N; key < visible; key += step) {
    const Adjacent<N, T> own_grad = load_within<N>(grad_row, key, visible, before_grad);
    const Adjacent<N, T> own_y = load_within<N>(y_row, key, visible, before_y);
    store_gradient<T, N>(nullptr, 0, own_grad, own_y, inner, call.scale, sum);
  }
  sum = threads.reduce(sum, scratch, Sum{});
  if (threads.lane == 0) wanted.row_sums[threads.row] = sum;
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
  return {dim3(static_cast<unsigned>(call.rows)), dim3(static_cast<unsigned>(warps * 32))};
}

// Elements of shared memory for a long row that begins anywhere in an access; the last of it, too.
template <class T>
int64_t room_of(int64_t keys) {
  return ceil_div(keys, kWidth<T>) * kWidth<T> + 2 * kWidth<T>;
}

// Launches once(threads, bytes) where `bytes` of shared memory are there for a row, else
// twice(threads, 0). Two blocks share a multiprocessor where they can: one loads while the other
// computes.
template <class Once, class Twice, class... Arguments>
cudaError_t launch_long(Once once, Twice twice, int64_t bytes, const Softmax& call,
                        const Place& place, Arguments... arguments) {
  constexpr int64_t kScratchBytes = kMaxWarps * sizeof(float);
  const dim3 grid(static_cast<unsigned>(call.rows));
  if (!allow_shared(once, bytes, kScratchBytes)) {
    return launch(twice, grid, dim3(kLongThreads), 0, place.stream, arguments...);
  }
  // A block has another KiB that the runtime needs.
  const bool is_half = 2 * (bytes + kScratchBytes + 1024) <= kMostSharedBytes + 1024;
  return launch(once, grid, dim3(is_half ? kLongThreads / 2 : kLongThreads),
                static_cast<size_t>(bytes), place.stream, arguments...);
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
      return launch_long(long_forward_kernel<T, true>, long_forward_kernel<T, false>,
                         room_of<T>(call.keys) * static_cast<int64_t>(sizeof(T)), call, place, x, y,
                         call);
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
      return launch_long(long_backward_kernel<T, true>, long_backward_kernel<T, false>,
                         2 * room_of<T>(call.keys) * static_cast<int64_t>(sizeof(T)), call, place,
                         grad, y, wanted, call, room_of<T>(call.keys));
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
