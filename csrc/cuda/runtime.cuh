// The one switch between the two compilers of a kernel file, and the launch of a kernel.
//
// nvcc gives kernels for NVIDIA devices; with ANYCHIP_IS_EMULATED any C++ compiler gives the same
// kernels on the host, through the emulator of tests/native/cuda_emulator. A kernel file includes
// nothing of CUDA itself, declares shared memory by ANYCHIP_SHARED, and launches by launch():
// `<<<...>>>` stands only here.
#pragma once

#include <cstddef>
#include <cstdint>

#if !ANYCHIP_IS_EMULATED

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// `count` elements of T per block; dynamic shared memory is 16-byte aligned.
#define ANYCHIP_SHARED(T, name, count) __shared__ T name[count]
#define ANYCHIP_DYNAMIC_SHARED(T, name)                                           \
  extern __shared__ __align__(16) unsigned char anychip_dynamic_shared_memory_[]; \
  T* name = reinterpret_cast<T*>(anychip_dynamic_shared_memory_)

#if defined(__CUDACC__)

namespace anychip::cuda {

// Queues a kernel. Arguments are converted to the kernel's parameter types. The result is the
// launch's own error; one of the kernel itself appears at a later call, as everywhere in CUDA.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments... arguments) {
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
}

}  // namespace anychip::cuda

#endif

#else

#include "cuda_emulator.h"

namespace anychip::cuda {

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments... arguments) {
  return cuda_emulator::launch(kernel, grid, block, shared_bytes, stream, arguments...);
}

}  // namespace anychip::cuda

#endif

namespace anychip::cuda {

// What any device of ours gives a block, and what every device gives it without being asked.
constexpr int64_t kMostSharedBytes = 227 * 1024;
constexpr int64_t kFreeSharedBytes = 48 * 1024;

// Lets a kernel have `bytes` of dynamic shared memory besides `own` ones of its declarations, or
// says that the device has not got them.
template <class... Parameters>
bool allow_shared(void (*kernel)(Parameters...), int64_t bytes, int64_t own) {
  if (bytes + own <= kFreeSharedBytes) return true;
  if (bytes + own > kMostSharedBytes) return false;
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (cudaFuncSetAttribute(kernel, attribute, static_cast<int>(bytes)) == cudaSuccess) return true;
  cudaGetLastError();  // it is answered here, and not for the next launch to find
  return false;
}

// Where a call runs: a device of this process and a stream of it, as torch's current ones.
struct Place {
  int device = 0;
  cudaStream_t stream = nullptr;
};

// Makes the device of a call current, and the caller's again at the end. The driver keeps one
// current device per thread, which torch's runtime and ours share.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    status_ = cudaGetDevice(&before_);
    if (status_ == cudaSuccess && before_ != device) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  cudaError_t status() const { return status_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace anychip::cuda
