// What dropout does to the elements of rows, which have words of a stream of random numbers.
//
// An element keeps its value when its word, which is word n % 4 of block offset + n / 4, is at
// least floor(p * 2^32); with rows n is signed, and / rounds down. What is kept is multiplied by 1
// / (1 - p) in float32. Nothing survives p = 1, whose threshold is no 32 bit number.
#pragma once

#include "../operators.h"
#include "loops.h"
#include "philox.h"

namespace anychip::cpu::ANYCHIP_ISA {

class Dropping {
 public:
  ANYCHIP_INLINE explicit Dropping(const Drop& drop)
      : drop_(drop),
        words_(drop.rng),
        keeps_none_(drop.p >= 1.0),
        threshold_(keeps_none_ ? 0 : static_cast<uint32_t>(drop.p * 0x1p32)),
        scale_(static_cast<float>(1.0 / (1.0 - drop.p))) {}

  // word: of the first lane.
  ANYCHIP_INLINE F32 apply(F32 v, const uint32_t* word) const {
    if (keeps_none_) return F32{};
    U32 words;
    read(words, word);
    return select(words >= threshold_, v * scale_, F32{});
  }

  // body(column, how many, their words) for parts of a row, or of what is left of it in a range
  // that ends `left` elements further; `width` is that of the row.
  template <class Body>
  ANYCHIP_INLINE void for_each_part(int64_t row, int64_t column, int64_t n, int64_t width,
                                    int64_t left, const Body& body) {
    const int64_t first = word_of(row, column, width);
    int64_t ahead = drop_.rows ? followers(row, n, width, left) : left;
    for (int64_t done = 0, part; done < n; done += part, ahead -= part) {
      part = n - done < Words::kMost ? n - done : Words::kMost;
      body(column + done, part, words_.from(first + done, part, ahead));
    }
  }

 private:
  // Unsigned, because a number that is no row's may wrap.
  ANYCHIP_INLINE int64_t word_of(int64_t row, int64_t column, int64_t width) const {
    const int64_t* rows = drop_.rows;
    const uint64_t whole = static_cast<uint64_t>(rows ? rows[row] : row) *
                           static_cast<uint64_t>(rows ? drop_.width : width);
    return static_cast<int64_t>(whole + static_cast<uint64_t>((rows ? drop_.column : 0) + column));
  }

  // How many words this row and the next ones take that follow one another, as far as that matters.
  ANYCHIP_INLINE int64_t followers(int64_t row, int64_t n, int64_t width, int64_t left) const {
    int64_t ahead = n;
    while (width == drop_.width && ahead + width <= left && ahead < Words::kMost &&
           drop_.rows[row + 1] - 1 == drop_.rows[row]) {
      ahead += width;
      ++row;
    }
    return ahead;
  }

  const Drop& drop_;
  Words words_;
  bool keeps_none_;
  uint32_t threshold_;
  float scale_;
};

}  // namespace anychip::cpu::ANYCHIP_ISA
