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

// One block of the grid: squares in float32, added up in pairs after zeros up to `block`.
inline float sum_in_pairs(std::vector<float> values, int64_t block) {
  values.resize(static_cast<size_t>(block), 0.0f);
  for (size_t width = values.size() / 2; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) values[i] += values[i + width];
  }
  return values[0];
}

// Room for the sums of every tensor, after three blocks that nobody may touch.
struct Grid {
  std::vector<int64_t> first;
  int64_t block, total = 3;

  Grid(const std::vector<Tensor>& list, int64_t size) : block(size) {
    for (const Tensor& tensor : list) {
      first.push_back(total);
      total += (tensor.numel() + block - 1) / block;
    }
  }
};

}  // namespace anychip::cpu::test
