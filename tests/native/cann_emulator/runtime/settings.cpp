// Settings, messages, and the faults that settings ask for.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "runtime/state.h"

namespace cann {
namespace {

thread_local std::string last_message;
std::atomic<long> allocations{0};
std::atomic<long> launches{0};
std::atomic<long> named_calls{0};

constexpr char kPrefix[] = "ANYCHIP_CANN_";
constexpr const char* kNames[] = {
    "DEVICES",       "MEMORY_MB",         "SOC",         "VERSION",
    "STRICT",        "DELAY_US",          "SYNCHRONOUS", "SEED",
    "LOG",           "LINK_TIMEOUT_S",    "LINK_DOWN",   "FAIL_ALLOCATION",
    "FAIL_OPERATOR", "LOSE_DEVICE_AFTER", "SLOW_RANK",
};

// A setting that does nothing would be a test that shows nothing. There is nobody to throw to.
[[noreturn]] void refuse(const std::string& message) {
  fprintf(stderr, "cann emulator: %s\n", message.c_str());
  _exit(2);
}

long number_in(const char* name, const std::string& text) {
  char* end = nullptr;
  const long number = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0') {
    refuse(std::string(kPrefix) + name + ": expected a number, got '" + text + "'");
  }
  return number;
}

// "text" or "text:number"; the number is 0 where there is none.
std::pair<std::string, long> text_and_number(const char* name) {
  const std::string text = setting_text(name, "");
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return {text, 0};
  return {text.substr(0, colon), number_in(name, text.substr(colon + 1))};
}

}  // namespace

long setting(const char* name, long otherwise) {
  const std::string text = setting_text(name, "");
  return text.empty() ? otherwise : number_in(name, text);
}

std::string setting_text(const char* name, const char* otherwise) {
  const char* text = std::getenv((kPrefix + std::string(name)).c_str());
  return text != nullptr && *text != '\0' ? text : otherwise;
}

void check_settings() {
  const std::string prefix = kPrefix;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    if (text.rfind(prefix, 0) != 0) continue;
    const std::string name = text.substr(prefix.size(), text.find('=') - prefix.size());
    if (std::find(std::begin(kNames), std::end(kNames), name) == std::end(kNames)) {
      refuse(prefix + name + " is not a setting; see docs/cann-emulator.md");
    }
  }
}

void set_error(const std::string& message) { last_message = message; }

// FAIL_ALLOCATION=n: the n-th allocation of device memory, counted from 1, finds none, and no later
// one does; n:count: that many find none. torch_npu tries again after it has freed what it caches,
// so that a person sees a failure only when several follow each other.
Status fault_at_allocation() {
  static const auto [first_text, count] = text_and_number("FAIL_ALLOCATION");
  static const long first = first_text.empty() ? 0 : number_in("FAIL_ALLOCATION", first_text);
  if (first == 0) return kSuccess;
  const long number = ++allocations;
  if (number < first || (count != 0 && number - first >= count)) return kSuccess;
  set_error("emulated fault: allocation " + std::to_string(number) + " finds no memory");
  return kOutOfMemory;
}

// FAIL_OPERATOR=aclnnAdd or aclnnAdd:3: that operator fails, at every call or at the third.
// LOSE_DEVICE_AFTER=n: the device is lost when n pieces of work were begun.
void fault_at_work(const std::string& name) {
  static const long lose_after = setting("LOSE_DEVICE_AFTER", 0);
  static const auto [wanted, position] = text_and_number("FAIL_OPERATOR");
  if (lose_after != 0) ++launches;
  if (wanted.empty() || wanted != name) return;
  const long call = ++named_calls;
  if (position == 0 || position == call) {
    throw std::runtime_error("emulated fault: " + name + " fails at call " + std::to_string(call));
  }
}

std::optional<Failure> lost_device() {
  static const long lose_after = setting("LOSE_DEVICE_AFTER", 0);
  if (lose_after == 0 || launches < lose_after) return std::nullopt;
  return Failure{kLostHeartbeat, "emulated fault: the device is lost (heartbeat)"};
}

}  // namespace cann

// The pointer stays valid until the thread's next error.
CANN_API const char* aclGetRecentErrMsg() {
  return cann::last_message.empty() ? nullptr : cann::last_message.c_str();
}
