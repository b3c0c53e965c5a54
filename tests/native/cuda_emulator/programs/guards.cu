// What the engine must refuse or see by itself, and what it must let through: one scenario per
// call.
//
//   guards SCENARIO     prints "code name: sentence" of the first error, or "0 cudaSuccess: ..."
//   with
//                       what the scenario found
// The test looks for the lines that are marked by "at:".
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "runtime.cuh"

namespace {

using anychip::cuda::launch;

constexpr unsigned kAll = 0xffffffffu;

// Filled by scenarios, and printed when nothing failed.
int* results = nullptr;
constexpr int kResults = 4096;

template <class... Parameters, class... Arguments>
cudaError_t run(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                Arguments... arguments) {
  const cudaError_t status = launch(kernel, grid, block, shared_bytes, nullptr, arguments...);
  return status == cudaSuccess ? cudaDeviceSynchronize() : status;
}

__global__ void nothing() {}

__global__ void two_barriers() {
  if (threadIdx.x < 40) {
    __syncthreads();  // at: first barrier
  } else {
    __syncthreads();  // at: second barrier
  }
}

__global__ void half_a_warp() {
  if (threadIdx.x % 32 < 16) {
    __syncwarp();  // at: lanes that wait for the warp
  } else {
    __syncthreads();  // at: lanes that wait for the block
  }
}

__global__ void two_operations() {
  if (threadIdx.x % 2 == 0) {
    __shfl_sync(kAll, 1, 0);  // at: even lanes
  } else {
    __ballot_sync(kAll, 1);  // at: odd lanes
  }
}

__global__ void overlapping_masks() {
  if (threadIdx.x < 16) {
    __syncwarp(0x0001ffffu);  // at: seventeen lanes
  } else {
    __syncwarp(0xffff8000u);  // at: seventeen others
  }
}

__global__ void caller_not_named() {
  __syncwarp(0x7fffffffu);  // at: not lane 31
}

__global__ void bad_width() {
  __shfl_xor_sync(kAll, 1, 1, 5);  // at: width of five
}

template <int kBytes>
__global__ void static_shared() {
  ANYCHIP_SHARED(char, bytes, kBytes);  // at: shared variable
  bytes[threadIdx.x] = 0;
}

__global__ void dynamic_shared() {
  ANYCHIP_DYNAMIC_SHARED(char, bytes);
  bytes[threadIdx.x] = 0;
}

__global__ void both_shared() {
  ANYCHIP_SHARED(float, one, 1024);  // at: one variable too many
  ANYCHIP_DYNAMIC_SHARED(char, bytes);
  bytes[threadIdx.x] = 0;
  one[threadIdx.x] = 0.0f;
}

__global__ void global_store_to_shared() {
  ANYCHIP_SHARED(float, one, 32);
  __stwb(&one[threadIdx.x], 1.0f);  // at: store of global memory
}

__global__ void global_load_of_shared(float* out) {
  ANYCHIP_SHARED(float, one, 32);
  out[threadIdx.x] = __ldg(&one[threadIdx.x]);  // at: load of global memory
}

template <int kBytes>
struct Parameters {
  char bytes[kBytes];
};
template <int kBytes>
__global__ void takes(Parameters<kBytes> parameters, int* out) {
  out[threadIdx.x] = parameters.bytes[kBytes - 1];
}

__global__ void waits_for_nobody(const volatile int* flag) {
  while (*flag == 0) __nanosleep(100);  // at: endless sleep
}

__global__ void waits_for_a_warp(volatile int* flag) {
  if (threadIdx.x == 40) *flag = 7;
  while (*flag != 7) __nanosleep(100);
}

// The lanes that take one branch: all of them, or each alone.
__global__ void asks_active_mask(int* out) {
  if (threadIdx.x % 4 == 1) out[0] = static_cast<int>(__activemask());
}

// What shuffles give whose source takes no part, or is outside of the segment.
__global__ void absent_sources(int* out) {
  if (threadIdx.x < 16) {
    const int value = __shfl_sync(0x0000ffffu, 5, 20);
    if (threadIdx.x == 3) out[0] = value;
  }
  if (threadIdx.x == 31) return;
  const int other = __shfl_down_sync(kAll, 6, 1);
  if (threadIdx.x >= 29) out[threadIdx.x - 28] = other;
}

// How often each thread of each block runs, by its number in the grid.
__global__ void counts_itself(int* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  atomicAdd(&out[block * blockDim.x * blockDim.y * blockDim.z + thread], 1);
  __syncthreads();
}

__global__ void writes(int* out, int value) { out[threadIdx.x] = value; }

__global__ void early_end(int* out) {
  if (threadIdx.x % 2 == 0) return;
  __syncthreads();
  out[threadIdx.x] = static_cast<int>(__ballot_sync(kAll, 1));
}

// Thread numbers from 1, in the order in which they run before the barrier, and after it.
__global__ void notes_order(int* out, int* counts) {
  out[atomicAdd(&counts[0], 1)] = static_cast<int>(threadIdx.x) + 1;
  __syncthreads();
  out[blockDim.x + atomicAdd(&counts[1], 1)] = static_cast<int>(threadIdx.x) + 1;
}

cudaError_t order_of_threads() {
  int* counts = nullptr;
  cudaMallocManaged(&counts, sizeof(int) * 2);
  std::memset(counts, 0, sizeof(int) * 2);
  const cudaError_t status = run(notes_order, dim3(1), dim3(128), 0, results, counts);
  cudaFree(counts);
  return status;
}

__global__ void notes_block(int* out, int* count) {
  out[atomicAdd(count, 1)] = static_cast<int>(blockIdx.x) + 1;
}

// A kernel of one launch may run on fibers of another, which another thread of the host began.
cudaError_t host_threads_in_turn() {
  cudaError_t status = cudaSuccess;
  for (int turn = 0; turn < 4; ++turn) {
    const auto count = [&] {
      if (status == cudaSuccess) status = run(counts_itself, dim3(2), dim3(32), 0, results);
    };
    if (turn % 2 == 0) {
      count();
    } else {
      std::thread(count).join();
    }
  }
  return status;
}

cudaError_t order_of_blocks() {
  return run(notes_block, dim3(100), dim3(1), 0, results, results + kResults - 1);
}

template <class Kernel>
cudaError_t allow(Kernel* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

cudaError_t after_allowing(int allowed, size_t asked) {
  const cudaError_t status = allow(dynamic_shared, allowed);
  return status == cudaSuccess ? run(dynamic_shared, dim3(1), dim3(32), asked) : status;
}

cudaError_t after_a_failure() {
  run(caller_not_named, dim3(3), dim3(64), 0);
  return run(early_end, dim3(1), dim3(64), 0, results);
}

cudaError_t copies_and_fills() {
  int host[4] = {1, 2, 3, 4};
  cudaMemsetAsync(results, 0, sizeof(int) * 32);
  launch(writes, dim3(1), dim3(32), 0, nullptr, results + 4, 9);
  cudaMemcpyAsync(results, host, sizeof host, cudaMemcpyHostToDevice);
  cudaMemcpyAsync(results + 8, results, sizeof host, cudaMemcpyDeviceToDevice);
  return cudaDeviceSynchronize();
}

// Which call says that the kernel failed: 1 the launch, 2 the call that waits.
cudaError_t when_a_kernel_fails() {
  const cudaError_t at_launch = launch(caller_not_named, dim3(1), dim3(32), 0, nullptr);
  const cudaError_t at_wait = cudaDeviceSynchronize();
  results[0] = (at_launch != cudaSuccess) + 2 * (at_wait != cudaSuccess);
  return cudaSuccess;
}

cudaError_t when_a_shape_is_wrong() {
  const cudaError_t at_launch = launch(nothing, dim3(1), dim3(1025), 0, nullptr);
  const cudaError_t at_wait = cudaDeviceSynchronize();
  results[0] = (at_launch != cudaSuccess) + 2 * (at_wait != cudaSuccess);
  return cudaSuccess;
}

cudaError_t last_error() {
  cudaSetDevice(1);
  results[0] = cudaPeekAtLastError();
  results[1] = cudaGetLastError();
  results[2] = cudaGetLastError();
  return cudaSuccess;
}

cudaError_t attributes() {
  const cudaDeviceAttr asked[] = {cudaDevAttrMultiProcessorCount, cudaDevAttrWarpSize,
                                  cudaDevAttrMaxThreadsPerBlock, cudaDevAttrMaxSharedMemoryPerBlock,
                                  cudaDevAttrMaxSharedMemoryPerBlockOptin};
  cudaError_t status = cudaSuccess;
  for (int i = 0; i < 5 && status == cudaSuccess; ++i) {
    status = cudaDeviceGetAttribute(&results[i], asked[i], 0);
  }
  return status;
}

cudaError_t occupancy() {
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&results[0], nothing, 1000, 0);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&results[1], nothing, 32, 0);
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&results[2], nothing, 32, 100 << 10);
}

const std::map<std::string, std::function<cudaError_t()>>& scenarios() {
  static const std::map<std::string, std::function<cudaError_t()>> all{
      {"divergent barrier", [] { return run(two_barriers, dim3(1), dim3(64), 0); }},
      {"deadlock", [] { return run(half_a_warp, dim3(1), dim3(64), 0); }},
      {"divergent warp operation", [] { return run(two_operations, dim3(1), dim3(32), 0); }},
      {"overlapping masks", [] { return run(overlapping_masks, dim3(1), dim3(32), 0); }},
      {"caller not in mask", [] { return run(caller_not_named, dim3(1), dim3(32), 0); }},
      {"width", [] { return run(bad_width, dim3(1), dim3(32), 0); }},
      {"static shared 48 KiB", [] { return run(static_shared<49152>, dim3(1), dim3(32), 0); }},
      {"static shared over", [] { return run(static_shared<49153>, dim3(1), dim3(32), 0); }},
      {"dynamic shared 48 KiB", [] { return run(dynamic_shared, dim3(1), dim3(32), 49152); }},
      {"dynamic shared over", [] { return run(dynamic_shared, dim3(1), dim3(32), 49153); }},
      {"dynamic shared allowed", [] { return after_allowing(232448, 232448); }},
      {"dynamic shared over allowed", [] { return after_allowing(65536, 65537); }},
      {"attribute over", [] { return allow(dynamic_shared, 232449); }},
      {"both shared over", [] { return run(both_shared, dim3(1), dim3(32), 49152 - 4095); }},
      {"both shared", [] { return run(both_shared, dim3(1), dim3(32), 49152 - 4096); }},
      {"global store", [] { return run(global_store_to_shared, dim3(1), dim3(32), 0); }},
      {"global load",
       [] {
         return run(global_load_of_shared, dim3(1), dim3(32), 0, reinterpret_cast<float*>(results));
       }},
      {"no blocks", [] { return run(nothing, dim3(0), dim3(32), 0); }},
      {"no threads", [] { return run(nothing, dim3(1), dim3(32, 0), 0); }},
      {"1024 threads", [] { return run(nothing, dim3(1), dim3(16, 1, 64), 0); }},
      {"1025 threads", [] { return run(nothing, dim3(1), dim3(1025), 0); }},
      {"1056 threads", [] { return run(nothing, dim3(1), dim3(32, 33), 0); }},
      {"65 threads in z", [] { return run(nothing, dim3(1), dim3(1, 1, 65), 0); }},
      {"65536 blocks in y", [] { return run(nothing, dim3(1, 65536), dim3(1), 0); }},
      {"65536 blocks in z", [] { return run(nothing, dim3(1, 1, 65536), dim3(1), 0); }},
      {"too many blocks in x", [] { return run(nothing, dim3(0x80000000u), dim3(1), 0); }},
      {"parameters 4096",
       [] { return run(takes<4088>, dim3(1), dim3(1), 0, Parameters<4088>{}, results); }},
      {"parameters over",
       [] { return run(takes<4089>, dim3(1), dim3(1), 0, Parameters<4089>{}, results); }},
      {"cooperative",
       [] { return cudaLaunchCooperativeKernel(nothing, dim3(2), dim3(1), nullptr); }},
      {"endless sleep", [] { return run(waits_for_nobody, dim3(1), dim3(64), 0, results); }},
      {"sleep", [] { return run(waits_for_a_warp, dim3(1), dim3(64), 0, results); }},
      {"active mask", [] { return run(asks_active_mask, dim3(1), dim3(32), 0, results); }},
      {"absent sources", [] { return run(absent_sources, dim3(1), dim3(32), 0, results); }},
      {"each thread once",
       [] { return run(counts_itself, dim3(2, 3, 4), dim3(5, 3, 7), 0, results); }},
      {"host threads in turn", host_threads_in_turn},
      {"order of threads", order_of_threads},
      {"order of blocks", order_of_blocks},
      {"early end", [] { return run(early_end, dim3(1), dim3(64), 0, results); }},
      {"after a failure", after_a_failure},
      {"copies and fills", copies_and_fills},
      {"when a kernel fails", when_a_kernel_fails},
      {"when a shape is wrong", when_a_shape_is_wrong},
      {"last error", last_error},
      {"other device", [] { return cudaSetDevice(1); }},
      {"attributes", attributes},
      {"occupancy", occupancy},
  };
  return all;
}

}  // namespace

int main(int count, char** words) {
  const auto found = count == 2 ? scenarios().find(words[1]) : scenarios().end();
  if (found == scenarios().end()) {
    std::printf("usage: guards SCENARIO\n");
    return 2;
  }
  cudaMallocManaged(&results, sizeof(int) * kResults);
  std::memset(results, 0, sizeof(int) * kResults);
  const cudaError_t status = found->second();
  std::printf("%d %s:", static_cast<int>(status), cudaGetErrorName(status));
  if (status != cudaSuccess) {
    std::printf(" %s\n", cudaGetErrorString(status));
  } else {
    int last = kResults - 1;
    while (last > 0 && results[last] == 0) --last;
    for (int i = 0; i <= last; ++i) std::printf(" %d", results[i]);
    std::printf("\n");
  }
  cudaFree(results);
  return 0;
}
