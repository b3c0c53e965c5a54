// Note [Order of memory]
//
// What one thread wrote, another may read only over one of these edges, and the thread sanitizer is
// told of no others:
//   launch        what was done before it, to every thread; every thread, to what is done after it
//   __syncthreads every thread before it, to every thread after it
//   __syncwarp    the same for the lanes of its mask
//   fence, atomic __threadfence and then an atomic operation, to an atomic operation at the same
//                 address and then __threadfence: the only order between blocks
// Shuffles, votes and atomic operations alone order nothing: CUDA promises nothing about them.
// Source: CUDA C++ Programming Guide, "Memory Fence Functions" and "Synchronization Functions".
//
// An edge goes over an address. Barriers use addresses of a reserved range that nothing is stored
// in, other ones for each block: a block must not inherit what the one before it has synchronized.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(CUDA_EMULATOR_THREAD_SANITIZER)
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace cuda_emulator {

inline void release([[maybe_unused]] const void* address) {
#if defined(CUDA_EMULATOR_THREAD_SANITIZER)
  __tsan_release(const_cast<void*>(address));
#endif
}
inline void acquire([[maybe_unused]] const void* address) {
#if defined(CUDA_EMULATOR_THREAD_SANITIZER)
  __tsan_acquire(const_cast<void*>(address));
#endif
}

class BarrierAddresses {
 public:
  explicit BarrierAddresses(char* range) : range_(range) {}

  void next_block() { number_ = (number_ + 1) % (kRange / kPerBlock); }
  // Two in turn: a fast thread reaches the next barrier while a slow one leaves this one.
  const char* block(unsigned generation) const { return start() + generation % 2; }
  const char* warp(unsigned warp, unsigned lowest_lane, unsigned generation) const {
    return start() + 64 + (warp * 32 + lowest_lane) * 2 + generation % 2;
  }

  static constexpr size_t kPerBlock = 4096;
  static constexpr size_t kRange = size_t{1} << 32;  // reserved, never touched

 private:
  const char* start() const { return range_ + number_ * kPerBlock; }
  char* range_;
  size_t number_ = 0;
};

}  // namespace cuda_emulator
