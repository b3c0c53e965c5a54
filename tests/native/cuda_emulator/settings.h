// What a person may set, by environment variables: read again at every launch.
//
//   ANYCHIP_EMULATOR_ORDER            forward, reverse, random (default) or warp: ready_threads.h
//   ANYCHIP_EMULATOR_SEED             of the random choices; default 1
//   ANYCHIP_EMULATOR_THREADS          how many threads of the host run blocks; default 1
//   ANYCHIP_EMULATOR_DELAYED          1: launches wait for a synchronization; default 0: queue.h
//   ANYCHIP_EMULATOR_MULTIPROCESSORS  what cudaDeviceGetAttribute answers; default 4
//   ANYCHIP_EMULATOR_KEPT_FIBERS      finished threads that the thread sanitizer remembers; 2048
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace cuda_emulator {

enum class Order { kForward, kReverse, kRandom, kWarp };

struct Settings {
  Order order = Order::kRandom;
  uint64_t seed = 1;
  int threads = 1;
  bool delayed = false;
  int multiprocessors = 4;
  size_t kept_fibers = 2048;

  // What is wrong with them goes to `problem`.
  static Settings read(std::string& problem);
};

// Marsaglia's xorshift: few instructions, since it runs at every switch of threads.
// Source: Marsaglia, "Xorshift RNGs", Journal of Statistical Software 8(14), 2003.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0xD1342543DE82EF95ull | 1) {}
  uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>(state_ >> 32);
  }
  uint32_t below(uint32_t limit) {
    return static_cast<uint32_t>(static_cast<uint64_t>(next()) * limit >> 32);
  }

 private:
  uint64_t state_;
};

}  // namespace cuda_emulator
