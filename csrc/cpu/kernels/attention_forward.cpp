// The forward of attention: softmax of a tile of keys after the other (Milakov and Gimelshein 2018;
// Dao et al. 2022, algorithm 1).
//
// Rounding: scores, sums of weights and y are chains in the order of their terms (Note [Fused
// products]; the first have one rounding more, by the scale), a weight has 1 ulp, and what was
// summed before a tile with a larger score is rounded once more there, and a weight where some are
// dropped.
#include "attention.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

// Of the rows of a tile: the largest score so far, the sum of the weights, and what these must be
// multiplied with since the tile of keys before.
struct Softmax {
  alignas(64) float largest[kRows], tile_largest[kRows], sum[kRows], factor[kRows];
};

// Scaled scores, -infinity where hidden, and the largest of each row that is not NaN.
ANYCHIP_INLINE void write_scores(const float* keys, const float* columns, int64_t head_dim,
                                 float scale, const Sight& sight, float* scores,
                                 float* tile_largest) {
  for_each_vector(0, kRows, [&](int64_t row, auto lanes) {
    store(tile_largest + row, fill<F32>(-kInfinity), lanes);
  });
  multiply_keys(keys, columns, head_dim, sight, [&](int64_t key, int64_t row, auto product) {
    using V = decltype(product);
    V limit, largest, score = product * scale;
    if (key >= sight.of(row)) {
      read(limit, sight.limits() + row);
      score = select(limit > static_cast<float>(key), score, fill<V>(-kInfinity));
    }
    read(largest, tile_largest + row);
    write(tile_largest + row, maximum(score, largest));
    write(scores + key * kRows + row, score);
  });
}

// Scores become weights. Before any score that is not -infinity or NaN, weights are taken against
// 0: so they are 0 or NaN.
ANYCHIP_INLINE void write_weights(const Sight& sight, float* scores, Softmax& softmax) {
  for_each_vector(0, round_up(sight.rows(), kLanes), [&](int64_t row, auto lanes) {
    const F32 before = load(softmax.largest + row, lanes);
    const F32 largest = maximum(load(softmax.tile_largest + row, lanes), before);
    const F32 base = select(largest == -kInfinity, F32{}, largest);
    const F32 factor = exp(before - base);
    F32 sum{};
    const int64_t end = sight.of_last(row + kLanes - 1);
    for (int64_t key = 0; key < end; ++key) {
      float* score = scores + key * kRows + row;
      const F32 weight = exp(load(score, lanes) - base);
      store(score, weight, lanes);
      sum = sum + weight;
    }
    store(softmax.largest + row, largest, lanes);
    store(softmax.factor + row, factor, lanes);
    store(softmax.sum + row, fused(load(softmax.sum + row, lanes), factor, sum), lanes);
    clear_hidden(scores, row, sight);
  });
}

ANYCHIP_INLINE void write_rows(const AttentionGroup& group, Range positions, const float* sums,
                               const Softmax& softmax, void* y) {
  const int64_t width = attention_width(group.head_dim);
  for_each_row_of(group, positions, [&](int64_t row, int64_t position, int64_t head) {
    const float sum = softmax.sum[row];
    group.lse[head * group.lse_head + position] =
        static_cast<float>(softmax.largest[row] + __builtin_log(static_cast<double>(sum)));
    void* to = row_at(y, group.out_row, group.head_dim, position, head, group.y_dtype);
    visit_dtype(group.y_dtype, [&](auto t) {
      for_each_vector(0, group.head_dim, [&](int64_t i, auto lanes) {
        store(static_cast<decltype(t)*>(to) + i, load(sums + row * width + i, AllLanes{}) / sum,
              lanes);
      });
    });
  });
}

}  // namespace

[[gnu::flatten]] void attention_forward(const AttentionGroup& group, void* y, float* scratch,
                                        Range positions) {
  const int64_t head_dim = group.head_dim, width = attention_width(head_dim);
  Scratch room(scratch);
  float *columns = room.take(width * kRows), *sums = room.take(kRows * width),
        *keys = room.take(kKeys * width), *values = room.take(kKeys * width),
        *scores = room.take(kKeys * kRows);
  WeightDrop drop(group, room);
  Softmax softmax;
  for_each_vector(0, kRows, [&](int64_t row, auto lanes) {
    store(softmax.largest + row, fill<F32>(-kInfinity), lanes);
    store(softmax.sum + row, F32{}, lanes);
  });
  Sight sight(group, positions);
  pack_queries(group.q, group, positions, group.dtype, sums);
  transpose(sums, round_up(sight.rows(), kLanes), head_dim, columns);
  clear_rows(sight.rows(), width, sums);
  for (int64_t first = 0; first < sight.most(); first += kKeys) {
    const int64_t count = sight.look_at(first);
    pack_keys(group.k, group, first, count, keys);
    pack_keys(group.v, group, first, count, values);
    write_scores(keys, columns, head_dim, group.scale, sight, scores, softmax.tile_largest);
    write_weights(sight, scores, softmax);
    if (drop) {
      drop.look_at(positions, first, count, sight);
      drop.apply(sight, scores);
    }
    add_to_rows(scores, values, head_dim, sight, sums,
                [&](int64_t row, auto before) { return before * softmax.factor[row]; });
  }
  write_rows(group, positions, sums, softmax, y);
}

}  // namespace anychip::cpu::ANYCHIP_ISA
