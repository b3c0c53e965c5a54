// Lists of tensors as launchers take them.
#pragma once

#include <vector>

#include "dtype.h"

namespace anychip::cuda {

// Tensors of any sizes and types, contiguous; the vectors are of one length. An address may be 0
// where there are no elements.
struct TensorList {
  std::vector<int64_t> data;  // addresses
  std::vector<int64_t> numel;
  std::vector<int64_t> dtype;  // codes of DType

  size_t size() const { return data.size(); }
};

// Elements that a block works on. A list is cut into such chunks, each tensor on its own.
constexpr int64_t kChunk = 16384;

// Chunks of a tensor; its head, `head` elements before the first vector, goes with the first.
inline int64_t chunks_of(int64_t numel, int64_t head) {
  if (numel == 0) return 0;
  return numel <= head + kChunk ? 1 : (numel - head + kChunk - 1) / kChunk;
}

// The elements of a tensor that a block works on: `head` of them right before `begin`, and those
// from `begin` to `end`.
struct Part {
  int head;
  int64_t begin;
  int64_t end;
};

__host__ __device__ inline Part part_of(int64_t numel, int64_t head, int64_t chunk) {
  if (head > numel) head = numel;
  const int64_t begin = head + chunk * kChunk;
  const int64_t end = begin + kChunk < numel ? begin + kChunk : numel;
  return {chunk == 0 ? static_cast<int>(head) : 0, begin, end};
}

}  // namespace anychip::cuda
