// Cross-entropy, forward and backward, against float64.
#include "operators.h"
#include "tensor.h"

namespace anychip::cpu::test {
namespace {

constexpr int64_t kIgnore = -100;

struct Case {
  int64_t rows, vocab;
  double smoothing, z_loss;
  Reduction reduction;
  DType dtype;
  bool ignore_some = true;
};

struct Reference {
  Expected row_loss, lse, dlogits, loss;
  double counted = 0.0;
};

Reference expected_results(const Case& c, const Tensor& logits, const std::vector<int64_t>& target,
                           const Tensor& grad) {
  Reference r{Expected(c.rows), Expected(c.rows), Expected(c.rows * c.vocab), Expected(1)};
  for (const int64_t t : target) r.counted += t != kIgnore;
  const bool per_row = c.reduction == Reduction::kNone;
  const double divisor = c.reduction == Reduction::kMean ? r.counted : 1.0;
  for (int64_t row = 0; row < c.rows; ++row) {
    const auto at_row = static_cast<size_t>(row);
    const int64_t base = row * c.vocab, t = target[at_row];
    double largest = -INFINITY, sum = 0.0, mean = 0.0, size = 0.0;
    for (int64_t i = 0; i < c.vocab; ++i) largest = std::max(largest, logits.get(base + i));
    for (int64_t i = 0; i < c.vocab; ++i) {
      sum += std::exp(logits.get(base + i) - largest);
      mean += logits.get(base + i) / static_cast<double>(c.vocab);
      size = std::max(size, std::fabs(logits.get(base + i)));
    }
    const double lse = largest + std::log(sum);
    r.lse.want[at_row] = lse;
    r.lse.terms[at_row] = std::fabs(lse) + 1.0;
    if (t == kIgnore) continue;
    r.row_loss.want[at_row] = (1.0 - c.smoothing) * (lse - logits.get(base + t)) +
                              c.smoothing * (lse - mean) + c.z_loss * lse * lse;
    r.row_loss.terms[at_row] = 1.0 + std::fabs(lse) + size + c.z_loss * lse * lse;
    r.loss.want[0] += r.row_loss.want[at_row] / divisor;
    r.loss.terms[0] += r.row_loss.terms[at_row] / divisor;
    const double dy = grad.get(per_row ? row : 0) / divisor;
    for (int64_t i = 0; i < c.vocab; ++i) {
      const double p = std::exp(logits.get(base + i) - lse) * (1.0 + 2.0 * c.z_loss * lse);
      const double spread = c.smoothing / static_cast<double>(c.vocab);
      const double certain = i == t ? 1.0 - c.smoothing : 0.0;
      const auto at = static_cast<size_t>(base + i);
      r.dlogits.want[at] = dy * (p - spread - certain);
      r.dlogits.terms[at] = std::fabs(dy) * (p * (1.0 + std::fabs(lse) + size) + spread + certain);
    }
  }
  if (c.reduction == Reduction::kMean && r.counted == 0.0) r.loss.want[0] = NAN;
  return r;
}

std::vector<int64_t> targets_of(const Case& c) {
  std::vector<int64_t> target;
  for (int64_t row = 0; row < c.rows; ++row) {
    target.push_back(c.ignore_some && row % 3 == 1 ? kIgnore : (row * 7919 + 3) % c.vocab);
  }
  return target;
}

void test_case(const Case& c) {
  const bool per_row = c.reduction == Reduction::kNone;
  const std::string name =
      label("cross_entropy", c.dtype, c.rows) + " x " + std::to_string(c.vocab) + " reduction " +
      std::to_string(static_cast<int>(c.reduction)) + " smoothing " + std::to_string(c.smoothing);
  Tensor logits(c.dtype, random_values(c.rows * c.vocab, 1, 4.0));
  Tensor grad(DType::kFloat32, random_values(per_row ? c.rows : 1, 2));
  const std::vector<int64_t> target = targets_of(c);
  const Reference want = expected_results(c, logits, target, grad);
  const CrossEntropyOptions options{c.rows,   c.vocab,     kIgnore, c.smoothing,
                                    c.z_loss, c.reduction, c.dtype};
  const double sum = static_cast<double>(c.vocab) / 64.0 + 16.0;
  check_same_bits(name, [&] {
    Tensor loss(DType::kFloat32, per_row ? c.rows : 1), lse(DType::kFloat32, c.rows);
    Tensor dlogits(c.dtype, c.rows * c.vocab);
    cross_entropy_forward({logits.data(), target.data(), loss.floats(), lse.floats(), options});
    cross_entropy_backward(
        {grad.floats(), logits.data(), target.data(), lse.floats(), dlogits.data(), options});
    check_close(name + " loss", loss, per_row ? want.row_loss : want.loss, sum);
    check_close(name + " lse", lse, want.lse, sum);
    check_close(name + " dlogits", dlogits, want.dlogits, 2.0 * sum);
    Bytes bytes;
    for (Tensor* tensor : {&loss, &lse, &dlogits}) tensor->append_to(bytes);
    return bytes;
  });
}

void test_special_values() {
  const CrossEntropyOptions options{4, 3, kIgnore, 0.0, 0.0, Reduction::kNone, DType::kFloat32};
  Tensor logits(DType::kFloat32,
                Doubles{1e30, -1e30, 0.0, -INFINITY, 1.0, 1.0, INFINITY, 0.0, 0.0, NAN, 0.0, 0.0});
  const int64_t target[4] = {0, 1, 1, 1};
  check_same_bits("special logits", [&] {
    Tensor loss(DType::kFloat32, 4), lse(DType::kFloat32, 4);
    cross_entropy_forward({logits.data(), target, loss.floats(), lse.floats(), options});
    check_that(loss.get(0) == 0.0, "a certain row has no loss");
    check_that(std::fabs(loss.get(1) - std::log(2.0)) < 1e-7, "a masked logit does not count");
    check_that(std::isinf(lse.get(2)) && lse.get(2) > 0.0, "an infinite logit is kept");
    check_that(std::isnan(loss.get(3)), "a NaN logit is kept");
    return Bytes{};
  });
}

void test_bad_targets_write_nothing() {
  const CrossEntropyOptions options{2, 5, kIgnore, 0.0, 0.0, Reduction::kMean, DType::kFloat32};
  Tensor logits(DType::kFloat32, Doubles(10, 0.0)), loss(DType::kFloat32, Doubles{7.0});
  Tensor dlogits(DType::kFloat32, Doubles(10, 7.0)), lse(DType::kFloat32, Doubles{7.0, 7.0});
  for (const int64_t bad : {int64_t{5}, int64_t{-1}}) {
    const int64_t target[2] = {0, bad};
    const std::string got = "[0, 5) or ignore_index -100, got " + std::to_string(bad) + " in row 1";
    check_throws<std::out_of_range>(got.c_str(), [&] {
      cross_entropy_forward({logits.data(), target, loss.floats(), lse.floats(), options});
    });
    check_throws<std::out_of_range>(got.c_str(), [&] {
      cross_entropy_backward(
          {loss.floats(), logits.data(), target, lse.floats(), dlogits.data(), options});
    });
  }
  check_that(loss.get(0) == 7.0 && lse.get(0) == 7.0 && dlogits.get(0) == 7.0, "nothing written");
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  for (const DType dtype : kDTypes) {
    for (const int64_t vocab : kSizes) {
      if (vocab > 0) test_case({4, vocab, 0.0, 0.0, Reduction::kMean, dtype});
    }
    for (const Reduction reduction : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
      test_case({7, 63, 0.1, 1e-3, reduction, dtype});
      test_case({0, 63, 0.0, 0.0, reduction, dtype});
    }
    test_case({97, 1000, 0.1, 1e-4, Reduction::kMean, dtype});  // for several threads
  }
  test_case({3, 17, 0.0, 0.0, Reduction::kSum, DType::kFloat32, false});
  test_special_values();
  test_bad_targets_write_nothing();
  return report("loss");
}
