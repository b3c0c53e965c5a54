// A fiber: a stack, and where its code stopped. Switching saves the registers that a called
// function must keep, and nothing else: no system call, a few nanoseconds.
//
// The sanitizers are told of every switch. Note [Fibers of the thread sanitizer] in fiber.cpp.
#pragma once

#include <cstddef>

namespace cuda_emulator {

#if defined(CUDA_EMULATOR_THREAD_SANITIZER)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif
#if defined(CUDA_EMULATOR_ADDRESS_SANITIZER)
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif

class Fiber {
 public:
  // The stack that the caller runs on, which is a fiber as soon as it switches to another.
  void adopt_current_stack();
  // `entry` begins when this fiber is switched to, on the stack below `top`, and never returns.
  void prepare(char* bottom, char* top, void (*entry)());
  // Goes on in `to`, and returns when something switches back.
  void switch_to(Fiber& to);
  // What `entry` must call first.
  static void on_entry();

  // Gives the edge from what this fiber has done to who acquires `address`, as if it did so itself.
  void release_for(const void* address);
  // The thread sanitizer's record of this fiber; the caller ends it by forget().
  void* detach_record();
  static void forget(void* record);

 private:
  void* stack_pointer_ = nullptr;
  const void* bottom_ = nullptr;  // of the stack, and how long it is, for the address sanitizer
  size_t size_ = 0;
  void* fake_stack_ = nullptr;
  void* record_ = nullptr;
};

}  // namespace cuda_emulator
