// GELU and SwiGLU, forward and backward, against float64.
#include "operators.h"
#include "tensor.h"

namespace anychip::cpu::test {
namespace {

double cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
double pdf(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2.0 * M_PI); }
double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
constexpr double kRoot = 0.79788456080286535588;  // sqrt(2 / pi)

// Inputs of every size, and some that reach the ends.
Tensor wide_values(DType dtype, int64_t numel, unsigned seed) {
  Tensor x(dtype, random_values(numel, seed, 3.0));
  const double special[] = {0.0, -0.0, 12.0, -12.0, 100.0, -100.0, 6e4, -6e4, 1e-7, NAN};
  for (int64_t i = 0; i < 10 && numel > 20; ++i) x.set(i, special[i]);
  return x;
}

double gelu(double x, bool tanh) {
  return tanh ? x * sigmoid(2.0 * kRoot * (x + 0.044715 * x * x * x)) : x * cdf(x);
}

double gelu_derivative(double x, bool tanh) {
  if (!tanh) return cdf(x) + (std::fabs(x) > 50.0 ? 0.0 : x * pdf(x));
  const double s = sigmoid(2.0 * kRoot * (x + 0.044715 * x * x * x));
  return s + x * s * (1.0 - s) * 2.0 * kRoot * (1.0 + 3.0 * 0.044715 * x * x);
}

void test_gelu(DType dtype, int64_t numel, bool tanh) {
  const std::string name = label(tanh ? "gelu tanh" : "gelu", dtype, numel);
  Tensor x = wide_values(dtype, numel, 1), grad(dtype, random_values(numel, 2));
  Expected y(numel), dx(numel);
  for (int64_t i = 0; i < numel; ++i) {
    const auto at = static_cast<size_t>(i);
    y.want[at] = gelu(x.get(i), tanh);
    y.terms[at] = std::fabs(x.get(i));
    dx.want[at] = grad.get(i) * gelu_derivative(x.get(i), tanh);
    dx.terms[at] = std::fabs(grad.get(i)) * (1.0 + std::fabs(x.get(i)) * pdf(x.get(i)));
  }
  check_same_bits(name, [&] {
    Tensor got_y(dtype, numel), got_dx(dtype, numel);
    gelu_forward({x.data(), got_y.data(), numel, tanh, dtype});
    gelu_backward({grad.data(), x.data(), got_dx.data(), numel, tanh, dtype});
    check_close(name + " y", got_y, y, 5.0);
    check_close(name + " dx", got_dx, dx, 10.0);
    Bytes bytes;
    got_y.append_to(bytes);
    got_dx.append_to(bytes);
    return bytes;
  });
}

void test_swiglu(DType dtype, int64_t numel) {
  const std::string name = label("swiglu", dtype, numel);
  Tensor gate = wide_values(dtype, numel, 3), up(dtype, random_values(numel, 4));
  Tensor grad(dtype, random_values(numel, 5));
  Expected y(numel), dgate(numel), dup(numel);
  for (int64_t i = 0; i < numel; ++i) {
    const auto at = static_cast<size_t>(i);
    const double g = gate.get(i), u = up.get(i), dy = grad.get(i), s = sigmoid(g);
    const double complement = sigmoid(-g);
    const double underflow = std::fabs(g) * 0x1p-125;  // of a subnormal sigmoid, in units of 2^-24
    y.want[at] = g * s * u;
    y.terms[at] = std::fabs(y.want[at]) + std::fabs(u) * underflow;
    dgate.want[at] = dy * u * (s + g * s * complement);
    dgate.terms[at] = std::fabs(dy * u) * (s + std::fabs(g * s * complement) + underflow);
    dup.want[at] = dy * g * s;
    dup.terms[at] = std::fabs(dup.want[at]) + std::fabs(dy) * underflow;
  }
  check_same_bits(name, [&] {
    Tensor got_y(dtype, numel), got_dgate(dtype, numel), got_dup(dtype, numel);
    swiglu_forward({gate.data(), up.data(), got_y.data(), numel, dtype});
    swiglu_backward({grad.data(), gate.data(), up.data(), got_dgate.data(), nullptr, numel, dtype});
    swiglu_backward({grad.data(), gate.data(), up.data(), nullptr, got_dup.data(), numel, dtype});
    check_close(name + " y", got_y, y, 8.0);
    check_close(name + " dgate", got_dgate, dgate, 14.0);
    check_close(name + " dup", got_dup, dup, 8.0);
    Bytes bytes;
    got_y.append_to(bytes);
    got_dgate.append_to(bytes);
    got_dup.append_to(bytes);
    return bytes;
  });
}

void test_errors() {
  float value = 1.0f;
  const DType dtype = DType::kFloat32;
  check_throws<std::invalid_argument>("numel >= 0, got -5",
                                      [&] { gelu_forward({&value, &value, -5, false, dtype}); });
  check_throws<std::invalid_argument>("address of x",
                                      [&] { gelu_forward({nullptr, &value, 1, false, dtype}); });
  check_throws<std::invalid_argument>("address of up",
                                      [&] { swiglu_forward({&value, nullptr, &value, 1, dtype}); });
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  for (const DType dtype : kDTypes) {
    for (const int64_t numel : kSizes) {
      test_gelu(dtype, numel, false);
      test_gelu(dtype, numel, true);
      test_swiglu(dtype, numel);
    }
    test_gelu(dtype, kManyElements, false);
    test_swiglu(dtype, kManyElements);
  }
  test_errors();
  return report("elementwise");
}
