// Streams and events: each stream is a thread, so that work is as late as on a device.
#include "runtime/state.h"

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

void Queue::push(const char* name, Work work) { add({name, std::move(work)}); }

void Queue::push_record(std::shared_ptr<Record> record) {
  const auto complete = [this, record = std::move(record)] {
    const std::lock_guard<std::mutex> lock(record->mutex);
    record->is_complete = true;
    record->time = Clock::now();
    // Only this queue's thread, which runs this, writes it.
    record->failure = failure_ ? failure_ : lost_device();
    record->changed.notify_all();
  };
  add({"event record", complete, true});
}

std::optional<Failure> Record::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [this] { return is_complete; });
  return failure;
}

std::shared_ptr<Record> Event::now() {
  const std::lock_guard<std::mutex> lock(mutex);
  return last;
}

void Queue::add(Item item) {
  static const bool is_synchronous = setting("SYNCHRONOUS", 0) != 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(std::move(item));
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
  if (!item.is_record) {
    if (const auto lost = lost_device()) throw DeviceError(*lost);
    fault_at_work(item.name);
  }
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
    const bool is_skipped = failure_.has_value() && !item.is_record;
    lock.unlock();
    std::optional<Failure> failure;
    if (!is_skipped) {
      try {
        do_one(item);
      } catch (const DeviceError& error) {
        failure = Failure{error.status, error.what()};
      } catch (const std::exception& error) {
        failure = Failure{kCoreException, item.name + ": " + text_of(error)};
      } catch (...) {
        failure = Failure{kCoreException, item.name + ": an exception of unknown type"};
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
  const auto failure = failure_ ? failure_ : lost_device();
  if (!failure) return kSuccess;
  set_error(failure->message);
  return failure->status;
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
  const int status = guarded(name, [&]() -> int {
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
  });
  return static_cast<Status>(status);
}

}  // namespace cann

using cann::Event;
using cann::Queue;

namespace {

Event& event_of(void* handle) { return *static_cast<Event*>(handle); }

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
  return cann::guarded("aclrtSynchronizeStream", [&]() -> int {
    const auto queue = cann::queue_of(stream);
    if (queue) return queue->wait(timeout_ms);
    cann::set_error("aclrtSynchronizeStream: the stream does not exist, or was destroyed");
    return kInvalidHandle;
  });
}

// When the queue came to it; nullopt when it has not yet.
std::optional<cann::Clock::time_point> time_of(cann::Record& record) {
  const std::lock_guard<std::mutex> lock(record.mutex);
  return record.is_complete ? std::optional(record.time) : std::nullopt;
}

int new_event(void** event) {
  *event = new Event();
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
  delete &event_of(event);
  return kSuccess;
}
CANN_API int aclrtRecordEvent(void* handle, cann::Stream stream) {
  return cann::guarded("aclrtRecordEvent", [&]() -> int {
    const auto queue = cann::queue_of(stream);
    if (!queue) {
      cann::set_error("aclrtRecordEvent: the stream does not exist, or was destroyed");
      return kInvalidHandle;
    }
    const auto record = std::make_shared<cann::Record>();
    Event& event = event_of(handle);
    {
      const std::lock_guard<std::mutex> lock(event.mutex);
      event.last = record;
    }
    queue->push_record(record);
    return kSuccess;
  });
}
CANN_API int aclrtStreamWaitEvent(cann::Stream stream, void* handle) {
  const auto record = event_of(handle).now();
  if (!record) return kSuccess;
  return cann::launch(stream, "event wait", [record] {
    // What was waited for is not there: going on would compute with garbage.
    if (const auto failure = record->wait()) throw cann::DeviceError(*failure);
  });
}
CANN_API int aclrtResetEvent(void*, cann::Stream) { return kSuccess; }
CANN_API int aclrtSynchronizeEvent(void* handle) {
  const auto record = event_of(handle).now();
  if (!record) return kSuccess;
  const auto failure = record->wait();
  if (!failure) return kSuccess;
  cann::set_error(failure->message);
  return failure->status;
}
CANN_API int aclrtQueryEventStatus(void* handle, int* status) {
  const auto record = event_of(handle).now();
  *status = !record || time_of(*record) ? 1 : 0;
  return kSuccess;
}
CANN_API int aclrtQueryEventWaitStatus(void*, int* status) {
  *status = 0;
  return kSuccess;
}
CANN_API int aclrtEventElapsedTime(float* milliseconds, void* start, void* end) {
  std::optional<cann::Clock::time_point> times[2];
  for (int i = 0; i < 2; ++i) {
    const auto record = event_of(i == 0 ? start : end).now();
    if (record) times[i] = time_of(*record);
    if (!times[i]) {
      cann::set_error("aclrtEventElapsedTime: an event is not recorded, or not complete yet");
      return kEventNotComplete;
    }
  }
  *milliseconds = std::chrono::duration<float, std::milli>(*times[1] - *times[0]).count();
  return kSuccess;
}
CANN_API int aclrtEventGetTimestamp(void* handle, uint64_t* microseconds) {
  const auto record = event_of(handle).now();
  const auto time = record ? time_of(*record) : std::nullopt;
  if (!time) return kEventNotComplete;
  *microseconds =
      std::chrono::duration_cast<std::chrono::microseconds>(time->time_since_epoch()).count();
  return kSuccess;
}
