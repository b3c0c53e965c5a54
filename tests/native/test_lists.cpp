// l2_norm, sums_of_squares, clip, unscale_and_check over lists of tensors, against float64.
#include "lists.h"

namespace anychip::cpu::test {
namespace {

void test_l2_norm(DType dtype, double scale) {
  const std::string name = std::string("l2_norm ") + name_of(dtype);
  std::vector<Tensor> list = random_list(dtype, 1, scale);
  Expected want(1);
  for (const Tensor& tensor : list) {
    for (const double value : tensor.values()) want.want[0] += value * value;
  }
  want.want[0] = std::sqrt(want.want[0]);
  check_same_bits(name, [&] {
    Tensor out(DType::kFloat32, 1);
    l2_norm(refs(list), out.floats());
    check_close(name, out, want, 1e-3);  // a float64 sum: nothing but the last rounding
    Bytes bytes;
    out.append_to(bytes);
    return bytes;
  });
}

// Numbers of so many exponents: tiles take two sums, three, or none. And special ones.
void test_sums_of_squares(DType dtype, double exponents, bool special) {
  const std::string name = std::string("sums_of_squares ") + name_of(dtype) + " of " +
                           std::to_string(exponents) + " exponents";
  std::vector<Tensor> list = random_list(dtype, 1, 1.0);
  for (Tensor& tensor : list) {
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      tensor.set(
          i, std::ldexp(tensor.get(i), -static_cast<int>(exponents * (i * 7919 % 4093) / 4093)));
    }
  }
  if (special) {
    list.back().set(5, INFINITY);
    list.back().set(39999, NAN);
    list[9].set(4096, -INFINITY);
  }
  std::vector<int64_t> want;
  for (const Tensor& tensor : list) {
    const std::vector<int64_t> row = exact_sum_of_squares(tensor.values());
    want.insert(want.end(), row.begin(), row.end());
  }
  check_same_bits(name, [&] {
    std::vector<int64_t> rows(want.size() + 1, -1);
    sums_of_squares(refs(list), rows.data());
    check_that(rows.back() == -1, name + ": wrote outside of its output");
    rows.pop_back();
    check_that(rows == want, name);
    const auto* bytes = reinterpret_cast<const unsigned char*>(rows.data());
    return Bytes(bytes, bytes + rows.size() * sizeof rows[0]);
  });
}

void test_clip(DType dtype, float norm, double max_norm) {
  const std::string name = std::string("clip ") + name_of(dtype) + " " + std::to_string(norm);
  const std::vector<Tensor> before = random_list(dtype, 1, 1.0);
  const float ratio = static_cast<float>(max_norm) / (norm + 1e-6f);
  const double coefficient = ratio < 1.0f || std::isnan(ratio) ? ratio : 1.0;
  check_same_bits(name, [&] {
    std::vector<Tensor> list = before;
    clip(refs(list), &norm, max_norm);
    for (size_t n = 0; n < list.size(); ++n) {
      Expected want(list[n].numel());
      for (int64_t i = 0; i < list[n].numel(); ++i) {
        want.want[static_cast<size_t>(i)] = before[n].get(i) * coefficient;
      }
      check_close(name, list[n], want, 0.0);
    }
    return bytes_of(list);
  });
}

// `poison` is put into the last element of the longest tensor.
void test_unscale(DType dtype, float scale, double poison, bool found) {
  const std::string name = std::string("unscale_and_check ") + name_of(dtype) + " / " +
                           std::to_string(scale) + " with " + std::to_string(poison);
  std::vector<Tensor> before = random_list(dtype, 1, 1.0);
  before.back().set(before.back().numel() - 1, poison);
  check_same_bits(name, [&] {
    std::vector<Tensor> list = before;
    float found_inf = 0.0f;
    unscale_and_check(refs(list), &scale, &found_inf);
    check_that(found_inf == (found ? 1.0f : 0.0f), name + ": found_inf");
    for (size_t n = 0; n < list.size(); ++n) {
      Expected want(list[n].numel());
      for (int64_t i = 0; i < list[n].numel(); ++i) {
        const auto quotient = static_cast<float>(before[n].get(i) / double{scale});
        want.want[static_cast<size_t>(i)] = round_to(dtype, quotient);
      }
      check_close(name, list[n], want, 0.0);
    }
    found_inf = 1.0f;
    std::vector<TensorRef> nothing;
    unscale_and_check(nothing, &scale, &found_inf);
    check_that(found_inf == 1.0f, name + ": found_inf was reset");
    return bytes_of(list);
  });
}

void test_errors() {
  float value = 1.0f;
  check_throws<std::invalid_argument>("numel >= 0, got -2",
                                      [&] { l2_norm({{&value, -2, DType::kFloat32}}, &value); });
  check_throws<std::invalid_argument>("address of a tensor",
                                      [&] { clip({{nullptr, 2, DType::kFloat32}}, &value, 1.0); });
  check_throws<std::invalid_argument>("numel of all tensors <= ", [&] {
    const TensorRef half{&value, int64_t{1} << 46, DType::kFloat32};
    l2_norm({half, half, half}, &value);
  });
  check_throws<std::invalid_argument>(
      "address of out", [&] { sums_of_squares({{&value, 1, DType::kFloat32}}, nullptr); });
  sums_of_squares({}, nullptr);  // no tensor, no row
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  for (const DType dtype : kDTypes) {
    test_l2_norm(dtype, 1.0);
    for (const double exponents : {0.0, 17.0, 20.0, 30.0, 45.0, 120.0}) {
      test_sums_of_squares(dtype, exponents, exponents == 30.0);
    }
    for (const float norm : {0.5f, 7.0f, INFINITY, NAN}) test_clip(dtype, norm, 1.0);
    test_unscale(dtype, 8.0f, 1.0, false);
    test_unscale(dtype, 3.0f, 1.0, false);  // whose reciprocal is not exact
    for (const double poison : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
      test_unscale(dtype, 8.0f, poison, true);
    }
  }
  test_l2_norm(DType::kFloat32, 1e30);             // squares overflow float32
  test_l2_norm(DType::kFloat32, 1e-30);            // and underflow it
  test_unscale(DType::kFloat16, 0.5f, 6e4, true);  // overflows by the division
  test_errors();
  return report("lists");
}
