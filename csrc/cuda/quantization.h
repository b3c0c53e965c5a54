// Codes by blocks: quantize, dequantize.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

// How numbers are coded; the names are those of core's operators/codes.py.
struct CodeFormat {
  int bits;           // of a code, 8 or 4
  float largest;      // magnitude of a value
  int exponent_bits;  // of a float; 0: integers, or a table
  int mantissa_bits;
  bool is_table;
  bool is_mx;        // scales are exponents of powers of two
  int top_exponent;  // of the largest value, floor(log2)
};

// Whether there is a format of this name.
bool find_format(const char* name, CodeFormat& found);

// codes and scales of `numel` contiguous elements in blocks of `block`, the last one shorter.
// `rng` is an int64[2] (seed, offset) on the device, for rounding integers at random; nullptr: to
// the nearest. codes is 16-byte aligned, numel bytes for 8 bits and (numel + 1) / 2 for 4; scales
// has a float per block, or a byte of an MX format, for which x is 16-byte aligned and `block` 32.
cudaError_t quantize(const void* x, const int64_t* rng, void* codes, void* scales, int64_t numel,
                     int64_t block, const CodeFormat& format, DType dtype, Place place);
// y = code's value * scale of its block, in float32.
cudaError_t dequantize(const void* codes, const void* scales, float* y, int64_t numel,
                       int64_t block, const CodeFormat& format, Place place);

}  // namespace anychip::cuda
