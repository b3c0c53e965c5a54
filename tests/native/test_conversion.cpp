// bfloat16 and float16: every number decoded, and encoding against round-to-nearest-even by
// float64.
#include "tensor.h"

namespace anychip::cpu::test {
namespace {

void test_decoding(DType dtype) {
  Tensor half(dtype, 65536);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    std::memcpy(static_cast<uint16_t*>(half.data()) + bits, &bits, 2);
  }
  std::vector<float> wide(65536);
  kernels().to_float(dtype, half.data(), wide.data(), 65536);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double want = decode(dtype, bits), got = wide[bits];
    const bool same = (got == want && std::signbit(got) == std::signbit(want)) ||
                      (std::isnan(got) && std::isnan(want));
    check_that(same, std::string(name_of(dtype)) + " " + std::to_string(bits) + " decoded");
  }
}

// Around every number of the type: itself, its neighbours in float32, and the ties between numbers.
void test_encoding(DType dtype) {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto value = static_cast<float>(decode(dtype, bits));
    if (std::isnan(value)) continue;
    const auto tie = static_cast<float>(value + 0.5 * ulp(dtype, value));
    for (const float centre : {value, tie}) {
      values.push_back(centre);
      values.push_back(std::nextafterf(centre, INFINITY));
      values.push_back(std::nextafterf(centre, -INFINITY));
    }
  }
  for (const float extreme : {65519.996f, 65520.0f, 0x1.fffffep127f, 0x1p-25f, 0x1.000002p-25f}) {
    values.push_back(extreme);
    values.push_back(-extreme);
  }
  const auto count = static_cast<int64_t>(values.size());
  Tensor half(dtype, count);
  kernels().from_float(dtype, values.data(), half.data(), count);
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, static_cast<uint16_t*>(half.data()) + i, 2);
    const float value = values[static_cast<size_t>(i)];
    check_that(bits == encode(dtype, value),
               std::string(name_of(dtype)) + " of " + std::to_string(value));
  }
  check_that(half.guards_intact(), "wrote outside of its output");
}

void test_nan_is_kept(DType dtype) {
  for (const uint32_t pattern : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0x7fffffffu, 0xff800001u}) {
    float value, back;
    std::memcpy(&value, &pattern, sizeof value);
    uint16_t bits;
    kernels().from_float(dtype, &value, &bits, 1);
    kernels().to_float(dtype, &bits, &back, 1);
    check_that(std::isnan(back), std::string(name_of(dtype)) + " NaN became a number");
  }
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  for (const KernelTable* table : available_tables()) {
    set_isa(table->name);
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      test_decoding(dtype);
      test_encoding(dtype);
      test_nan_is_kept(dtype);
    }
  }
  return report("conversion");
}
