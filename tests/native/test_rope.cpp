// Rotary embedding, both layouts and directions, against float64.
#include "operators.h"
#include "tensor.h"

namespace anychip::cpu::test {
namespace {

struct Shape {
  int64_t batch, seq, heads, kv_heads, head_dim;
};

Expected rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, const Shape& shape,
                 int64_t heads, bool interleaved, bool inverse) {
  const int64_t dim = shape.head_dim, half = dim / 2;
  Expected expected(x.numel());
  for (int64_t at = 0; at < x.numel(); at += dim) {
    const int64_t position = at / dim / heads % shape.seq;
    for (int64_t pair = 0; pair < half; ++pair) {
      const int64_t first = at + (interleaved ? 2 * pair : pair);
      const int64_t second = interleaved ? first + 1 : first + half;
      const double c = cos.get(position * half + pair);
      const double s = sin.get(position * half + pair) * (inverse ? -1.0 : 1.0);
      const double x1 = x.get(first), x2 = x.get(second);
      const auto i = static_cast<size_t>(first), j = static_cast<size_t>(second);
      expected.want[i] = x1 * c - x2 * s;
      expected.terms[i] = std::fabs(x1 * c) + std::fabs(x2 * s);
      expected.want[j] = x2 * c + x1 * s;
      expected.terms[j] = std::fabs(x2 * c) + std::fabs(x1 * s);
    }
  }
  return expected;
}

void test_rope(DType dtype, const Shape& shape, bool interleaved, bool inverse) {
  const std::string name = label("rope", dtype, shape.head_dim) +
                           (interleaved ? " interleaved" : "") + (inverse ? " inverse" : "");
  const int64_t positions = shape.batch * shape.seq, half = shape.head_dim / 2;
  Tensor q(dtype, random_values(positions * shape.heads * shape.head_dim, 1));
  Tensor k(dtype, random_values(positions * shape.kv_heads * shape.head_dim, 2));
  Tensor cos(DType::kFloat32, shape.seq * half), sin(DType::kFloat32, shape.seq * half);
  for (int64_t i = 0; i < cos.numel(); ++i) {
    cos.set(i, std::cos(0.1 * static_cast<double>(i)));
    sin.set(i, std::sin(0.1 * static_cast<double>(i)));
  }
  const Expected want_q = rotated(q, cos, sin, shape, shape.heads, interleaved, inverse);
  const Expected want_k = rotated(k, cos, sin, shape, shape.kv_heads, interleaved, inverse);
  check_same_bits(name, [&] {
    Tensor q_out(dtype, q.numel()), k_out(dtype, k.numel()), k_alone(dtype, k.numel());
    Rope args{q.data(),       k.data(),    cos.floats(), sin.floats(), q_out.data(),
              k_out.data(),   shape.batch, shape.seq,    shape.heads,  shape.kv_heads,
              shape.head_dim, interleaved, inverse,      dtype};
    rope(args);
    check_close(name + " q", q_out, want_q, 2.0);
    check_close(name + " k", k_out, want_k, 2.0);
    args.q = args.q_out = nullptr;
    args.k_out = k_alone.data();
    rope(args);
    Bytes bytes, alone;
    k_out.append_to(bytes);
    k_alone.append_to(alone);
    check_that(bytes == alone, name + ": k alone has other bits");
    q_out.append_to(bytes);
    return bytes;
  });
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  // head_dim / 2 below, at and above the 16 lanes; the last has work for several threads.
  const Shape shapes[] = {{1, 1, 1, 1, 2},  {2, 3, 4, 2, 16},  {2, 5, 3, 1, 30},
                          {1, 4, 2, 2, 32}, {1, 3, 2, 1, 40},  {1, 2, 1, 1, 0},
                          {0, 4, 2, 2, 8},  {1, 3, 2, 2, 126}, {2, 70, 8, 4, 64}};
  for (const DType dtype : kDTypes) {
    for (const Shape& shape : shapes) {
      for (const bool interleaved : {false, true}) {
        test_rope(dtype, shape, interleaved, false);
        test_rope(dtype, shape, interleaved, true);
      }
    }
  }
  float value = 0.0f;
  Rope args{&value, &value, &value, &value, &value, &value, 1,
            1,      1,      1,      3,      false,  false,  DType::kFloat32};
  check_throws<std::invalid_argument>("even head_dim, got 3", [&] { rope(args); });
  args.head_dim = 2;
  args.q_out = nullptr;
  check_throws<std::invalid_argument>("q with q_out", [&] { rope(args); });
  return report("rope");
}
