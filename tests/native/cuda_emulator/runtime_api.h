// The part of CUDA's runtime API that launchers and test programs use, and the launch of a kernel.
//
// Error codes have CUDA's numbers and names. Memory of the "device" is memory of the host. There is
// one device, whose limits are those of compute capability 9.0.
// Source: CUDA Runtime API, "Error Handling" to "Memory Management".
#pragma once

#include <cstddef>
#include <functional>
#include <tuple>

#include "vector_types.h"

enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInvalidDevice = 101,
  cudaErrorLaunchFailure = 719,
  cudaErrorCooperativeLaunchTooLarge = 720,
  cudaErrorNotSupported = 801,
  cudaErrorUnknown = 999,
};
using cudaError_t = cudaError;

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrCooperativeLaunch = 95,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};
using cudaStream_t = struct CUstream_st*;

const char* cudaGetErrorName(cudaError_t error);
// CUDA's words, and behind them what the emulator knows about the last such error.
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

// Work that was queued (Note [Delayed launches] in queue.h) is done on return.
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaStreamSynchronize(cudaStream_t stream);

cudaError_t cudaMalloc(void** address, size_t bytes);
cudaError_t cudaMallocManaged(void** address, size_t bytes, unsigned flags = 1);
cudaError_t cudaFree(void* address);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void* address, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream = nullptr);
template <class T>
cudaError_t cudaMalloc(T** address, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(address), bytes);
}
template <class T>
cudaError_t cudaMallocManaged(T** address, size_t bytes, unsigned flags = 1) {
  return cudaMallocManaged(reinterpret_cast<void**>(address), bytes, flags);
}

namespace cuda_emulator {

struct Launch {
  const void* function;  // which kernel, for its attributes
  dim3 grid, block;
  size_t dynamic_shared_bytes;
  size_t parameter_bytes;
  std::function<void()> kernel;  // with its arguments: what every thread calls
};

cudaError_t submit(Launch launch);
cudaError_t set_attribute(const void* function, cudaFuncAttribute attribute, int value);
cudaError_t max_active_blocks(int* blocks, const void* function, int threads, size_t shared_bytes);
cudaError_t refuse_cooperative(dim3 grid);

// How many bytes the parameters take, each aligned as its type asks for.
template <class... Parameters>
constexpr size_t parameter_bytes() {
  size_t end = 0;
  ((end = (end + alignof(Parameters) - 1) / alignof(Parameters) * alignof(Parameters) +
          sizeof(Parameters)),
   ...);
  return end;
}

// kernel<<<grid, block, dynamic_shared_bytes, stream>>>(arguments...), and cudaGetLastError().
// Arguments are copied now and converted to the kernel's types, as CUDA does.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                   size_t dynamic_shared_bytes, cudaStream_t, Arguments&&... arguments) {
  auto copies = std::tuple<std::remove_cv_t<Parameters>...>(static_cast<Parameters>(arguments)...);
  const cudaError_t status =
      submit({reinterpret_cast<const void*>(kernel), grid, block, dynamic_shared_bytes,
              parameter_bytes<Parameters...>(),
              [kernel, copies = std::move(copies)] { std::apply(kernel, copies); }});
  cudaGetLastError();
  return status;
}

}  // namespace cuda_emulator

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return cuda_emulator::set_attribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
// Registers are not known here: the device may hold fewer.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel* kernel, int threads,
                                                          size_t dynamic_shared_bytes) {
  return cuda_emulator::max_active_blocks(blocks, reinterpret_cast<const void*>(kernel), threads,
                                          dynamic_shared_bytes);
}
// Blocks run one after another, so that none can wait for another: refused.
template <class Kernel>
cudaError_t cudaLaunchCooperativeKernel(Kernel*, dim3 grid, dim3, void**, size_t = 0,
                                        cudaStream_t = nullptr) {
  return cuda_emulator::refuse_cooperative(grid);
}
