// What device code asks of the engine: everything that waits, shares or orders memory.
//
// The headers beside this one give these functions CUDA's names. Sites (file, line) come with every
// call that can wait, so that an error says where.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vector_types.h"

namespace cuda_emulator {

// What threadIdx needs; the engine's own record of a thread derives from it.
struct ThreadPosition {
  uint3 index;
  unsigned rank;  // in its block, x fastest; lane and warp follow from it
  unsigned lane() const { return rank % 32; }
  unsigned warp() const { return rank / 32; }
};

struct Position {
  ThreadPosition* thread;  // null outside of a kernel
  uint3 block_index;
  dim3 block_size, grid_size;
};
// Read all the time: thread_local would call a function that initializes it, and another model of
// thread-local storage one that finds it.
extern __thread Position position __attribute__((tls_model("initial-exec")));

struct Site {
  const char* file;
  int line;
};

enum class Barrier { kPlain, kCount, kAnd, kOr };

enum class WarpOperation {
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kSync,
  kMatchAny,
  kMatchAll,
  kAdd,
  kMin,
  kMax,
  kMinSigned,
  kMaxSigned,
  kAnd,
  kOr,
  kXor,
};

// __syncthreads and its relatives; the result is that of the reduction of `predicate`.
int block_barrier(Barrier kind, bool predicate, Site site);

// Every lane of `mask` calls it with the same operation at the same site. `argument` and `width`
// are those of the shuffles: source lane, distance or lane mask, and the width of a segment.
uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, int argument,
                        int width, Site site);
unsigned active_mask(Site site);
void sleep(Site site);

// The memory of a block. A variable is named by an address that is its own.
void* shared_variable(const void* key, size_t bytes, size_t alignment, const char* name,
                      const char* file, int line);
void* dynamic_shared_memory();
// Ends the kernel where `name`, which takes an address in global memory, got one in shared memory.
void check_global(const void* address, const char* name, Site site);

// Note [Order of memory] in happens_before.h.
void fence();
void before_atomic(const void* address);
void after_atomic(const void* address);

}  // namespace cuda_emulator

// A call's site, as the last two parameters of a function of the device.
#define CUDA_EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
