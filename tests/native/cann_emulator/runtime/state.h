// The runtime's own objects: devices, streams, events, memory.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "emulator.h"

namespace cann {

using Clock = std::chrono::steady_clock;

// A device's error ends all work on it: what is queued fails until the process ends.
struct Failure {
  Status status;
  std::string message;
};

// A queue of work, done in order by a thread of its own.
class Queue {
 public:
  Queue(int device, int id);
  ~Queue();

  void push(const char* name, Work work);
  // Waits until everything queued is done; a timeout in milliseconds below 0 waits for ever.
  Status wait(long timeout_ms);
  bool is_idle();

  const int device;
  const int id;

 private:
  struct Item {
    std::string name;
    Work work;
  };
  void run();
  void do_one(Item& item);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  std::optional<Failure> failure_;
  bool is_busy_ = false;
  bool is_ending_ = false;
  uint64_t random_;
  std::thread thread_;
};

// A point in a queue. Shared: queued work keeps it alive after aclrtDestroyEvent.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;   // how often aclrtRecordEvent was called
  uint64_t completed = 0;  // the last of them that a queue has reached
  Clock::time_point time{};
};

// The device that is current for the calling thread; nullopt before aclrtSetDevice.
std::optional<int>& current_device();
int device_count();

std::shared_ptr<Queue> queue_of(Stream stream);
Status wait_for_device(int device, long timeout_ms);

// Faults that the settings ask for; each counts calls in the whole process.
Status fault_at_allocation();
void fault_at_work(const std::string& name);
std::optional<Failure> lost_device();

}  // namespace cann
