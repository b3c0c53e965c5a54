// AdamW with averages in 8 bits, one pass: a warp decodes a block of 256 elements, moves it, finds
// the largest of the new averages, and encodes them, all in registers.
//
// Note [Codes]: a byte is a small floating-point number, fraction below exponent, so that it is the
// top of a float32 number whose exponent counts from another place: see operators/adamw_8bit.py.
// A code whose exponent field is 0 has no leading 1, which a difference of two floats takes out.
//
// Note [Magnitudes]: the bits of |x| are ordered as the numbers are, NaN above all: a maximum of
// unsigned integers is exact in any order, and keeps NaN.
#include "adamw_8bit.h"

#include "reduce.cuh"
#include "tensor_list.cuh"
#include "update_step.cuh"

namespace anychip::cuda {
namespace {

// Arrays of a table. The last is the copy in another type.
constexpr int kParam = 0, kGrad = 1, kCodes = 2, kScales = 4, kLow = 6;
using Table = TensorTable<7, 48>;

// Few threads for 96 registers each: five blocks of a multiprocessor have 40 KB in flight.
constexpr int kThreads = 128;
// Vectors of four per lane and block.
constexpr int kVectorsOfLane = kCodedBlock / (4 * kWarp);
static_assert(kChunk % kCodedBlock == 0, "no block lies in two chunks");

// The smallest number that has all digits of its code, and that number's exponent field.
constexpr float kSmallestWhole = 6.103515625e-05f;  // 2^-14
constexpr uint32_t kSmallestField = 113;
// Below it a scale is not a normal number: the block is all zeros.
constexpr float kSmallestScale = 1.1754943508222875e-38f;
constexpr float kLargestFloat = 3.4028234663852886e38f;

template <int kFractionBits, bool kSigned>
struct Codes {
  static constexpr int kShift = 23 - kFractionBits;
  static constexpr uint32_t kTop = (16u << kFractionBits) - 1;

  // The number that kTop stands for.
  static __device__ __forceinline__ float largest() {
    return kFractionBits == 3 ? 1.875f : 1.9375f;
  }

  static __device__ __forceinline__ float decode(uint32_t code) {
    const uint32_t size = kSigned ? code & 127u : code;
    const bool is_small = size < (1u << kFractionBits);
    const uint32_t field = is_small ? kSmallestField : kSmallestField - 1;
    float value = __uint_as_float((size << kShift) + (field << 23));
    if (is_small) value -= kSmallestWhole;
    return kSigned ? __uint_as_float(__float_as_uint(value) | (code & 128u) << 24) : value;
  }

  // The code next to x * reciprocal, halves to even.
  static __device__ __forceinline__ uint32_t encode(float x, float reciprocal) {
    const float size = fabsf(x) * reciprocal;
    uint32_t code;
    if (size < kSmallestWhole) {
      code = static_cast<uint32_t>(rintf(size * static_cast<float>(1 << (14 + kFractionBits))));
    } else {
      const uint32_t bits = __float_as_uint(size);
      const uint32_t half = (1u << (kShift - 1)) - 1 + ((bits >> kShift) & 1u);
      code = ((bits + half) >> kShift) - ((kSmallestField - 1) << kFractionBits);
    }
    code = min(code, kTop);
    if (kSigned) return code | (code != 0 && x < 0.0f ? 128u : 0u);
    return max(code, x > 0.0f ? 1u : 0u);
  }
};
using FirstCodes = Codes<3, true>;
using SecondCodes = Codes<4, false>;

__device__ __forceinline__ uint32_t magnitude(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

__device__ __forceinline__ float scale_of(uint32_t top, float largest) {
  const float scale = __uint_as_float(top) / largest;
  return scale < kSmallestScale ? 0.0f : scale;
}

// Of the elements of a lane's vector from `i` on, those that are before `end`.
__device__ __forceinline__ int present(int64_t i, int64_t end) {
  const int64_t left = end - i;
  return left > 4 ? 4 : left > 0 ? static_cast<int>(left) : 0;
}

// Four codes, the first element's in the lowest byte; `count` of them are there. kWhole: all, at an
// address that vectors may have.
template <bool kWhole>
__device__ __forceinline__ uint32_t load_codes(const unsigned char* from, int count) {
  if constexpr (kWhole) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t packed = 0;
  for (int n = 0; n < count; ++n) packed |= static_cast<uint32_t>(from[n]) << (8 * n);
  return packed;
}

template <bool kWhole>
__device__ __forceinline__ void store_codes(unsigned char* to, uint32_t packed, int count) {
  if constexpr (kWhole) {
    *reinterpret_cast<uint32_t*>(to) = packed;
  } else {
    for (int n = 0; n < count; ++n) to[n] = static_cast<unsigned char>(packed >> (8 * n));
  }
}

// Elements i to i + 4 of Elements, of which `count` are there; 0 for the others.
template <bool kWhole, class Array>
__device__ __forceinline__ void load_present(const Array& array, int64_t i, int count,
                                             float (&values)[4]) {
  if constexpr (kWhole) {
    array.load(i, values);
  } else {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float one[1] = {0.0f};
      if (n < count) array.load(i + n, one);
      values[n] = one[0];
    }
  }
}

template <bool kWhole, class Array>
__device__ __forceinline__ void store_present(const Array& array, int64_t i, int count,
                                              const float (&values)[4]) {
  if constexpr (kWhole) {
    array.store(i, values);
  } else {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float one[1] = {values[n]};
      if (n < count) array.store(i + n, one);
    }
  }
}

// New averages of a lane as codes of the block from `start` on, whose largest magnitude is `top`.
template <class Form, bool kWhole>
__device__ __forceinline__ void store_averages(const float (&values)[kVectorsOfLane][4],
                                               uint32_t top, unsigned char* codes, float* scales,
                                               int64_t start, int64_t end, int lane) {
  const float scale = scale_of(top, Form::largest());
  const bool usable = scale > 0.0f && scale <= kLargestFloat;
  const float reciprocal = usable ? 1.0f / scale : 0.0f;
  if (lane == 0) scales[start / kCodedBlock] = scale;
#pragma unroll
  for (int step = 0; step < kVectorsOfLane; ++step) {
    uint32_t packed = 0;
    if (usable) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        packed |= Form::encode(values[step][n], reciprocal) << (8 * n);
      }
    }
    const int64_t i = start + 4 * (lane + kWarp * step);
    store_codes<kWhole>(codes + i, packed, present(i, end));
  }
}

// What a warp has of one tensor.
template <class Param, class Grad>
struct Block {
  Param param;
  Grad grad;
  unsigned char* codes[2];
  float* scales[2];
  void* low;
  uint32_t low_type;

  // Elements from `start`, a multiple of the block, to `end`. kWhole: a block, in vectors.
  template <bool kWhole>
  __device__ __forceinline__ void move(const AdamW& rule, const StepFactors& f, int64_t start,
                                       int64_t end, int lane) const {
    float p[kVectorsOfLane][4], g[kVectorsOfLane][4], m[kVectorsOfLane][4], v[kVectorsOfLane][4];
    uint32_t first[kVectorsOfLane], second[kVectorsOfLane];
#pragma unroll
    for (int step = 0; step < kVectorsOfLane; ++step) {
      const int64_t i = start + 4 * (lane + kWarp * step);
      const int count = present(i, end);
      load_present<kWhole>(param, i, count, p[step]);
      load_present<kWhole>(grad, i, count, g[step]);
      first[step] = load_codes<kWhole>(codes[0] + i, count);
      second[step] = load_codes<kWhole>(codes[1] + i, count);
    }
    const float first_scale = scales[0][start / kCodedBlock];
    const float second_scale = scales[1][start / kCodedBlock];
    uint32_t tops[2] = {0, 0};
#pragma unroll
    for (int step = 0; step < kVectorsOfLane; ++step) {
      const int64_t i = start + 4 * (lane + kWarp * step);
      const int count = present(i, end);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float s[2] = {FirstCodes::decode((first[step] >> (8 * n)) & 255u) * first_scale,
                      SecondCodes::decode((second[step] >> (8 * n)) & 255u) * second_scale};
        rule(f, f.lr, p[step][n], g[step][n] * f.gradient, s);
        // What is behind the end has averages of 0, times a scale that may be infinite.
        const bool is_there = kWhole || n < count;
        m[step][n] = is_there ? s[0] : 0.0f;
        v[step][n] = is_there ? s[1] : 0.0f;
        tops[0] = max(tops[0], magnitude(m[step][n]));
        tops[1] = max(tops[1], magnitude(v[step][n]));
      }
      store_param<kWhole>(i, count, p[step]);
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      tops[0] = max(tops[0], __shfl_xor_sync(kAllLanes, tops[0], distance));
      tops[1] = max(tops[1], __shfl_xor_sync(kAllLanes, tops[1], distance));
    }
    // Every lane has read the scales before one of them writes the new ones.
    __syncwarp(kAllLanes);
    store_averages<FirstCodes, kWhole>(m, tops[0], codes[0], scales[0], start, end, lane);
    store_averages<SecondCodes, kWhole>(v, tops[1], codes[1], scales[1], start, end, lane);
  }

  template <bool kWhole>
  __device__ __forceinline__ void store_param(int64_t i, int count, float (&p)[4]) const {
    store_present<kWhole>(param, i, count, p);
    if (low_type == kNoType) return;
#pragma unroll
    for (int n = 0; n < 4; ++n) p[n] = param.stored(p[n]);
    visit_elements(low, low_type,
                   [&](const auto& copy) { store_present<kWhole>(copy, i, count, p); });
  }
};

__global__ void __launch_bounds__(kThreads, 5)
    adamw_8bit_kernel(const __grid_constant__ Table table, AdamW rule, const StepFactors* factors) {
  const StepFactors f = *factors;
  if (f.is_skipped != 0.0f) return;
  int tensor;
  const Part part = part_of_block(table, tensor);
  const uint32_t traits = table.traits[tensor];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  visit_elements(table.data[kParam][tensor], type_of(traits, 0), [&](const auto& param) {
    visit_elements(table.data[kGrad][tensor], type_of(traits, 1), [&](const auto& grad) {
      Block<std::decay_t<decltype(param)>, std::decay_t<decltype(grad)>> block{
          param, grad, {}, {}, table.data[kLow][tensor], type_of(traits, 2)};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        block.codes[k] = static_cast<unsigned char*>(table.data[kCodes + k][tensor]);
        block.scales[k] = static_cast<float*>(table.data[kScales + k][tensor]);
      }
#pragma unroll 1
      for (int64_t start = part.begin + warp * kCodedBlock; start < part.end;
           start += kThreads / kWarp * kCodedBlock) {
        const int64_t end = min(start + kCodedBlock, part.end);
        if ((traits & kVectors) && end - start == kCodedBlock) {
          block.template move<true>(rule, f, start, end, lane);
        } else {
          block.template move<false>(rule, f, start, end, lane);
        }
      }
    });
  });
}

bool is_consistent(const CodedUpdate& update) {
  const size_t count = update.params.size();
  bool consistent = update.grads.size() == count && update.grad_dtypes.size() == count;
  for (int k = 0; k < 2; ++k) {
    consistent = consistent && update.codes[k].size() == count && update.scales[k].size() == count;
  }
  const size_t copies = update.low_precision.empty() ? 0 : count;
  return consistent && update.low_precision.size() == copies && update.low_dtypes.size() == copies;
}

// Writes what tensor `index` has into a slot, and returns its chunks, or -1 when it is not valid.
int64_t describe(const CodedUpdate& update, size_t index, Table& table, int slot) {
  bool valid = true, vectors = true;
  const auto add = [&](int array, int64_t address, int64_t bytes) {
    valid = valid && address != 0 && address % bytes == 0;
    vectors = vectors && address % (4 * bytes) == 0;
    table.data[array][slot] = reinterpret_cast<void*>(address);
  };
  const int64_t param_type = update.params.dtype[index], grad_type = update.grad_dtypes[index];
  add(kParam, update.params.data[index], element_bytes(param_type));
  add(kGrad, update.grads[index], element_bytes(grad_type));
  int64_t low_type = kNoType;
  if (!update.low_precision.empty()) {
    low_type = update.low_dtypes[index];
    add(kLow, update.low_precision[index], element_bytes(low_type));
  }
  for (int k = 0; k < 2; ++k) {
    add(kCodes + k, update.codes[k][index], 1);
    // Read one at a time, at any multiple of their size.
    const int64_t scales = update.scales[k][index];
    valid = valid && scales != 0 && scales % static_cast<int64_t>(sizeof(float)) == 0;
    table.data[kScales + k][slot] = reinterpret_cast<void*>(scales);
  }
  const int64_t numel = update.params.numel[index];
  table.numel[slot] = numel;
  table.traits[slot] = static_cast<uint32_t>(param_type | grad_type << 4 | low_type << 8) |
                       (vectors ? kVectors : 0u);
  return numel == 0 || (numel > 0 && valid) ? chunks_of(numel, 0) : -1;
}

}  // namespace

cudaError_t adamw_8bit(const CodedUpdate& update, const float* factors, double beta1, double beta2,
                       double eps, Place place) {
  if (factors == nullptr || !is_consistent(update)) return cudaErrorInvalidValue;
  const AdamW rule{betas_of(beta1, beta2), rounded_once(eps)};
  return for_each_table<Table>(
      update.params.size(),
      [&](size_t index, Table& table, int slot) { return describe(update, index, table, slot); },
      [&](const Table& table, int64_t chunks) {
        return launch(adamw_8bit_kernel, dim3(static_cast<unsigned>(chunks)), dim3(kThreads), 0,
                      place.stream, table, rule, reinterpret_cast<const StepFactors*>(factors));
      });
}

}  // namespace anychip::cuda
