// Philox4x32-10: the known answers of Random123 (kat_vectors), and dropout's use of it.
#include "operators.h"
#include "philox.h"
#include "tensor.h"

namespace anychip::cpu::test {
namespace {

using Block = std::array<uint32_t, 4>;

void test_block_known_answers() {
  const uint32_t ones = 0xffffffff;
  check_that(
      philox_block({0, 0, 0, 0}, {0, 0}) == Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
      "counter 0, key 0");
  check_that(philox_block({ones, ones, ones, ones}, {ones, ones}) ==
                 Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
             "counter and key of ones");
  check_that(
      philox_block({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
          Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
      "digits of pi");
}

uint32_t word_of_element(uint64_t seed, uint64_t offset, int64_t i) {
  const uint64_t counter = offset + static_cast<uint64_t>(i >> 2);
  const Block block =
      philox_block({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0},
                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return block[static_cast<size_t>(i & 3)];
}

// columns: of each row, where the elements are rows -3, 4, 11 ... of a wider whole; 0: all of it.
void test_dropout(DType dtype, int64_t numel, uint64_t seed, uint64_t offset, double p,
                  int64_t columns = 0) {
  const std::string name = label("dropout", dtype, numel) + " p " + std::to_string(p) +
                           " columns " + std::to_string(columns);
  const int64_t width = columns + 5, column = 2;
  std::vector<int64_t> rows;
  for (int64_t i = 0; columns > 0 && i < numel / columns; ++i) rows.push_back(7 * i - 3);
  const auto word_number = [&](int64_t i) {
    if (columns == 0) return i;
    return rows[static_cast<size_t>(i / columns)] * width + column + i % columns;
  };
  Tensor x(dtype, random_values(numel, 1));
  if (numel > 3) x.set(3, NAN);  // a dropped NaN is 0, a kept one stays
  Expected expected(numel);
  const double scale = static_cast<float>(1.0 / (1.0 - p));
  const auto threshold = static_cast<uint64_t>(std::floor(p * 0x1p32));
  for (int64_t i = 0; i < numel; ++i) {
    const bool keep = word_of_element(seed, offset, word_number(i)) >= threshold;
    const auto product =
        static_cast<float>(x.get(i) * scale);  // exact in float64, then one rounding
    expected.want[static_cast<size_t>(i)] = keep ? round_to(dtype, product) : 0.0;
  }
  const int64_t rng[2] = {static_cast<int64_t>(seed), static_cast<int64_t>(offset)};
  check_same_bits(name, [&] {
    Tensor y(dtype, numel);
    const int64_t* numbers = columns > 0 ? rows.data() : nullptr;
    dropout({x.data(), rng, y.data(), numel, p, dtype, numbers, columns, width, column});
    for (int64_t i = 0; i < numel; ++i) {
      const double want = expected.want[static_cast<size_t>(i)], got = y.get(i);
      check_that(got == want || (std::isnan(got) && std::isnan(want)), name + ": wrong value");
    }
    check_that(y.guards_intact(), name + ": wrote outside of its output");
    Bytes bytes;
    y.append_to(bytes);
    return bytes;
  });
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  test_block_known_answers();
  for (const DType dtype : kDTypes) {
    for (const int64_t numel : kSizes) test_dropout(dtype, numel, 0x123456789abcdef0, 77, 0.3);
    for (const double p : {0.0, 0.5, 0x1p-32, 1.0 - 0x1p-32, 1.0}) {
      test_dropout(dtype, 1000, ~uint64_t{0}, 5, p);
    }
    test_dropout(dtype, kManyElements, 1, 0, 0.1);
    for (const int64_t columns : {1, 3, 64, 65, 500}) {
      test_dropout(dtype, 40 * columns, 1, 3, 0.4, columns);
    }
    test_dropout(dtype, kManyElements / 1001 * 1001, 1, 0, 0.1, 1001);
  }
  // The counter carries into its upper word, and wraps around.
  test_dropout(DType::kFloat32, 1000, 42, 0xffffffff - 100, 0.5);
  test_dropout(DType::kFloat32, 1000, 42, ~uint64_t{0} - 100, 0.5);
  const int64_t rng[2] = {0, 0};
  float value = 1.0f;
  check_throws<std::invalid_argument>(
      "numel >= 0, got -1", [&] { dropout({&value, rng, &value, -1, 0.5, DType::kFloat32}); });
  check_throws<std::invalid_argument>(
      "0 <= p <= 1", [&] { dropout({&value, rng, &value, 1, 1.5, DType::kFloat32}); });
  const auto with_rows = [&](int64_t columns, int64_t column) {
    dropout({&value, rng, &value, 1, 0.5, DType::kFloat32, rng, columns, 4, column});
  };
  check_throws<std::invalid_argument>("1 elements in rows of 2", [&] { with_rows(2, 0); });
  check_throws<std::invalid_argument>("column 4 to 5 of 4", [&] { with_rows(1, 4); });
  check_throws<std::invalid_argument>("column -1 to 0 of 4", [&] { with_rows(1, -1); });
  return report("philox");
}
