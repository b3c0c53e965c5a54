// Collectives and messages between ranks of one host; plain C outside, no Python, no libtorch.
//
// anychip/comm/shared_memory.py loads this. Calls wait in native code: who makes them holds no lock
// of Python's. A call returns its status, and above it the rank that was waited for.
#include <memory>

#include "collectives.h"
#include "point_to_point.h"
#include "segment.h"

#define ANYCHIP_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace anychip::comm;

struct Host;

struct Member {
  Host& host;
  Group group;
  int first_peer;
};

struct Host {
  Host(int fd, int rank, int world_size)
      : segment(fd, rank, world_size, PointToPoint::channels_nbytes(world_size)),
        messages(segment) {}
  Segment segment;
  PointToPoint messages;
  std::vector<std::unique_ptr<Member>> members;
};

Host& host_of(void* handle) { return *static_cast<Host*>(handle); }

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

uint8_t* bytes_of(void* data) { return static_cast<uint8_t*>(data); }
const uint8_t* bytes_of(const void* data) { return static_cast<const uint8_t*>(data); }

int64_t answer(Status status, int peer) {
  return status == kDone ? 0 : status + (static_cast<int64_t>(peer) << 8);
}

template <class Call>
int64_t make(void* handle, uint64_t ticket, uint32_t tag, double seconds, Call call) {
  Member& member = *static_cast<Member*>(handle);
  const Segment::Use use(member.host.segment);
  if (!use.is_open()) return answer(kLost, member.first_peer);
  Outcome outcome = {after(seconds), member.first_peer, 0};
  const Status status =
      member.group.in_turn(ticket, tag, outcome, [&] { return call(member.group, outcome); });
  return answer(status, outcome.peer);
}

}  // namespace

ANYCHIP_EXPORT int anychip_shared_abi() { return 1; }

// Of the file, for a world of so many ranks and so many groups.
ANYCHIP_EXPORT int64_t anychip_shared_nbytes(int world_size, int num_groups) {
  return static_cast<int64_t>(
      Segment::head_nbytes(world_size, PointToPoint::channels_nbytes(world_size)) +
      num_groups * Group::region_nbytes(world_size));
}

// `fd` stays open until the handle is closed. NULL: there is no memory to map it.
ANYCHIP_EXPORT void* anychip_shared_new(int fd, int rank, int world_size) {
  try {
    return new Host(fd, rank, world_size);
  } catch (...) {
    return nullptr;
  }
}

// The end of a group, for its calls; gone with the host's handle.
ANYCHIP_EXPORT void* anychip_shared_group(void* handle, int number, const int* ranks, int rank,
                                          int size) {
  try {
    Host& host = host_of(handle);
    host.members.emplace_back(
        new Member{host, {host.segment, number, ranks, rank, size}, (rank + 1) % size});
    return host.members.back().get();
  } catch (...) {
    return nullptr;
  }
}

// Calls under way fail, and those that follow; from any thread.
ANYCHIP_EXPORT void anychip_shared_abort(void* handle) { host_of(handle).segment.abort(); }

// Gives the memory back when no call uses it, and tells the other ranks.
ANYCHIP_EXPORT void anychip_shared_close(void* handle) { host_of(handle).segment.close(); }

// After that, when nobody has the handle any more.
ANYCHIP_EXPORT void anychip_shared_free(void* handle) { delete &host_of(handle); }

ANYCHIP_EXPORT int64_t anychip_shared_barrier(void* group, uint64_t ticket, uint32_t tag,
                                              double seconds) {
  return make(group, ticket, tag, seconds, [](Group& g, Outcome&) { return g.barrier(); });
}

ANYCHIP_EXPORT int64_t anychip_shared_all_reduce(void* group, uint64_t ticket, uint32_t tag,
                                                 double seconds, void* data, int64_t numel,
                                                 int itemsize, int dtype, int how) {
  return make(group, ticket, tag, seconds, [=](Group& g, Outcome&) {
    return g.all_reduce(bytes_of(data), numel, itemsize, DType(dtype), Reduction(how));
  });
}

ANYCHIP_EXPORT int64_t anychip_shared_reduce_scatter(void* group, uint64_t ticket, uint32_t tag,
                                                     double seconds, void* output,
                                                     const void* input, const int64_t* sizes,
                                                     int itemsize, int dtype, int how) {
  return make(group, ticket, tag, seconds, [=](Group& g, Outcome&) {
    return g.reduce_scatter(bytes_of(output), bytes_of(input), sizes, itemsize, DType(dtype),
                            Reduction(how));
  });
}

ANYCHIP_EXPORT int64_t anychip_shared_all_gather(void* group, uint64_t ticket, uint32_t tag,
                                                 double seconds, void* output, const void* input,
                                                 const int64_t* nbytes) {
  return make(group, ticket, tag, seconds, [=](Group& g, Outcome&) {
    return g.all_gather(bytes_of(output), bytes_of(input), nbytes);
  });
}

ANYCHIP_EXPORT int64_t anychip_shared_broadcast(void* group, uint64_t ticket, uint32_t tag,
                                                double seconds, void* data, int64_t nbytes,
                                                int source) {
  return make(group, ticket, tag, seconds,
              [=](Group& g, Outcome&) { return g.broadcast(bytes_of(data), nbytes, source); });
}

// `sent`: where the status is kWrong, the bytes that the rank sends.
ANYCHIP_EXPORT int64_t anychip_shared_all_to_all(void* group, uint64_t ticket, uint32_t tag,
                                                 double seconds, uint8_t* const* outputs,
                                                 const int64_t* rooms, const uint8_t* const* inputs,
                                                 const int64_t* nbytes, int64_t* sent) {
  return make(group, ticket, tag, seconds, [=](Group& g, Outcome& outcome) {
    const Status status = g.all_to_all(outputs, rooms, inputs, nbytes);
    *sent = outcome.nbytes;
    return status;
  });
}

// One end of a message, NULL after closing; its memory stays until it has been waited for.
ANYCHIP_EXPORT void* anychip_shared_post(void* handle, int is_send, int peer, uint32_t tag,
                                         void* data, int64_t nbytes) {
  const Segment::Use use(host_of(handle).segment);
  if (!use.is_open()) return nullptr;
  return host_of(handle).messages.post(is_send != 0, peer, tag, bytes_of(data), nbytes);
}

ANYCHIP_EXPORT int anychip_shared_wait(void* handle, void* message, double seconds) {
  const Segment::Use use(host_of(handle).segment);
  if (!use.is_open() || message == nullptr) return kLost;
  return host_of(handle).messages.wait(static_cast<Message*>(message), after(seconds));
}
