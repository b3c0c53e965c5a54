// Sharing a loop among the threads of torch's OpenMP runtime.
//
// The module links no OpenMP library. It calls the runtime that torch has loaded, through its
// stable C interface, so that there is one pool of threads in the process and torch.set_num_threads
// rules both. Without a runtime everything runs on the calling thread, and openmp_status() says so.
#pragma once

#include <cstdint>
#include <string>

#include "kernel_table.h"

namespace anychip::cpu {

struct OpenMPStatus {
  bool ok;
  std::string message;  // one sentence
  std::string library;  // path of the runtime in use, empty without one
};

// Binds to the runtime that the loaded object `soname` (libtorch_cpu.so) calls: the one in global
// scope, or else the one among that object's own dependencies. Throws std::runtime_error when that
// object is not loaded; an object without OpenMP is a status that is not ok.
void bind_openmp(const char* soname);
OpenMPStatus openmp_status();

// Threads that a kernel called from this thread may use.
int num_threads();

// Below this many elements a loop stays on its thread: entering a parallel region costs some
// microseconds, as long as this takes at memory speed.
constexpr int64_t kElementsPerThread = 32768;

using RangeFunction = void (*)(const void* context, Range range);
void run_ranges(int64_t items, int64_t elements_per_item, RangeFunction function,
                const void* context);

// Calls work(range) for consecutive ranges that cover [0, items), at most one per thread.
template <class Work>
void parallel_items(int64_t items, int64_t elements_per_item, const Work& work) {
  run_ranges(
      items, elements_per_item,
      [](const void* context, Range range) { (*static_cast<const Work*>(context))(range); }, &work);
}

// The same for elements; every range begins at a multiple of 1024.
template <class Work>
void parallel_elements(int64_t numel, const Work& work) {
  constexpr int64_t kBlock = 1024;
  parallel_items((numel + kBlock - 1) / kBlock, kBlock, [&](Range blocks) {
    const int64_t end = blocks.end * kBlock;
    work(Range{blocks.begin * kBlock, end < numel ? end : numel});
  });
}

}  // namespace anychip::cpu
