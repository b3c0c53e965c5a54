// What the emulator's libraries share: status codes, work on streams, addresses, messages,
// settings.
//
// libascendcl.so (runtime/) defines these functions; libopapi.so (operators/) and libhccl.so
// (collectives/) call them. No exception may cross a function that torch_npu calls: its threads end
// the process on one. guarded() turns exceptions into a status and a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#define CANN_API extern "C" __attribute__((visibility("default")))

// Status codes that CANN documents (AscendCL API reference, "aclError").
enum Status : int {
  kSuccess = 0,
  kInvalidParameter = 107000,
  kInvalidDevice = 107001,
  kNoContext = 107002,
  kInvalidHandle = 107017,
  kWaitTimeout = 107019,
  kNotSupported = 207000,
  kOutOfMemory = 207001,
  kStreamNotComplete = 507004,
  kEventNotComplete = 507006,
  kLostHeartbeat = 507010,
  kCoreException = 507015,
};

namespace cann {

using Stream = void*;
using Work = std::function<void()>;

// Queues `work` behind what is on the stream (nullptr: the default one of the current device). An
// exception of the work makes every later synchronisation of the stream fail with its message.
// `name` is for messages, and for the faults that settings ask for.
Status launch(Stream stream, const char* name, Work work);

// The address under which the emulator itself reaches what torch_npu knows as `address`. They
// differ in strict mode, where torch_npu's addresses cannot be read or written by anybody.
void* reachable(const void* address);
// Whether it is memory of a device. What is not may be gone when queued work runs.
bool is_on_device(const void* address);

// Message of the calling thread's last error, as aclGetRecentErrMsg gives it.
void set_error(const std::string& message);

// What an exception says, without the frames that ATen adds.
inline std::string text_of(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find("\nException raised from"));
}

// Settings are environment variables ANYCHIP_CANN_<name>.
long setting(const char* name, long otherwise);
std::string setting_text(const char* name, const char* otherwise);

// Runs `call` and returns its status; an exception becomes `status` and its message.
template <class Call>
int guarded(const char* name, Call&& call, Status status = kCoreException) {
  try {
    return call();
  } catch (const std::exception& error) {
    set_error(std::string(name) + ": " + text_of(error));
  } catch (...) {
    set_error(std::string(name) + ": an exception of unknown type");
  }
  return status;
}

}  // namespace cann
