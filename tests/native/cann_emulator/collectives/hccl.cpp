// libhccl.so: HCCL's functions over shared memory, real ones between real processes.
//
// Collectives go through the windows of a board, piece by piece: every rank writes its piece, all
// meet, every rank reads what it needs, all meet. Reductions are in rank order, so that all ranks
// get the same bits. Send and receive go through mailboxes. All of it is work on the caller's
// stream.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "collectives/board.h"
#include "collectives/reduction.h"
#include "emulator.h"

using namespace cann;

namespace {

// HcclResult of the HCCL API reference.
enum Result : int {
  kDone = 0,
  kBadParameter = 1,
  kInternal = 4,
  kUnsupported = 5,
  kTimeout = 9,
  kRemote = 21,
};

constexpr size_t kRootInfoBytes = 4108;
constexpr size_t kNameBytes = 128;

struct Communicator {
  std::string name;
  std::unique_ptr<Board> board;
  std::atomic<int> async_error{kDone};
};

using Handle = std::shared_ptr<Communicator>*;

std::shared_ptr<Communicator> of(void* handle) { return *static_cast<Handle>(handle); }

double timeout_s() { return static_cast<double>(setting("LINK_TIMEOUT_S", 120)); }

// SLOW_RANK=r:ms: that rank begins every collective late. LINK_DOWN=r: that rank never begins one.
void begin_late(const Board& board) {
  static const std::string slow = setting_text("SLOW_RANK", "");
  static const long down = setting("LINK_DOWN", -1);
  if (!slow.empty() && std::stol(slow) == board.rank) {
    const size_t colon = slow.find(':');
    const long ms = colon == std::string::npos ? 100 : std::stol(slow.substr(colon + 1));
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
  }
  if (down == board.rank) {
    std::this_thread::sleep_for(std::chrono::duration<double>(timeout_s()));
    throw std::runtime_error("emulated fault: the link of rank " + std::to_string(down) +
                             " is down");
  }
}

// Queues a collective; its failure is the stream's and the communicator's.
template <class Call>
int queue(const char* name, void* handle, Stream stream, Call call) {
  if (handle == nullptr) {
    set_error(std::string(name) + ": no communicator");
    return kBadParameter;
  }
  const auto communicator = of(handle);
  const Status status = launch(stream, name, [communicator, call, name] {
    try {
      begin_late(*communicator->board);
      call(*communicator->board);
    } catch (const std::exception& error) {
      communicator->async_error = kRemote;
      throw std::runtime_error(communicator->name + ": " + error.what());
    }
  });
  return status == kSuccess ? kDone : kInternal;
}

// Runs `piece(offset, bytes)` over `bytes` in pieces that fit a window divided by `parts`. All
// ranks must call it with the same numbers.
template <class Piece>
void by_pieces(size_t bytes, size_t parts, size_t unit, Piece piece) {
  const size_t longest = std::max(unit, kWindowBytes / parts / unit * unit);
  for (size_t offset = 0; offset < bytes; offset += longest) {
    piece(offset, std::min(longest, bytes - offset));
  }
}

// Every rank's `from` joined in rank order into `to`, on the ranks that want it.
void all_reduce(Board& board, const char* from, char* to, size_t count, int type, int operation,
                bool is_wanted, const char* what) {
  const size_t unit = element_size(type);
  by_pieces(count * unit, 1, unit, [&](size_t offset, size_t bytes) {
    memcpy(board.window(board.rank), from + offset, bytes);
    board.meet(what);
    if (is_wanted) {
      std::vector<char> sum(board.window(0), board.window(0) + bytes);
      for (int r = 1; r < board.ranks; ++r) {
        reduce(sum.data(), board.window(r), bytes / unit, type, operation);
      }
      memcpy(to + offset, sum.data(), bytes);
    }
    board.meet(what);
  });
}

// parts[r] of every rank's row: what rank r sends to rank s lies at from(s), and comes to to(r).
template <class From, class To, class Bytes>
void exchange(Board& board, From from, To to, Bytes bytes_between, size_t longest,
              const char* what) {
  const size_t share = kWindowBytes / board.ranks;
  for (size_t offset = 0; offset < longest; offset += share) {
    for (int r = 0; r < board.ranks; ++r) {
      const size_t whole = bytes_between(board.rank, r);
      if (offset >= whole) continue;
      memcpy(board.window(board.rank) + r * share, from(r) + offset,
             std::min(share, whole - offset));
    }
    board.meet(what);
    for (int r = 0; r < board.ranks; ++r) {
      const size_t whole = bytes_between(r, board.rank);
      if (offset >= whole) continue;
      memcpy(to(r) + offset, board.window(r) + board.rank * share, std::min(share, whole - offset));
    }
    board.meet(what);
  }
}

struct Transfer {
  bool is_send;
  int peer;
  char* data;
  size_t left;
};

// All transfers make progress together, so that two ranks which both send first do not wait for
// each other.
void transfer(Board& board, std::vector<Transfer> transfers, const char* what) {
  double last_progress = seconds();
  while (true) {
    bool is_done = true;
    bool has_moved = false;
    std::vector<bool> is_busy(static_cast<size_t>(board.ranks) * 2, false);
    for (Transfer& t : transfers) {
      if (t.left == 0) continue;
      is_done = false;
      // Several to one peer go one after the other.
      const size_t direction = static_cast<size_t>(t.peer) * 2 + (t.is_send ? 1 : 0);
      if (is_busy[direction]) continue;
      is_busy[direction] = true;
      const size_t moved = t.is_send ? board.try_send(t.peer, t.data, t.left)
                                     : board.try_receive(t.peer, t.data, t.left);
      t.data += moved;
      t.left -= moved;
      has_moved = has_moved || moved != 0;
    }
    if (is_done) return;
    if (has_moved) {
      last_progress = seconds();
      continue;
    }
    for (const Transfer& t : transfers) {
      if (t.left != 0) board.check_alive(what, t.peer, t.peer + 1, last_progress);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

char* bytes_at(const void* address) { return static_cast<char*>(reachable(address)); }

int refuse_reduction(const char* name, int type, int operation) {
  if (is_reducible(type, operation)) return kDone;
  set_error(std::string(name) + ": data type " + std::to_string(type) +
            " is not in the documented list for reduction " + std::to_string(operation));
  return kUnsupported;
}

int connect(uint32_t ranks, const char* id, uint32_t rank, const char* name, void** handle) {
  return guarded(
      "HcclCommInitRootInfo",
      [&]() -> int {
        auto made = std::make_shared<Communicator>();
        made->name = name;
        made->board = std::make_unique<Board>(id, static_cast<int>(rank), static_cast<int>(ranks),
                                              timeout_s());
        *handle = new std::shared_ptr<Communicator>(std::move(made));
        return kDone;
      },
      static_cast<Status>(kTimeout));
}

}  // namespace

CANN_API int HcclGetRootInfo(char* info) {
  return guarded(
      "HcclGetRootInfo",
      [&]() -> int {
        memset(info, 0, kRootInfoBytes);
        snprintf(info, kNameBytes, "%s", Board::make().c_str());
        return kDone;
      },
      static_cast<Status>(kInternal));
}
CANN_API int HcclCommInitRootInfo(uint32_t ranks, const char* info, uint32_t rank, void** handle) {
  return connect(ranks, info, rank, info, handle);
}
CANN_API int HcclCommInitRootInfoConfig(uint32_t ranks, const char* info, uint32_t rank,
                                        const void*, void** handle) {
  return connect(ranks, info, rank, info, handle);
}
// What still waits fails: torch_npu destroys a communicator in order to abort it.
CANN_API int HcclCommDestroy(void* handle) {
  of(handle)->board->give_up();
  delete static_cast<Handle>(handle);
  return kDone;
}
CANN_API int HcclCommAbort(void* handle) {
  of(handle)->board->abort();
  return kDone;
}
CANN_API int HcclGetCommName(void* handle, char* name) {
  snprintf(name, kNameBytes, "%s", of(handle)->name.c_str());
  return kDone;
}
CANN_API int HcclGetRankSize(void* handle, uint32_t* ranks) {
  *ranks = static_cast<uint32_t>(of(handle)->board->ranks);
  return kDone;
}
CANN_API int HcclGetRankId(void* handle, uint32_t* rank) {
  *rank = static_cast<uint32_t>(of(handle)->board->rank);
  return kDone;
}
CANN_API int HcclGetCommAsyncError(void* handle, int* error) {
  *error = of(handle)->async_error;
  return kDone;
}
CANN_API const char* HcclGetErrorString(int result) {
  switch (result) {
    case kDone:
      return "no error";
    case kBadParameter:
      return "parameter error";
    case kUnsupported:
      return "not supported";
    case kTimeout:
      return "timeout";
    case kRemote:
      return "a remote rank failed";
    default:
      return "internal error";
  }
}
// Which fields of a communicator's configuration are read: none.
CANN_API uint32_t HcclGetCommConfigCapability() { return 0; }
CANN_API int HcclSetConfig(int, uint64_t) { return kDone; }

CANN_API int HcclAllReduce(void* from, void* to, uint64_t count, int type, int operation,
                           void* handle, Stream stream) {
  if (const int refused = refuse_reduction("HcclAllReduce", type, operation)) return refused;
  return queue("HcclAllReduce", handle, stream, [=](Board& board) {
    all_reduce(board, bytes_at(from), bytes_at(to), count, type, operation, true, "HcclAllReduce");
  });
}
CANN_API int HcclReduce(void* from, void* to, uint64_t count, int type, int operation,
                        uint32_t root, void* handle, Stream stream) {
  if (const int refused = refuse_reduction("HcclReduce", type, operation)) return refused;
  return queue("HcclReduce", handle, stream, [=](Board& board) {
    const bool is_root = board.rank == static_cast<int>(root);
    all_reduce(board, bytes_at(from), bytes_at(to), count, type, operation, is_root, "HcclReduce");
  });
}
CANN_API int HcclReduceScatter(void* from, void* to, uint64_t count, int type, int operation,
                               void* handle, Stream stream) {
  if (const int refused = refuse_reduction("HcclReduceScatter", type, operation)) return refused;
  return queue("HcclReduceScatter", handle, stream, [=](Board& board) {
    const size_t bytes = count * element_size(type);
    for (int r = 0; r < board.ranks; ++r) {
      all_reduce(board, bytes_at(from) + r * bytes, bytes_at(to), count, type, operation,
                 r == board.rank, "HcclReduceScatter");
    }
  });
}
CANN_API int HcclBroadcast(void* data, uint64_t count, int type, uint32_t root, void* handle,
                           Stream stream) {
  return queue("HcclBroadcast", handle, stream, [=](Board& board) {
    const bool is_root = board.rank == static_cast<int>(root);
    char* mine = bytes_at(data);
    by_pieces(count * element_size(type), 1, 1, [&](size_t offset, size_t bytes) {
      if (is_root) memcpy(board.window(board.rank), mine + offset, bytes);
      board.meet("HcclBroadcast");
      if (!is_root) memcpy(mine + offset, board.window(static_cast<int>(root)), bytes);
      board.meet("HcclBroadcast");
    });
  });
}
CANN_API int HcclAllGather(void* from, void* to, uint64_t count, int type, void* handle,
                           Stream stream) {
  return queue("HcclAllGather", handle, stream, [=](Board& board) {
    const size_t whole = count * element_size(type);
    char* mine = bytes_at(from);
    char* result = bytes_at(to);
    by_pieces(whole, 1, 1, [&](size_t offset, size_t bytes) {
      memcpy(board.window(board.rank), mine + offset, bytes);
      board.meet("HcclAllGather");
      for (int r = 0; r < board.ranks; ++r) {
        memcpy(result + r * whole + offset, board.window(r), bytes);
      }
      board.meet("HcclAllGather");
    });
  });
}
CANN_API int HcclScatter(void* from, void* to, uint64_t count, int type, uint32_t root,
                         void* handle, Stream stream) {
  return queue("HcclScatter", handle, stream, [=](Board& board) {
    const size_t whole = count * element_size(type);
    const auto sent = [&](int sender, int) -> size_t {
      return sender == static_cast<int>(root) ? whole : 0;
    };
    exchange(
        board, [&](int r) { return bytes_at(from) + r * whole; }, [&](int) { return bytes_at(to); },
        sent, whole, "HcclScatter");
  });
}
CANN_API int HcclAlltoAll(const void* from, uint64_t count, int type, const void* to, uint64_t, int,
                          void* handle, Stream stream) {
  return queue("HcclAlltoAll", handle, stream, [=](Board& board) {
    const size_t whole = count * element_size(type);
    exchange(
        board, [&](int r) { return bytes_at(from) + r * whole; },
        [&](int r) { return bytes_at(to) + r * whole; }, [&](int, int) { return whole; }, whole,
        "HcclAlltoAll");
  });
}
// Counts and displacements are arrays of uint64 on the host, read now.
CANN_API int HcclAlltoAllV(const void* from, const uint64_t* send_counts,
                           const uint64_t* send_starts, int type, const void* to,
                           const uint64_t* receive_counts, const uint64_t* receive_starts, int,
                           void* handle, Stream stream) {
  const size_t ranks = static_cast<size_t>(of(handle)->board->ranks);
  const std::vector<uint64_t> sent(send_counts, send_counts + ranks);
  const std::vector<uint64_t> sent_at(send_starts, send_starts + ranks);
  const std::vector<uint64_t> received(receive_counts, receive_counts + ranks);
  const std::vector<uint64_t> received_at(receive_starts, receive_starts + ranks);
  return queue("HcclAlltoAllV", handle, stream, [=](Board& board) {
    const size_t unit = element_size(type);
    std::vector<Transfer> transfers;
    for (int r = 0; r < board.ranks; ++r) {
      char* source = bytes_at(from) + sent_at[r] * unit;
      char* target = bytes_at(to) + received_at[r] * unit;
      if (r == board.rank) {
        memmove(target, source, received[r] * unit);
        continue;
      }
      transfers.push_back({true, r, source, sent[r] * unit});
      transfers.push_back({false, r, target, received[r] * unit});
    }
    transfer(board, std::move(transfers), "HcclAlltoAllV");
  });
}
CANN_API int HcclSend(void* data, uint64_t count, int type, uint32_t peer, void* handle,
                      Stream stream) {
  return queue("HcclSend", handle, stream, [=](Board& board) {
    const size_t bytes = count * element_size(type);
    transfer(board, {{true, static_cast<int>(peer), bytes_at(data), bytes}}, "HcclSend");
  });
}
CANN_API int HcclRecv(void* data, uint64_t count, int type, uint32_t peer, void* handle,
                      Stream stream) {
  return queue("HcclRecv", handle, stream, [=](Board& board) {
    const size_t bytes = count * element_size(type);
    transfer(board, {{false, static_cast<int>(peer), bytes_at(data), bytes}}, "HcclRecv");
  });
}

namespace {
struct SendReceiveItem {
  int kind;  // 0 send, 1 receive
  void* data;
  uint64_t count;
  int type;
  uint32_t peer;
};
}  // namespace

CANN_API int HcclBatchSendRecv(const SendReceiveItem* items, uint32_t count, void* handle,
                               Stream stream) {
  const std::vector<SendReceiveItem> all(items, items + count);
  return queue("HcclBatchSendRecv", handle, stream, [all](Board& board) {
    std::vector<Transfer> transfers;
    for (const SendReceiveItem& item : all) {
      transfers.push_back({item.kind == 0, static_cast<int>(item.peer), bytes_at(item.data),
                           item.count * element_size(item.type)});
    }
    transfer(board, std::move(transfers), "HcclBatchSendRecv");
  });
}
CANN_API int HcclBarrier(void* handle, Stream stream) {
  return queue("HcclBarrier", handle, stream, [](Board& board) { board.meet("HcclBarrier"); });
}
CANN_API int HcclGroupStart() { return kDone; }
CANN_API int HcclGroupEnd() { return kDone; }
