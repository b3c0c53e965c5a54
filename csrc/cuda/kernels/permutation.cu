// permute and unpermute.
//
// The map is a counting sort in three launches: choices of each expert per chunk, where each
// chunk's begin among those of its expert, and the places. Order within a chunk is that of its
// warps, of their rounds, and of the lanes: no atomic operation, so that the sort is stable and the
// same in every run. Rows are moved by a warp each, in accesses of 16 bytes, straight between the
// tokens and their places.
#include "permutation.h"

#include "reduce.cuh"
#include "vector.cuh"

namespace anychip::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
// Choices of a chunk: a warp takes so many rounds of 32, one after the other.
constexpr int kRounds = 4;
constexpr int kWarpChunk = kRounds * kWarp;
constexpr int kChunk = kWarps * kWarpChunk;
// Experts, and those choices that are of none.
constexpr int kMostBins = kMostExperts + 1;
// Accesses of a lane before the first one is used.
constexpr int kSteps = 4;

// The expert of a choice, num_experts if it is none, and -1 behind the last choice.
__device__ __forceinline__ int expert_at(const void* indices, bool wide, int64_t entry,
                                         int64_t entries, int num_experts) {
  if (entry >= entries) return -1;
  const int64_t index =
      wide ? static_cast<const int64_t*>(indices)[entry] : static_cast<const int*>(indices)[entry];
  return index >= 0 && index < num_experts ? static_cast<int>(index) : num_experts;
}

// bins[warp][expert]: choices of each warp. Lanes with the same expert are counted by the first
// one.
__device__ __forceinline__ void count_experts(const void* indices, bool wide, int64_t entries,
                                              int num_experts, int* bins) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * (num_experts + 1); i += kThreads)
    bins[i] = 0;
  __syncthreads();
  int* own = bins + warp * (num_experts + 1);
  const int64_t start = int64_t{blockIdx.x} * kChunk + warp * kWarpChunk + lane;
  for (int round = 0; round < kRounds; ++round) {
    const int expert = expert_at(indices, wide, start + round * kWarp, entries, num_experts);
    const unsigned same = __match_any_sync(kAllLanes, static_cast<unsigned>(expert));
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) own[expert] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
}

// counts[expert][chunk]
__global__ void __launch_bounds__(kThreads)
    count_kernel(const void* indices, bool wide, int* counts, int64_t entries, int num_experts,
                 int64_t chunks) {
  ANYCHIP_SHARED(int, bins, kWarps* kMostBins);
  count_experts(indices, wide, entries, num_experts, bins);
  for (int expert = static_cast<int>(threadIdx.x); expert <= num_experts; expert += kThreads) {
    int total = 0;
    for (int warp = 0; warp < kWarps; ++warp) total += bins[warp * (num_experts + 1) + expert];
    counts[expert * chunks + blockIdx.x] = total;
  }
}

// The sum over the threads before this one; `total` gets that of all. All threads of a block call
// it.
__device__ __forceinline__ int64_t sum_before(int64_t value, int64_t* scratch, int64_t& total) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int64_t sum = value;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == kWarp - 1) scratch[warp] = sum;
  __syncthreads();
  int64_t before = sum - value;
  total = 0;
  for (int other = 0; other < kWarps; ++other) {
    if (other < warp) before += scratch[other];
    total += scratch[other];
  }
  __syncthreads();
  return before;
}

// A block per expert: its counts become where its choices of a chunk begin, and their sum.
__global__ void __launch_bounds__(kThreads)
    scan_kernel(int* counts, int64_t* totals, int64_t chunks) {
  ANYCHIP_SHARED(int64_t, scratch, kWarps);
  int* own = counts + int64_t{blockIdx.x} * chunks;
  int64_t begin = 0;
  for (int64_t first = 0; first < chunks; first += kThreads) {
    const int64_t chunk = first + threadIdx.x;
    const int value = chunk < chunks ? own[chunk] : 0;
    int64_t total;
    const int64_t before = sum_before(value, scratch, total);
    if (chunk < chunks) own[chunk] = static_cast<int>(begin + before);
    begin += total;
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = begin;
}

// A block per chunk. Places of a chunk's choices: those of all experts before, of this expert's
// chunks before, of this chunk's warps before, of this warp's rounds before, of the lanes before.
__global__ void __launch_bounds__(kThreads)
    place_kernel(const void* indices, bool wide, const int* counts, const int64_t* totals,
                 int64_t* row_map, int64_t* offsets, int64_t entries, int num_experts,
                 int64_t chunks) {
  ANYCHIP_SHARED(int, bins, kWarps* kMostBins);
  ANYCHIP_SHARED(int64_t, starts, kMostBins);
  ANYCHIP_SHARED(int64_t, scratch, kWarps);
  count_experts(indices, wide, entries, num_experts, bins);
  int64_t begin = 0;
  for (int first = 0; first <= num_experts; first += kThreads) {
    const int expert = first + static_cast<int>(threadIdx.x);
    const int64_t value = expert <= num_experts ? totals[expert] : 0;
    int64_t total;
    const int64_t before = sum_before(value, scratch, total);
    if (expert <= num_experts) {
      starts[expert] = begin + before + counts[expert * chunks + blockIdx.x];
      if (blockIdx.x == 0 && expert < num_experts) offsets[expert] = begin + before + value;
      int warps_before = 0;
      for (int warp = 0; warp < kWarps; ++warp) {
        int* bin = bins + warp * (num_experts + 1) + expert;
        const int count = *bin;
        *bin = warps_before;
        warps_before += count;
      }
    }
    begin += total;
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int* own = bins + warp * (num_experts + 1);
  const int64_t start = int64_t{blockIdx.x} * kChunk + warp * kWarpChunk + lane;
  for (int round = 0; round < kRounds; ++round) {
    const int64_t entry = start + round * kWarp;
    const int expert = expert_at(indices, wide, entry, entries, num_experts);
    const unsigned same = __match_any_sync(kAllLanes, static_cast<unsigned>(expert));
    const int lanes_before = __popc(same & ((1u << lane) - 1u));
    if (expert >= 0) row_map[entry] = starts[expert] + own[expert] + lanes_before;
    __syncwarp();
    if (expert >= 0 && lanes_before == 0) own[expert] += __popc(same);
    __syncwarp();
  }
}

// Without a choice no chunk is counted.
__global__ void __launch_bounds__(kThreads) no_offsets_kernel(int64_t* offsets, int num_experts) {
  const int expert = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (expert < num_experts) offsets[expert] = 0;
}

// A warp per token: its row is read once, and written to each of its places. Unit: what one access
// moves, uint4 where rows are aligned.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    permute_kernel(const Unit* x, const int64_t* row_map, Unit* y, int64_t tokens, int choices,
                   int64_t units) {
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (token >= tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const Unit* from = x + token * units;
  const int64_t* places = row_map + token * choices;
  for (int64_t first = lane; first < units; first += kSteps * kWarp) {
    Unit values[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (first + step * kWarp < units) values[step] = from[first + step * kWarp];
    }
    for (int choice = 0; choice < choices; ++choice) {
      Unit* to = y + places[choice] * units;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (first + step * kWarp < units) to[first + step * kWarp] = values[step];
      }
    }
  }
}

// Of any type: one number a row, beside which a conversion costs nothing.
__device__ __forceinline__ float weight_at(const void* weights, DType dtype, int64_t entry) {
  if (weights == nullptr) return 1.0f;
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(weights)[entry];
    case DType::kBFloat16:
      return to_float(static_cast<const BFloat16*>(weights)[entry]);
    default:
      return to_float(static_cast<const Float16*>(weights)[entry]);
  }
}

__device__ __forceinline__ void store_weight(void* weights, DType dtype, int64_t entry,
                                             float value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(weights)[entry] = value;
      break;
    case DType::kBFloat16:
      static_cast<BFloat16*>(weights)[entry] = from_float<BFloat16>(value);
      break;
    default:
      static_cast<Float16*>(weights)[entry] = from_float<Float16>(value);
  }
}

// Rows of one token that are loaded before the first is added.
constexpr int kRowsAhead = 4;

// A warp per token and kWarp * N elements of its row; terms are added in the order of the choices.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const T* x, const int64_t* row_map, const void* weights, DType weight_dtype,
                   T* y, int64_t tokens, int choices, int64_t hidden) {
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (token >= tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t entry = token * choices;
  for (int64_t first = int64_t{lane} * N; first < hidden; first += int64_t{kWarp} * N) {
    float total[N] = {};
    for (int begin = 0; begin < choices; begin += kRowsAhead) {
      float rows[kRowsAhead][N];
      float factors[kRowsAhead];
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        if (begin + i < choices) {
          load(x + row_map[entry + begin + i] * hidden + first, rows[i]);
          factors[i] = weight_at(weights, weight_dtype, entry + begin + i);
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        if (begin + i < choices) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const float term = rows[i][j] * factors[i];
            // Not 0 + term: the sum of zeros keeps their sign.
            total[j] = begin + i == 0 ? term : total[j] + term;
          }
        }
      }
    }
    store(y + token * hidden + first, total);
  }
}

// A warp per choice: the token's gradient comes from the cache for all of them but the first.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    combine_backward_kernel(const T* grad, const T* x, const int64_t* row_map, const void* weights,
                            DType weight_dtype, T* dx, void* dweights, int64_t entries, int choices,
                            int64_t hidden) {
  const int64_t entry = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (entry >= entries) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t row = row_map[entry] * hidden;
  const T* own = grad + entry / choices * hidden;
  const float factor = weight_at(weights, weight_dtype, entry);
  constexpr int kAhead = 2;
  float sum = 0.0f;
  for (int64_t first = int64_t{lane} * N; first < hidden; first += int64_t{kAhead} * kWarp * N) {
    float slopes[kAhead][N];
    float values[kAhead][N];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = first + int64_t{i} * kWarp * N;
      if (at < hidden) {
        load(own + at, slopes[i]);
        if (dweights != nullptr) load(x + row + at, values[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = first + int64_t{i} * kWarp * N;
      if (at < hidden) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (dweights != nullptr) sum += slopes[i][j] * values[i][j];
          slopes[i][j] *= factor;
        }
        if (dx != nullptr) store(dx + row + at, slopes[i]);
      }
    }
  }
  if (dweights == nullptr) return;
  sum = warp_sum(sum);
  if (lane == 0) store_weight(dweights, weight_dtype, entry, sum);
}

dim3 grid_of(int64_t items, int64_t per_block) {
  return dim3(static_cast<unsigned>((items + per_block - 1) / per_block));
}

int64_t chunks_of(int64_t entries) { return (entries + kChunk - 1) / kChunk; }

template <class Unit>
cudaError_t permute_units(const void* x, const int64_t* row_map, void* y, int64_t tokens,
                          int choices, int64_t row_bytes, cudaStream_t stream) {
  return launch(permute_kernel<Unit>, grid_of(tokens, kWarps), dim3(kThreads), 0, stream,
                static_cast<const Unit*>(x), row_map, static_cast<Unit*>(y), tokens, choices,
                row_bytes / int64_t{sizeof(Unit)});
}

bool are_rows(int64_t tokens, int choices, int64_t hidden) {
  return tokens >= 0 && choices >= 1 && hidden >= 0;
}

}  // namespace

int64_t permutation_scratch(int64_t entries, int num_experts) {
  // Totals are int64, and stand first.
  return (num_experts + 1) * (2 + chunks_of(entries));
}

cudaError_t permutation_map(const void* indices, bool wide, int64_t* row_map, int64_t* offsets,
                            int* scratch, int64_t entries, int num_experts, Place place) {
  const bool fits = num_experts >= 1 && num_experts <= kMostExperts;
  if (!fits || entries < 0 || entries > INT32_MAX) return cudaErrorInvalidValue;
  if (entries == 0) {
    return launch(no_offsets_kernel, grid_of(num_experts, kThreads), dim3(kThreads), 0,
                  place.stream, offsets, num_experts);
  }
  const int64_t chunks = chunks_of(entries);
  auto* totals = reinterpret_cast<int64_t*>(scratch);
  int* counts = scratch + 2 * (num_experts + 1);
  cudaError_t status = launch(count_kernel, grid_of(chunks, 1), dim3(kThreads), 0, place.stream,
                              indices, wide, counts, entries, num_experts, chunks);
  if (status != cudaSuccess) return status;
  status = launch(scan_kernel, grid_of(num_experts + 1, 1), dim3(kThreads), 0, place.stream, counts,
                  totals, chunks);
  if (status != cudaSuccess) return status;
  return launch(place_kernel, grid_of(chunks, 1), dim3(kThreads), 0, place.stream, indices, wide,
                counts, totals, row_map, offsets, entries, num_experts, chunks);
}

cudaError_t permute_rows(const void* x, const int64_t* row_map, void* y, int64_t tokens,
                         int choices, int64_t row_bytes, Place place) {
  if (!are_rows(tokens, choices, row_bytes) || row_bytes % 2) return cudaErrorInvalidValue;
  if (tokens == 0 || row_bytes == 0) return cudaSuccess;
  if (is_vectorizable(x, row_bytes) && is_vectorizable(y)) {
    return permute_units<uint4>(x, row_map, y, tokens, choices, row_bytes, place.stream);
  }
  return permute_units<unsigned short>(x, row_map, y, tokens, choices, row_bytes, place.stream);
}

cudaError_t combine_rows(const void* x, const int64_t* row_map, const void* weights, void* y,
                         int64_t tokens, int choices, int64_t hidden, DType dtype,
                         DType weight_dtype, Place place) {
  if (!are_rows(tokens, choices, hidden)) return cudaErrorInvalidValue;
  if (tokens == 0 || hidden == 0) return cudaSuccess;
  return visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const bool vectors = is_vectorizable(x, hidden * int64_t{sizeof(T)}) && is_vectorizable(y);
    const auto kernel = vectors ? combine_kernel<T, kWidth<T>> : combine_kernel<T, 1>;
    return launch(kernel, grid_of(tokens, kWarps), dim3(kThreads), 0, place.stream,
                  static_cast<const T*>(x), row_map, weights, weight_dtype, static_cast<T*>(y),
                  tokens, choices, hidden);
  });
}

cudaError_t combine_rows_backward(const void* grad, const void* x, const int64_t* row_map,
                                  const void* weights, void* dx, void* dweights, int64_t tokens,
                                  int choices, int64_t hidden, DType dtype, DType weight_dtype,
                                  Place place) {
  if (!are_rows(tokens, choices, hidden)) return cudaErrorInvalidValue;
  if (tokens == 0 || (dx == nullptr && dweights == nullptr)) return cudaSuccess;
  return visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t row_bytes = hidden * int64_t{sizeof(T)};
    const bool vectors =
        is_vectorizable(grad, row_bytes) && is_vectorizable(x) && is_vectorizable(dx);
    const auto kernel =
        vectors ? combine_backward_kernel<T, kWidth<T>> : combine_backward_kernel<T, 1>;
    return launch(kernel, grid_of(tokens * choices, kWarps), dim3(kThreads), 0, place.stream,
                  static_cast<const T*>(grad), static_cast<const T*>(x), row_map, weights,
                  weight_dtype, static_cast<T*>(dx), dweights, tokens * choices, choices, hidden);
  });
}

}  // namespace anychip::cuda
