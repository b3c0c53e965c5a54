// Attention over the threads, which share tiles of queries, and backwards groups: a key head of a
// sequence with its query heads.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "drop.h"
#include "parallel.h"
#include "scratch.h"

namespace anychip::cpu {
namespace {

// One of the batch, or of what is packed: from where on, in elements, and how long.
struct Sequence {
  int64_t batch, first_query, first_key;  // either batch or the other two are 0
  int64_t queries, keys;
};

void check_ends(const char* where, const char* name, const int64_t* ends, int64_t batch,
                int64_t rows) {
  check(ends[0] == 0, where, std::string("expected ") + name + "[0] = 0");
  for (int64_t b = 0; b < batch; ++b) {
    check(ends[b] <= ends[b + 1] && ends[b + 1] <= rows, where,
          std::string("expected ") + name + " sorted and at most " + std::to_string(rows) +
              ", got " + std::to_string(ends[b + 1]) + " after " + std::to_string(ends[b]));
  }
}

// The sequences, and of those that are packed what is left as one without keys and one without
// queries.
std::vector<Sequence> sequences_of(const char* where, const AttentionShape& shape) {
  std::vector<Sequence> found;
  if (!shape.ends_q) {
    for (int64_t b = 0; b < shape.batch; ++b) {
      found.push_back({b, 0, 0, shape.queries, shape.keys});
    }
    return found;
  }
  const int64_t *q = shape.ends_q, *k = shape.ends_k, batch = shape.batch;
  check_ends(where, "ends_q", q, batch, shape.queries);
  check_ends(where, "ends_k", k, batch, shape.keys);
  for (int64_t b = 0; b < batch; ++b) {
    found.push_back({0, q[b], k[b], q[b + 1] - q[b], k[b + 1] - k[b]});
  }
  found.push_back({0, q[batch], 0, shape.queries - q[batch], 0});
  found.push_back({0, 0, k[batch], 0, shape.keys - k[batch]});
  return found;
}

void check_heads(const char* where, const char* name, const StridedHeads& heads) {
  for (const int64_t stride : {heads.batch, heads.row, heads.head}) {
    check_sizes(where, {{name, stride}});
  }
}

// Raises for what cannot be; returns whether there is anything to do.
bool check_shape(const char* where, const AttentionShape& shape) {
  const bool packed = shape.ends_q || shape.ends_k;
  const int64_t batch = packed ? 1 : shape.batch;
  check_sizes(where, {{"batch", shape.batch}});
  check_sizes(where, {{"width", shape.drop.width}});
  const int64_t q = check_sizes(where, {{"batch", batch},
                                        {"queries", shape.queries},
                                        {"heads", shape.heads},
                                        {"head_dim", shape.head_dim}});
  const int64_t k = check_sizes(where, {{"batch", batch},
                                        {"keys", shape.keys},
                                        {"kv_heads", shape.kv_heads},
                                        {"head_dim", shape.head_dim}});
  if (q == 0 && k == 0) return false;
  check(shape.kv_heads > 0 && shape.heads > 0 && shape.heads % shape.kv_heads == 0, where,
        "expected heads that are a multiple of kv_heads, got " + std::to_string(shape.heads) +
            " and " + std::to_string(shape.kv_heads));
  check(shape.heads / shape.kv_heads <= kAttentionRows, where,
        "expected at most " + std::to_string(kAttentionRows) + " query heads of a key head, got " +
            std::to_string(shape.heads / shape.kv_heads));
  if (packed) {
    check_address(where, "ends_q", shape.ends_q);
    check_address(where, "ends_k", shape.ends_k);
  }
  if (const Drop& drop = shape.drop; drop.rng) {
    check(!packed, where, "packed sequences have no dropout");
    check_address(where, "row_index", drop.rows);
    const int64_t columns = shape.key_index ? 0 : shape.keys;  // any word, or those of a row
    check_drop(where, drop, q / shape.head_dim * columns, columns);
  }
  return true;
}

char* moved(void* data, DType dtype, int64_t elements) {
  return static_cast<char*>(data) + elements * element_size(dtype);
}
AttentionRows rows_of(const StridedHeads& heads, DType dtype, int64_t batch, int64_t row,
                      int64_t head) {
  const int64_t at = batch * heads.batch + row * heads.row + head * heads.head;
  return {static_cast<const char*>(heads.data) + at * element_size(dtype), heads.row, heads.head};
}

// Where sequences and their heads lie in what is read and written.
class Layout {
 public:
  explicit Layout(const AttentionShape& shape)
      : shape_(shape), groups_(shape.heads / shape.kv_heads) {}

  // The queries, the first ones, that see nothing.
  int64_t blind(const Sequence& one) const {
    if (one.keys == 0) return one.queries;
    return shape_.causal ? std::max<int64_t>(0, one.queries - one.keys) : 0;
  }
  int64_t groups() const { return groups_; }
  int64_t positions() const { return kAttentionRows / groups_; }
  int64_t query(const Sequence& one) const {  // its first, in what is written
    return one.batch * shape_.queries + one.first_query;
  }
  int64_t lse(const Sequence& one, int64_t head) const {
    return (one.batch * shape_.heads + head) * shape_.queries + one.first_query;
  }
  int64_t key(const Sequence& one) const { return one.batch * shape_.keys + one.first_key; }

  void* row(void* rows, DType dtype, int64_t query, int64_t head) const {
    return moved(rows, dtype, (query * shape_.heads + head) * shape_.head_dim);
  }
  void* key_row(void* rows, int64_t key, int64_t head) const {
    return moved(rows, shape_.dtype, (key * shape_.kv_heads + head) * shape_.head_dim);
  }
  // The query heads' parts of a row.
  size_t row_bytes(DType dtype) const {
    return static_cast<size_t>(shape_.heads * shape_.head_dim * element_size(dtype));
  }
  size_t key_row_bytes() const {
    return static_cast<size_t>(shape_.kv_heads * shape_.head_dim * element_size(shape_.dtype));
  }

  AttentionGroup group(const StridedHeads& q, const StridedHeads& k, const StridedHeads& v,
                       const float* lse, const Sequence& one, int64_t kv_head) const {
    const int64_t first = blind(one), head = kv_head * groups_;
    const double scale = shape_.scale;
    return {rows_of(q, shape_.dtype, one.batch, one.first_query + first, head),
            rows_of(k, shape_.dtype, one.batch, one.first_key, kv_head),
            rows_of(v, shape_.dtype, one.batch, one.first_key, kv_head),
            one.queries - first,
            one.keys,
            groups_,
            shape_.head_dim,
            shape_.heads * shape_.head_dim,
            shape_.kv_heads * shape_.head_dim,
            const_cast<float*>(lse) + this->lse(one, head) + first,
            shape_.queries,
            static_cast<float>(scale),
            shape_.causal,
            shape_.dtype,
            shape_.y_dtype,
            drop(this->lse(one, head) + first),
            shape_.key_index};
  }

 private:
  Drop drop(int64_t row) const {  // of the rows from one on
    Drop found = shape_.drop;
    if (found.rng) found.rows += row;
    return found;
  }

  const AttentionShape& shape_;
  int64_t groups_;
};

// What one thread does at once, and what that costs: about the products of its rows and keys.
struct Unit {
  const Sequence* sequence;
  int64_t kv_head;
  Range positions;
  int64_t cost;
};

// Units of `positions` of the queries that see something, or of all of them.
std::vector<Unit> units_of(const AttentionShape& shape, const Layout& layout,
                           const std::vector<Sequence>& sequences, int64_t positions) {
  std::vector<Unit> units;
  for (const Sequence& one : sequences) {
    const int64_t seeing = one.queries - layout.blind(one);
    for (int64_t head = 0; seeing > 0 && head < shape.kv_heads; ++head) {
      for (int64_t first = 0; first < seeing; first += positions) {
        const Range range{first, std::min(seeing, first + positions)};
        const int64_t hidden =
            shape.causal ? seeing - (range.begin + range.end) / 2 : 0;  // of one on average
        const int64_t rows = (range.end - range.begin) * layout.groups();
        units.push_back({&one, head, range, rows * std::max<int64_t>(1, one.keys - hidden)});
      }
    }
  }
  return units;
}

// work(unit, scratch) for all of them: each thread has its share of what they cost, in their order.
template <class Work>
void share_units(const std::vector<Unit>& units, int64_t head_dim, int64_t scratch,
                 const Work& work) {
  double all = 0.0;
  for (const Unit& unit : units) all += static_cast<double>(unit.cost);
  const auto shares = std::min<int64_t>(num_threads(), static_cast<int64_t>(units.size()));
  if (shares == 0) return;
  // As parallel.h counts: an element takes about as long as sixteen products.
  const double elements = all * static_cast<double>(head_dim) / 16.0 / static_cast<double>(shares);
  parallel_items(shares, static_cast<int64_t>(std::min(elements, 1e12)), [&](Range range) {
    const AlignedFloats room = aligned_floats(scratch);
    double done = 0.0;
    for (const Unit& unit : units) {
      const auto share = static_cast<int64_t>(done / all * static_cast<double>(shares));
      done += static_cast<double>(unit.cost);
      if (share >= range.begin && share < range.end) work(unit, room.get());
    }
  });
}

}  // namespace

void attention_forward(const AttentionForward& args) {
  const char* where = "attention_forward";
  const AttentionShape& shape = args.shape;
  check_heads(where, "strides of q", args.q);
  check_heads(where, "strides of k", args.k);
  check_heads(where, "strides of v", args.v);
  if (!check_shape(where, shape)) return;
  for (const auto& [name, address] : {std::pair<const char*, const void*>{"q", args.q.data},
                                      {"k", args.k.data},
                                      {"v", args.v.data},
                                      {"y", args.y},
                                      {"lse", args.lse}}) {
    check_address(where, name, address);
  }
  const std::vector<Sequence> sequences = sequences_of(where, shape);
  const Layout layout(shape);
  for (const Sequence& one : sequences) {
    const auto blind = static_cast<size_t>(layout.blind(one));
    if (blind == 0) continue;
    std::memset(layout.row(args.y, shape.y_dtype, layout.query(one), 0), 0,
                blind * layout.row_bytes(shape.y_dtype));
    for (int64_t head = 0; head < shape.heads; ++head) {
      std::fill_n(args.lse + layout.lse(one, head), blind, -std::numeric_limits<float>::infinity());
    }
  }
  const auto units = units_of(shape, layout, sequences, layout.positions());
  share_units(units, shape.head_dim, attention_forward_scratch(shape.head_dim, shape.drop.rng),
              [&](const Unit& unit, float* scratch) {
                const Sequence& one = *unit.sequence;
                const int64_t query = layout.query(one) + layout.blind(one);
                void* y = layout.row(args.y, shape.y_dtype, query, unit.kv_head * layout.groups());
                kernels().attention_forward(
                    layout.group(args.q, args.k, args.v, args.lse, one, unit.kv_head), y, scratch,
                    unit.positions);
              });
}

void attention_backward(const AttentionBackward& args) {
  const char* where = "attention_backward";
  const AttentionShape& shape = args.shape;
  const std::pair<const char*, const StridedHeads*> read[] = {
      {"grad", &args.grad}, {"q", &args.q}, {"k", &args.k}, {"v", &args.v}, {"y", &args.y}};
  for (const auto& [name, heads] : read) check_heads(where, name, *heads);
  if (!check_shape(where, shape)) return;
  for (const auto& [name, heads] : read) check_address(where, name, heads->data);
  check_address(where, "lse", args.lse);
  const std::vector<Sequence> sequences = sequences_of(where, shape);
  const Layout layout(shape);
  int64_t longest = 0;
  for (const Sequence& one : sequences) {
    const auto blind = static_cast<size_t>(layout.blind(one));
    if (args.dq && blind > 0) {
      std::memset(layout.row(args.dq, shape.dtype, layout.query(one), 0), 0,
                  blind * layout.row_bytes(shape.dtype));
    }
    for (void* gradient : {args.dk, args.dv}) {
      if (!gradient || one.keys == 0 || one.queries > static_cast<int64_t>(blind)) continue;
      std::memset(layout.key_row(gradient, layout.key(one), 0), 0,
                  static_cast<size_t>(one.keys) * layout.key_row_bytes());
    }
    longest = std::max(longest, one.keys);
  }
  const auto units = units_of(shape, layout, sequences, std::max<int64_t>(1, shape.queries));
  share_units(units, shape.head_dim,
              attention_backward_scratch(shape.head_dim, longest, shape.drop.rng),
              [&](const Unit& unit, float* scratch) {
                const Sequence& one = *unit.sequence;
                const int64_t blind = layout.blind(one), head = unit.kv_head * layout.groups();
                const auto rows = [&](const StridedHeads& heads) {
                  return rows_of(heads, shape.y_dtype, one.batch, one.first_query + blind, head);
                };
                const int64_t query = layout.query(one) + blind, key = layout.key(one);
                const auto key_row = [&](void* to) {
                  return to ? layout.key_row(to, key, unit.kv_head) : nullptr;
                };
                kernels().attention_backward(
                    layout.group(args.q, args.k, args.v, args.lse, one, unit.kv_head),
                    {rows(args.grad), rows(args.y),
                     args.dq ? layout.row(args.dq, shape.dtype, query, head) : nullptr,
                     key_row(args.dk), key_row(args.dv)},
                    scratch);
              });
}

}  // namespace anychip::cpu
