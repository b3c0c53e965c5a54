// Where threads wait for each other: barriers of the block, operations of a warp, sleep; and what
// is said when they wait for ever.
#include <cstring>
#include <string>

#include "failure.h"
#include "multiprocessor.h"

namespace cuda_emulator {
namespace {

// After so many wake-ups in which nothing else happened, sleepers wait for what will not come.
constexpr unsigned kMostIdleRounds = 100000;

bool same_site(Site a, Site b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

}  // namespace

// Barriers of the block. A thread that has ended counts as arrived, as on the device.

int Multiprocessor::barrier(Barrier kind, bool predicate, Site site) {
  Thread& me = current();
  idle_rounds_ = 0;
  if (barrier_.arrived == 0) {
    barrier_.kind = kind;
    barrier_.site = site;
    barrier_.first_rank = me.rank;
    barrier_.count = 0;
  } else if (barrier_.kind != kind || !same_site(barrier_.site, site)) {
    fail("divergent __syncthreads: thread %u waits at %s:%d, thread %u at %s:%d",
         barrier_.first_rank, barrier_.site.file, barrier_.site.line, me.rank, site.file,
         site.line);
  }
  const char* edge = edges_.block(barrier_.generation);
  release(edge);
  ++barrier_.arrived;
  barrier_.count += predicate;
  warp_of(me).at_barrier |= 1u << me.lane();
  release_barrier_if_complete();
  wait(me);
  acquire(edge);
  return barrier_.result;
}

void Multiprocessor::release_barrier_if_complete() {
  if (barrier_.arrived == 0 || barrier_.arrived < alive_) return;
  switch (barrier_.kind) {
    case Barrier::kPlain:
    case Barrier::kCount:
      barrier_.result = barrier_.count;
      break;
    case Barrier::kAnd:
      barrier_.result = barrier_.count == barrier_.arrived;
      break;
    case Barrier::kOr:
      barrier_.result = barrier_.count > 0;
      break;
  }
  barrier_.arrived = 0;
  ++barrier_.generation;
  for (unsigned warp = 0; warp < kMaxWarps && warp * kLanes < static_cast<unsigned>(num_threads_);
       ++warp) {
    ready_.add(warp, warps_[warp].at_barrier);
    warps_[warp].at_barrier = 0;
  }
}

void Multiprocessor::arrive_exited(Warp& warp, unsigned lane) {
  warp.exited |= 1u << lane;
  const unsigned number = current().warp();
  if (warp.num_groups > 0) complete_groups(warp, number);
  release_barrier_if_complete();
}

// Operations of a warp

uint64_t Multiprocessor::operate(WarpOperation operation, unsigned mask, uint64_t value,
                                 int argument, int width, Site site) {
  Thread& me = current();
  const unsigned lane = me.lane();
  Warp& warp = warp_of(me);
  idle_rounds_ = 0;
  if (!(mask >> lane & 1u)) {
    fail("%s:%d: lane %u calls a warp operation whose mask %08x does not name it", site.file,
         site.line, lane, mask);
  }
  if (width <= 0 || width > kLanes || (width & (width - 1)) != 0) {
    fail("%s:%d: expected a shuffle's width of 1, 2, 4, 8, 16 or 32, got %d", site.file, site.line,
         width);
  }
  Group& group = group_for(warp, operation, mask, site);
  group.arrived |= 1u << lane;
  warp.registers.value[lane] = value;
  warp.registers.shuffle[lane] = {argument, width};
  const char* edge = nullptr;
  if (operation == WarpOperation::kSync) {
    const auto lowest = static_cast<unsigned>(__builtin_ctz(mask));
    edge = edges_.warp(me.warp(), lowest, warp.generation[lowest]);
    release(edge);
  }
  if (group.arrived == (mask & ~warp.exited)) finish(warp, me.warp(), group);
  wait(me);
  if (edge != nullptr) acquire(edge);
  return warp.registers.value[lane];
}

// Groups of other masks may wait at the same time, as long as they do not wait for each other.
inline Multiprocessor::Group& Multiprocessor::group_for(Warp& warp, WarpOperation operation,
                                                        unsigned mask, Site site) {
  Group* found = nullptr;
  const unsigned lane = current().lane();
  for (int i = 0; i < warp.num_groups; ++i) {
    Group& group = warp.groups[i];
    if (group.mask == mask && group.operation == operation && same_site(group.site, site)) {
      found = &group;
    } else if ((group.mask >> lane & 1u) && (group.arrived & mask)) {
      fail_divergent(group, mask, site);
    }
  }
  if (found == nullptr) {
    found = &warp.groups[warp.num_groups++];
    *found = {operation, mask, 0, site};
  }
  return *found;
}

void Multiprocessor::fail_divergent(const Group& group, unsigned mask, Site site) {
  fail(
      "divergent warp operation: lane %u of warp %u with mask %08x at %s:%d, lanes %08x that it "
      "waits for with mask %08x at %s:%d",
      current().lane(), current().warp(), mask, site.file, site.line, group.arrived & mask,
      group.mask, group.site.file, group.site.line);
}

// After a lane has ended: it is not waited for any more.
void Multiprocessor::complete_groups(Warp& warp, unsigned warp_number) {
  for (int i = warp.num_groups - 1; i >= 0; --i) {
    Group& group = warp.groups[i];
    if (group.arrived == (group.mask & ~warp.exited)) finish(warp, warp_number, group);
  }
}

void Multiprocessor::finish(Warp& warp, unsigned warp_number, Group& group) {
  complete(group.operation, group.arrived, warp.registers);
  if (group.operation == WarpOperation::kSync) ++warp.generation[__builtin_ctz(group.mask)];
  ready_.add(warp_number, group.arrived);
  group = warp.groups[--warp.num_groups];
}

// __activemask may name any lanes that run together, the caller at least. In order random each lane
// is alone; in the others it is all that come to the same site before the warp has to wait.

unsigned Multiprocessor::active_mask(Site site) {
  Thread& me = current();
  const uint32_t own = 1u << me.lane();
  if (settings_.order == Order::kRandom) return own;
  Warp& warp = warp_of(me);
  me.site = site;
  warp.at_active_mask |= own;
  wait(me);
  return me.active;
}

void Multiprocessor::release_active_mask(Warp& warp, unsigned warp_number) {
  if (ready_.lanes(warp_number) != 0) return;
  const uint32_t lanes = warp.at_active_mask;
  Thread* threads = threads_ + warp_number * kLanes;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    threads[lane].active = 0;
    for (unsigned other = 0; other < kLanes; ++other) {
      const bool together = (lanes >> lane & lanes >> other & 1u) &&
                            same_site(threads[lane].site, threads[other].site);
      threads[lane].active |= uint32_t{together} << other;
    }
  }
  warp.at_active_mask = 0;
  ready_.add(warp_number, lanes);
}

// __nanosleep

void Multiprocessor::sleep(Site site) {
  Thread& me = current();
  me.site = site;
  warp_of(me).asleep |= 1u << me.lane();
  if (idle_rounds_ > kMostIdleRounds) {
    fail(
        "%s:%d: every thread that could run sleeps, and waits for what no thread of this block "
        "does; blocks run one after another here, so that none may wait for another",
        site.file, site.line);
  }
  wait(me);
}

// Nothing else can run: all who sleep wake up. The number of the first, or -1.
int Multiprocessor::take_sleeper() {
  for (unsigned warp = 0; warp * kLanes < static_cast<unsigned>(num_threads_); ++warp) {
    ready_.add(warp, warps_[warp].asleep);
    warps_[warp].asleep = 0;
  }
  ++idle_rounds_;
  return ready_.take();
}

// Note [Order of memory] in happens_before.h

void Multiprocessor::fence() {
  Thread& me = current();
  me.fenced = true;
  if (me.last_atomic != nullptr) acquire(me.last_atomic);
}
void Multiprocessor::before_atomic(const void* address) {
  if (current().fenced) release(address);
}
void Multiprocessor::after_atomic(const void* address) { current().last_atomic = address; }

void Multiprocessor::report_deadlock() {
  std::string waits;
  const auto add = [&](int threads, unsigned first, const char* what, Site site) {
    waits += " " + std::to_string(threads) + " thread(s), first " + std::to_string(first) +
             ", in " + what + " at " + site.file + ":" + std::to_string(site.line) + ";";
  };
  if (barrier_.arrived > 0) {
    add(barrier_.arrived, barrier_.first_rank, "__syncthreads", barrier_.site);
  }
  int shown = 0;
  for (unsigned number = 0; number * kLanes < static_cast<unsigned>(num_threads_); ++number) {
    const Warp& warp = warps_[number];
    for (int i = 0; i < warp.num_groups && shown < 4; ++i, ++shown) {
      const Group& group = warp.groups[i];
      add(__builtin_popcount(group.arrived),
          number * kLanes + static_cast<unsigned>(__builtin_ctz(group.arrived)), "a warp operation",
          group.site);
    }
  }
  const uint3 block = position.block_index;
  report_failure(cudaErrorLaunchFailure,
                 "deadlock in block (%u,%u,%u), %d of %d threads have ended:%s", block.x, block.y,
                 block.z, num_threads_ - alive_, num_threads_, waits.c_str());
}

}  // namespace cuda_emulator
