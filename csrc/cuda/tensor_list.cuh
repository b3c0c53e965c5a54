// Lists of tensors in one launch: which tensors, and which part of one each block works on.
//
// Note [Lists in parameters]: addresses travel in the kernel's parameters, for as many tensors as
// 4 KiB hold; a longer list takes several launches. Nothing is copied to the device before a
// launch, no memory must outlive it, and a captured graph keeps its addresses. Tensors are cut into
// chunks. A block finds its own by a binary search among the first chunks of all tensors, so that
// one launch serves any sizes and types.
//
// Note [Head]: a view into a flat buffer begins anywhere. Its first elements, up to an address that
// vectors may have, go one by one; when the arrays of a tensor disagree about where that is, all
// do.
#pragma once

#include "tensor_list.h"
#include "vector.cuh"

namespace anychip::cuda {

constexpr int kListThreads = 256;
constexpr size_t kParameterBytes = 4096;
// What a kernel of lists may take besides its table.
constexpr size_t kOtherParameters = 128;

// `arrays` belong to every tensor, all with its number of elements.
template <int arrays, int tensors>
struct TensorTable {
  static constexpr int kArrays = arrays;
  static constexpr int kTensors = tensors;

  void* data[arrays][tensors];
  int64_t numel[tensors];
  uint32_t first_chunk[tensors];  // among the chunks of this launch
  uint32_t traits[tensors];
  int64_t chunks_before;  // in earlier launches
  int32_t tensors_before;
  int32_t count;
};

// Traits: types of up to three arrays, 4 bits each, kNoType for an array that is not there; then
// the elements of the head; then whether vectors may be used behind it.
constexpr uint32_t kNoType = 15;
constexpr int kHeadShift = 12;
constexpr uint32_t kVectors = 1u << 16;

__host__ __device__ __forceinline__ uint32_t type_of(uint32_t traits, int array) {
  return (traits >> (4 * array)) & 15u;
}

inline int64_t element_bytes(int64_t dtype) {
  return dtype == static_cast<int64_t>(DType::kFloat32) ? 4 : 2;
}

// Elements of an array before the first that a vector of `width` elements may begin with.
inline int64_t head_of(int64_t address, int64_t bytes, int64_t width) {
  const int64_t phase = address / bytes % width;
  return (width - phase) % width;
}

// The tensor of this block, and the number of its chunk there.
template <class Table>
__device__ __forceinline__ int tensor_of_block(const Table& table, int64_t& chunk) {
  int low = 0;
  int high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_chunk[middle] <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  chunk = int64_t{blockIdx.x} - table.first_chunk[low];
  return low;
}

template <class Table>
__device__ __forceinline__ Part part_of_block(const Table& table, int& tensor) {
  int64_t chunk;
  tensor = tensor_of_block(table, chunk);
  return part_of(table.numel[tensor], (table.traits[tensor] >> kHeadShift) & 15u, chunk);
}

// Fills tables and launches them: describe(index, table, slot) writes a tensor's data, numel and
// traits and returns its chunks, or -1 when it is not valid; queue(table, chunks) launches.
template <class Table, class Describe, class Queue>
cudaError_t for_each_table(size_t tensors, const Describe& describe, const Queue& queue) {
  static_assert(sizeof(Table) + kOtherParameters <= kParameterBytes, "parameters of a kernel");
  constexpr int64_t most = INT32_MAX;  // blocks of a grid
  Table table;
  table.chunks_before = 0;
  table.tensors_before = 0;
  table.count = 0;
  int64_t chunks = 0;
  const auto flush = [&]() -> cudaError_t {
    const cudaError_t status = chunks == 0 ? cudaSuccess : queue(table, chunks);
    table.chunks_before += chunks;
    table.tensors_before += table.count;
    table.count = 0;
    chunks = 0;
    return status;
  };
  for (size_t index = 0; index < tensors; ++index) {
    // Written to the table before it is known to fit: a slot is free then, and is filled again.
    int64_t own = describe(index, table, table.count);
    if (own < 0 || own > most) return cudaErrorInvalidValue;
    if (chunks + own > most) {
      if (const cudaError_t status = flush()) return status;
      own = describe(index, table, 0);
    }
    table.first_chunk[table.count++] = static_cast<uint32_t>(chunks);
    chunks += own;
    if (table.count == Table::kTensors) {
      if (const cudaError_t status = flush()) return status;
    }
  }
  return flush();
}

// An array of float32, or of one of the types of 16 bits, which is known only at run time: half the
// kernels, for a selection per element.
template <bool kWide>
struct Elements {
  static constexpr bool kIsWide = kWide;

  char* data;
  bool is_bfloat16;

  __device__ __forceinline__ char* at(int64_t i) const { return data + i * (kWide ? 4 : 2); }

  // Elements i to i + N; N is 4 and the address a multiple of their bytes, or N is 1.
  template <int N>
  __device__ __forceinline__ void load(int64_t i, float (&to)[N]) const {
    static_assert(N == 1 || N == 4, "one element or a vector");
    if constexpr (kWide) {
      anychip::cuda::load(reinterpret_cast<const float*>(at(i)), to);
    } else {
      uint16_t raw[N];
      if constexpr (N == 1) {
        raw[0] = *reinterpret_cast<const uint16_t*>(at(i));
      } else {
        const uint2 both = *reinterpret_cast<const uint2*>(at(i));
        memcpy(raw, &both, sizeof raw);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) to[k] = widened(raw[k]);
    }
  }

  template <int N>
  __device__ __forceinline__ void store(int64_t i, const float (&from)[N]) const {
    static_assert(N == 1 || N == 4, "one element or a vector");
    if constexpr (kWide) {
      anychip::cuda::store(reinterpret_cast<float*>(at(i)), from);
    } else {
      uint16_t raw[N];
#pragma unroll
      for (int k = 0; k < N; ++k) raw[k] = narrowed(from[k]);
      if constexpr (N == 1) {
        *reinterpret_cast<uint16_t*>(at(i)) = raw[0];
      } else {
        uint2 both;
        memcpy(&both, raw, sizeof raw);
        *reinterpret_cast<uint2*>(at(i)) = both;
      }
    }
  }

  // `value` as it is after a store.
  __device__ __forceinline__ float stored(float value) const {
    if constexpr (kWide) return value;
    return is_bfloat16 ? rounded<BFloat16>(value) : rounded<Float16>(value);
  }

 private:
  __device__ __forceinline__ float widened(uint16_t raw) const {
    BFloat16 as_bfloat16;
    Float16 as_float16;
    memcpy(&as_bfloat16, &raw, sizeof raw);
    memcpy(&as_float16, &raw, sizeof raw);
    return is_bfloat16 ? to_float(as_bfloat16) : to_float(as_float16);
  }

  __device__ __forceinline__ uint16_t narrowed(float value) const {
    const BFloat16 as_bfloat16 = from_float<BFloat16>(value);
    const Float16 as_float16 = from_float<Float16>(value);
    uint16_t raw;
    if (is_bfloat16) {
      memcpy(&raw, &as_bfloat16, sizeof raw);
    } else {
      memcpy(&raw, &as_float16, sizeof raw);
    }
    return raw;
  }
};

// visit(Elements) of an array of this type: the code of a DType.
template <class Visit>
__device__ __forceinline__ void visit_elements(void* data, uint32_t type, const Visit& visit) {
  char* bytes = static_cast<char*>(data);
  if (type == static_cast<uint32_t>(DType::kFloat32)) {
    visit(Elements<true>{bytes, false});
  } else {
    visit(Elements<false>{bytes, type == static_cast<uint32_t>(DType::kBFloat16)});
  }
}

}  // namespace anychip::cuda
