#include "fiber.h"

#include "happens_before.h"

// Note [Fibers of the thread sanitizer]
//
// Every thread of a kernel is a fiber of the sanitizer, with a clock of its own; switching gives no
// happens-before edge. A report is lost when the sanitizer has forgotten the thread of the older
// access, so finished fibers are kept for a while (ANYCHIP_EMULATOR_KEPT_FIBERS), at about 0.8 MB
// each. It has 256 slots for clocks, and may miss a race when threads share one: few blocks, small
// shapes, and several seeds find more than one large run.
extern "C" {
#if defined(CUDA_EMULATOR_THREAD_SANITIZER)
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
#endif
#if defined(CUDA_EMULATOR_ADDRESS_SANITIZER)
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
#endif
}

namespace cuda_emulator {
namespace {

#if defined(__x86_64__)

// Pushes the registers that a callee keeps, exchanges the stacks, pops those of the other fiber.
// The return address lies on the stack too. Source: System V ABI for AMD64, section 3.2.1.
__attribute__((naked, noinline)) void exchange_stacks(void** /*saved*/, void* /*to*/) {
  asm volatile(
      "pushq %rbp\n"
      "pushq %rbx\n"
      "pushq %r12\n"
      "pushq %r13\n"
      "pushq %r14\n"
      "pushq %r15\n"
      "movq %rsp, (%rdi)\n"
      "movq %rsi, %rsp\n"
      "popq %r15\n"
      "popq %r14\n"
      "popq %r13\n"
      "popq %r12\n"
      "popq %rbx\n"
      "popq %rbp\n"
      "ret\n");
}

// A stack from which exchange_stacks "returns" to entry. A function expects the stack 8 bytes off a
// multiple of 16, as after a call: the empty word is that call's return address.
void* first_frame(char* top, void (*entry)()) {
  auto** word = reinterpret_cast<void**>(top);
  *--word = nullptr;
  *--word = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--word = nullptr;
  return word;
}

#elif defined(__aarch64__)

// Not run yet: no machine was at hand. Saves x19 to x30 and d8 to d15.
// Source: Procedure Call Standard for the Arm 64-bit Architecture, sections 6.1.1 and 6.1.2.
asm(".text\n"
    ".align 2\n"
    ".type cuda_emulator_exchange_stacks, %function\n"
    "cuda_emulator_exchange_stacks:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\n"
    "stp x21, x22, [sp, #16]\n"
    "stp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n"
    "stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n"
    "stp d10, d11, [sp, #112]\n"
    "stp d12, d13, [sp, #128]\n"
    "stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n"
    "str x9, [x0]\n"
    "mov sp, x1\n"
    "ldp x19, x20, [sp]\n"
    "ldp x21, x22, [sp, #16]\n"
    "ldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\n"
    "ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n"
    "ldp d10, d11, [sp, #112]\n"
    "ldp d12, d13, [sp, #128]\n"
    "ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n"
    "ret\n");
extern "C" void cuda_emulator_exchange_stacks(void** saved, void* to);
void exchange_stacks(void** saved, void* to) { cuda_emulator_exchange_stacks(saved, to); }

void* first_frame(char* top, void (*entry)()) {
  auto** frame = reinterpret_cast<void**>(top - 160);
  for (int i = 0; i < 20; ++i) frame[i] = nullptr;
  frame[11] = reinterpret_cast<void*>(entry);  // x30, where ret goes
  return frame;
}

#else
#error \
    "The CUDA emulator switches stacks on x86-64 and aarch64: write exchange_stacks for this one."
#endif

// Who switched last: on arrival the address sanitizer says on which stack that was.
[[maybe_unused]] thread_local Fiber* switching = nullptr;

}  // namespace

void Fiber::adopt_current_stack() {
#if defined(CUDA_EMULATOR_THREAD_SANITIZER)
  record_ = __tsan_get_current_fiber();
#endif
}

void Fiber::prepare(char* bottom, char* top, void (*entry)()) {
  bottom_ = bottom;
  size_ = static_cast<size_t>(top - bottom);
  fake_stack_ = nullptr;
  stack_pointer_ = first_frame(top, entry);
#if defined(CUDA_EMULATOR_THREAD_SANITIZER)
  record_ = __tsan_create_fiber(0);
#endif
}

void Fiber::switch_to(Fiber& to) {
#if defined(CUDA_EMULATOR_THREAD_SANITIZER)
  __tsan_switch_to_fiber(to.record_, 1);  // 1: without a happens-before edge
#endif
#if defined(CUDA_EMULATOR_ADDRESS_SANITIZER)
  switching = this;
  __sanitizer_start_switch_fiber(&fake_stack_, to.bottom_, to.size_);
#endif
  exchange_stacks(&stack_pointer_, to.stack_pointer_);
#if defined(CUDA_EMULATOR_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(fake_stack_, &switching->bottom_, &switching->size_);
#endif
}

void Fiber::on_entry() {
#if defined(CUDA_EMULATOR_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(nullptr, &switching->bottom_, &switching->size_);
#endif
}

void Fiber::release_for([[maybe_unused]] const void* address) {
#if defined(CUDA_EMULATOR_THREAD_SANITIZER)
  void* caller = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(record_, 1);
  release(address);
  __tsan_switch_to_fiber(caller, 1);
#endif
}

void* Fiber::detach_record() {
  void* record = record_;
  record_ = nullptr;
  return record;
}

void Fiber::forget([[maybe_unused]] void* record) {
#if defined(CUDA_EMULATOR_THREAD_SANITIZER)
  __tsan_destroy_fiber(record);
#endif
}

}  // namespace cuda_emulator
