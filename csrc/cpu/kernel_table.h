// The kernels of one instruction set, as a table of functions over a range of rows or elements;
// kernel_list.h says which.
//
// A range is done by one thread. How a tensor is cut into ranges never changes a result, except for
// the partial sums that a caller combines itself; it cuts those on a fixed grid.
#pragma once

#include "operators.h"

namespace anychip::cpu {

struct Range {
  int64_t begin, end;
};

// The factors of one step of a rule, the same for all elements.
struct AdamWFactors {
  float grad;   // clip / scale
  float decay;  // 1 - lr * weight_decay
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float update;        // lr / (1 - beta1^t)
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
  float eps;
};
struct GradFactors {
  float scale;  // divides; 1 without a scale
  float clip;   // multiplies
};
struct SgdFactors {
  GradFactors grad;
  float lr, decay, weight_decay, momentum;  // decay: 1 - lr * weight_decay
  bool nesterov, decoupled;
};
struct LionFactors {
  GradFactors grad;
  float lr, decay;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
};
struct LambFactors {
  GradFactors grad;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float correction1, correction2, eps, weight_decay;
};

constexpr int64_t kIgnored = -2;
// Of a row of logits.
struct LogitSums {
  double lse;
  float picked, total;  // that of its column, 0 without one; of all, where it is wanted
};
// What a row's gradient is made of: (exp(logit - lse) by_exp + by_all) grad, and at its column
// by_column more in the brackets. That of an ignored row is 0, whatever the logits are.
struct LogitSlopes {
  float lse, by_exp, by_all, by_column, grad;
  int64_t column;  // -1: none, kIgnored
};

// Room for a group of blocks, with 128 elements more, where the call needs it.
struct QuantizeScratch {
  float* values;    // of a type that is not float32
  uint32_t* words;  // with rng
  uint8_t* codes;   // of 4 bits
};

// A number of a row, as one that is the smaller the larger its magnitude, and the lower its index.
// Its size is what the magnitude's bits are, of a NaN the largest that there is.
constexpr uint32_t kLargestSize = 0x7fffffff;
constexpr uint64_t place_of(uint32_t size, uint32_t index) {
  return uint64_t{kLargestSize - size} << 32 | index;
}
constexpr uint32_t size_of_place(uint64_t place) {
  return kLargestSize - static_cast<uint32_t>(place >> 32);
}

// Tiles of attention: rows, which are queries and their heads, and keys. Multiples of 6 and 16, the
// blocks that a tile is computed in. The results do not depend on how many rows a tile has.
constexpr int64_t kAttentionRows = 96, kAttentionKeys = 96;

// Of a row of a tile in memory: whole vectors, an odd number of them, as rows at a multiple of a
// large power of two drive each other out of the first cache.
constexpr int64_t attention_width(int64_t head_dim) { return (head_dim + 15) / 16 * 16 | 16; }

// Heads at positions of a sequence, from its first and the first that is meant on.
struct AttentionRows {
  const void* data;
  int64_t row, head;  // elements to the next
};
// One key head of one sequence, and the queries that see at least one of its keys, at `groups`
// heads. Outputs have rows of out_row, or out_key_row, elements and heads without a gap.
struct AttentionGroup {
  AttentionRows q, k, v;
  int64_t queries, keys, groups, head_dim;
  int64_t out_row, out_key_row;
  float* lse;
  int64_t lse_head;
  float scale;
  bool causal;
  DType dtype, y_dtype;
  Drop drop;  // of rows that lie as lse does
  const int64_t* key_index;
};
// What weights are multiplied by, as rows and as columns.
constexpr int64_t attention_drop_scratch(bool drops) {
  return drops ? kAttentionRows * (kAttentionKeys + attention_width(kAttentionKeys)) : 0;
}
constexpr int64_t attention_forward_scratch(int64_t head_dim, bool drops) {
  return kAttentionRows * (kAttentionKeys + 4 * attention_width(head_dim)) +
         attention_drop_scratch(drops);
}
constexpr int64_t attention_backward_scratch(int64_t head_dim, int64_t keys, bool drops) {
  return kAttentionRows * (2 * kAttentionKeys + 7 * attention_width(head_dim)) +
         2 * (keys + 5) * attention_width(head_dim) + attention_drop_scratch(drops);
}
struct AttentionGradients {
  AttentionRows grad, y;
  void* dq;
  void* dk;
  void* dv;
};

// Of a product's factors, as panels of so many rows of the left one, columns of the right one.
constexpr int kTileRows = 6, kTileColumns = 16;
constexpr int64_t kProductDepth = 256;  // terms of a part of a sum
// With some numbers between panels, which else would begin in the same places of the caches.
constexpr int64_t panel_size(int64_t width, int64_t depth) { return width * depth + 16; }
struct PackedPart {
  const float* from;
  int64_t stride, count, depth;  // between the matrix's rows; of rows or columns for panels
  bool is_along;                 // the matrix's rows are along the depth, and not across it
};
struct ProductPart {
  const float *left, *right;  // panels
  const float* bias;          // null: none
  float* c;
  int64_t stride, rows, columns, depth;
  bool adds;
};

constexpr int64_t kTurnedColumns = 64;  // that become rows at a time

// Columns of a panel of a product's right factor, in bfloat16.
constexpr int64_t kPairColumns = 64;
// A block of rows, or a panel of columns: zeros after `count`, and after `depth` up to `room`. Rows
// are written one after the other; a panel has pairs of terms, those of all columns side by side.
struct PackedPairs {
  const BFloat16* from;
  int64_t stride, count, depth, room;
  bool is_along;  // the matrix's rows are along the depth, and not across it
};
struct PairsResult {
  const float* sums;  // rows of kPairColumns
  const float* bias;  // null: none
  float* to;
  int64_t stride, rows, columns;
  bool adds;
};

struct KernelTable {
  const char* name;
#define ANYCHIP_KERNEL(result, name, parameters) result(*name) parameters;
#include "kernel_list.h"
#undef ANYCHIP_KERNEL
};

// The table in use; it changes only by set_isa.
const KernelTable& kernels();

}  // namespace anychip::cpu
