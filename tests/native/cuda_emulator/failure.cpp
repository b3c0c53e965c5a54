#include "failure.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace cuda_emulator {
namespace {

struct Name {
  cudaError_t code;
  const char *name, *words;
};
// Source: CUDA Runtime API, enum cudaError.
constexpr Name kNames[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorCooperativeLaunchTooLarge, "cudaErrorCooperativeLaunchTooLarge",
     "too many blocks in cooperative launch"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const Name& name_of(cudaError_t code) {
  for (const Name& name : kNames) {
    if (name.code == code) return name;
  }
  return kNames[sizeof kNames / sizeof kNames[0] - 1];
}

std::mutex failure_mutex;
std::atomic<bool> failed{false};
cudaError_t failed_code = cudaSuccess;  // of the last failure; stays after take_failure()
char sentence[2048];
thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

void report_failure(cudaError_t code, const char* format, ...) {
  const std::lock_guard<std::mutex> lock(failure_mutex);
  if (failed) return;
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  failed_code = code;
  failed = true;
}

bool has_failed() { return failed; }

cudaError_t take_failure() {
  const std::lock_guard<std::mutex> lock(failure_mutex);
  if (!failed) return cudaSuccess;
  failed = false;
  last_error = failed_code;
  return failed_code;
}

}  // namespace cuda_emulator

const char* cudaGetErrorName(cudaError_t error) { return cuda_emulator::name_of(error).name; }

const char* cudaGetErrorString(cudaError_t error) {
  using namespace cuda_emulator;
  thread_local std::string text;
  const std::lock_guard<std::mutex> lock(failure_mutex);
  text = name_of(error).words;
  if (error != cudaSuccess && error == failed_code) text += std::string(": ") + sentence;
  return text.c_str();
}

cudaError_t cudaPeekAtLastError() { return cuda_emulator::last_error; }

cudaError_t cudaGetLastError() {
  const cudaError_t error = cuda_emulator::last_error;
  cuda_emulator::last_error = cudaSuccess;
  return error;
}
