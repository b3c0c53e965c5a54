#include "collectives/board.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <vector>

namespace cann {
namespace {

constexpr auto kPause = std::chrono::microseconds(50);

struct Header {
  std::atomic<int32_t> mapped;  // ranks that have the file
  std::atomic<int32_t> is_aborted;
  std::atomic<int32_t> is_closed;  // by the process that made the file
  RankState states[kMaxRanks];
};

size_t page_rounded(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

Header& header_of(char* memory) { return *reinterpret_cast<Header*>(memory); }

size_t mailboxes_offset(int ranks) { return page_rounded(sizeof(Header)) + ranks * kWindowBytes; }
size_t mailbox_stride() { return page_rounded(sizeof(Mailbox)) + kMailboxBytes; }

// A process that ended is still there for kill() until its parent asks how: /proc says that it is a
// zombie (Z) or just gone (X). The state follows the name, which may have brackets itself.
bool is_dead(int process) {
  if (process == 0) return false;
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return kill(process, 0) != 0 && errno == ESRCH;
  const size_t end_of_name = line.rfind(')');
  if (end_of_name == std::string::npos || end_of_name + 2 >= line.size()) return false;
  const char state = line[end_of_name + 2];
  return state == 'Z' || state == 'X';
}

// New memory is zero; each rank gives the file its size.
char* mapped(const std::string& id, int maker, int number, size_t bytes) {
  const std::string path = "/proc/" + std::to_string(maker) + "/fd/" + std::to_string(number);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  void* address = MAP_FAILED;
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  }
  if (file >= 0) close(file);
  if (address != MAP_FAILED) return static_cast<char*>(address);
  throw std::runtime_error("no shared memory for communicator " + id + ": process " +
                           std::to_string(maker) + ", which made it, may have ended");
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (const int rank : ranks) text += " " + std::to_string(rank);
  return text;
}

}  // namespace

double seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// The file has no name, so that nothing is left behind however the processes end: the others find
// it among the open files of the process that made it. "process_file_count".
std::string Board::make() {
  static std::atomic<int> count{0};
  const int file = memfd_create("cann_emulator_board", MFD_CLOEXEC);
  if (file < 0) throw std::runtime_error("no shared memory for a communicator");
  return std::to_string(getpid()) + "_" + std::to_string(file) + "_" + std::to_string(count++);
}

Board::Board(const std::string& id, int rank, int ranks, double timeout_s)
    : rank(rank), ranks(ranks), timeout_s_(timeout_s) {
  if (ranks < 1 || ranks > kMaxRanks) {
    throw std::runtime_error("the emulator has 1 to 64 ranks, not " + std::to_string(ranks));
  }
  int maker = 0;
  int number = -1;
  if (rank < 0 || rank >= ranks || sscanf(id.c_str(), "%d_%d_", &maker, &number) != 2) {
    throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                             ": no communicator " + id);
  }
  bytes_ = mailboxes_offset(ranks) + static_cast<size_t>(ranks) * ranks * mailbox_stride();
  memory_ = mapped(id, maker, number, bytes_);
  Header& header = header_of(memory_);
  header.states[rank].process = getpid();
  ++header.mapped;
  const double start = seconds();
  while (header.mapped < ranks) {
    if (seconds() - start > timeout_s_) {
      std::vector<int> missing;
      for (int r = 0; r < ranks; ++r) {
        if (header.states[r].process == 0) missing.push_back(r);
      }
      munmap(memory_, bytes_);
      throw std::runtime_error(listed(missing) + " did not come to communicator " + id);
    }
    std::this_thread::sleep_for(kPause);
  }
  if (maker == getpid() && header.is_closed.exchange(1) == 0) close(number);
}

Board::~Board() { munmap(memory_, bytes_); }

char* Board::window(int r) { return memory_ + page_rounded(sizeof(Header)) + r * kWindowBytes; }

void Board::abort() { header_of(memory_).is_aborted = 1; }
void Board::give_up() { is_given_up_ = true; }

void Board::check_alive(const std::string& what, int first, int last, double since_s) {
  Header& header = header_of(memory_);
  if (is_given_up_) throw std::runtime_error(what + ": the communicator was destroyed");
  if (header.is_aborted) throw std::runtime_error(what + ": the communicator was aborted");
  std::vector<int> dead;
  for (int r = first; r < last; ++r) {
    if (is_dead(header.states[r].process)) dead.push_back(r);
  }
  if (!dead.empty()) throw std::runtime_error(what + ": " + listed(dead) + " ended");
  if (seconds() - since_s > timeout_s_) {
    throw std::runtime_error(what + ": not done within " +
                             std::to_string(static_cast<long>(timeout_s_)) + " s");
  }
}

void Board::meet(const std::string& what) {
  Header& header = header_of(memory_);
  const uint64_t number = ++header.states[rank].arrivals;
  const double start = seconds();
  int spins = 0;
  for (int r = 0; r < ranks; ++r) {
    while (header.states[r].arrivals < number) {
      if (++spins < 200) {
        std::this_thread::yield();
        continue;
      }
      check_alive(what, r, r + 1, start);
      std::this_thread::sleep_for(kPause);
    }
  }
}

Mailbox& Board::mailbox(int from, int to, char** data) {
  char* start = memory_ + mailboxes_offset(ranks) + (from * ranks + to) * mailbox_stride();
  *data = start + page_rounded(sizeof(Mailbox));
  return *reinterpret_cast<Mailbox*>(start);
}

size_t Board::try_send(int to, const char* from, size_t bytes) {
  char* data;
  Mailbox& box = mailbox(rank, to, &data);
  const uint64_t written = box.written;
  const size_t room = kMailboxBytes - static_cast<size_t>(written - box.read);
  const size_t place = written % kMailboxBytes;
  const size_t now = std::min({bytes, room, kMailboxBytes - place});
  memcpy(data + place, from, now);
  box.written = written + now;
  return now;
}

size_t Board::try_receive(int from, char* to, size_t bytes) {
  char* data;
  Mailbox& box = mailbox(from, rank, &data);
  const uint64_t read = box.read;
  const size_t there = static_cast<size_t>(box.written - read);
  const size_t place = read % kMailboxBytes;
  const size_t now = std::min({bytes, there, kMailboxBytes - place});
  memcpy(to, data + place, now);
  box.read = read + now;
  return now;
}

}  // namespace cann
