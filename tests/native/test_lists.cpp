// l2_norm, l2_norm_partials, clip, unscale_and_check over lists of tensors, against float64.
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

void test_l2_norm_partials(DType dtype, int64_t block) {
  const std::string name =
      std::string("l2_norm_partials ") + name_of(dtype) + " by " + std::to_string(block);
  std::vector<Tensor> list = random_list(dtype, 1, 1.0);
  const Grid grid(list, block);
  std::vector<float> want(3, -1.0f);
  for (const Tensor& tensor : list) {
    for (int64_t begin = 0; begin < tensor.numel(); begin += block) {
      std::vector<float> squares;
      for (int64_t i = begin; i < std::min(tensor.numel(), begin + block); ++i) {
        const auto value = static_cast<float>(tensor.get(i));
        squares.push_back(value * value);
      }
      want.push_back(sum_in_pairs(squares, block));
    }
  }
  check_same_bits(name, [&] {
    Tensor out(DType::kFloat32, Doubles(static_cast<size_t>(grid.total), -1.0));
    l2_norm_partials(refs(list), {grid.first, block, out.floats()});
    check_that(out.values() == Doubles(want.begin(), want.end()), name);
    check_that(out.guards_intact(), name + ": wrote outside of its output");
    Bytes bytes;
    out.append_to(bytes);
    return bytes;
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
  check_throws<std::invalid_argument>("a power of two, got 12", [&] {
    l2_norm_partials({{&value, 1, DType::kFloat32}}, {{0}, 12, &value});
  });
  check_throws<std::invalid_argument>("a power of two, got 33554432", [&] {
    l2_norm_partials({{&value, 1, DType::kFloat32}}, {{0}, int64_t{1} << 25, &value});
  });
  check_throws<std::invalid_argument>("for tensor 0, got -1", [&] {
    l2_norm_partials({{&value, 1, DType::kFloat32}}, {{-1}, 4, &value});
  });
  check_throws<std::invalid_argument>("numel of all tensors <= ", [&] {
    const TensorRef half{&value, int64_t{1} << 46, DType::kFloat32};
    l2_norm({half, half, half}, &value);
  });
  check_throws<std::invalid_argument>("address of out", [&] {
    l2_norm_partials({{&value, 1, DType::kFloat32}}, {{0}, 4, nullptr});
  });
  l2_norm_partials({{nullptr, 0, DType::kFloat32}}, {{0}, 4, nullptr});  // no block, no sum
  check_throws<std::invalid_argument>("each of 1 tensors, got 2", [&] {
    l2_norm_partials({{&value, 1, DType::kFloat32}}, {{0, 1}, 4, &value});
  });
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  for (const DType dtype : kDTypes) {
    test_l2_norm(dtype, 1.0);
    for (const int64_t block : {1, 8, 64, 1024, 32768}) test_l2_norm_partials(dtype, block);
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
