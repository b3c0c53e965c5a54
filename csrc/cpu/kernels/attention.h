// What attention's forward and backward have in common: tiles of rows and of keys.
//
// The query heads of one key head are rows of one product: row r is head r % groups at position
// r / groups, so rows see more keys the later they are. Scores lie with the rows as lanes, one key
// below the other: maxima, sums and exponentials over keys need no lane of another, keys and values
// are read as they lie, and only queries (and the gradient of y) are transposed, once per tile.
//
// Note [Zeros of the hidden]: blocks of 6 keys or rows reach past what a row sees. What they read
// there is 0, and a NaN or infinity among the values of the same block becomes NaN, as in the
// specification's equation; blocks that none of their rows see are left out.
#pragma once

#include "dropping.h"
#include "math.h"
#include "products.h"
#include "rows.h"

namespace anychip::cpu::ANYCHIP_ISA {

constexpr float kInfinity = __builtin_inff();
constexpr int64_t kRows = kAttentionRows, kKeys = kAttentionKeys;

// Room is taken from the front of what the caller gave.
class Scratch {
 public:
  ANYCHIP_INLINE explicit Scratch(float* room) : room_(room) {}
  ANYCHIP_INLINE float* take(int64_t numel) {
    float* taken = room_;
    room_ += numel;
    return taken;
  }

 private:
  float* room_;
};

// How many keys each row of a tile sees, of all and of a tile of keys.
class Sight {
 public:
  ANYCHIP_INLINE Sight(const AttentionGroup& group, Range positions)
      : rows_((positions.end - positions.begin) * group.groups) {
    int64_t seen = group.keys, next = positions.begin * group.groups, row = 0;
    for (int64_t at = positions.begin; at < positions.end; ++at) {
      if (group.causal) seen = group.keys - group.queries + at + 1;
      for (next = row + group.groups; row < next; ++row) seen_[row] = seen;
    }
    for (; row < kRows + kLanes; ++row) seen_[row] = seen;  // rows that there are not
  }

  ANYCHIP_INLINE int64_t rows() const { return rows_; }
  ANYCHIP_INLINE int64_t most() const { return seen_[rows_ - 1]; }

  // From now on of the keys from `first` on; returns how many there are for any row.
  ANYCHIP_INLINE int64_t look_at(int64_t first) {
    const int64_t keys = most() - first < kKeys ? most() - first : kKeys;
    for (int64_t row = 0; row < kRows + kLanes; ++row) {
      const int64_t ahead = seen_[row] - first;
      limit_[row] = static_cast<float>(ahead < 0 ? 0 : ahead < keys ? ahead : keys);
    }
    return keys;
  }
  ANYCHIP_INLINE int64_t of(int64_t row) const { return static_cast<int64_t>(limit_[row]); }
  ANYCHIP_INLINE int64_t of_last(int64_t row) const { return of(row < rows_ ? row : rows_ - 1); }
  ANYCHIP_INLINE const float* limits() const { return limit_; }

 private:
  int64_t rows_;
  int64_t seen_[kRows + kLanes];
  alignas(64) float limit_[kRows + kLanes];
};

// A head at a position, of what is read and of what is written.
ANYCHIP_INLINE const void* row_at(const AttentionRows& rows, int64_t position, int64_t head,
                                  DType dtype) {
  return row_of(rows.data, dtype, position * rows.row + head * rows.head);
}
ANYCHIP_INLINE void* row_at(void* rows, int64_t row, int64_t head_dim, int64_t position,
                            int64_t head, DType dtype) {
  return row_of(rows, dtype, position * row + head * head_dim);
}

// work(row, position, head) for every row of some positions.
template <class Work>
ANYCHIP_INLINE void for_each_row_of(const AttentionGroup& group, Range positions,
                                    const Work& work) {
  int64_t row = 0;
  for (int64_t position = positions.begin; position < positions.end; ++position) {
    for (int64_t head = 0; head < group.groups; ++head) work(row++, position, head);
  }
}

// A row in float32, with zeros up to a multiple of 16.
ANYCHIP_INLINE void widen(const void* from, DType dtype, int64_t numel, float* to) {
  visit_dtype(dtype, [&](auto t) {
    const auto* source = static_cast<const decltype(t)*>(from);
    for_each_vector(0, numel, [&](int64_t i, auto lanes) {
      store(to + i, load(source + i, lanes), AllLanes{});
    });
  });
}

// Sums of rows, in whole blocks of them.
ANYCHIP_INLINE void clear_rows(int64_t count, int64_t width, float* sums) {
  const int64_t numel = round_up(count, kBlock) * width;
  for (int64_t i = 0; i < numel; i += kLanes) store(sums + i, F32{}, AllLanes{});
}

// Keys or values of a tile, and rows of zeros up to a whole block.
ANYCHIP_INLINE void pack_keys(const AttentionRows& rows, const AttentionGroup& group, int64_t first,
                              int64_t keys, float* packed) {
  const int64_t width = attention_width(group.head_dim);
  for (int64_t j = 0; j < keys; ++j) {
    widen(row_at(rows, first + j, 0, group.dtype), group.dtype, group.head_dim, packed + j * width);
  }
  for (int64_t j = keys * width; j < round_up(keys, kBlock) * width; ++j) packed[j] = 0.0f;
}

// Rows of a tile, and rows of zeros up to a whole vector.
ANYCHIP_INLINE void pack_queries(const AttentionRows& rows, const AttentionGroup& group,
                                 Range positions, DType dtype, float* packed) {
  const int64_t width = attention_width(group.head_dim);
  int64_t count = 0;
  for_each_row_of(group, positions, [&](int64_t row, int64_t position, int64_t head) {
    widen(row_at(rows, position, head, dtype), dtype, group.head_dim, packed + row * width);
    count = row + 1;
  });
  for (int64_t i = count * width; i < round_up(count, kLanes) * width; ++i) packed[i] = 0.0f;
}

// Lanes of a and b in turn, of their lower and of their upper halves.
struct LowInTurn {
  static constexpr int source(int k) { return k / 2 + k % 2 * kRegisterLanes; }
};
struct HighInTurn {
  static constexpr int source(int k) { return LowInTurn::source(k) + kRegisterLanes / 2; }
};

// (head_dim, kRows) of (rows, width), both up to whole vectors.
ANYCHIP_INLINE void transpose(const float* rows, int64_t count, int64_t head_dim, float* columns) {
  const int64_t width = attention_width(head_dim);
  for (int64_t row = 0; row < count; row += kRegisterLanes) {
    for (int64_t i = 0; i < head_dim; i += kRegisterLanes) {
      RegisterF block[kRegisterLanes], next[kRegisterLanes];
      for (int k = 0; k < kRegisterLanes; ++k) read(block[k], rows + (row + k) * width + i);
      for (int step = 1; step < kRegisterLanes; step *= 2) {
        for (int k = 0; k < kRegisterLanes / 2; ++k) {
          const RegisterF low = block[k], high = block[k + kRegisterLanes / 2];
          next[2 * k] = shuffle<LowInTurn>(low, high);
          next[2 * k + 1] = shuffle<HighInTurn>(low, high);
        }
        for (int k = 0; k < kRegisterLanes; ++k) block[k] = next[k];
      }
      for (int k = 0; k < kRegisterLanes; ++k) write(columns + (i + k) * kRows + row, block[k]);
    }
  }
}

// finish(key, first row, V) for the products of rows, a lane each, with the keys that they see, in
// whole blocks of these.
template <class Finish>
ANYCHIP_INLINE void multiply_keys(const float* keys, const float* columns, int64_t head_dim,
                                  const Sight& sight, const Finish& finish) {
  const int64_t width = attention_width(head_dim);
  for_each_columns(round_up(sight.rows(), kLanes), [&](int64_t row, auto v) {
    using V = decltype(v);
    const int64_t end = sight.of_last(row + static_cast<int64_t>(sizeof(V) / 4) - 1);
    for (int64_t key = 0; key < end; key += kBlock) {
      multiply_block<V>(
          Left{keys + key * width, width, 1}, Right{columns + row, kRows}, head_dim,
          [](int) { return V{}; }, [&](int i, V product) { finish(key + i, row, product); },
          BlockRows{});
    }
  });
}

// sums (rows, width) = start(row, what there is) + scores (keys, rows) times right (keys, width),
// for each row over the keys that it sees.
template <class Start>
ANYCHIP_INLINE void add_to_rows(const float* scores, const float* right, int64_t head_dim,
                                const Sight& sight, float* sums, const Start& start) {
  const int64_t width = attention_width(head_dim);
  for (int64_t row = 0; row < sight.rows(); row += kBlock) {
    const int64_t keys = sight.of_last(row + kBlock - 1);
    if (keys == 0) continue;
    for_each_columns(round_up(head_dim, kLanes), [&](int64_t column, auto v) {
      using V = decltype(v);
      float* sum = sums + row * width + column;
      multiply_block<V>(
          Left{scores + row, 1, kRows}, Right{right + column, width}, keys,
          [&](int i) {
            V before;
            read(before, sum + i * width);
            return start(row + i, before);
          },
          [&](int i, V total) { write(sum + i * width, total); }, BlockRows{});
    });
  }
}

// What blocks of rows and of keys read of a panel of 16 rows beyond the keys that it sees.
ANYCHIP_INLINE void clear_hidden(float* scores, int64_t row, const Sight& sight) {
  const int64_t end = sight.of_last(row + kLanes - 1), whole = round_up(end, kBlock);
  const int64_t next = sight.of_last(row + kLanes + kBlock - 2);
  for (int64_t key = end; key < (next > whole ? next : whole); ++key) {
    store(scores + key * kRows + row, F32{}, AllLanes{});
  }
}

// What the weights of a tile are multiplied by: 0, or 1 / (1 - p).
class WeightDrop {
 public:
  ANYCHIP_INLINE WeightDrop(const AttentionGroup& group, Scratch& room)
      : group_(group), dropping_(group.drop) {
    if (!group.drop.rng) return;
    rows_ = room.take(kRows * attention_width(kKeys)), columns_ = room.take(kKeys * kRows);
  }
  ANYCHIP_INLINE explicit operator bool() const { return rows_; }

  // From now on of these positions and of `count` keys from `first` on.
  ANYCHIP_INLINE void look_at(Range positions, int64_t first, int64_t count, const Sight& sight) {
    const int64_t width = attention_width(count), rows = round_up(sight.rows(), kLanes);
    for (int64_t i = 0; i < rows * width; i += kLanes) store(rows_ + i, F32{}, AllLanes{});
    for (int64_t head = 0; head < group_.groups; ++head) {
      for (int64_t at = positions.begin; at < positions.end; ++at) {
        const int64_t row = (at - positions.begin) * group_.groups + head;
        // Whole short rows take words that follow each other, if hidden keys have factors too.
        const bool whole = count == group_.keys && count <= kWordsTogether;
        const int64_t keys = whole ? count : sight.of(row);
        write_row(head, at, positions.end - at, first, keys, rows_ + row * width);
      }
    }
    transpose(rows_, rows, count, columns_);
  }

  // weights: (keys, rows).
  ANYCHIP_INLINE void apply(const Sight& sight, float* weights) const {
    for_each_vector(0, round_up(sight.rows(), kLanes), [&](int64_t row, auto lanes) {
      const int64_t end = sight.of_last(row + kLanes - 1);
      for (int64_t at = row; at < end * kRows + row; at += kRows) {
        store(weights + at, load(weights + at, lanes) * load(columns_ + at, lanes), lanes);
      }
    });
  }

 private:
  // left: positions from this one on. Keys that follow each other take words that do.
  ANYCHIP_INLINE void write_row(int64_t head, int64_t position, int64_t left, int64_t first,
                                int64_t keys, float* to) {
    const int64_t *index = group_.key_index, row = head * group_.lse_head + position;
    const auto follows = [&](int64_t key) {  // unsigned, because any number may be there
      return static_cast<uint64_t>(index[key]) - static_cast<uint64_t>(index[key - 1]) == 1;
    };
    const int64_t all = !index && keys == group_.keys ? left * keys : keys;
    for (int64_t key = 0, end; key < keys; key = end) {
      end = index ? key + 1 : keys;
      while (end < keys && follows(first + end)) ++end;
      const int64_t column = index ? index[first + key] : first + key;
      dropping_.for_each_part(row, column, end - key, group_.keys, all,
                              [&](int64_t at, int64_t count, const uint32_t* words) {
                                for_each_vector(0, count, [&](int64_t i, auto lanes) {
                                  store(to + key + (at - column) + i,
                                        dropping_.apply(fill<F32>(1.0f), words + i), lanes);
                                });
                              });
    }
  }

  const AttentionGroup& group_;
  Dropping dropping_;
  float *rows_ = nullptr, *columns_ = nullptr;
};

}  // namespace anychip::cpu::ANYCHIP_ISA
