// Where does the time of a step go? While profiling, each piece of work waits for the device before
// and after itself, so that none is charged what another one queued. Otherwise nothing is timed.

#include <chrono>
#include <map>
#include <mutex>
#include <sstream>

#include "bridge.h"

namespace anychip_bridge {
namespace {

struct Spent {
  int64_t calls = 0, ns = 0, copied_ns = 0, copied_bytes = 0;
};

std::atomic<bool> is_on{false};
std::mutex mutex;

std::map<std::string, Spent>& spent() {  // under mutex
  static auto* made = new std::map<std::string, Spent>;
  return *made;
}

// Of the work under way in this thread: how deep, and the copies inside it.
thread_local int depth = 0;
thread_local int64_t copied_ns = 0, copied_bytes = 0;

int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void profile(bool on) {
  std::lock_guard<std::mutex> lock(mutex);
  if (on) spent().clear();
  is_on = on;
}

std::string profiled() {
  std::lock_guard<std::mutex> lock(mutex);
  std::ostringstream text;
  for (const auto& [name, of] : spent())
    text << name << ' ' << of.calls << ' ' << of.ns << ' ' << of.copied_ns << ' ' << of.copied_bytes
         << '\n';
  return text.str();
}

Timed::Timed(const char* who, const char* name, c10::DeviceIndex device, int64_t nbytes)
    : device_(device), nbytes_(nbytes) {
  if (!is_on) return;
  name_ = std::string(who) + ' ' + name;
  if (depth++ == 0) {
    chip.device_synchronize(device_);
    copied_ns = copied_bytes = 0;
  }
  begin_ns_ = now_ns();
}

Timed::~Timed() {
  if (!begin_ns_) return;
  if (--depth == 0) chip.device_synchronize(device_);
  const int64_t took = now_ns() - begin_ns_;
  if (nbytes_) copied_ns += took, copied_bytes += nbytes_;
  if (depth || !is_kept_) return;
  std::lock_guard<std::mutex> lock(mutex);
  auto& of = spent()[name_];
  ++of.calls;
  of.ns += took;
  of.copied_ns += copied_ns;
  of.copied_bytes += copied_bytes;
}

}  // namespace anychip_bridge
