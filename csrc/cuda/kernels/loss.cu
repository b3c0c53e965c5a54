// Cross-entropy: every logit is read once forward, read and written once backward.
//
// A row belongs to a warp when it is short and to a block when it is long. Per row, with
// lse = log sum exp(x): nll = lse - x[target], smooth = lse - mean(x),
// loss = (1 - ls) nll + ls smooth + z lse^2; gradient with p = exp(x - lse):
// (1 + 2 z lse) p - ls / vocabulary - (1 - ls) [target].
#include "loss.h"

#include <algorithm>
#include <limits>

#include "reduce.cuh"
#include "vector.cuh"

namespace anychip::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnrolled = 4;    // accesses of a thread that are in flight at a time, forward
constexpr int kGradients = 16;  // elements of a thread that are in flight at a time, backward
constexpr float kLog2E = 1.44269504f;

// Where the aligned vectors of a row are. What lies before and behind them goes one by one.
struct Split {
  int64_t head;  // elements before the first vector
  int64_t vectors;

  // The elements outside of the vectors are numbered from 0 to rest() - 1.
  template <int N>
  __device__ __forceinline__ int64_t rest(int64_t length) const {
    return length - vectors * N;
  }
  template <int N>
  __device__ __forceinline__ int64_t place_of_rest(int64_t number) const {
    return number < head ? number : number + vectors * N;
  }
};

template <int N, class T>
__device__ __forceinline__ int64_t elements_to_alignment(const T* row) {
  const auto element = reinterpret_cast<uintptr_t>(row) / sizeof(T);
  return static_cast<int64_t>((N - element % N) % N);
}

// Note [Rows of an odd length]: such a row starts anywhere in a vector (50,257 classes), but behind
// a head of less than a vector it is aligned. Only when read and written rows start at different
// places of a vector is there no head that fits both, and all goes one by one.
template <int N, class In, class Out>
__device__ __forceinline__ Split split_row(const In* in, const Out* out, int64_t length) {
  const int64_t head = elements_to_alignment<N>(out);
  const bool fits = elements_to_alignment<N>(in + head) % kWidth<In> == 0;
  if (!fits || head > length) return {length, 0};
  return {head, (length - head) / N};
}

// The sum of exp(x - top) over what a thread has seen, with the largest number that it has seen.
//
// Note [Infinite logits]: top is never NaN, since fmaxf drops NaN; the sum keeps it. exp is taken
// relative to 0 where top is infinite, which keeps infinity - infinity out: a row with infinity
// has the sum infinity, one of -infinity alone the sum 0.
struct OnlineSum {
  float top = -INFINITY;
  float sum = 0.0f;
  float total = 0.0f;  // of the logits themselves, for the mean

  static __device__ __forceinline__ float origin(float top) {
    return fabsf(top) == INFINITY ? 0.0f : top;
  }
  // exp in base 2: the subtraction and the product round |x - top| twice, and the terms in which
  // that shows are the small ones.
  static __device__ __forceinline__ float power(float difference) {
    return exp2f(difference * kLog2E);
  }

  __device__ __forceinline__ void raise(float higher) {
    if (top != -INFINITY) sum *= power(origin(top) - origin(higher));
    top = higher;
  }

  template <int N>
  __device__ __forceinline__ void add(const float (&x)[N], bool with_total) {
    float highest = top;
#pragma unroll
    for (int i = 0; i < N; ++i) highest = fmaxf(highest, x[i]);
    if (highest > top) raise(highest);
    const float from = origin(top);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += power(x[i] - from);
    if (with_total) {
#pragma unroll
      for (int i = 0; i < N; ++i) total += x[i];
    }
  }

  // Joins the threads of a row, which all call it.
  template <int kRowThreads>
  __device__ __forceinline__ void join(float* scratch) {
    float highest[1] = {top};
    if constexpr (kRowThreads == kWarp) {
      highest[0] = warp_max(highest[0]);
    } else {
      block_reduce(highest, scratch, Max{});
    }
    raise(highest[0]);
    float sums[2] = {sum, total};
    if constexpr (kRowThreads == kWarp) {
      sums[0] = warp_sum(sums[0]);
      sums[1] = warp_sum(sums[1]);
    } else {
      block_sum(sums, scratch);
    }
    sum = sums[0];
    total = sums[1];
  }
};

template <class T>
struct Forward {
  const T* logits;
  int64_t stride;
  const int64_t* target;
  float* loss;
  float* lse;
  int64_t rows, vocabulary, ignore_index;
  float smoothing, certain, z_loss;
};

template <class T, int kRowThreads>
__device__ __forceinline__ OnlineSum sum_row(const T* x, int64_t length, bool with_total) {
  constexpr int N = kWidth<T>;
  const int thread = threadIdx.x % kRowThreads;
  const Split split = split_row<N>(x, x, length);
  OnlineSum state;
  for (int64_t first = thread; first < split.vectors; first += kRowThreads * kUnrolled) {
    float values[kUnrolled][N];
#pragma unroll
    for (int step = 0; step < kUnrolled; ++step) {
      const int64_t vector = first + step * kRowThreads;
      if (vector < split.vectors) load(x + split.head + vector * N, values[step]);
    }
#pragma unroll
    for (int step = 0; step < kUnrolled; ++step) {
      if (first + step * kRowThreads < split.vectors) state.add(values[step], with_total);
    }
  }
  for (int64_t i = thread; i < split.rest<N>(length); i += kRowThreads) {
    float value[1];
    load(x + split.place_of_rest<N>(i), value);
    state.add(value, with_total);
  }
  return state;
}

template <class T, int kRowThreads>
__global__ void __launch_bounds__(kThreads) forward_kernel(Forward<T> args) {
  ANYCHIP_SHARED(float, scratch, 2 * kMaxWarps);
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  if (row >= args.rows) return;
  const T* x = args.logits + row * args.stride;
  const int64_t target = args.target[row];
  const bool is_class = target >= 0 && target < args.vocabulary;
  // Asked for before the row is read, and used behind it.
  const float picked = is_class ? to_float(x[target]) : NAN;

  OnlineSum state = sum_row<T, kRowThreads>(x, args.vocabulary, args.smoothing != 0.0f);
  state.join<kRowThreads>(scratch);
  if (threadIdx.x % kRowThreads != 0) return;

  // From the largest logit on: nll of a row that is nearly certain keeps its digits.
  const float from = OnlineSum::origin(state.top);
  const float rest = logf(state.sum);
  const float lse = from + rest;
  args.lse[row] = lse;
  float loss = args.certain * ((from - picked) + rest);
  if (args.smoothing != 0.0f) {
    loss += args.smoothing * (lse - state.total / static_cast<float>(args.vocabulary));
  }
  if (args.z_loss != 0.0f) loss += args.z_loss * lse * lse;
  args.loss[row] = target == args.ignore_index ? 0.0f : loss;
}

template <class In, class Out>
struct Backward {
  const float* grad;
  int64_t grad_stride;
  const float* count;
  const In* logits;
  int64_t stride;
  const int64_t* target;
  const float* lse;
  Out* dlogits;
  int64_t dstride;
  int64_t rows, vocabulary, ignore_index;
  float spread, certain, z_loss;
};

// What the gradient of a row is made of, besides its logits. An ignored row has no logits to read,
// so that it is 0 whatever they are.
struct Slope {
  float lse, factor, spread, certain, weight;
  int64_t target;
  bool is_ignored;

  template <int N, class In>
  __device__ __forceinline__ void read(const In* x, float (&values)[N]) const {
    if (!is_ignored) load(x, values);
  }

  template <int N>
  __device__ __forceinline__ void apply(float (&x)[N], int64_t first) const {
    const int64_t distance = target - first;
    const int hit = distance >= 0 && distance < N ? static_cast<int>(distance) : N;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float slope = expf(x[i] - lse) * factor - spread - (i == hit ? certain : 0.0f);
      x[i] = is_ignored ? 0.0f : slope * weight;
    }
  }
};

// A thread stores only what it has loaded itself: the rows may be the same memory.
template <class In, class Out, int kRowThreads>
__device__ __forceinline__ void write_row(const In* x, Out* dx, int64_t length,
                                          const Slope& slope) {
  constexpr int N = kWidth<In> > kWidth<Out> ? kWidth<In> : kWidth<Out>;
  constexpr int steps = kGradients / N;
  const int thread = threadIdx.x % kRowThreads;
  const Split split = split_row<N>(x, dx, length);
  for (int64_t first = thread; first < split.vectors; first += kRowThreads * steps) {
    float values[steps][N] = {};
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int64_t vector = first + step * kRowThreads;
      if (vector < split.vectors) slope.read(x + split.head + vector * N, values[step]);
    }
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int64_t vector = first + step * kRowThreads;
      const int64_t at = split.head + vector * N;
      slope.apply(values[step], at);
      if (vector < split.vectors) store(dx + at, values[step]);
    }
  }
  for (int64_t i = thread; i < split.rest<N>(length); i += kRowThreads) {
    const int64_t at = split.place_of_rest<N>(i);
    float value[1] = {};
    slope.read(x + at, value);
    slope.apply(value, at);
    store(dx + at, value);
  }
}

template <class In, class Out, int kRowThreads>
__global__ void __launch_bounds__(kThreads) backward_kernel(Backward<In, Out> args) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  if (row >= args.rows) return;
  Slope slope;
  slope.target = args.target[row];
  slope.is_ignored = slope.target == args.ignore_index;
  slope.lse = args.lse[row];
  slope.factor = 1.0f + 2.0f * args.z_loss * slope.lse;
  slope.spread = args.spread;
  slope.certain = args.certain;
  slope.weight = args.grad[row * args.grad_stride];
  if (args.count != nullptr) slope.weight /= *args.count;
  if (slope.target < 0 || slope.target >= args.vocabulary) slope.weight = NAN;
  const In* x = args.logits + row * args.stride;
  Out* dx = args.dlogits + row * args.dstride;
  write_row<In, Out, kRowThreads>(x, dx, args.vocabulary, slope);
}

// Note [Reduction over rows]: tiles of kTile rows are summed by a block each, and their sums by one
// more block; the order depends on the number of rows alone. Counts are floats: exact to 2^24, and
// as exact as the division by them beyond.
constexpr int64_t kTile = 8192;

struct Reduction {
  float* total;  // either may be nullptr
  float* count;
  bool mean;

  __device__ __forceinline__ void write(float sum, float counted) const {
    if (total != nullptr) *total = mean ? sum / counted : sum;
    if (count != nullptr) *count = counted;
  }
};

// The result when there is one tile, else sums[tile] and counts[tile].
__global__ void __launch_bounds__(kThreads)
    tile_kernel(const float* row_loss, const int64_t* target, int64_t rows, int64_t ignore_index,
                float* sums, float* counts, Reduction reduction) {
  ANYCHIP_SHARED(float, scratch, 2 * kMaxWarps);
  const int64_t begin = int64_t{blockIdx.x} * kTile;
  const int64_t end = min(begin + kTile, rows);
  float values[2] = {0.0f, 0.0f};
  for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) {
    if (row_loss != nullptr) values[0] += row_loss[row];
    values[1] += target[row] == ignore_index ? 0.0f : 1.0f;
  }
  block_sum(values, scratch);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) {
    reduction.write(values[0], values[1]);
  } else {
    sums[blockIdx.x] = values[0];
    counts[blockIdx.x] = values[1];
  }
}

__global__ void __launch_bounds__(kThreads)
    total_kernel(const float* sums, const float* counts, int64_t tiles, Reduction reduction) {
  ANYCHIP_SHARED(float, scratch, 2 * kMaxWarps);
  float values[2] = {0.0f, 0.0f};
  for (int64_t tile = threadIdx.x; tile < tiles; tile += kThreads) {
    values[0] += sums[tile];
    values[1] += counts[tile];
  }
  block_sum(values, scratch);
  if (threadIdx.x == 0) reduction.write(values[0], values[1]);
}

bool is_valid(const CrossEntropyOptions& options) {
  return options.rows >= 0 && options.vocabulary > 0 &&
         options.rows <= std::numeric_limits<int>::max();
}

// A warp has enough of a row when every lane gets all accesses that it can have in flight.
template <class T>
bool is_short(int64_t vocabulary) {
  return vocabulary <= int64_t{kWarp} * kUnrolled * kWidth<T>;
}

dim3 grid_of(int64_t rows, int64_t rows_per_block) {
  return dim3(static_cast<unsigned>((rows + rows_per_block - 1) / rows_per_block));
}

template <class In, class Out>
cudaError_t launch_backward(const Backward<In, Out>& args, const Place& place) {
  if (is_short<In>(args.vocabulary)) {
    return launch(backward_kernel<In, Out, kWarp>, grid_of(args.rows, kThreads / kWarp),
                  dim3(kThreads), 0, place.stream, args);
  }
  return launch(backward_kernel<In, Out, kThreads>, grid_of(args.rows, 1), dim3(kThreads), 0,
                place.stream, args);
}

}  // namespace

cudaError_t cross_entropy_forward(const LogitRows& logits, const int64_t* target, float* loss,
                                  float* lse, const CrossEntropyOptions& options, Place place) {
  if (!is_valid(options)) return cudaErrorInvalidValue;
  if (options.rows == 0) return cudaSuccess;
  return visit_dtype(logits.dtype, [&](auto element) {
    using T = decltype(element);
    const Forward<T> args{static_cast<const T*>(logits.data),
                          logits.stride,
                          target,
                          loss,
                          lse,
                          options.rows,
                          options.vocabulary,
                          options.ignore_index,
                          static_cast<float>(options.label_smoothing),
                          static_cast<float>(1.0 - options.label_smoothing),
                          static_cast<float>(options.z_loss)};
    if (is_short<T>(options.vocabulary)) {
      return launch(forward_kernel<T, kWarp>, grid_of(options.rows, kThreads / kWarp),
                    dim3(kThreads), 0, place.stream, args);
    }
    return launch(forward_kernel<T, kThreads>, grid_of(options.rows, 1), dim3(kThreads), 0,
                  place.stream, args);
  });
}

cudaError_t cross_entropy_backward(const float* grad, bool per_row, const float* count,
                                   const LogitRows& logits, const int64_t* target, const float* lse,
                                   const LogitRows& dlogits, const CrossEntropyOptions& options,
                                   Place place) {
  // Logits in float32 for a gradient in 16 bits are what linear_cross_entropy has.
  const bool widths_fit = logits.dtype == dlogits.dtype || logits.dtype == DType::kFloat32;
  if (!is_valid(options) || !widths_fit) return cudaErrorInvalidValue;
  if (options.rows == 0) return cudaSuccess;
  const auto start = [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    const double spread = options.label_smoothing / static_cast<double>(options.vocabulary);
    const Backward<In, Out> args{grad,
                                 per_row ? 1 : 0,
                                 count,
                                 static_cast<const In*>(logits.data),
                                 logits.stride,
                                 target,
                                 lse,
                                 static_cast<Out*>(dlogits.data),
                                 dlogits.stride,
                                 options.rows,
                                 options.vocabulary,
                                 options.ignore_index,
                                 static_cast<float>(spread),
                                 static_cast<float>(1.0 - options.label_smoothing),
                                 static_cast<float>(options.z_loss)};
    return launch_backward(args, place);
  };
  return visit_dtype(dlogits.dtype, [&](auto out) {
    return logits.dtype == dlogits.dtype ? start(out, out) : start(float{}, out);
  });
}

int64_t reduction_scratch(int64_t rows) { return 2 * ((rows + kTile - 1) / kTile); }

cudaError_t reduce_losses(const float* row_loss, const int64_t* target, float* total, float* count,
                          float* scratch, int64_t rows, int64_t ignore_index, bool mean,
                          Place place) {
  if (rows < 0 || (total != nullptr && row_loss == nullptr && rows > 0)) {
    return cudaErrorInvalidValue;
  }
  // One tile at least: without rows the sum is 0, and the mean NaN.
  const int64_t tiles = std::max<int64_t>((rows + kTile - 1) / kTile, 1);
  const Reduction reduction{total, count, mean};
  const cudaError_t status =
      launch(tile_kernel, grid_of(tiles, 1), dim3(kThreads), 0, place.stream, row_loss, target,
             rows, ignore_index, scratch, scratch + tiles, reduction);
  if (tiles == 1 || status != cudaSuccess) return status;
  return launch(total_kernel, dim3(1), dim3(kThreads), 0, place.stream, scratch, scratch + tiles,
                tiles, reduction);
}

}  // namespace anychip::cuda
