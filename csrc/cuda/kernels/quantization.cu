// quantize and dequantize.
//
// A block that fits the registers of a group of threads is read once: by some lanes of a warp, or
// by all threads of a block of the grid. Other blocks (longer, or no multiple of a vector) take
// three launches: largest magnitudes, codes, scales. Note [largest magnitude] below.
#include "quantization.h"

#include <cstring>

#include "codes.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace anychip::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxThreads = 1024;
// Vectors of one thread: 64 bytes in flight.
constexpr int kSteps = 4;
__device__ __forceinline__ Coding read_coding(const int64_t* rng, const CodeFormat& format) {
  const bool random = rng != nullptr;
  return {random ? read_stream(rng) : PhiloxStream{0, 0}, random, format};
}

// Note [largest magnitude]
// The bits of |x| are ordered as the numbers are, Inf above all of them and NaN above Inf: a
// maximum of unsigned integers is exact in any order, and keeps NaN.
__device__ __forceinline__ uint32_t magnitude(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

// Codes of N elements from `first` on, divided by factor_at(i): the lowest element in the lowest
// byte, or in the lowest four bits. Behind the end all bits are 0, in every format.
template <int N, class Factors>
__device__ __forceinline__ uint64_t encode(const float (&values)[N], const Factors& factor_at,
                                           int64_t first, int64_t end, const Coding& coding) {
  const int bits = coding.format.bits;
  uint64_t packed = 0;
  uint4 words = make_uint4(0u, 0u, 0u, 0u);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    // `first` is a multiple of N: a vector begins with a Philox block, or with half of one.
    if (coding.random && i % 4 == 0) {
      words = philox_block(coding.stream, static_cast<uint64_t>((first + i) / 4));
    }
    const int word = static_cast<int>((first + i) % 4);
    const uint32_t code = code_of(values[i], factor_at(i), word_of(words, word), coding);
    if (first + i < end) packed |= uint64_t{code & ((1u << bits) - 1u)} << (bits * i);
  }
  return packed;
}

template <int kBytes>
__device__ __forceinline__ void store_bytes(unsigned char* to, uint64_t bytes) {
  if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(static_cast<uint32_t>(bytes), static_cast<uint32_t>(bytes >> 32));
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(bytes);
  } else if constexpr (kBytes == 2) {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(bytes);
  } else {
    *to = static_cast<unsigned char>(bytes);
  }
}

// Stores the codes of the elements from `first`, a multiple of N, that are there.
template <int N>
__device__ __forceinline__ void store_codes(unsigned char* codes, uint64_t packed, int64_t first,
                                            int64_t numel, bool four_bits) {
  unsigned char* to = codes + (four_bits ? first / 2 : first);
  if (first + N <= numel) {
    if (four_bits) {
      store_bytes<N / 2>(to, packed);
    } else {
      store_bytes<N>(to, packed);
    }
    return;
  }
  const int left = static_cast<int>(numel - first);
  const int bytes = four_bits ? (left + 1) / 2 : left;
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<unsigned char>(packed >> (8 * i));
}

// values[i] = x[first + i], and 0 behind the end.
template <int N, bool kVectors, class T>
__device__ __forceinline__ void load_present(const T* x, int64_t first, int64_t end,
                                             float (&values)[N]) {
  if (kVectors && first + N <= end) {
    if constexpr (kVectors) load(x + first, values);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = first + i < end ? to_float(x[first + i]) : 0.0f;
}

// A group of `lanes` threads per block of elements: lanes of a warp (a power of two), or, with
// kWholeGroup, all threads of a block of the grid.
template <class T, bool kWholeGroup>
__global__ void __launch_bounds__(kWholeGroup ? kMaxThreads : kThreads)
    quantize_vector_kernel(const T* x, const int64_t* rng, unsigned char* codes, void* scales,
                           int64_t numel, int64_t blocks, int block, int lanes, CodeFormat format) {
  constexpr int N = kWidth<T>;
  int64_t group = blockIdx.x;
  int lane = static_cast<int>(threadIdx.x);
  if constexpr (!kWholeGroup) {
    group = group * (kThreads / lanes) + lane / lanes;
    lane %= lanes;
  }
  const int64_t start = group * block;
  // A group behind the last block reads nothing, and takes part in the warp's operations.
  const int64_t end = group < blocks ? min(start + block, numel) : start;
  float values[kSteps][N];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_present<N, true>(x, start + int64_t{step * lanes + lane} * N, end, values[step]);
  }
  uint32_t top = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < N; ++i) top = max(top, magnitude(values[step][i]));
  }
  float all[1];
  if constexpr (kWholeGroup) {
    ANYCHIP_SHARED(float, scratch, kMaxWarps);
    all[0] = __uint_as_float(top);
    block_reduce(all, scratch, Max{});
  } else {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      top = max(top, __shfl_xor_sync(kAllLanes, top, distance));
    }
    all[0] = __uint_as_float(top);
  }
  if (group >= blocks) return;
  const Coding coding = read_coding(rng, format);
  const float factor = factor_of(all[0], format);
  if (lane == 0) store_scale(scales, group, factor, format);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t first = start + int64_t{step * lanes + lane} * N;
    if (first < end) {
      const uint64_t packed =
          encode(values[step], [factor](int) { return factor; }, first, end, coding);
      store_codes<N>(codes, packed, first, end, format.bits == 4);
    }
  }
}

// Any block: the bits of the largest magnitudes, into `tops`, which are 0 before.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const T* x, uint32_t* tops, int64_t numel, int64_t block) {
  constexpr int N = kVectors ? kWidth<T> : 1;
  constexpr int64_t span = int64_t{kWarp} * kSteps * N;
  const int64_t warp = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t start = warp * span;
  const int64_t end = min(start + span, numel);
  if (start >= end) return;
  // One atomic operation for a warp whose elements are of one block.
  const bool one_block = start / block == (end - 1) / block;
  uint32_t top = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t first = start + int64_t{step * kWarp + lane} * N;
    float values[N];
    load_present<N, kVectors>(x, first, end, values);
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) own = max(own, magnitude(values[i]));
    top = max(top, own);
    if (!one_block && first < end) atomicMax(tops + first / block, own);
  }
  if (!one_block) return;
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    top = max(top, __shfl_xor_sync(kAllLanes, top, distance));
  }
  if (lane == 0) atomicMax(tops + start / block, top);
}

// Any block: codes from the largest magnitudes.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    codes_kernel(const T* x, const int64_t* rng, unsigned char* codes, const float* tops,
                 int64_t numel, int64_t block, CodeFormat format) {
  // Two at least: they share a byte, also when they are of two blocks.
  constexpr int N = kVectors ? kWidth<T> : 2;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (first >= numel) return;
  float values[N];
  load_present<N, kVectors>(x, first, numel, values);
  const Coding coding = read_coding(rng, format);
  const bool four_bits = format.bits == 4;
  float factors[kVectors ? 1 : N];
#pragma unroll
  for (int i = 0; i < (kVectors ? 1 : N); ++i) {
    // Behind the end there is no block; what is coded there is 0.
    const int64_t element = min(first + i, numel - 1);
    factors[i] = factor_of(tops[element / block], format);
  }
  const uint64_t packed =
      encode(values, [&factors](int i) { return factors[kVectors ? 0 : i]; }, first, numel, coding);
  if constexpr (kVectors) {
    store_codes<N>(codes, packed, first, numel, four_bits);
  } else {
    const int bytes = four_bits ? 1 : 2;
    for (int i = 0; i < bytes; ++i) {
      const int64_t byte = four_bits ? first / 2 : first + i;
      if (four_bits || byte < numel) codes[byte] = static_cast<unsigned char>(packed >> (8 * i));
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    scales_kernel(float* tops, int64_t blocks, CodeFormat format) {
  const int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (block < blocks) tops[block] = factor_of(tops[block], format);
}

// Four elements a thread and step: an access of 16 bytes when they are stored.
constexpr int kOutputs = 4;

// A block's number, by a shift where its length is a power of two: a division of 64 bits is slow.
struct BlockOf {
  int64_t block;
  int shift;
  __device__ __forceinline__ int64_t operator()(int64_t element) const {
    return shift >= 0 ? element >> shift : element / block;
  }
};

template <bool kVectors>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const unsigned char* codes, const void* scales, float* y, int64_t numel,
                      BlockOf block_of, CodeFormat format) {
  const bool four_bits = format.bits == 4;
  const int64_t base = int64_t{blockIdx.x} * kThreads * kSteps * kOutputs;
  uint32_t raw[kSteps];
  float scale[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t first =
        base + int64_t{step * kThreads + static_cast<int>(threadIdx.x)} * kOutputs;
    raw[step] = 0;
    scale[step] = 0.0f;
    if (kVectors && first + kOutputs <= numel) {
      raw[step] = four_bits ? *reinterpret_cast<const unsigned short*>(codes + first / 2)
                            : *reinterpret_cast<const uint32_t*>(codes + first);
      scale[step] = load_scale(scales, block_of(first), format.is_mx);
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t first =
        base + int64_t{step * kThreads + static_cast<int>(threadIdx.x)} * kOutputs;
    if (kVectors && first + kOutputs <= numel) {
      float values[kOutputs];
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        values[i] = value_of(raw[step] >> (format.bits * i), format) * scale[step];
      }
      // An assignment, since store() costs more registers here than there are.
      *reinterpret_cast<float4*>(y + first) =
          make_float4(values[0], values[1], values[2], values[3]);
      continue;
    }
    for (int64_t i = first; i < min(first + kOutputs, numel); ++i) {
      const uint32_t code = four_bits ? codes[i / 2] >> (i % 2 * 4) : codes[i];
      y[i] = value_of(code, format) * load_scale(scales, block_of(i), format.is_mx);
    }
  }
}

unsigned grid_of(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

template <class T, bool kVectors>
cudaError_t quantize_in_passes(const T* x, const int64_t* rng, unsigned char* codes, float* scales,
                               int64_t numel, int64_t block, const CodeFormat& format,
                               cudaStream_t stream) {
  const int64_t blocks = (numel + block - 1) / block;
  const int64_t width = kVectors ? kWidth<T> : 1;
  const int64_t outputs = kVectors ? kWidth<T> : 2;
  cudaError_t status =
      cudaMemsetAsync(scales, 0, static_cast<size_t>(blocks) * sizeof(float), stream);
  if (status != cudaSuccess) return status;
  status = launch(largest_kernel<T, kVectors>, dim3(grid_of(numel, kThreads * kSteps * width)),
                  dim3(kThreads), 0, stream, x, reinterpret_cast<uint32_t*>(scales), numel, block);
  if (status != cudaSuccess) return status;
  status = launch(codes_kernel<T, kVectors>, dim3(grid_of(numel, kThreads * outputs)),
                  dim3(kThreads), 0, stream, x, rng, codes, scales, numel, block, format);
  if (status != cudaSuccess) return status;
  return launch(scales_kernel, dim3(grid_of(blocks, kThreads)), dim3(kThreads), 0, stream, scales,
                blocks, format);
}

template <class T>
cudaError_t quantize_typed(const T* x, const int64_t* rng, unsigned char* codes, void* scales,
                           int64_t numel, int64_t block, const CodeFormat& format,
                           cudaStream_t stream) {
  constexpr int64_t width = kWidth<T>;
  const bool vectors = is_vectorizable(x) && block % width == 0;
  const int64_t blocks = (numel + block - 1) / block;
  // The passes keep largest magnitudes where scales will be: floats.
  if (format.is_mx && !vectors) return cudaErrorInvalidValue;
  auto* tops = static_cast<float*>(scales);
  if (!vectors) {
    return quantize_in_passes<T, false>(x, rng, codes, tops, numel, block, format, stream);
  }
  if (block > kMaxThreads * kSteps * width) {
    return quantize_in_passes<T, true>(x, rng, codes, tops, numel, block, format, stream);
  }
  if (block > kWarp * kSteps * width) {
    const int64_t per_warp = kWarp * kSteps * width;
    const int threads = static_cast<int>((block + per_warp - 1) / per_warp) * kWarp;
    return launch(quantize_vector_kernel<T, true>, dim3(static_cast<unsigned>(blocks)),
                  dim3(static_cast<unsigned>(threads)), 0, stream, x, rng, codes, scales, numel,
                  blocks, block, threads, format);
  }
  int lanes = 1;
  while (lanes * kSteps * width < block) lanes *= 2;
  return launch(quantize_vector_kernel<T, false>, dim3(grid_of(blocks, kThreads / lanes)),
                dim3(kThreads), 0, stream, x, rng, codes, scales, numel, blocks, block, lanes,
                format);
}

struct Named {
  const char* name;
  CodeFormat format;
};

constexpr Named kFormats[] = {
    {"int8", {8, 127.0f, 0, 0, false, false, 6}},
    {"int4", {4, 7.0f, 0, 0, false, false, 2}},
    {"nf4", {4, 1.0f, 0, 0, true, false, 0}},
    {"e4m3", {8, 448.0f, 4, 3, false, false, 8}},
    {"e5m2", {8, 57344.0f, 5, 2, false, false, 15}},
    {"mx_e4m3", {8, 448.0f, 4, 3, false, true, 8}},
    {"mx_e5m2", {8, 57344.0f, 5, 2, false, true, 15}},
    {"mx_e2m1", {4, 6.0f, 2, 1, false, true, 2}},
};

bool is_valid(int64_t numel, int64_t block, const CodeFormat& format) {
  return numel >= 0 && block >= 1 && (block == 32 || !format.is_mx);
}

}  // namespace

bool find_format(const char* name, CodeFormat& found) {
  for (const Named& each : kFormats) {
    if (std::strcmp(each.name, name) == 0) {
      found = each.format;
      return true;
    }
  }
  return false;
}

cudaError_t quantize(const void* x, const int64_t* rng, void* codes, void* scales, int64_t numel,
                     int64_t block, const CodeFormat& format, DType dtype, Place place) {
  const bool can_draw = !format.is_table && format.exponent_bits == 0;
  if (!is_valid(numel, block, format) || !is_vectorizable(codes) || (rng != nullptr && !can_draw)) {
    return cudaErrorInvalidValue;
  }
  if (numel == 0) return cudaSuccess;
  return visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return quantize_typed(static_cast<const T*>(x), rng, static_cast<unsigned char*>(codes), scales,
                          numel, block, format, place.stream);
  });
}

cudaError_t dequantize(const void* codes, const void* scales, float* y, int64_t numel,
                       int64_t block, const CodeFormat& format, Place place) {
  if (!is_valid(numel, block, format)) return cudaErrorInvalidValue;
  if (numel == 0) return cudaSuccess;
  BlockOf block_of{block, -1};
  if ((block & (block - 1)) == 0) {
    block_of.shift = 0;
    while (int64_t{1} << block_of.shift < block) ++block_of.shift;
  }
  // The codes of four elements are one access: 4 bytes, or 2.
  const bool vectors =
      is_vectorizable(y) && block % kOutputs == 0 && reinterpret_cast<uintptr_t>(codes) % 4 == 0;
  const dim3 grid(grid_of(numel, int64_t{kThreads} * kSteps * kOutputs));
  return launch(vectors ? dequantize_kernel<true> : dequantize_kernel<false>, grid, dim3(kThreads),
                0, place.stream, static_cast<const unsigned char*>(codes), scales, y, numel,
                block_of, format);
}

}  // namespace anychip::cuda
