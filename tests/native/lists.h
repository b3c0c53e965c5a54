// Lists of tensors for the tests of the operators over them.
#pragma once

#include "operators.h"
#include "tensor.h"

namespace anychip::cpu::test {

// Sizes that straddle vectors and chunks (16384), together enough for several threads.
constexpr int64_t kList[] = {0, 1, 7, 8, 15, 16, 17, 63, 1000, 4097, 16384, 40001};

inline std::vector<Tensor> random_list(DType dtype, unsigned seed, double scale) {
  std::vector<Tensor> list;
  for (const int64_t numel : kList) list.emplace_back(dtype, random_values(numel, seed++, scale));
  return list;
}

inline std::vector<Tensor> squares(std::vector<Tensor> list) {
  for (Tensor& tensor : list) {
    for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, tensor.get(i) * tensor.get(i));
  }
  return list;
}

inline std::vector<TensorRef> refs(std::vector<Tensor>& list) {
  std::vector<TensorRef> result;
  for (Tensor& tensor : list) result.push_back({tensor.data(), tensor.numel(), tensor.dtype()});
  return result;
}

inline Bytes bytes_of(std::vector<Tensor>& list) {
  Bytes bytes;
  for (Tensor& tensor : list) tensor.append_to(bytes);
  return bytes;
}

// A row of Note [Exact sums], in units of 2^-298, of which a long number has a bit each.
inline std::vector<int64_t> exact_sum_of_squares(const Doubles& values) {
  std::vector<int64_t> row(kDigits, 0);
  for (const double value : values) {
    if (!std::isfinite(value)) {
      row[std::isnan(value) ? kNaNs : kInfinities] += 1;
      continue;
    }
    int exponent;
    const auto whole = static_cast<int64_t>(std::ldexp(std::frexp(value, &exponent), 24));
    const auto square = static_cast<uint64_t>(whole * whole);
    // Bit by bit from the lowest one that is set: exact for subnormal numbers too.
    for (int bit = 0; bit < 48; ++bit) {
      const int place = 2 * (exponent - 24) + 298 + bit;
      if (square >> bit & 1) row[static_cast<size_t>(place / 32)] += int64_t{1} << (place % 32);
    }
  }
  for (size_t k = 0; k + 1 < kInfinities; ++k) {
    row[k + 1] += row[k] >> 32;
    row[k] &= 0xffffffff;
  }
  return row;
}

}  // namespace anychip::cpu::test
