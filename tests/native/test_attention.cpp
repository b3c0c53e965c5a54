// Attention by every instruction set and any number of threads: the same bits, nothing written or
// read beside its tensors, and what it refuses. The sanitizers watch it (.ci/run native).
#include <memory>
#include <numeric>

#include "operators.h"
#include "tensor.h"

namespace anychip::cpu::test {
namespace {

struct Lengths {
  int64_t batch, queries, keys, heads, kv_heads, head_dim;
};

// The heads of (batch, rows, heads, width), of which the tensor ends with the last element read.
struct Given {
  Given(DType dtype, int64_t batch, int64_t rows, int64_t heads, int64_t head_dim, unsigned seed)
      : width(head_dim + seed % 3),
        tensor(dtype,
               random_values(std::max<int64_t>(0, batch * rows * heads * width - seed % 3), seed)),
        strides{tensor.data(), rows * heads * width, heads * width, width} {}
  int64_t width;
  Tensor tensor;
  StridedHeads strides;
};

// Numbers of rows and keys in the whole: those of these, or others, some of which follow another.
struct Dropped {
  double p = 0.0;
  bool apart = false;
  std::vector<int64_t> numbers(int64_t count) const {
    std::vector<int64_t> found(static_cast<size_t>(count));
    std::iota(found.begin(), found.end(), int64_t{0});
    for (int64_t i = 0; apart && i < count; ++i) found[static_cast<size_t>(i)] += i / 5 % 3 * 1000;
    return found;
  }
};

void test_bits(DType dtype, DType y_dtype, const Lengths& s, const std::vector<int64_t>& ends_q,
               const std::vector<int64_t>& ends_k, bool special, Dropped dropped = {}) {
  const bool packed = !ends_q.empty();
  const int64_t batch = packed ? 1 : s.batch, rows = batch * s.queries * s.heads;
  const int64_t numel = rows * s.head_dim, k_numel = batch * s.keys * s.kv_heads * s.head_dim;
  const auto given = [&](DType type, bool of_keys, unsigned seed) {
    return std::make_unique<Given>(type, batch, of_keys ? s.keys : s.queries,
                                   of_keys ? s.kv_heads : s.heads, s.head_dim, seed);
  };
  const auto q = given(dtype, false, 1), k = given(dtype, true, 2), v = given(dtype, true, 3);
  const auto grad = given(y_dtype, false, 4);
  if (special) q->tensor.set(5, NAN), k->tensor.set(7, INFINITY), v->tensor.set(3, -INFINITY);
  const std::string name = label("attention", dtype, s.queries) + " of " + std::to_string(s.keys) +
                           " x " + std::to_string(s.head_dim) + (packed ? " packed" : "");
  const int64_t rng[] = {7, -3};
  const std::vector<int64_t> row_index = dropped.numbers(batch * s.heads * s.queries);
  const std::vector<int64_t> key_index = dropped.numbers(s.keys);
  for (const bool causal : {false, true}) {
    check_same_bits(name, [&] {
      AttentionShape shape{packed ? static_cast<int64_t>(ends_q.size()) - 1 : s.batch,
                           s.queries,
                           s.keys,
                           s.heads,
                           s.kv_heads,
                           s.head_dim,
                           packed ? ends_q.data() : nullptr,
                           packed ? ends_k.data() : nullptr,
                           0.3,
                           causal,
                           dtype,
                           y_dtype};
      if (dropped.p > 0.0) shape.drop = {rng, dropped.p, row_index.data(), s.keys};
      if (dropped.apart) shape.key_index = key_index.data();
      Tensor y(y_dtype, numel), lse(kDTypes[0], rows), dq(dtype, numel), alone(dtype, numel);
      Tensor dk(dtype, k_numel), dv(dtype, k_numel);
      attention_forward({q->strides, k->strides, v->strides, y.data(), lse.floats(), shape});
      const StridedHeads read_y{y.data(), s.queries * s.heads * s.head_dim, s.heads * s.head_dim,
                                s.head_dim};
      const auto backward = [&](void* to_q, void* to_k, void* to_v) {
        attention_backward({grad->strides, q->strides, k->strides, v->strides, read_y, lse.floats(),
                            to_q, to_k, to_v, shape});
      };
      backward(dq.data(), dk.data(), dv.data());
      backward(alone.data(), nullptr, nullptr);
      Bytes all, one, other;
      for (Tensor* tensor : {&y, &lse, &dq, &alone, &dk, &dv}) {
        check_that(tensor->guards_intact(), name + ": wrote outside of its output");
        tensor->append_to(all);
      }
      dq.append_to(one), alone.append_to(other);
      check_that(one == other, name + ": other bits when it is asked for alone");
      return all;
    });
  }
}

void test_wrong_arguments() {
  float value = 1.0f, *v = &value;
  const int64_t ends[] = {0, 1}, late[] = {1, 1}, beyond[] = {0, 2}, falling[] = {0, 1, 0};
  const auto attend = [&](int64_t stride, int64_t kv_heads, const int64_t* q, const int64_t* k,
                          Drop drop = {}) {
    const StridedHeads x{v, 1, stride, 1};
    const int64_t heads = drop.rng ? 1 : kv_heads == 3 ? 4 : 97;
    attention_forward({x,
                       x,
                       x,
                       v,
                       v,
                       {q == falling ? 2 : 1, 1, 1, heads, kv_heads, 1, q, k, 1.0, false,
                        kDTypes[0], kDTypes[0], drop}});
  };
  const std::pair<const char*, std::function<void()>> cases[] = {
      {"strides of q >= 0, got -1", [&] { attend(-1, 97, ends, ends); }},
      {"multiple of kv_heads, got 4 and 3", [&] { attend(1, 3, ends, ends); }},
      {"at most 96 query heads of a key head, got 97", [&] { attend(1, 1, ends, ends); }},
      {"address of ends_k", [&] { attend(1, 97, ends, nullptr); }},
      {"ends_q[0] = 0", [&] { attend(1, 97, late, ends); }},
      {"ends_k sorted and at most 1, got 2 after 0", [&] { attend(1, 97, ends, beyond); }},
      {"ends_q sorted and at most 1, got 0 after 1", [&] { attend(1, 97, falling, falling); }},
      {"packed sequences have no dropout", [&] { attend(1, 1, ends, ends, {ends, 0.5}); }},
      {"address of row_index", [&] { attend(1, 1, nullptr, nullptr, {ends, 0.5}); }},
      {"rows within a width", [&] { attend(1, 1, nullptr, nullptr, {ends, 0.5, ends}); }},
      {"0 <= p <= 1, got 2", [&] { attend(1, 1, nullptr, nullptr, {ends, 2.0, ends, 1}); }},
  };
  for (const auto& [message, call] : cases) check_throws<std::invalid_argument>(message, call);
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  // Below and above tiles of 96 and blocks of 6 and 16; more queries than keys, and fewer.
  const Lengths all[] = {{2, 1, 1, 1, 1, 1},     {3, 7, 5, 4, 2, 8},     {2, 100, 97, 2, 2, 33},
                         {1, 40, 200, 5, 1, 16}, {1, 130, 70, 4, 2, 64}, {1, 20, 20, 96, 1, 4}};
  for (const DType dtype : kDTypes) {
    for (const Lengths& lengths : all) test_bits(dtype, dtype, lengths, {}, {}, false);
    test_bits(dtype, kDTypes[0], all[1], {}, {}, true);
    test_bits(dtype, dtype, {0, 150, 140, 4, 2, 8}, {0, 20, 20, 50, 149}, {0, 30, 37, 37, 138},
              false);
  }
  for (const Lengths& lengths : all) {
    test_bits(kDTypes[0], kDTypes[0], lengths, {}, {}, false, {0.3, false});
    test_bits(kDTypes[0], kDTypes[0], lengths, {}, {}, false, {0.3, true});
  }
  test_wrong_arguments();
  return report("test_attention");
}
