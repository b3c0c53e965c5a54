#include "runtime_api.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "failure.h"
#include "memory.h"
#include "queue.h"
#include "settings.h"

namespace cuda_emulator {
namespace {

constexpr int kThreadsOfMultiprocessor = 2048, kBlocksOfMultiprocessor = 32;
constexpr size_t kReservedShared = 1 << 10;  // per block, by the system
constexpr size_t kAlignment = 256;           // of cudaMalloc

cudaError_t refuse(cudaError_t code, const char* call, const std::string& expected_and_got) {
  report_failure(code, "%s: %s", call, expected_and_got.c_str());
  return take_failure();
}

cudaError_t check_device(int device, const char* call) {
  if (device == 0) return cudaSuccess;
  return refuse(cudaErrorInvalidDevice, call,
                "expected device 0, the only one, got " + std::to_string(device));
}

}  // namespace

cudaError_t max_active_blocks(int* blocks, const void*, int threads, size_t shared_bytes) {
  if (threads <= 0 || threads > 1024) {
    return refuse(cudaErrorInvalidValue, "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
                  "expected 1 to 1024 threads, got " + std::to_string(threads));
  }
  const int by_threads = kThreadsOfMultiprocessor / ((threads + 31) / 32 * 32);
  const auto by_shared =
      static_cast<int>(kSharedOfMultiprocessor / (shared_bytes + kReservedShared));
  *blocks = std::min({by_threads, by_shared, kBlocksOfMultiprocessor});
  return cudaSuccess;
}

}  // namespace cuda_emulator

using namespace cuda_emulator;

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return check_device(device, "cudaSetDevice"); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const cudaError_t status = check_device(device, "cudaDeviceGetAttribute");
  if (status != cudaSuccess) return status;
  std::string problem;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = Settings::read(problem).multiprocessors;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = kThreadsOfMultiprocessor;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
    case cudaDevAttrCooperativeLaunch:
      *value = 0;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(kStaticShared);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(kMostShared);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(kSharedOfMultiprocessor);
      break;
    default:
      problem = "attribute " + std::to_string(attribute) + " is not known here";
  }
  if (problem.empty()) return cudaSuccess;
  return refuse(cudaErrorInvalidValue, "cudaDeviceGetAttribute", problem);
}

cudaError_t cudaDeviceSynchronize() { return run_queued(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return run_queued(); }

cudaError_t cudaMalloc(void** address, size_t bytes) {
  *address = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (*address != nullptr || bytes == 0) return cudaSuccess;
  return refuse(cudaErrorMemoryAllocation, "cudaMalloc", std::to_string(bytes) + " bytes");
}
cudaError_t cudaMallocManaged(void** address, size_t bytes, unsigned) {
  return cudaMalloc(address, bytes);
}
cudaError_t cudaFree(void* address) {
  const cudaError_t status = run_queued();
  std::free(address);
  return status;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  return run_or_queue([=] {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
  });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t status = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return status == cudaSuccess ? run_queued() : status;
}
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  return run_or_queue([=] {
    std::memset(address, value, bytes);
    return cudaSuccess;
  });
}
cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  const cudaError_t status = cudaMemsetAsync(address, value, bytes, nullptr);
  return status == cudaSuccess ? run_queued() : status;
}
