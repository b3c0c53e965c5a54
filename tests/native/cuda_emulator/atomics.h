// Atomic functions of 2, 4 and 8 bytes. Relaxed, as on the device: alone they order nothing else.
// Source: CUDA C++ Programming Guide, "Atomic Functions".
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine.h"
#include "float16.h"

namespace cuda_emulator {

template <size_t kBytes>
struct Word;
template <>
struct Word<2> {
  using Type = uint16_t;
};
template <>
struct Word<4> {
  using Type = uint32_t;
};
template <>
struct Word<8> {
  using Type = uint64_t;
};

// *address = update(*address); returns what was there.
template <class T, class Update>
T read_modify_write(T* address, const Update& update) {
  using Bits = typename Word<sizeof(T)>::Type;
  before_atomic(address);
  auto* word = reinterpret_cast<Bits*>(address);
  Bits old_bits = __atomic_load_n(word, __ATOMIC_RELAXED);
  Bits new_bits;
  T old_value;
  do {
    std::memcpy(&old_value, &old_bits, sizeof old_value);
    const T new_value = update(old_value);
    std::memcpy(&new_bits, &new_value, sizeof new_value);
  } while (!__atomic_compare_exchange_n(word, &old_bits, new_bits, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
  after_atomic(address);
  return old_value;
}

// Only the first argument names the type, as with CUDA's overloads.
template <class T>
using Same = std::common_type_t<T>;

template <class T>
constexpr bool is_integer_word = std::is_integral<T>::value && (sizeof(T) == 4 || sizeof(T) == 8);

}  // namespace cuda_emulator

#define CUDA_EMULATOR_ATOMIC(name, expression)                                             \
  template <class T>                                                                       \
  T name(T* address, cuda_emulator::Same<T> value) {                                       \
    static_assert(cuda_emulator::is_integer_word<T>, #name " takes 4 or 8 byte integers"); \
    return cuda_emulator::read_modify_write(                                               \
        address, [value](T old) { return static_cast<T>(expression); });                   \
  }
CUDA_EMULATOR_ATOMIC(atomicSub, old - value)
CUDA_EMULATOR_ATOMIC(atomicMin, value < old ? value : old)
CUDA_EMULATOR_ATOMIC(atomicMax, old < value ? value : old)
CUDA_EMULATOR_ATOMIC(atomicAnd, old& value)
CUDA_EMULATOR_ATOMIC(atomicOr, old | value)
CUDA_EMULATOR_ATOMIC(atomicXor, old ^ value)
#undef CUDA_EMULATOR_ATOMIC

// Integers, float, double, __half, __nv_bfloat16 and the pairs of the last two.
template <class T>
T atomicAdd(T* address, cuda_emulator::Same<T> value) {
  return cuda_emulator::read_modify_write(address,
                                          [value](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicExch(T* address, cuda_emulator::Same<T> value) {
  return cuda_emulator::read_modify_write(address, [value](T) { return value; });
}
template <class T>
T atomicCAS(T* address, cuda_emulator::Same<T> expected, cuda_emulator::Same<T> value) {
  static_assert(std::is_integral<T>::value, "atomicCAS takes integers of 2, 4 or 8 bytes");
  return cuda_emulator::read_modify_write(
      address, [expected, value](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return cuda_emulator::read_modify_write(
      address, [limit](unsigned old) { return old >= limit ? 0u : old + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned limit) {
  return cuda_emulator::read_modify_write(
      address, [limit](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}
