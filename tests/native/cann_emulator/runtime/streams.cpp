// Streams and events: each stream is a thread, so that work is as late as on a device.
#include "runtime/state.h"

#include <algorithm>

namespace cann {
namespace {

std::mutex table_mutex;
std::map<Stream, std::shared_ptr<Queue>> made;
std::map<int, std::shared_ptr<Queue>> defaults;
int next_id = 0;

// The unsigned numbers of xorshift64 (Marsaglia 2003): small, and the same everywhere.
uint64_t next_random(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

}  // namespace

Queue::Queue(int device, int id)
    : device(device), id(id), random_(0x9E3779B97F4A7C15ull * (setting("SEED", 1) + id + 1) | 1) {
  thread_ = std::thread([this] { run(); });
}

Queue::~Queue() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Queue::push(const char* name, Work work) {
  static const bool is_synchronous = setting("SYNCHRONOUS", 0) != 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back({name, std::move(work)});
  }
  changed_.notify_all();
  if (is_synchronous) wait(-1);
}

// DELAY_US=n: work starts up to n microseconds late, so that a missing wait shows.
void Queue::do_one(Item& item) {
  static const long longest_us = setting("DELAY_US", 200);
  if (longest_us > 0) {
    // One piece of work in four is late: all of them would only be slow.
    const uint64_t number = next_random(random_);
    if (number % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds((number >> 8) % longest_us));
    }
  }
  if (const auto lost = lost_device()) {
    failure_ = lost;
    return;
  }
  fault_at_work(item.name);
  item.work();
}

void Queue::run() {
  current_device() = device;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_ending_ || !items_.empty(); });
    if (items_.empty()) return;
    Item item = std::move(items_.front());
    items_.pop_front();
    is_busy_ = true;
    const bool is_failed = failure_.has_value();
    lock.unlock();
    std::optional<Failure> failure;
    // Events still complete on a failed stream, or whoever waits for them would wait for ever.
    if (!is_failed || item.name.rfind("event", 0) == 0) {
      try {
        do_one(item);
      } catch (const std::exception& error) {
        failure = Failure{kCoreException, item.name + ": " + error.what()};
      }
    }
    item.work = nullptr;
    lock.lock();
    if (failure && !failure_) failure_ = failure;
    is_busy_ = false;
    changed_.notify_all();
  }
}

Status Queue::wait(long timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_done = [this] { return items_.empty() && !is_busy_; };
  if (timeout_ms < 0) {
    changed_.wait(lock, is_done);
  } else if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_done)) {
    set_error("stream " + std::to_string(id) + ": not done within " + std::to_string(timeout_ms) +
              " ms");
    return kWaitTimeout;
  }
  if (!failure_) return kSuccess;
  set_error(failure_->message);
  return failure_->status;
}

bool Queue::is_idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return items_.empty() && !is_busy_;
}

std::shared_ptr<Queue> queue_of(Stream stream) {
  const std::lock_guard<std::mutex> lock(table_mutex);
  if (stream != nullptr) {
    const auto found = made.find(stream);
    return found == made.end() ? nullptr : found->second;
  }
  const int device = current_device().value_or(0);
  auto& queue = defaults[device];
  if (!queue) queue = std::make_shared<Queue>(device, next_id++);
  return queue;
}

Status wait_for_device(int device, long timeout_ms) {
  std::vector<std::shared_ptr<Queue>> queues;
  {
    const std::lock_guard<std::mutex> lock(table_mutex);
    for (const auto& [stream, queue] : made) queues.push_back(queue);
    for (const auto& [index, queue] : defaults) queues.push_back(queue);
  }
  Status status = kSuccess;
  for (const auto& queue : queues) {
    if (queue->device != device) continue;
    const Status own = queue->wait(timeout_ms);
    if (own != kSuccess) status = own;
  }
  return status;
}

Status launch(Stream stream, const char* name, Work work) {
  if (const auto lost = lost_device()) {
    set_error(lost->message);
    return lost->status;
  }
  const auto queue = queue_of(stream);
  if (!queue) {
    set_error(std::string(name) + ": the stream does not exist, or was destroyed");
    return kInvalidHandle;
  }
  queue->push(name, std::move(work));
  return kSuccess;
}

}  // namespace cann

using cann::Event;
using cann::Queue;

namespace {

using EventHandle = std::shared_ptr<Event>*;

Event& event_of(void* handle) { return **static_cast<EventHandle>(handle); }

int new_stream(cann::Stream* stream) {
  return cann::guarded("aclrtCreateStream", [&]() -> int {
    const std::lock_guard<std::mutex> lock(cann::table_mutex);
    auto queue = std::make_shared<Queue>(cann::current_device().value_or(0), cann::next_id++);
    *stream = queue.get();
    cann::made[*stream] = std::move(queue);
    return kSuccess;
  });
}

int wait_for_stream(cann::Stream stream, long timeout_ms) {
  const auto queue = cann::queue_of(stream);
  return queue ? queue->wait(timeout_ms) : kInvalidHandle;
}

int new_event(void** event) {
  *event = new std::shared_ptr<Event>(std::make_shared<Event>());
  return kSuccess;
}

}  // namespace

CANN_API int aclrtCreateStream(cann::Stream* stream) { return new_stream(stream); }
CANN_API int aclrtCreateStreamWithConfig(cann::Stream* stream, uint32_t, uint32_t) {
  return new_stream(stream);
}
CANN_API int aclrtDestroyStream(cann::Stream stream) {
  // Its thread is joined after the lock is given back: its last work may ask for a stream.
  std::shared_ptr<Queue> queue;
  {
    const std::lock_guard<std::mutex> lock(cann::table_mutex);
    const auto found = cann::made.find(stream);
    if (found == cann::made.end()) return kInvalidHandle;
    queue = std::move(found->second);
    cann::made.erase(found);
  }
  return kSuccess;
}
CANN_API int aclrtDestroyStreamForce(cann::Stream stream) { return aclrtDestroyStream(stream); }
CANN_API int aclrtSynchronizeStream(cann::Stream stream) { return wait_for_stream(stream, -1); }
CANN_API int aclrtSynchronizeStreamWithTimeout(cann::Stream stream, int32_t timeout_ms) {
  return wait_for_stream(stream, timeout_ms);
}
CANN_API int aclrtSynchronizeDevice() {
  return cann::wait_for_device(cann::current_device().value_or(0), -1);
}
CANN_API int aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  return cann::wait_for_device(cann::current_device().value_or(0), timeout_ms);
}
CANN_API int aclrtStreamQuery(cann::Stream stream, int* status) {
  const auto queue = cann::queue_of(stream);
  if (!queue) return kInvalidHandle;
  *status = queue->is_idle() ? 0 : 1;
  return kSuccess;
}
CANN_API int aclrtStreamGetId(cann::Stream stream, int32_t* id) {
  const auto queue = cann::queue_of(stream);
  if (!queue) return kInvalidHandle;
  *id = queue->id;
  return kSuccess;
}
CANN_API int aclrtLaunchHostFunc(cann::Stream stream, void (*function)(void*), void* argument) {
  return cann::launch(stream, "host function", [=] { function(argument); });
}
CANN_API int aclrtLaunchCallback(void (*function)(void*), void* argument, int,
                                 cann::Stream stream) {
  return cann::launch(stream, "host function", [=] { function(argument); });
}
CANN_API int aclrtSubscribeReport(uint64_t, cann::Stream) { return kSuccess; }
CANN_API int aclrtUnSubscribeReport(uint64_t, cann::Stream) { return kSuccess; }
CANN_API int aclrtProcessReport(int32_t) { return kSuccess; }
CANN_API int aclrtSetStreamFailureMode(cann::Stream, uint64_t) { return kSuccess; }
CANN_API int aclrtSetStreamOverflowSwitch(cann::Stream, uint32_t) { return kSuccess; }
CANN_API int aclrtGetStreamOverflowSwitch(cann::Stream, uint32_t* flag) {
  *flag = 0;
  return kSuccess;
}

CANN_API int aclrtCreateEvent(void** event) { return new_event(event); }
CANN_API int aclrtCreateEventWithFlag(void** event, uint32_t) { return new_event(event); }
CANN_API int aclrtCreateEventExWithFlag(void** event, uint32_t) { return new_event(event); }
CANN_API int aclrtDestroyEvent(void* event) {
  delete static_cast<EventHandle>(event);
  return kSuccess;
}
CANN_API int aclrtRecordEvent(void* handle, cann::Stream stream) {
  std::shared_ptr<Event> event = *static_cast<EventHandle>(handle);
  uint64_t number;
  {
    const std::lock_guard<std::mutex> lock(event->mutex);
    number = ++event->recorded;
  }
  return cann::launch(stream, "event record", [event, number] {
    const std::lock_guard<std::mutex> lock(event->mutex);
    event->completed = std::max(event->completed, number);
    event->time = cann::Clock::now();
    event->changed.notify_all();
  });
}
CANN_API int aclrtStreamWaitEvent(cann::Stream stream, void* handle) {
  std::shared_ptr<Event> event = *static_cast<EventHandle>(handle);
  uint64_t number;
  {
    const std::lock_guard<std::mutex> lock(event->mutex);
    number = event->recorded;
  }
  return cann::launch(stream, "event wait", [event, number] {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->completed >= number; });
  });
}
CANN_API int aclrtResetEvent(void*, cann::Stream) { return kSuccess; }
CANN_API int aclrtSynchronizeEvent(void* handle) {
  Event& event = event_of(handle);
  std::unique_lock<std::mutex> lock(event.mutex);
  const uint64_t number = event.recorded;
  event.changed.wait(lock, [&] { return event.completed >= number; });
  return kSuccess;
}
CANN_API int aclrtQueryEventStatus(void* handle, int* status) {
  Event& event = event_of(handle);
  const std::lock_guard<std::mutex> lock(event.mutex);
  *status = event.completed >= event.recorded ? 1 : 0;
  return kSuccess;
}
CANN_API int aclrtQueryEventWaitStatus(void*, int* status) {
  *status = 0;
  return kSuccess;
}
CANN_API int aclrtEventElapsedTime(float* milliseconds, void* start, void* end) {
  const auto duration = event_of(end).time - event_of(start).time;
  *milliseconds = std::chrono::duration<float, std::milli>(duration).count();
  return kSuccess;
}
CANN_API int aclrtEventGetTimestamp(void* handle, uint64_t* microseconds) {
  const auto time = event_of(handle).time.time_since_epoch();
  *microseconds = std::chrono::duration_cast<std::chrono::microseconds>(time).count();
  return kSuccess;
}
