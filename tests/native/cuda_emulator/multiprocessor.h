// Runs blocks, one after another: their threads, barriers and warp operations.
//
// Each thread of a kernel is a fiber; one runs until it has to wait, and then chooses the next. A
// fiber whose thread has ended takes up a thread that has not begun, so that kernels without
// barriers never switch. Under the thread sanitizer each thread has a fiber of its own.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "fiber.h"
#include "happens_before.h"
#include "memory.h"
#include "ready_threads.h"
#include "runtime_api.h"
#include "warp_operation.h"

namespace cuda_emulator {

class Multiprocessor {
 public:
  Multiprocessor();
  ~Multiprocessor();

  // What follows runs blocks of this launch.
  void begin(const Launch& launch, const Settings& settings, size_t opted_in, uint64_t number);
  // False when the block failed: report_failure() has been called.
  bool run_block(uint3 block_index);
  void end();

  // Called by the thread that runs; engine.h says what they do.
  int barrier(Barrier kind, bool predicate, Site site);
  uint64_t operate(WarpOperation operation, unsigned mask, uint64_t value, int argument, int width,
                   Site site);
  unsigned active_mask(Site site);
  void sleep(Site site);
  void fence();
  void before_atomic(const void* address);
  void after_atomic(const void* address);
  SharedMemory& shared() { return shared_; }
  // Reports the failure, and leaves the block as it is: does not return.
  [[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));

  // The one that the calling thread of the host runs blocks on; null outside of a kernel.
  static __thread Multiprocessor* running __attribute__((tls_model("initial-exec")));

 private:
  struct Thread : ThreadPosition {
    Fiber* fiber = nullptr;  // null before it begins
    const void* last_atomic = nullptr;
    bool fenced = false;
    Site site{};  // where it sleeps, or asks which lanes are active
    uint32_t active = 0;
  };
  // Lanes that wait for each other.
  struct Group {
    WarpOperation operation;
    uint32_t mask, arrived;
    Site site;
  };
  struct Warp {
    uint32_t exited = 0, at_barrier = 0, asleep = 0, at_active_mask = 0;
    int num_groups = 0;
    Group groups[kLanes];
    uint8_t generation[kLanes] = {};  // of __syncwarp, by the lowest lane of its mask
    WarpRegisters registers;
  };
  struct BlockBarrier {
    Barrier kind = Barrier::kPlain;
    Site site{};
    int arrived = 0, count = 0;
    unsigned first_rank = 0, generation = 0;
    int result = 0;
  };

  static void fiber_main();
  void run_thread();
  void start_threads();
  // These run at every switch.
  __attribute__((always_inline)) void wait(Thread& me);
  __attribute__((always_inline)) Thread* next_thread(const Thread& me);
  int take_sleeper();
  Fiber* take_fiber();
  void renew_stacks();

  void arrive_exited(Warp& warp, unsigned lane);
  void release_barrier_if_complete();
  Group& group_for(Warp& warp, WarpOperation operation, unsigned mask, Site site);
  [[noreturn]] void fail_divergent(const Group& group, unsigned mask, Site site);
  void complete_groups(Warp& warp, unsigned warp_number);
  void finish(Warp& warp, unsigned warp_number, Group& group);
  void release_active_mask(Warp& warp, unsigned warp_number);
  bool wake_sleepers();
  void report_deadlock();

  Thread& current() { return *static_cast<Thread*>(position.thread); }
  Warp& warp_of(const Thread& thread) { return warps_[thread.warp()]; }

  const Launch* launch_ = nullptr;
  Settings settings_;
  size_t opted_in_ = 0;
  int num_threads_ = 0, alive_ = 0;
  unsigned idle_rounds_ = 0;  // wake-ups of sleepers since anything else happened

  Pages stacks_;
  std::unique_ptr<Fiber[]> fibers_;
  int num_fibers_ = 0;
  std::vector<Fiber*> free_fibers_;
  std::vector<void*> finished_records_;
  Fiber host_;
  std::thread::id host_thread_;

  Thread threads_[kMaxThreads];
  Warp warps_[kMaxWarps];
  ReadyThreads ready_;
  BlockBarrier barrier_;
  SharedMemory shared_;
  Pages addresses_;
  BarrierAddresses edges_;
};

// The two that run at every switch.

// Null when none can run; `me` is the thread that stops.
inline Multiprocessor::Thread* Multiprocessor::next_thread(const Thread& me) {
  if (__builtin_expect(warp_of(me).at_active_mask != 0, 0)) {
    release_active_mask(warp_of(me), me.warp());
  }
  int rank = ready_.take();
  if (__builtin_expect(rank < 0, 0)) rank = take_sleeper();
  return rank < 0 ? nullptr : &threads_[rank];
}

// It has been noted what makes `me`, the current thread, ready again; others run until then.
inline void Multiprocessor::wait(Thread& me) {
  Thread* next = next_thread(me);
  if (next == &me) return;
  if (__builtin_expect(next == nullptr, 0)) {
    me.fiber->switch_to(host_);
    return;
  }
  if (__builtin_expect(next->fiber == nullptr, 0)) next->fiber = take_fiber();
  position.thread = next;
  me.fiber->switch_to(*next->fiber);
}

}  // namespace cuda_emulator
