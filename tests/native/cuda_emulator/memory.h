// The memory of blocks: shared variables with red zones, and the ranges that stacks lie in.
#pragma once

#include <cstddef>

#include "engine.h"

namespace cuda_emulator {

// Limits of compute capability 9.0, in bytes per block.
// Source: CUDA C++ Programming Guide, "Compute Capabilities", table of technical specifications.
constexpr size_t kStaticShared = 48 << 10;
constexpr size_t kMostShared = 227 << 10;  // static and dynamic, for a kernel that asks
constexpr size_t kSharedOfMultiprocessor = 228 << 10;

// Zeroed pages of a private range, which is reserved but takes no memory until it is written.
class Pages {
 public:
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  char* data() const { return data_; }
  // Gives pages back and takes new ones at the same place: the thread sanitizer then forgets what
  // was done there before.
  void renew(size_t bytes);
  // An access to these bytes, which are whole pages, ends the program.
  void forbid(size_t offset, size_t bytes);

 private:
  char* data_;
  size_t bytes_;
};

// Shared memory of the block that runs. It is full of NaN when a block begins, since nothing is
// known of it on the device, and variables lie kRedZone bytes apart.
class SharedMemory {
 public:
  SharedMemory();
  // `opted_in` is the dynamic size that cudaFuncSetAttribute allowed, 0 without.
  void begin_block(size_t dynamic_bytes, size_t opted_in);
  // The variable of this key, made at its first use. Null when all variables are too large.
  void* variable(const void* key, size_t bytes, size_t alignment);
  void* dynamic() const { return pages_.data(); }
  bool contains(const void* address) const {
    const auto* byte = static_cast<const char*>(address);
    return byte >= pages_.data() && byte < pages_.data() + kArea;
  }
  size_t dynamic_bytes() const { return dynamic_bytes_; }
  size_t static_bytes() const { return static_bytes_; }

 private:
  static constexpr int kMaxVariables = 64;
  static constexpr size_t kRedZone = 64;
  static constexpr size_t kArea = kSharedOfMultiprocessor + (kMaxVariables + 2) * 2 * kRedZone;

  struct Variable {
    const void* key;
    char* address;
  };

  Pages pages_;
  Variable variables_[kMaxVariables];
  int num_variables_ = 0;
  size_t dynamic_bytes_ = 0, opted_in_ = 0, static_bytes_ = 0, used_ = 0;
};

}  // namespace cuda_emulator
