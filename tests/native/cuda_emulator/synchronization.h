// Barriers, fences, and the operations of a warp, under CUDA's names.
// Source: CUDA C++ Programming Guide, "Synchronization Functions" to "Warp Shuffle Functions".
#pragma once

#include <cstring>
#include <type_traits>

#include "engine.h"

inline void __syncthreads(CUDA_EMULATOR_SITE) {
  cuda_emulator::block_barrier(cuda_emulator::Barrier::kPlain, false, {file, line});
}
inline int __syncthreads_count(int predicate, CUDA_EMULATOR_SITE) {
  return cuda_emulator::block_barrier(cuda_emulator::Barrier::kCount, predicate != 0, {file, line});
}
inline int __syncthreads_and(int predicate, CUDA_EMULATOR_SITE) {
  return cuda_emulator::block_barrier(cuda_emulator::Barrier::kAnd, predicate != 0, {file, line});
}
inline int __syncthreads_or(int predicate, CUDA_EMULATOR_SITE) {
  return cuda_emulator::block_barrier(cuda_emulator::Barrier::kOr, predicate != 0, {file, line});
}

inline void __threadfence() { cuda_emulator::fence(); }
inline void __threadfence_block() { cuda_emulator::fence(); }
inline void __threadfence_system() { cuda_emulator::fence(); }

// Other threads of the block run meanwhile, as long as they take.
inline void __nanosleep(unsigned, CUDA_EMULATOR_SITE) { cuda_emulator::sleep({file, line}); }

inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_EMULATOR_SITE) {
  cuda_emulator::warp_operation(cuda_emulator::WarpOperation::kSync, mask, 0, 0, 32, {file, line});
}
inline unsigned __activemask(CUDA_EMULATOR_SITE) {
  return cuda_emulator::active_mask({file, line});
}

namespace cuda_emulator {

// `value` is compared and moved as its bits.
template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value,
                "a warp operation moves plain values of up to 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
T shuffle(WarpOperation operation, unsigned mask, T value, int argument, int width, Site site) {
  const uint64_t bits = warp_operation(operation, mask, bits_of(value), argument, width, site);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
T warp_reduce(WarpOperation operation, unsigned mask, T value, Site site) {
  return static_cast<T>(warp_operation(operation, mask, bits_of(value), 0, 32, site));
}

}  // namespace cuda_emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_EMULATOR_SITE) {
  return cuda_emulator::shuffle(cuda_emulator::WarpOperation::kShuffle, mask, value, source, width,
                                {file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, CUDA_EMULATOR_SITE) {
  return cuda_emulator::shuffle(cuda_emulator::WarpOperation::kShuffleUp, mask, value,
                                static_cast<int>(distance), width, {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, CUDA_EMULATOR_SITE) {
  return cuda_emulator::shuffle(cuda_emulator::WarpOperation::kShuffleDown, mask, value,
                                static_cast<int>(distance), width, {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUDA_EMULATOR_SITE) {
  return cuda_emulator::shuffle(cuda_emulator::WarpOperation::kShuffleXor, mask, value, lane_mask,
                                width, {file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_EMULATOR_SITE) {
  return static_cast<unsigned>(cuda_emulator::warp_operation(
      cuda_emulator::WarpOperation::kBallot, mask, predicate != 0, 0, 32, {file, line}));
}
inline int __any_sync(unsigned mask, int predicate, CUDA_EMULATOR_SITE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_EMULATOR_SITE) {
  return __ballot_sync(mask, !predicate, file, line) == 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, CUDA_EMULATOR_SITE) {
  return static_cast<unsigned>(
      cuda_emulator::warp_operation(cuda_emulator::WarpOperation::kMatchAny, mask,
                                    cuda_emulator::bits_of(value), 0, 32, {file, line}));
}
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, CUDA_EMULATOR_SITE) {
  const auto same = static_cast<unsigned>(
      cuda_emulator::warp_operation(cuda_emulator::WarpOperation::kMatchAll, mask,
                                    cuda_emulator::bits_of(value), 0, 32, {file, line}));
  *predicate = same != 0;
  return same;
}

#define CUDA_EMULATOR_REDUCE(name, T, operation)                                            \
  inline T name(unsigned mask, T value, CUDA_EMULATOR_SITE) {                               \
    return cuda_emulator::warp_reduce(cuda_emulator::WarpOperation::operation, mask, value, \
                                      {file, line});                                        \
  }
CUDA_EMULATOR_REDUCE(__reduce_add_sync, unsigned, kAdd)
CUDA_EMULATOR_REDUCE(__reduce_add_sync, int, kAdd)
CUDA_EMULATOR_REDUCE(__reduce_min_sync, unsigned, kMin)
CUDA_EMULATOR_REDUCE(__reduce_min_sync, int, kMinSigned)
CUDA_EMULATOR_REDUCE(__reduce_max_sync, unsigned, kMax)
CUDA_EMULATOR_REDUCE(__reduce_max_sync, int, kMaxSigned)
CUDA_EMULATOR_REDUCE(__reduce_and_sync, unsigned, kAnd)
CUDA_EMULATOR_REDUCE(__reduce_or_sync, unsigned, kOr)
CUDA_EMULATOR_REDUCE(__reduce_xor_sync, unsigned, kXor)
#undef CUDA_EMULATOR_REDUCE
