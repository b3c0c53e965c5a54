// Integer codes by blocks: quantize, dequantize.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

// codes and scales of `numel` contiguous elements in blocks of `block`, the last one shorter.
// `rng` is an int64[2] (seed, offset) on the device, for rounding at random; nullptr: to the
// nearest, halves to even. codes is 16-byte aligned, numel bytes for 8 bits and (numel + 1) / 2 for
// 4; scales has a float per block.
cudaError_t quantize(const void* x, const int64_t* rng, void* codes, float* scales, int64_t numel,
                     int64_t block, int bits, DType dtype, Place place);
// y = code * scale of its block, in float32.
cudaError_t dequantize(const void* codes, const float* scales, float* y, int64_t numel,
                       int64_t block, int bits, Place place);

}  // namespace anychip::cuda
