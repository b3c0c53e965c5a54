// Sums of squares by blocks of a grid over lists of tensors: anychip.operators.partials.
//
// A block of up to 1,024 elements is a warp's, 4 KiB of float32 in eight accesses per lane; a
// longer one is a thread block's. What is squared comes from Sources, whose kSums sequences go side
// by side: sources.visit(table, tensor, first, visit) gives the source of a tensor from element
// `first` on, and source.load(i, values) what elements i to i + N are before they are squared; N is
// 4, from a vector's address on, or 1.
#pragma once

#include "pairs.cuh"
#include "tensor_list.cuh"

namespace anychip::cuda {

constexpr int kWarps = kListThreads / kWarp;
// Blocks of up to 1,024 * 4 * 2^6 elements: sums that wait are registers.
constexpr int kPartialLevels = 6;
constexpr int64_t kMostBlock = int64_t{kPairs} << (kPartialLevels + 2);

template <int kSums, int N>
__device__ __forceinline__ void square(float (&values)[kSums][N]) {
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int k = 0; k < N; ++k) values[s][k] = rounded_product(values[s][k], values[s][k]);
  }
}

// Squares of elements first to first + 4, 0 from `count` on.
template <int kSums, class Source>
__device__ __forceinline__ void load_some_squares(const Source& source, int first, int count,
                                                  float (&values)[kSums][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float one[kSums][1] = {};
    if (first + k < count) source.load(first + k, one);
#pragma unroll
    for (int s = 0; s < kSums; ++s) values[s][k] = one[s][0];
  }
  square(values);
}

// One warp per block of up to kPairs elements. The last array of the table is where a tensor's
// partials go; those of the next sequence are `total` behind.
template <class Table, class Sources>
__global__ void __launch_bounds__(kListThreads, 2)
    partials_kernel(const __grid_constant__ Table table, Sources sources, int64_t block,
                    int64_t total) {
  int64_t chunk;
  const int tensor = tensor_of_block(table, chunk);
  const int64_t number = chunk * kWarps + threadIdx.x / kWarp;
  const int64_t begin = number * block;
  const int64_t numel = table.numel[tensor];
  if (begin >= numel) return;
  const int count = static_cast<int>(numel - begin < block ? numel - begin : block);
  const bool is_whole = count == kPairs && (table.traits[tensor] & kVectors);
  float* out = static_cast<float*>(table.data[Table::kArrays - 1][tensor]);
  sources.visit(table, tensor, begin, [&](const auto& source) {
    constexpr int kSums = Sources::kSums;
    float sums[kSums];
    if (is_whole) {
      // Without a condition at any load, so that all of them are under way before the first is
      // used.
      const auto load = [&](int first, float (&values)[kSums][4]) {
        source.load(first, values);
        square(values);
      };
      warp_sum_in_pairs(load, sums);
    } else {
      const auto load = [&](int first, float (&values)[kSums][4]) {
        load_some_squares(source, first, count, values);
      };
      warp_sum_in_pairs(load, sums);
    }
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) out[s * total + number] = sums[s];
    }
  });
}

// One thread block per block of more elements, for callers that want few partials.
template <class Table, class Sources>
__global__ void __launch_bounds__(kPairs)
    wide_partials_kernel(const __grid_constant__ Table table, Sources sources, int64_t block,
                         int64_t total) {
  int64_t number;
  const int tensor = tensor_of_block(table, number);
  const int64_t begin = number * block;
  const int64_t left = table.numel[tensor] - begin;
  const int count = static_cast<int>(left < block ? left : block);
  float* out = static_cast<float*>(table.data[Table::kArrays - 1][tensor]);
  ANYCHIP_SHARED(float, scratch, Sources::kSums* kPairs);
  sources.visit(table, tensor, begin, [&](const auto& source) {
    constexpr int kSums = Sources::kSums;
    float sums[kSums];
    block_sum_in_pairs<kSums, kPartialLevels>(
        count,
        [&](int i, float (&values)[kSums]) {
          float one[kSums][1];
          source.load(i, one);
          square(one);
#pragma unroll
          for (int s = 0; s < kSums; ++s) values[s] = one[s][0];
        },
        scratch, sums);
    if (threadIdx.x == 0) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) out[s * total + number] = sums[s];
    }
  });
}

inline bool is_block(int64_t block) {
  return block >= 1 && block <= kMostBlock && (block & (block - 1)) == 0;
}

// Thread blocks for a tensor.
inline int64_t chunks_of_partials(int64_t numel, int64_t block) {
  const int64_t elements = block <= kPairs ? block * kWarps : block;
  return (numel + elements - 1) / elements;
}

template <class Table, class Sources>
cudaError_t launch_partials(const Table& table, int64_t chunks, const Sources& sources,
                            int64_t block, int64_t total, const Place& place) {
  const dim3 grid(static_cast<unsigned>(chunks));
  if (block <= kPairs) {
    return launch(partials_kernel<Table, Sources>, grid, dim3(kListThreads), 0, place.stream, table,
                  sources, block, total);
  }
  return launch(wide_partials_kernel<Table, Sources>, grid, dim3(kPairs), 0, place.stream, table,
                sources, block, total);
}

}  // namespace anychip::cuda
