// What the ranks of one communicator share: a file in memory with a window per rank, and a barrier.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace cann {

constexpr int kMaxRanks = 64;
constexpr size_t kWindowBytes = size_t{4} << 20;
constexpr size_t kMailboxBytes = size_t{256} << 10;

// One direction between two ranks: bytes in order, as many at once as fit.
struct Mailbox {
  std::atomic<uint64_t> written;
  std::atomic<uint64_t> read;
};

struct RankState {
  std::atomic<int32_t> process;  // 0 before the rank has come
  std::atomic<uint64_t> arrivals;
  std::atomic<uint64_t> departures;
};

// Throws std::runtime_error, with the ranks that are missing, when one is gone or late.
class Board {
 public:
  // Makes the file and returns the id by which every process of this machine opens it.
  static std::string make();
  // Opens the file of `id` and waits until `ranks` have.
  Board(const std::string& id, int rank, int ranks, double timeout_s);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  char* window(int rank);
  // Every rank comes before any leaves. `what` names the call in errors.
  void meet(const std::string& what);

  // Moves what fits and returns how many bytes; 0 when the mailbox is full, or empty.
  size_t try_send(int to, const char* from, size_t bytes);
  size_t try_receive(int from, char* to, size_t bytes);

  // Throws when a rank in [first, last) is dead, the communicator is aborted, or `since` is too
  // long ago.
  void check_alive(const std::string& what, int first, int last, double since_s);
  void abort();
  // Ends this rank's own calls only: they throw where they wait.
  void give_up();

  const int rank;
  const int ranks;

 private:
  Mailbox& mailbox(int from, int to, char** data);

  std::atomic<bool> is_given_up_{false};
  double timeout_s_;
  size_t bytes_;
  char* memory_;
};

double seconds();

}  // namespace cann
