// Products of float32 matrices, a tile of 6 x 16 numbers at a time.
//
// Both factors are copied to panels, in which a tile's numbers follow each other: Goto and van de
// Geijn 2008, "Anatomy of High-Performance Matrix Multiplication", sections 4 and 5. A tile's
// twelve sums (of AVX2) and its factors are what the registers hold.
//
// Rounding: a number is the sum of its terms in the order of depth, each a fused multiply-add, in
// parts of at most kProductDepth terms; a part is added to those before, and the bias to the first
// one. |error| <= (kProductDepth + depth / kProductDepth + 1) * 2^-24 * sum |term|.
#include "products.h"
#include "table.h"
#include "transpose.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

static_assert(kTileRows == kBlock && kTileColumns == kLanes, "a tile is a block");

// What the processor does not ask for by itself, as rows are read in short pieces.
constexpr int64_t kRowsAhead = 12;
constexpr int64_t kPanelsAtOnce = 16;  // whose ends the caches hold

// One panel of a matrix whose rows are along the panel's depth.
template <int width>
ANYCHIP_INLINE void pack_along(const float* from, int64_t stride, int64_t count, int64_t depth,
                               float* to) {
  int64_t k = 0;
  for (; k + 8 <= depth; k += 8) {
    for (int i = 0; i < width; i += 8) {
      const int64_t rows = count - i < 0 ? 0 : count - i;
      const int most = width - i < 8 ? width - i : 8;
#pragma GCC unroll 8
      for (int r = 0; r < most; ++r) __builtin_prefetch(from + (width + i + r) * stride + k);
      transpose_eight(from + i * stride + k, stride, rows < most ? rows : most, to + k * width + i,
                      width);
    }
  }
  for (; k < depth; ++k) {
    for (int i = 0; i < width; ++i) to[k * width + i] = i < count ? from[i * stride + k] : 0.0f;
  }
}

// Panels of a matrix whose rows are across them.
template <int width>
ANYCHIP_INLINE void pack_across(const float* from, int64_t stride, int64_t count, int64_t depth,
                                float* to) {
  const int64_t panel = panel_size(width, depth), whole = count / width, rest = count % width;
  for (int64_t k = 0; k < depth; ++k) {
    const float* row = from + k * stride;
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(row + kRowsAhead * stride + i);
    float* at = to + k * width;
    for (int64_t i = 0; i < whole; ++i) {
      __builtin_memcpy(at + i * panel, row + i * width, width * sizeof(float));
    }
    for (int64_t i = 0; rest && i < width; ++i) {
      at[whole * panel + i] = i < rest ? row[whole * width + i] : 0.0f;
    }
  }
}

template <int width>
[[gnu::flatten]] void pack(const PackedPart& part, float* panels) {
  const int64_t panel = panel_size(width, part.depth);
  for (int64_t i = 0; i < part.count;) {
    const int64_t most = part.is_along ? width : kPanelsAtOnce * width;
    const int64_t count = part.count - i < most ? part.count - i : most;
    if (part.is_along) {
      pack_along<width>(part.from + i * part.stride, part.stride, count, part.depth, panels);
    } else {
      pack_across<width>(part.from + i, part.stride, count, part.depth, panels);
    }
    i += count;
    panels += (count + width - 1) / width * panel;
  }
}

template <class Lanes>
ANYCHIP_INLINE void multiply_tile(const ProductPart& part, const float* left, const float* right,
                                  const float* bias, float* c, int64_t rows, Lanes lanes) {
#pragma GCC unroll 6
  for (int i = 0; i < kBlock; ++i) __builtin_prefetch(c + (i < rows ? i : 0) * part.stride, 1);
  const F32 start = bias ? load(bias, lanes) : F32{};
  multiply_block<F32>(
      Left{left, 1, kTileRows}, Right{right, kTileColumns}, part.depth, [](int) { return F32{}; },
      [&](int i, F32 sum) {
        if (i >= rows) return;
        float* to = c + i * part.stride;
        if (part.adds) {
          store(to, load(to, lanes) + sum, lanes);
        } else {
          store(to, bias ? start + sum : sum, lanes);
        }
      },
      BlockRows{});
}

}  // namespace

void pack_left(const PackedPart& part, float* panels) { pack<kTileRows>(part, panels); }

void pack_right(const PackedPart& part, float* panels) { pack<kTileColumns>(part, panels); }

[[gnu::flatten]] void multiply_panels(const ProductPart& part) {
  const int64_t left_panel = panel_size(kTileRows, part.depth);
  const int64_t right_panel = panel_size(kTileColumns, part.depth);
  for (int64_t j = 0; j < part.columns; j += kTileColumns) {
    const float* right = part.right + j / kTileColumns * right_panel;
    const float* bias = part.bias ? part.bias + j : nullptr;
    for (int64_t i = 0; i < part.rows; i += kTileRows) {
      const float* left = part.left + i / kTileRows * left_panel;
      float* c = part.c + i * part.stride + j;
      const int64_t rows = part.rows - i;
      if (j + kTileColumns <= part.columns) {
        multiply_tile(part, left, right, bias, c, rows, AllLanes{});
      } else {
        multiply_tile(part, left, right, bias, c, rows, FirstLanes{part.columns - j});
      }
    }
  }
}

}  // namespace anychip::cpu::ANYCHIP_ISA
