// Settings, messages, and the faults that settings ask for.
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "runtime/state.h"

namespace cann {
namespace {

thread_local std::string last_message;
std::atomic<long> allocations{0};
std::atomic<long> launches{0};
std::atomic<long> named_calls{0};

}  // namespace

long setting(const char* name, long otherwise) {
  const std::string text = setting_text(name, "");
  return text.empty() ? otherwise : std::strtol(text.c_str(), nullptr, 10);
}

std::string setting_text(const char* name, const char* otherwise) {
  const char* text = std::getenv((std::string("ANYCHIP_CANN_") + name).c_str());
  return text != nullptr && *text != '\0' ? text : otherwise;
}

void set_error(const std::string& message) { last_message = message; }

// FAIL_ALLOCATION=n: the n-th allocation of device memory, counted from 1, finds none.
Status fault_at_allocation() {
  static const long wanted = setting("FAIL_ALLOCATION", 0);
  if (wanted == 0 || ++allocations != wanted) return kSuccess;
  set_error("emulated fault: allocation " + std::to_string(wanted) + " finds no memory");
  return kOutOfMemory;
}

// FAIL_OPERATOR=aclnnAdd or aclnnAdd:3: that operator fails, at every call or at the third.
// LOSE_DEVICE_AFTER=n: after n pieces of work the device is lost.
void fault_at_work(const std::string& name) {
  static const std::string wanted = setting_text("FAIL_OPERATOR", "");
  static const long lose_after = setting("LOSE_DEVICE_AFTER", 0);
  if (lose_after != 0) ++launches;
  if (wanted.empty()) return;
  const size_t colon = wanted.find(':');
  if (wanted.substr(0, colon) != name) return;
  const long call = ++named_calls;
  if (colon == std::string::npos || std::stol(wanted.substr(colon + 1)) == call) {
    throw std::runtime_error("emulated fault: " + name + " fails at call " + std::to_string(call));
  }
}

std::optional<Failure> lost_device() {
  static const long lose_after = setting("LOSE_DEVICE_AFTER", 0);
  if (lose_after == 0 || launches <= lose_after) return std::nullopt;
  return Failure{kLostHeartbeat, "emulated fault: the device is lost (heartbeat)"};
}

}  // namespace cann

// The pointer stays valid until the thread's next error.
CANN_API const char* aclGetRecentErrMsg() {
  return cann::last_message.empty() ? nullptr : cann::last_message.c_str();
}
