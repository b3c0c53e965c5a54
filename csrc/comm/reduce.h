// Values of the ranks joined pairwise in the order of the ranks, with the bits of
// anychip/comm/reduction.py: neighbours, then neighbours of those; 16-bit floats in float32,
// rounded once; avg divides after the sum. Only the sign and payload of a NaN may differ.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anychip::comm {

// The codes are those of anychip/comm/shared_memory.py.
enum class DType : int { kF32, kF64, kBF16, kF16, kI8, kU8, kI16, kI32, kI64 };
enum class Reduction : int { kSum, kAvg, kMax, kMin };

// `output` (numel) becomes the reduction of `parts` (count of them, of numel each). It may be one
// of the parts.
void reduce(void* output, const void* const* parts, int count, size_t numel, DType dtype,
            Reduction reduction);

}  // namespace anychip::comm
