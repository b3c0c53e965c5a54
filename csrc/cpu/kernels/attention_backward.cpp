// The backward of attention (Dao et al. 2022, appendix B): weights are made again of the lse.
//
//   p = exp(s - lse)
//   ds = p (dp - delta) scale, with dp = grad v and delta = grad y
//   dq = ds k, dk = ds q, dv = p grad, the latter two summed over the heads that share a key
//
// Where weights are dropped, dp and the p of dv are multiplied by what they were multiplied by.
//
// Tiles of rows come in order, and within one tiles of keys: each gradient is one chain in the
// order of its terms. Rounding: Note [Fused products], a weight has 1 ulp, ds three beyond it; one
// more with dropout.
#include "attention.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

// The rows of a tile, as (rows, width) and as (head_dim, rows).
struct TileRows {
  float *q, *grad, *q_columns, *grad_columns;
  float* dq;
  float *weights, *slopes;  // (keys, rows)
  alignas(64) float lse[kRows], delta[kRows];
};

// Of a group: a row of which is of a key.
struct KeyGradients {
  float *dk, *dv;
};

ANYCHIP_INLINE void read_rows(const AttentionGroup& group, const AttentionGradients& gradients,
                              Range positions, TileRows& tile) {
  const int64_t width = attention_width(group.head_dim);
  const int64_t rows = round_up((positions.end - positions.begin) * group.groups, kLanes);
  pack_queries(gradients.y, group, positions, group.y_dtype, tile.q);
  pack_queries(gradients.grad, group, positions, group.y_dtype, tile.grad);
  for (int64_t row = 0; row < rows; ++row) {
    const float *grad = tile.grad + row * width, *y = tile.q + row * width;
    tile.delta[row] = sum_over(group.head_dim, [&](int64_t i, auto lanes) {
      return load(grad + i, lanes) * load(y + i, lanes);
    });
    tile.lse[row] = 0.0f;
  }
  for_each_row_of(group, positions, [&](int64_t row, int64_t position, int64_t head) {
    tile.lse[row] = group.lse[head * group.lse_head + position];
  });
  pack_queries(group.q, group, positions, group.dtype, tile.q);
  transpose(tile.q, rows, group.head_dim, tile.q_columns);
  transpose(tile.grad, rows, group.head_dim, tile.grad_columns);
  clear_rows(rows, width, tile.dq);
}

// Weights and slopes of scores and of the products of grad and the values, in their places.
ANYCHIP_INLINE void write_slopes(const Sight& sight, float scale, TileRows& tile) {
  for_each_vector(0, round_up(sight.rows(), kLanes), [&](int64_t row, auto lanes) {
    const F32 lse = load(tile.lse + row, lanes), delta = load(tile.delta + row, lanes);
    const F32 limit = load(sight.limits() + row, lanes);
    const int64_t all = sight.of(row), end = sight.of_last(row + kLanes - 1);
    for (int64_t key = 0; key < end; ++key) {
      float* weights = tile.weights + key * kRows + row;
      float* slopes = tile.slopes + key * kRows + row;
      F32 weight = exp(load(weights, lanes) * scale - lse);
      F32 slope = weight * (load(slopes, lanes) - delta) * scale;
      if (key >= all) {
        const Mask seen = limit > static_cast<float>(key);
        weight = select(seen, weight, F32{});
        slope = select(seen, slope, F32{});
      }
      store(weights, weight, lanes);
      store(slopes, slope, lanes);
    }
    clear_hidden(tile.weights, row, sight);
    clear_hidden(tile.slopes, row, sight);
  });
}

// sums (keys, width) += scores (keys, rows) right (rows, width).
ANYCHIP_INLINE void add_to_keys(const float* scores, const float* right, int64_t head_dim,
                                int64_t keys, const Sight& sight, float* sums) {
  const int64_t width = attention_width(head_dim);
  int64_t first = 0;
  for (int64_t key = 0; key < keys; key += kBlock) {
    while (sight.of(first) <= key) ++first;
    for_each_columns(round_up(head_dim, kLanes), [&](int64_t column, auto v) {
      using V = decltype(v);
      float* sum = sums + key * width + column;
      multiply_block<V>(
          Left{scores + key * kRows + first, kRows, 1},
          Right{right + first * width + column, width}, sight.rows() - first,
          [&](int i) {
            V before;
            read(before, sum + i * width);
            return before;
          },
          [&](int i, V total) { write(sum + i * width, total); }, BlockRows{});
    });
  }
}

ANYCHIP_INLINE void add_tile(const AttentionGroup& group, const AttentionGradients& gradients,
                             Range positions, TileRows& tile, Sight& sight, float* keys,
                             float* values, WeightDrop& drop, const KeyGradients& sums) {
  const int64_t head_dim = group.head_dim, width = attention_width(head_dim);
  for (int64_t first = 0; first < sight.most(); first += kKeys) {
    const int64_t count = sight.look_at(first);
    pack_keys(group.k, group, first, count, keys);
    pack_keys(group.v, group, first, count, values);
    const auto write_to = [&](float* scores) {
      return [=](int64_t key, int64_t row, auto product) {
        write(scores + key * kRows + row, product);
      };
    };
    multiply_keys(keys, tile.q_columns, head_dim, sight, write_to(tile.weights));
    multiply_keys(values, tile.grad_columns, head_dim, sight, write_to(tile.slopes));
    if (drop) {
      drop.look_at(positions, first, count, sight);
      drop.apply(sight, tile.slopes);
    }
    write_slopes(sight, group.scale, tile);
    if (drop) drop.apply(sight, tile.weights);
    if (gradients.dv) {
      add_to_keys(tile.weights, tile.grad, head_dim, count, sight, sums.dv + first * width);
    }
    if (gradients.dk) {
      add_to_keys(tile.slopes, tile.q, head_dim, count, sight, sums.dk + first * width);
    }
    if (!gradients.dq) continue;
    add_to_rows(tile.slopes, keys, head_dim, sight, tile.dq,
                [](int64_t, auto before) { return before; });
  }
}

ANYCHIP_INLINE void write_row(DType dtype, const float* from, int64_t numel, void* to) {
  visit_dtype(dtype, [&](auto t) {
    for_each_vector(0, numel, [&](int64_t i, auto lanes) {
      store(static_cast<decltype(t)*>(to) + i, load(from + i, AllLanes{}), lanes);
    });
  });
}

ANYCHIP_INLINE void write_keys(const AttentionGroup& group, const float* sums, void* to) {
  if (!to) return;
  for (int64_t key = 0; key < group.keys; ++key) {
    write_row(group.dtype, sums + key * attention_width(group.head_dim), group.head_dim,
              row_at(to, group.out_key_row, group.head_dim, key, 0, group.dtype));
  }
}

}  // namespace

[[gnu::flatten]] void attention_backward(const AttentionGroup& group,
                                         const AttentionGradients& gradients, float* scratch) {
  const int64_t width = attention_width(group.head_dim), all = round_up(group.keys, kBlock);
  Scratch room(scratch);
  TileRows tile;
  for (float** rows : {&tile.q, &tile.grad, &tile.q_columns, &tile.grad_columns, &tile.dq}) {
    *rows = room.take(kRows * width);
  }
  tile.weights = room.take(kKeys * kRows), tile.slopes = room.take(kKeys * kRows);
  float *keys = room.take(kKeys * width), *values = room.take(kKeys * width);
  const KeyGradients sums{room.take(all * width), room.take(all * width)};
  WeightDrop drop(group, room);
  clear_rows(all, width, sums.dk);
  clear_rows(all, width, sums.dv);
  const int64_t positions = kRows / group.groups;
  for (int64_t first = 0; first < group.queries; first += positions) {
    const int64_t end = first + positions;
    const Range range{first, end < group.queries ? end : group.queries};
    read_rows(group, gradients, range, tile);
    Sight sight(group, range);
    add_tile(group, gradients, range, tile, sight, keys, values, drop, sums);
    if (!gradients.dq) continue;
    for_each_row_of(group, range, [&](int64_t row, int64_t position, int64_t head) {
      write_row(group.dtype, tile.dq + row * width, group.head_dim,
                row_at(gradients.dq, group.out_row, group.head_dim, position, head, group.dtype));
    });
  }
  write_keys(group, sums.dk, gradients.dk);
  write_keys(group, sums.dv, gradients.dv);
}

}  // namespace anychip::cpu::ANYCHIP_ISA
