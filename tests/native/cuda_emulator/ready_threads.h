// Which threads of a block can run, and which of them runs next.
//
// Orders:
//   forward  a warp runs until all its lanes wait, lanes and warps by ascending number
//   reverse  the same by descending number
//   random   lanes in random order, and now and then another warp before this one has to wait
//   warp     warps have random priorities: the first of those that can run does, so that it is as
//            far ahead of the others as the barriers let it
// Staying in a warp keeps the stacks of 32 threads in the cache.
#pragma once

#include <cstdint>

#include "settings.h"

namespace cuda_emulator {

constexpr int kLanes = 32;
constexpr int kMaxWarps = 32;
constexpr int kMaxThreads = kLanes * kMaxWarps;

class ReadyThreads {
 public:
  ReadyThreads() : random_(1) {}

  void begin(Order order, const Random& random) {
    order_ = order;
    random_ = random;
  }

  // No thread is ready; warps get new priorities.
  void begin_block() {
    for (int warp = 0; warp < kMaxWarps; ++warp) {
      lanes_[warp] = 0;
      slot_[warp] = warp_in_[warp] = static_cast<uint8_t>(warp);
    }
    if (order_ == Order::kWarp) shuffle_slots();
    ready_slots_ = 0;
    slot_now_ = order_ == Order::kReverse ? 0 : kMaxWarps - 1;
    has_begun_ = false;
  }

  void add(unsigned warp, uint32_t lanes) {
    lanes_[warp] |= lanes;
    if (lanes) ready_slots_ |= 1u << slot_[warp];
  }
  uint32_t lanes(unsigned warp) const { return lanes_[warp]; }

  // The number of the thread that runs next, which is no longer ready; -1 when there is none.
  __attribute__((always_inline)) int take() {
    if (ready_slots_ == 0) return -1;
    const bool stays = has_begun_ && (ready_slots_ >> slot_now_ & 1u);
    has_begun_ = true;
    switch (order_) {
      case Order::kForward:
        if (!stays) enter(next_up(ready_slots_, slot_now_), kLanes - 1);
        return take_lane(next_up(now(), lane_now_));
      case Order::kReverse:
        if (!stays) enter(next_down(ready_slots_, slot_now_), 0);
        return take_lane(next_down(now(), lane_now_));
      case Order::kRandom:
        if (!stays || random_.below(16) == 0) enter(any_slot(), 0);
        return take_lane(any_lane());
      case Order::kWarp:
        enter(__builtin_ctz(ready_slots_), 0);
        return take_lane(any_lane());
    }
    return -1;
  }

 private:
  uint32_t& now() { return lanes_[warp_in_[slot_now_]]; }

  void enter(int slot, int lane) {
    slot_now_ = slot;
    lane_now_ = lane;
  }

  int take_lane(int lane) {
    lane_now_ = lane;
    now() &= ~(1u << lane);
    if (now() == 0) ready_slots_ &= ~(1u << slot_now_);
    return warp_in_[slot_now_] * kLanes + lane;
  }

  // The next bit above `bit`, or the lowest one; the next below, or the highest one.
  static int next_up(uint32_t bits, int bit) {
    const uint32_t above = bits & ~((2u << bit) - 1);
    return __builtin_ctz(above ? above : bits);
  }
  static int next_down(uint32_t bits, int bit) {
    const uint32_t below = bits & ((1u << bit) - 1);
    return 31 - __builtin_clz(below ? below : bits);
  }
  // The first from a random lane on: not each is as likely, but it is fast, and any can be.
  int any_lane() { return next_up(now(), static_cast<int>(random_.next() & 31u)); }

  int any_slot() {
    uint32_t slots = ready_slots_;
    const auto count = static_cast<uint32_t>(__builtin_popcount(slots));
    for (uint32_t skip = random_.below(count); skip > 0; --skip) slots &= slots - 1;
    return __builtin_ctz(slots);
  }

  void shuffle_slots() {
    for (uint32_t last = kMaxWarps; last > 1; --last) {
      const uint32_t other = random_.below(last);
      const uint8_t warp = warp_in_[last - 1];
      warp_in_[last - 1] = warp_in_[other];
      warp_in_[other] = warp;
    }
    for (uint8_t slot = 0; slot < kMaxWarps; ++slot) slot_[warp_in_[slot]] = slot;
  }

  Order order_ = Order::kForward;
  Random random_;
  uint32_t lanes_[kMaxWarps] = {};  // that are ready, of each warp
  uint32_t ready_slots_ = 0;        // warps with ready lanes, by slot: the lower the earlier
  uint8_t slot_[kMaxWarps] = {}, warp_in_[kMaxWarps] = {};
  int slot_now_ = 0, lane_now_ = 0;
  bool has_begun_ = false;
};

}  // namespace cuda_emulator
