// Memory that the ranks of one host share, and how they wait for each other in it.
//
// The file is sparse: what no call has touched has no pages. It begins with a place per rank and
// the channels of all pairs (point_to_point.h); the regions of the groups follow (collectives.h),
// each mapped when the group is made. A wait spins briefly, if every rank can have a core, then
// sleeps in a futex for some milliseconds at a time, so that it hears of an abort, which is of its
// process only.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace anychip::comm {

// Those of anychip/comm/shared_memory.py.
enum Status : int { kDone = 0, kLate = 1, kLost = 2, kWrong = 3 };

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint32_t>;  // of a futex
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "a futex is a plain 32-bit word");

constexpr size_t kPage = 4096, kLine = 64;
constexpr int64_t kSliceNs = 20'000'000;
constexpr int64_t kLeastSpinNs = 5'000, kMostSpinNs = 100'000;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void sleep_while(Word& word, uint32_t value) {
  const timespec slice = {0, kSliceNs};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &slice, nullptr, 0);
}

inline void wake(Word& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// What a rank says to all others.
struct alignas(kLine) Place {
  Word bell;      // grows with every change in its channels
  Word sleepers;  // who waits for that
  Word closed;
  Word core;  // on which it was last
};

class Segment {
 public:
  // Maps the file, which stays open; throws std::bad_alloc when the system does not let it.
  Segment(int fd, int rank, int world_size, size_t channels_nbytes)
      : rank_(rank), world_size_(world_size), fd_(fd), head_nbytes_(head(channels_nbytes)) {
    base_ = map(0, head_nbytes_);
    if (cores() >= world_size) most_spin_ns_ = kMostSpinNs;
    spin_ns_ = most_spin_ns_;
  }
  // Ranks that are threads of a test share one address.
  Segment(uint8_t* memory, int rank, int world_size, size_t channels_nbytes)
      : rank_(rank), world_size_(world_size), fd_(-1), head_nbytes_(head(channels_nbytes)) {
    base_ = memory;
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  static size_t head_nbytes(int world_size, size_t channels_nbytes) {
    return (places_nbytes(world_size) + channels_nbytes + kPage - 1) / kPage * kPage;
  }

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  Place& place(int rank) { return reinterpret_cast<Place*>(base_)[rank]; }
  uint8_t* channels() { return base_ + places_nbytes(world_size_); }

  uint8_t* map_group(int number, size_t nbytes) {
    const size_t at = head_nbytes_ + static_cast<size_t>(number) * nbytes;
    return fd_ < 0 ? base_ + at : map(at, nbytes);
  }

  bool is_aborted() const { return aborted_.load(std::memory_order_acquire); }
  void abort() { aborted_.store(true, std::memory_order_release); }

  // Calls are under way in this process while there is one of these, unless it came too late.
  class Use {
   public:
    explicit Use(Segment& segment) : segment_(segment) { ++segment_.uses_; }
    ~Use() { --segment_.uses_; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    bool is_open() const { return !segment_.is_closed_; }

   private:
    Segment& segment_;
  };

  // Gives the memory back when no call uses it; the other ranks see that this one has left.
  void close() {
    abort();
    if (is_closed_.exchange(true)) return;
    place(rank_).closed.store(1, std::memory_order_release);
    while (uses_ != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (const auto& [memory, nbytes] : mapped_) munmap(memory, nbytes);
    mapped_.clear();
  }

  // Says on which core this rank runs, for those that wait for it.
  void note_core() {
    Word& core = place(rank_).core;
    const uint32_t here = static_cast<uint32_t>(sched_getcpu());
    if (core.load(std::memory_order_relaxed) != here) core.store(here, std::memory_order_relaxed);
  }

  // Calls `is_there` until it is true: without a pause for a while, then with `sleep` in between,
  // which looks whether there is a reason to give up. Nobody spins on the core of the rank that he
  // waits for. Who slept for longer than a spin takes spins less the next time; who would have been
  // there in time spins longer: to be woken takes as long as many steps, and would make the other
  // rank sleep in its turn.
  template <class Condition, class Sleep>
  Status wait(int rank, Condition is_there, Sleep sleep) {
    if (is_there()) return kDone;
    const auto begin = Clock::now(), end = begin + std::chrono::nanoseconds(spin_ns_);
    const Word& core = place(rank).core;
    const auto here = static_cast<uint32_t>(sched_getcpu());
    while (core.load(std::memory_order_relaxed) != here && Clock::now() < end) {
      for (int i = 0; i < 64; ++i) {
        if (is_there()) return kDone;
        pause_briefly();
      }
    }
    Status status = kDone;
    while (!is_there() && (status = sleep()) == kDone) {
    }
    if (most_spin_ns_ > 0) {
      const bool was_near = Clock::now() - begin < std::chrono::nanoseconds(most_spin_ns_);
      spin_ns_ = was_near ? most_spin_ns_ : std::max<int64_t>(spin_ns_ / 2, kLeastSpinNs);
    }
    return status;
  }

 private:
  static size_t places_nbytes(int world_size) {
    return (world_size * sizeof(Place) + kPage - 1) / kPage * kPage;
  }
  size_t head(size_t channels_nbytes) const { return head_nbytes(world_size_, channels_nbytes); }

  uint8_t* map(size_t at, size_t nbytes) {
    void* found =
        mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, static_cast<off_t>(at));
    if (found == MAP_FAILED) throw std::bad_alloc();
    mapped_.emplace_back(found, nbytes);
    return static_cast<uint8_t*>(found);
  }

  static int cores() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  }

  const int rank_, world_size_, fd_;
  const size_t head_nbytes_;
  uint8_t* base_ = nullptr;
  int64_t most_spin_ns_ = 0;  // where each rank can have a core
  std::atomic<int64_t> spin_ns_{0};
  std::atomic<bool> aborted_{false};
  std::atomic<int> uses_{0};
  std::atomic<bool> is_closed_{false};
  std::vector<std::pair<void*, size_t>> mapped_;
};

}  // namespace anychip::comm
