// The error of exp, sigmoid and the normal distribution against float64, over every exponent.
#include "kernels/math.h"

#include "tensor.h"

namespace anychip::cpu::test {
namespace {

using tested::AllLanes;
using tested::F32;
using tested::kLanes;

struct Function {
  const char* name;
  F32 (*lanes)(F32);
  double (*exact)(double);
  double limit_ulp;                                 // as stated in math.h
  double smallest = -INFINITY, largest = INFINITY;  // arguments
};

const Function kFunctions[] = {
    {"exp", [](F32 x) { return tested::exp(x); }, [](double x) { return std::exp(x); }, 1.0,
     -INFINITY, 40.0},
    {"sigmoid", [](F32 x) { return tested::sigmoid(x).value; },
     [](double x) { return 1.0 / (1.0 + std::exp(-x)); }, 2.9},
    {"complement", [](F32 x) { return tested::sigmoid(x).complement; },
     [](double x) { return 1.0 / (1.0 + std::exp(x)); }, 2.9},
    {"slope", [](F32 x) { return tested::sigmoid_slope(x); },
     [](double x) { return 1.0 / ((1.0 + std::exp(x)) * (1.0 + std::exp(-x))); }, 3.6},
    {"tanh", [](F32 x) { return tested::tanh(x); }, [](double x) { return std::tanh(x); }, 2.5},
    {"log_one_plus", [](F32 x) { return tested::log_one_plus(x); },
     [](double x) { return std::log1p(x); }, 2.0, 0.0, 1.0},
    {"cdf", [](F32 x) { return tested::normal(x).cdf; },
     [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }, 6.5},
    {"pdf", [](F32 x) { return tested::normal(x).pdf; },
     [](double x) { return std::exp(-x * x / 2.0) / std::sqrt(2.0 * M_PI); }, 2.2},
};

void test_function(const Function& function) {
  double worst = 0.0, worst_at = 0.0;
  for (uint32_t bits = 0; bits < 0xffffffffu - kLanes * 40503u; bits += kLanes * 40503u) {
    float x[kLanes], y[kLanes];
    for (uint32_t k = 0; k < kLanes; ++k) {
      const uint32_t pattern = bits + k * 40503u;
      std::memcpy(&x[k], &pattern, sizeof pattern);
    }
    store(y, function.lanes(load(x, AllLanes{})), AllLanes{});
    for (int k = 0; k < kLanes; ++k) {
      if (std::isnan(x[k])) {
        check_that(std::isnan(y[k]), std::string(function.name) + " of NaN is not NaN");
        continue;
      }
      if (x[k] < function.smallest || x[k] > function.largest) continue;
      const double want = function.exact(x[k]);
      const double error = std::fabs(y[k] - want) / ulp(DType::kFloat32, want);
      if (error > worst) worst = error, worst_at = x[k];
    }
  }
  char text[120];
  std::snprintf(text, sizeof text, "%s: expected at most %.1f ulp, got %.3f at %.9g", function.name,
                function.limit_ulp, worst, worst_at);
  std::printf("%s\n", text);
  check_that(worst <= function.limit_ulp, text);
}

void test_extremes() {
  float x[kLanes] = {-INFINITY, -104.0f, -0.0f, 0.0f}, y[kLanes];
  store(y, tested::exp(load(x, AllLanes{})), AllLanes{});
  check_that(y[0] == 0.0f && y[1] == 0.0f && y[2] == 1.0f && y[3] == 1.0f, "exp at its ends");
  const float ends[kLanes] = {-INFINITY, INFINITY, -1e30f, 1e30f};
  store(y, tested::sigmoid(load(ends, AllLanes{})).value, AllLanes{});
  check_that(y[0] == 0.0f && y[1] == 1.0f && y[2] == 0.0f && y[3] == 1.0f, "sigmoid at its ends");
  store(y, tested::normal(load(ends, AllLanes{})).cdf, AllLanes{});
  check_that(y[0] == 0.0f && y[1] == 1.0f && y[2] == 0.0f && y[3] == 1.0f, "cdf at its ends");
}

// Rounded once, as the C library has it: also of sums that cancel, that lie near a middle between
// two numbers, that are subnormal, infinite or NaN.
void test_fused() {
  std::mt19937 random(1);
  const auto any_float = [&] {
    const uint32_t bits = random();
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  for (int round = 0; round < 100000; ++round) {
    float a[kLanes], b[kLanes], c[kLanes], y[kLanes];
    for (int k = 0; k < kLanes; ++k) {
      a[k] = k % 2 ? any_float() : std::ldexp(static_cast<float>(random() >> 8), -24);
      b[k] = k % 2 ? any_float() : std::ldexp(static_cast<float>(random() >> 8), -24);
      const float product = a[k] * b[k];
      c[k] = k % 4 < 2 ? any_float() : k % 8 < 4 ? -product : std::ldexp(product, k % 3 * 24 - 24);
      if (k == 4) c[k] = std::ldexp(1.0f, 24);  // the product decides about a half
    }
    store(y, tested::fused(load(a, AllLanes{}), load(b, AllLanes{}), load(c, AllLanes{})),
          AllLanes{});
    for (int k = 0; k < kLanes; ++k) {
      const float want = std::fmaf(a[k], b[k], c[k]);
      const bool same = std::isnan(want) ? std::isnan(y[k]) : !std::memcmp(&want, &y[k], 4);
      if (same) continue;
      char text[120];
      std::snprintf(text, sizeof text, "fused(%a, %a, %a): expected %a, got %a", a[k], b[k], c[k],
                    want, y[k]);
      return check_that(false, text);
    }
  }
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu::test;
  for (const Function& function : kFunctions) test_function(function);
  test_extremes();
  test_fused();
  return report("math");
}
