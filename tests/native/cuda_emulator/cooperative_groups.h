// Cooperative groups as far as they are a block or a tile of a warp: no grids, no clusters.
// Source: CUDA C++ Programming Guide, "Cooperative Groups".
#pragma once

#include "qualifiers.h"
#include "synchronization.h"

namespace cooperative_groups {

class thread_block {
 public:
  void sync(CUDA_EMULATOR_SITE) const { __syncthreads(file, line); }
  unsigned thread_rank() const { return cuda_emulator::position.thread->rank; }
  unsigned size() const { return blockDim.x * blockDim.y * blockDim.z; }
};

inline thread_block this_thread_block() { return {}; }

template <unsigned kSize>
class thread_block_tile {
  static_assert(kSize > 0 && kSize <= 32 && (kSize & (kSize - 1)) == 0,
                "a tile has 1, 2, 4, 8, 16 or 32 threads");

 public:
  unsigned thread_rank() const { return lane() % kSize; }
  unsigned meta_group_rank() const { return cuda_emulator::position.thread->rank / kSize; }
  static constexpr unsigned size() { return kSize; }

  void sync(CUDA_EMULATOR_SITE) const { __syncwarp(mask(), file, line); }
  template <class T>
  T shfl(T value, int source, CUDA_EMULATOR_SITE) const {
    return __shfl_sync(mask(), value, source, kSize, file, line);
  }
  template <class T>
  T shfl_up(T value, unsigned distance, CUDA_EMULATOR_SITE) const {
    return __shfl_up_sync(mask(), value, distance, kSize, file, line);
  }
  template <class T>
  T shfl_down(T value, unsigned distance, CUDA_EMULATOR_SITE) const {
    return __shfl_down_sync(mask(), value, distance, kSize, file, line);
  }
  template <class T>
  T shfl_xor(T value, int lane_mask, CUDA_EMULATOR_SITE) const {
    return __shfl_xor_sync(mask(), value, lane_mask, kSize, file, line);
  }
  unsigned ballot(int predicate, CUDA_EMULATOR_SITE) const {
    return (__ballot_sync(mask(), predicate, file, line) & mask()) >> first_lane();
  }
  int any(int predicate, CUDA_EMULATOR_SITE) const { return ballot(predicate, file, line) != 0; }
  int all(int predicate, CUDA_EMULATOR_SITE) const { return ballot(!predicate, file, line) == 0; }

 private:
  static unsigned lane() { return cuda_emulator::position.thread->lane(); }
  static unsigned first_lane() { return lane() / kSize * kSize; }
  static unsigned mask() { return (0xffffffffu >> (32 - kSize)) << first_lane(); }
};

template <unsigned kSize>
thread_block_tile<kSize> tiled_partition(const thread_block&) {
  return {};
}

template <class T>
struct plus {
  T operator()(T a, T b) const { return a + b; }
};
template <class T>
struct greater {
  T operator()(T a, T b) const { return a < b ? b : a; }
};
template <class T>
struct less {
  T operator()(T a, T b) const { return b < a ? b : a; }
};

template <unsigned kSize, class T, class Combine>
T reduce(const thread_block_tile<kSize>& tile, T value, Combine combine, CUDA_EMULATOR_SITE) {
  for (int distance = kSize / 2; distance > 0; distance /= 2) {
    value = combine(value, tile.shfl_xor(value, distance, file, line));
  }
  return value;
}

}  // namespace cooperative_groups
