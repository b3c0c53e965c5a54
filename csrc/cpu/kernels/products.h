// Fused products, and those of small blocks, of which attention is made.
//
// Note [Fused products]: a sum of products is a chain of fused multiply-adds in the order of its
// terms, each rounded once, so that n terms have |error| <= n * 2^-24 * sum |term|. Where there is
// no instruction float64 gives the same bits, many times as slowly: rows that are chosen for their
// speed ask for an instruction set that has one.
#pragma once

#include "loops.h"

namespace anychip::cpu::ANYCHIP_ISA {

// Rows of a block. With 16 columns on AVX2, 32 on AVX-512, it has 12 registers of sums: enough
// that none waits for the one before, and few enough to stay where they are.
constexpr int kBlock = 6;
using BlockRows = std::make_integer_sequence<int, kBlock>;

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The left factor: element (i, t) is data[i * row + t * step].
struct Left {
  const float* data;
  int64_t row, step;
};
// The right one, a row of which has the columns of the block.
struct Right {
  const float* data;
  int64_t step;
};

// finish(i, V), of row i, for start(i) + sum over t < depth of left(i, t) * right(t).
template <class V, class Start, class Finish, int... i>
ANYCHIP_INLINE void multiply_block(Left left, Right right, int64_t depth, const Start& start,
                                   const Finish& finish, std::integer_sequence<int, i...>) {
  V sum[kBlock] = {start(i)...};
#pragma GCC unroll 4
  for (int64_t t = 0; t < depth; ++t) {
    V columns;
    read(columns, right.data);
    ((sum[i] = fused(fill<V>(left.data[i * left.row]), columns, sum[i])), ...);
    left.data += left.step;
    right.data += right.step;
  }
  (finish(i, sum[i]), ...);
}

// body(first column, V{}) for columns up to `width`, a multiple of 16.
template <class Body>
ANYCHIP_INLINE void for_each_columns(int64_t width, const Body& body) {
  int64_t column = 0;
#if defined(__AVX512F__)
  for (; column + 2 * kLanes <= width; column += 2 * kLanes) body(column, Pair<F32>{});
#endif
  for (; column < width; column += kLanes) body(column, F32{});
}

}  // namespace anychip::cpu::ANYCHIP_ISA
