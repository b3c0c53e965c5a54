// Sends a process's heartbeats from a thread that needs nothing of Python's; plain C outside.
//
// anychip/comm/heartbeat.py loads this and anychip/comm/frames.py has the layout of a frame. One
// lock guards the connections; nobody waits while he holds it. A frame of which a part was sent is
// finished before another one begins, so that the stream stays whole; a beat for which there is no
// room is left out, as the one before it is still on its way.
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "sha256.h"

#define ANYCHIP_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kFrame = 1024, kContent = 992, kNumber = 12, kTicks = 20;

struct Line {
  uint8_t key[32];
  uint8_t content[kContent];  // of a beat
  uint64_t beats = 0;
  std::vector<uint8_t> unsent;
};

void put_u64(uint8_t* place, uint64_t value) {
  for (int i = 0; i < 8; ++i) {
    place[i] = static_cast<uint8_t>(value >> (56 - 8 * i));
  }
}

// Sends what there is room for; false when the connection is broken, which its reader finds.
bool flush(int fd, std::vector<uint8_t>& unsent) {
  while (!unsent.empty()) {
    const ssize_t sent = send(fd, unsent.data(), unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      unsent.erase(unsent.begin(), unsent.begin() + sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return true;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

class Heartbeat {
 public:
  explicit Heartbeat(int64_t interval_ms) : interval_(interval_ms) {
    // Signals are for Python's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Heartbeat() {
    {
      std::lock_guard<std::mutex> guard(lock_);
      stopped_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  void add(int fd, const uint8_t* key, const uint8_t* content) {
    std::lock_guard<std::mutex> guard(lock_);
    Line& line = lines_[fd];
    std::memcpy(line.key, key, sizeof line.key);
    std::memcpy(line.content, content, kContent);
  }

  void remove(int fd) {
    std::lock_guard<std::mutex> guard(lock_);
    lines_.erase(fd);
  }

  void tick() { ++ticks_; }

  int send_frame(int fd, const uint8_t* data, size_t nbytes, int64_t limit_ms) {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::milliseconds(limit_ms);
    bool queued = false;
    for (;;) {
      {
        std::lock_guard<std::mutex> guard(lock_);
        const auto found = lines_.find(fd);
        if (found == lines_.end()) {
          return EBADF;
        }
        std::vector<uint8_t>& unsent = found->second.unsent;
        if (!flush(fd, unsent)) {
          return EPIPE;
        }
        if (queued && unsent.empty()) {
          return 0;
        }
        if (!queued && unsent.size() < kFrame) {  // bounded: a frame, and the rest of another
          unsent.insert(unsent.end(), data, data + nbytes);
          queued = true;
          continue;
        }
      }
      if (Clock::now() >= deadline) {
        return ETIMEDOUT;
      }
      pollfd waiting = {fd, POLLOUT, 0};
      poll(&waiting, 1, 10);
    }
  }

 private:
  void run() {
    std::unique_lock<std::mutex> guard(lock_);
    while (!stopped_) {
      for (auto& [fd, line] : lines_) {
        if (flush(fd, line.unsent) && line.unsent.empty()) {
          beat(fd, line);
        }
      }
      wake_.wait_for(guard, interval_, [this] { return stopped_; });
    }
  }

  void beat(int fd, Line& line) {
    put_u64(line.content + kNumber, line.beats++);
    put_u64(line.content + kTicks, ticks_);
    line.unsent.assign(line.content, line.content + kContent);
    line.unsent.resize(kFrame);
    anychip::hmac_sha256(line.key, line.content, kContent, line.unsent.data() + kContent);
    flush(fd, line.unsent);
  }

  const std::chrono::milliseconds interval_;
  std::mutex lock_;
  std::condition_variable wake_;
  std::map<int, Line> lines_;
  std::atomic<uint64_t> ticks_{0};
  bool stopped_ = false;
  std::thread thread_;
};

Heartbeat* of(void* handle) { return static_cast<Heartbeat*>(handle); }

}  // namespace

ANYCHIP_EXPORT int anychip_heartbeat_abi() { return 1; }

ANYCHIP_EXPORT void* anychip_heartbeat_new(int64_t interval_ms) {
  try {
    return new Heartbeat(interval_ms);
  } catch (...) {  // no thread, or no memory
    return nullptr;
  }
}

ANYCHIP_EXPORT void anychip_heartbeat_add(void* handle, int fd, const uint8_t* key,
                                          const uint8_t* content) {
  of(handle)->add(fd, key, content);
}

ANYCHIP_EXPORT void anychip_heartbeat_remove(void* handle, int fd) { of(handle)->remove(fd); }

ANYCHIP_EXPORT void anychip_heartbeat_tick(void* handle) { of(handle)->tick(); }

ANYCHIP_EXPORT int anychip_heartbeat_send(void* handle, int fd, const uint8_t* data, int nbytes,
                                          int64_t limit_ms) {
  return of(handle)->send_frame(fd, data, static_cast<size_t>(nbytes), limit_ms);
}

ANYCHIP_EXPORT void anychip_heartbeat_free(void* handle) { delete of(handle); }
