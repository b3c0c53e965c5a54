// torch's product of a block of bfloat16 matrices, which its library holds beside its operators.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace anychip::cpu {

// sums = left right, or with `adds` sums + left right: left (rows, depth) with rows left_stride
// apart, right in pairs of terms (depth / 2, columns, 2), sums (rows, columns), float32.
using BlockProduct = void (*)(int64_t rows, int64_t columns, int64_t depth, int64_t left_stride,
                              int64_t right_stride, int64_t sums_stride, bool adds,
                              const BFloat16* left, const BFloat16* right, float* sums,
                              bool is_in_pairs);

struct BlockProducts {
  BlockProduct product;
  void (*release)(bool is_in_pairs);  // called by each thread after its last one, or null
};

// Products are made by those of the loaded object `soname` (libtorch_cpu.so), if it has them and
// they run here: oneDNN's for the processor's tiles (AMX) or, where it has none, for AVX-512's
// products of pairs. Else, and before, by slow ones of our own.
bool has_block_products();
void bind_block_products(const char* soname);

}  // namespace anychip::cpu
