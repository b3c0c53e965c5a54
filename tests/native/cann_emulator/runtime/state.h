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
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "emulator.h"

namespace cann {

using Clock = std::chrono::steady_clock;

// The first error on a stream. What is queued behind it is not done any more, and whoever waits for
// the stream, or for an event recorded on it, gets the error.
struct Failure {
  Status status;
  std::string message;
};

// Work throws it to fail with a status of its own; other exceptions are kCoreException.
struct DeviceError : std::runtime_error {
  explicit DeviceError(const Failure& failure)
      : std::runtime_error(failure.message), status(failure.status) {}
  Status status;
};

// A point in a queue that an event was recorded at. Shared: queued work keeps it alive after the
// event is recorded again, or destroyed.
struct Record {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_complete = false;
  Clock::time_point time{};
  std::optional<Failure> failure;  // of the work before it

  // Waits for the queue to come here; the failure of the work before it, if there is one.
  std::optional<Failure> wait();
};

// What aclrtCreateEvent makes. Who waits for it waits for its last record at that time.
struct Event {
  std::mutex mutex;
  std::shared_ptr<Record> last;  // nullptr before aclrtRecordEvent

  std::shared_ptr<Record> now();
};

// A queue of work, done in order by a thread of its own.
class Queue {
 public:
  Queue(int device, int id);
  ~Queue();

  void push(const char* name, Work work);
  // Queues the completion of a record, which comes even when the work before it failed: whoever
  // waits for it would wait for ever.
  void push_record(std::shared_ptr<Record> record);
  // Waits until everything queued is done; a timeout in milliseconds below 0 waits for ever.
  Status wait(long timeout_ms);
  bool is_idle();

  const int device;
  const int id;

 private:
  struct Item {
    std::string name;
    Work work;
    bool is_record = false;
  };
  void add(Item item);
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

// The device that is current for the calling thread; nullopt before aclrtSetDevice.
std::optional<int>& current_device();
int device_count();

std::shared_ptr<Queue> queue_of(Stream stream);
Status wait_for_device(int device, long timeout_ms);

// Ends the process when there is a variable ANYCHIP_CANN_* that is no setting.
void check_settings();
// Faults that the settings ask for; each counts calls in the whole process.
Status fault_at_allocation();
void fault_at_work(const std::string& name);
std::optional<Failure> lost_device();

}  // namespace cann
