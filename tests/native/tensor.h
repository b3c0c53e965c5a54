// Tensors for the tests: guarded memory, and conversions of their own.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "dtype.h"

namespace anychip::cpu::test {

using Doubles = std::vector<double>;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Straddles the widths of vectors (4, 8, 16), of unrolled loops (64) and of blocks (1024, 4096).
constexpr int64_t kSizes[] = {0, 1, 7, 8, 15, 16, 17, 63, 1000, 4097};
// Enough for several threads, and no multiple of anything.
constexpr int64_t kManyElements = 100003;

inline const char* name_of(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}

inline size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Fraction bits, smallest normal exponent, largest value.
struct Format {
  int fraction, min_exponent;
  double largest;
};
inline Format format_of(DType dtype) {
  if (dtype == DType::kFloat32) return {23, -126, 0x1.fffffep127};
  if (dtype == DType::kBFloat16) return {7, -126, 0x1.fep127};
  return {10, -14, 65504.0};
}

// The distance of neighbouring numbers of the type at `value`.
inline double ulp(DType dtype, double value) {
  const Format format = format_of(dtype);
  const int exponent =
      value == 0.0 || !std::isfinite(value) ? format.min_exponent : std::ilogb(std::fabs(value));
  return std::ldexp(1.0, std::max(exponent, format.min_exponent) - format.fraction);
}

// Round to nearest even by arithmetic on float64; the kernels do it on bits.
inline double round_to(DType dtype, double value) {
  if (!std::isfinite(value) || value == 0.0) return value;
  const double unit = ulp(dtype, value);
  const double rounded = std::nearbyint(value / unit) * unit;
  return std::fabs(rounded) > format_of(dtype).largest ? std::copysign(INFINITY, value) : rounded;
}

inline uint32_t encode(DType dtype, double value) {
  const float narrow = static_cast<float>(round_to(dtype, value));
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof bits);
  if (dtype == DType::kFloat32) return bits;
  if (dtype == DType::kBFloat16) return bits >> 16;
  const uint32_t sign = bits >> 16 & 0x8000u;
  const double magnitude = std::fabs(narrow);
  if (std::isnan(narrow)) return sign | 0x7e00u;
  if (std::isinf(narrow)) return sign | 0x7c00u;
  if (magnitude < 0x1p-14) return sign | static_cast<uint32_t>(magnitude * 0x1p24);
  const int exponent = std::ilogb(magnitude);
  const auto fraction = static_cast<uint32_t>((std::ldexp(magnitude, -exponent) - 1.0) * 1024.0);
  return sign | static_cast<uint32_t>(exponent + 15) << 10 | fraction;
}

inline double decode(DType dtype, uint32_t bits) {
  if (dtype != DType::kFloat16) {
    const uint32_t wide = dtype == DType::kFloat32 ? bits : bits << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  const double sign = bits & 0x8000u ? -1.0 : 1.0;
  const int exponent = bits >> 10 & 31;
  const double fraction = bits & 1023u;
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * fraction * 0x1p-24;
  return sign * std::ldexp(1.0 + fraction / 1024.0, exponent - 15);
}

// Elements between two guard zones, at an address that is aligned for one element and no more.
class Tensor {
 public:
  Tensor(DType dtype, int64_t numel) : dtype_(dtype), numel_(numel) {
    memory_.assign(2 * kGuard + bytes_of_data() + size_of(dtype), kPattern);
  }
  Tensor(DType dtype, const Doubles& values) : Tensor(dtype, static_cast<int64_t>(values.size())) {
    for (int64_t i = 0; i < numel_; ++i) set(i, values[static_cast<size_t>(i)]);
  }

  void* data() { return memory_.data() + kGuard + size_of(dtype_); }
  float* floats() { return static_cast<float*>(data()); }
  DType dtype() const { return dtype_; }
  int64_t numel() const { return numel_; }

  void set(int64_t i, double value) {
    const uint32_t bits = encode(dtype_, value);
    std::memcpy(at(i), &bits, size_of(dtype_));
  }
  double get(int64_t i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, const_cast<Tensor*>(this)->at(i), size_of(dtype_));
    return decode(dtype_, bits);
  }
  Doubles values() const {
    Doubles all;
    for (int64_t i = 0; i < numel_; ++i) all.push_back(get(i));
    return all;
  }

  bool guards_intact() const {
    const size_t begin = kGuard + size_of(dtype_), end = begin + bytes_of_data();
    for (size_t i = 0; i < memory_.size(); ++i) {
      if ((i < begin || i >= end) && memory_[i] != kPattern) return false;
    }
    return true;
  }
  // NaNs as one pattern: Note [Same bits] of csrc/cpu/kernels/vector.h leaves out sign and payload.
  void append_to(Bytes& bytes) const {
    for (int64_t i = 0; i < numel_; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, const_cast<Tensor*>(this)->at(i), size_of(dtype_));
      if (std::isnan(decode(dtype_, bits))) bits = encode(dtype_, std::nan(""));
      const auto* begin = reinterpret_cast<const unsigned char*>(&bits);
      bytes.insert(bytes.end(), begin, begin + size_of(dtype_));
    }
  }

 private:
  static constexpr size_t kGuard = 128;
  static constexpr unsigned char kPattern = 0xA5;
  size_t bytes_of_data() const { return static_cast<size_t>(numel_) * size_of(dtype_); }
  unsigned char* at(int64_t i) {
    return static_cast<unsigned char*>(data()) + static_cast<size_t>(i) * size_of(dtype_);
  }

  DType dtype_;
  int64_t numel_;
  std::vector<unsigned char> memory_;
};

inline Doubles random_values(int64_t count, unsigned seed, double scale = 1.0) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0.0, scale);
  Doubles values(static_cast<size_t>(count));
  for (double& value : values) value = normal(generator);
  return values;
}

inline std::string label(const char* operator_name, DType dtype, int64_t size) {
  return std::string(operator_name) + " " + name_of(dtype) + " " + std::to_string(size);
}

}  // namespace anychip::cpu::test
