// Checks of plain arguments. Messages: what was expected, what was got, in which operator.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace anychip::cpu {

inline void check(bool condition, const char* where, const std::string& expected_and_got) {
  if (!condition) throw std::invalid_argument(std::string(where) + ": " + expected_and_got);
}

inline void check_size(const char* where, const char* name, int64_t value) {
  check(value >= 0, where, std::string("expected ") + name + " >= 0, got " + std::to_string(value));
}

inline void check_address(const char* where, const char* name, const void* address) {
  check(address != nullptr, where, std::string("expected the address of ") + name + ", got 0");
}

}  // namespace anychip::cpu
