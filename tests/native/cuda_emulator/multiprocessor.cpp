#include "multiprocessor.h"

#include <cstdarg>
#include <cstdio>

#include "failure.h"

#if defined(CUDA_EMULATOR_ADDRESS_SANITIZER)
extern "C" void __asan_unpoison_memory_region(const volatile void* address, size_t bytes);
#endif

namespace cuda_emulator {
namespace {

// The address sanitizer puts red zones around variables: frames become several times as large.
constexpr size_t kStack = kAddressSanitizer ? 256 << 10 : 64 << 10;
constexpr size_t kPage = 4096;
// Stacks begin at different places of a page: at one place all would share a few lines of the
// cache.
constexpr size_t kColours = 12, kColour = 320;

const char kEndOfLaunch = 0;  // its address carries the edge from every thread to the host

}  // namespace

__thread Multiprocessor* Multiprocessor::running = nullptr;

Multiprocessor::Multiprocessor()
    : stacks_(kStack * kMaxThreads),
      fibers_(new Fiber[kMaxThreads]),
      addresses_(BarrierAddresses::kRange),
      edges_(addresses_.data()) {
  free_fibers_.reserve(kMaxThreads);
}

Multiprocessor::~Multiprocessor() = default;

void Multiprocessor::begin(const Launch& launch, const Settings& settings, size_t opted_in,
                           uint64_t number) {
  launch_ = &launch;
  settings_ = settings;
  opted_in_ = opted_in;
  ready_.begin(settings.order, Random(settings.seed + number));
  position.block_size = launch.block;
  position.grid_size = launch.grid;
  num_threads_ = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  for (unsigned rank = 0; rank < static_cast<unsigned>(num_threads_); ++rank) {
    const dim3 size = launch.block;
    threads_[rank].rank = rank;
    threads_[rank].index = {rank % size.x, rank / size.x % size.y, rank / (size.x * size.y)};
  }
  // What is on a stack may belong to the thread that began it: its thread-local storage, and the
  // sanitizers' own.
  if (host_thread_ != std::this_thread::get_id()) renew_stacks();
  host_thread_ = std::this_thread::get_id();
  host_.adopt_current_stack();
  running = this;
}

void Multiprocessor::end() {
  running = nullptr;
  for (void* record : finished_records_) Fiber::forget(record);
  finished_records_.clear();
  acquire(&kEndOfLaunch);
}

bool Multiprocessor::run_block(uint3 block_index) {
  position.block_index = block_index;
  if (kThreadSanitizer) renew_stacks();
  edges_.next_block();
  shared_.begin_block(launch_->dynamic_shared_bytes, opted_in_);
  start_threads();
  position.thread = &threads_[ready_.take()];
  if (current().fiber == nullptr) current().fiber = take_fiber();
  host_.switch_to(*current().fiber);
  position.thread = nullptr;
  if (alive_ > 0) {
    if (!has_failed()) report_deadlock();
    for (int i = 0; i < num_fibers_; ++i) fibers_[i].release_for(&kEndOfLaunch);
  }
  if (kThreadSanitizer) {
    for (int i = 0; i < num_fibers_; ++i) finished_records_.push_back(fibers_[i].detach_record());
    if (finished_records_.size() > settings_.kept_fibers) {
      for (void* record : finished_records_) Fiber::forget(record);
      finished_records_.clear();
    }
  }
  if (alive_ == 0) return true;
  renew_stacks();  // some still hold frames of the abandoned block
  return false;
}

void Multiprocessor::start_threads() {
  alive_ = num_threads_;
  idle_rounds_ = 0;
  barrier_.arrived = 0;
  ready_.begin_block();
  for (int rank = 0; rank < num_threads_; ++rank) {
    Thread& thread = threads_[rank];
    // A fiber that a thread makes inherits what that thread knows: the sanitizer's are made here.
    thread.fiber = kThreadSanitizer ? take_fiber() : nullptr;
    thread.last_atomic = nullptr;
    thread.fenced = false;
  }
  for (int first = 0; first < num_threads_; first += kLanes) {
    Warp& warp = warps_[first / kLanes];
    const int lanes = num_threads_ - first;
    const uint32_t exist = lanes >= kLanes ? ~0u : (1u << lanes) - 1;
    warp.exited = ~exist;
    warp.at_barrier = warp.asleep = warp.at_active_mask = 0;
    warp.num_groups = 0;
    ready_.add(static_cast<unsigned>(first / kLanes), exist);
  }
}

// Fibers. The next thread is chosen by the one that stops.

void Multiprocessor::fiber_main() {
  Fiber::on_entry();
  for (;;) running->run_thread();
}

// One thread from its begin to its end; on return this fiber is to run the current thread.
void Multiprocessor::run_thread() {
  Fiber* fiber = current().fiber;
  launch_->kernel();
  release(&kEndOfLaunch);
  Thread& me = current();
  --alive_;
  idle_rounds_ = 0;
  arrive_exited(warp_of(me), me.lane());
  Thread* next = next_thread(me);
  if (next != nullptr && next->fiber == nullptr) {
    next->fiber = fiber;
    position.thread = next;
    return;
  }
  free_fibers_.push_back(fiber);
  if (next == nullptr) {
    fiber->switch_to(host_);
  } else {
    position.thread = next;
    fiber->switch_to(*next->fiber);
  }
}

Fiber* Multiprocessor::take_fiber() {
  if (!kThreadSanitizer && !free_fibers_.empty()) {
    Fiber* fiber = free_fibers_.back();
    free_fibers_.pop_back();
    return fiber;
  }
  const auto number = static_cast<size_t>(num_fibers_++);
  char* bottom = stacks_.data() + number * kStack;
  // The lowest page is a guard: running over it is a segmentation fault, and no silent damage.
  if (!kThreadSanitizer) stacks_.forbid(number * kStack, kPage);
  char* top = bottom + kStack - number % kColours * kColour;
  fibers_[number].prepare(bottom + kPage, top, fiber_main);
  return &fibers_[number];
}

void Multiprocessor::renew_stacks() {
  stacks_.renew(kStack * static_cast<size_t>(num_fibers_));
#if defined(CUDA_EMULATOR_ADDRESS_SANITIZER)
  __asan_unpoison_memory_region(stacks_.data(), kStack * static_cast<size_t>(num_fibers_));
#endif
  num_fibers_ = 0;
  free_fibers_.clear();
}

void Multiprocessor::fail(const char* format, ...) {
  char text[1800];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  report_failure(cudaErrorLaunchFailure, "%s", text);
  current().fiber->switch_to(host_);
  __builtin_unreachable();
}

}  // namespace cuda_emulator
