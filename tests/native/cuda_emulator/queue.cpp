#include "queue.h"

#include <deque>
#include <map>
#include <mutex>

#include "engine.h"
#include "failure.h"
#include "launch.h"
#include "memory.h"

namespace cuda_emulator {
namespace {

// One at a time, from whichever thread of the host.
std::mutex queue_mutex;
std::deque<std::function<cudaError_t()>> queued;
std::map<const void*, size_t> opted_in;  // dynamic shared memory, by kernel

cudaError_t fail_with(cudaError_t code, const std::string& why) {
  report_failure(code, "%s", why.c_str());
  return take_failure();
}

bool read_settings(Settings& settings, std::string& problem) {
  settings = Settings::read(problem);
  return problem.empty();
}

cudaError_t flush() {
  cudaError_t status = cudaSuccess;
  while (status == cudaSuccess && !queued.empty()) {
    status = queued.front()();
    queued.pop_front();
  }
  queued.clear();
  return status;
}

}  // namespace

cudaError_t run_or_queue(std::function<cudaError_t()> work) {
  if (position.thread != nullptr) {
    return fail_with(cudaErrorNotSupported, "a kernel cannot give the device work here");
  }
  Settings settings;
  std::string problem;
  if (!read_settings(settings, problem)) return fail_with(cudaErrorUnknown, problem);
  const std::lock_guard<std::mutex> lock(queue_mutex);
  queued.push_back(std::move(work));
  return settings.delayed ? cudaSuccess : flush();
}

cudaError_t run_queued() {
  if (position.thread != nullptr) {
    return fail_with(cudaErrorNotSupported, "a kernel cannot wait for the device");
  }
  const std::lock_guard<std::mutex> lock(queue_mutex);
  return flush();
}

cudaError_t submit(Launch launch) {
  Settings settings;
  std::string problem;
  if (!read_settings(settings, problem)) return fail_with(cudaErrorUnknown, problem);
  size_t allowed;
  {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    const auto found = opted_in.find(launch.function);
    allowed = found == opted_in.end() ? 0 : found->second;
  }
  const cudaError_t refused = check(launch, allowed, problem);
  if (refused != cudaSuccess) return fail_with(refused, problem);
  return run_or_queue([launch = std::move(launch), settings, allowed] {
    return run_grid(launch, settings, allowed);
  });
}

cudaError_t set_attribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout && value >= -1 && value <= 100) {
    return cudaSuccess;
  }
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<size_t>(value) > kMostShared) {
    return fail_with(cudaErrorInvalidValue,
                     "cudaFuncSetAttribute: expected attribute 8 with 0 to 232448 bytes, or 9 with "
                     "-1 to 100, got attribute " +
                         std::to_string(attribute) + " with " + std::to_string(value));
  }
  const std::lock_guard<std::mutex> lock(queue_mutex);
  opted_in[function] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t refuse_cooperative(dim3 grid) {
  return fail_with(cudaErrorNotSupported,
                   "cooperative launch of " + std::to_string(uint64_t{grid.x} * grid.y * grid.z) +
                       " blocks: they run one after another here, and none may wait for another");
}

}  // namespace cuda_emulator
