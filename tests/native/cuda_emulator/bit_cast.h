// The bits of one type as another, as std::bit_cast of C++20.
#pragma once

#include <cstring>

namespace cuda_emulator {

template <class To, class From>
To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast: both types have one size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace cuda_emulator
