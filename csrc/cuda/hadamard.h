// The Walsh-Hadamard transform: hadamard, which is its own gradient.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

// The longest transform of one launch: its rows stay in the registers of a block.
constexpr int kLongestHadamard = 32768;

// y = x H / sqrt(length) for every `length` consecutive elements; length is a power of two up to
// kLongestHadamard, and divides numel.
cudaError_t hadamard(const void* x, void* y, int64_t numel, int length, DType dtype, Place place);

}  // namespace anychip::cuda
