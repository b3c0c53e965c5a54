// Checks of plain arguments. Messages: what was expected, what was got, in which operator.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace anychip::cpu {

inline void check(bool condition, const char* where, const std::string& expected_and_got) {
  if (!condition) throw std::invalid_argument(std::string(where) + ": " + expected_and_got);
}

// No address space has room for more; sums and products of what stays below do not overflow.
constexpr int64_t kMaxElements = int64_t{1} << 47;

struct Size {
  const char* name;
  int64_t value;
};

// Each size is at least 0, and all but those that are 0 make a tensor that can exist: a loop may
// run over one of them alone. Returns how many elements there are.
inline int64_t check_sizes(const char* where, std::initializer_list<Size> sizes) {
  int64_t elements = 1;
  bool empty = false;
  for (const Size& size : sizes) {
    if (size.value < 0) {
      check(false, where,
            std::string("expected ") + size.name + " >= 0, got " + std::to_string(size.value));
    }
    if (size.value > kMaxElements / elements) {
      check(false, where,
            std::string("expected ") + size.name +
                " <= " + std::to_string(kMaxElements / elements) +
                ", as more elements than 2^47 cannot exist, got " + std::to_string(size.value));
    }
    empty = empty || size.value == 0;
    elements *= size.value == 0 ? 1 : size.value;
  }
  return empty ? 0 : elements;
}

inline void check_address(const char* where, const char* name, const void* address) {
  check(address != nullptr, where, std::string("expected the address of ") + name + ", got 0");
}

}  // namespace anychip::cpu
