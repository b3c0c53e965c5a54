// Does the emulator find the mistakes that people make in kernels? Each kernel has one of them, and
// is correct with kCorrect: the correct twin must pass in every build and order.
//
// What must come of the wrong ones; the test reads this table:
//   pass    the numbers are right, and nothing is said
//   wrong   the numbers are wrong
//   error   the launch fails, with a sentence that names the line
//   report  a sanitizer reports it
// Orders forward to warp: without sanitizers. address: address and undefined-behaviour sanitizers,
// late: the same with delayed launches, thread: the thread sanitizer; all three in order random.
//
// bug                 | forward | reverse | random | warp  | address | late   | thread
// unordered_read      | wrong   | wrong   | wrong  | wrong | wrong   | wrong  | report
// early_reuse         | wrong   | wrong   | wrong  | wrong | wrong   | wrong  | report
// lost_update         | pass    | pass    | pass   | pass  | pass    | pass   | report
// divergent_barrier   | error   | error   | error  | error | error   | error  | error
// deadlock            | error   | error   | error  | error | error   | error  | error
// absent_source       | wrong   | wrong   | wrong  | wrong | wrong   | wrong  | wrong
// shared_overrun      | wrong   | wrong   | wrong  | wrong | report  | report | wrong
// uninitialized       | wrong   | wrong   | wrong  | wrong | wrong   | wrong  | wrong
// misaligned          | wrong   | wrong   | wrong  | wrong | report  | report | wrong
// no_syncwarp         | wrong   | wrong   | wrong  | wrong | wrong   | wrong  | report
// missing_fence       | pass    | pass    | pass   | pass  | pass    | pass   | report
// global_overrun      | wrong   | wrong   | wrong  | wrong | report  | report | wrong or report
// caller_not_in_mask  | error   | error   | error  | error | error   | error  | error
// host_pointer        | pass    | pass    | pass   | pass  | pass    | wrong  | pass
// freed_buffer        | pass    | pass    | pass   | pass  | pass    | report | pass
//
//   seeded_bugs BUG wrong|correct     prints the outcome: pass, wrong, or "error: " and why
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "runtime.cuh"

namespace {

using anychip::cuda::launch;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocks = 4;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kInputs = 1024;
constexpr int kOutputs = 1024;

__device__ float warp_sum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Shared memory is read without a barrier after it was written.
template <bool kCorrect>
__global__ void unordered_read(const float* in, float* out) {
  ANYCHIP_SHARED(float, sums, kWarps);
  const float sum = warp_sum(in[threadIdx.x]);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  if (kCorrect) __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < kWarps; ++warp) total += sums[warp];
  out[threadIdx.x] = total;
}

// A buffer is written again before every thread has read it.
template <bool kCorrect>
__global__ void early_reuse(const float* in, float* out) {
  ANYCHIP_SHARED(float, sums, kWarps);
  float total = 0.0f;
  for (int round = 0; round < 4; ++round) {
    const float sum = warp_sum(in[threadIdx.x] + static_cast<float>(round));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) total += sums[warp];
    if (kCorrect) __syncthreads();
  }
  out[threadIdx.x] = total;
}

// Blocks add to one place without an atomic operation.
template <bool kCorrect>
__global__ void lost_update(const float* in, float* out) {
  if (kCorrect) {
    atomicAdd(&out[threadIdx.x], in[threadIdx.x]);
  } else {
    out[threadIdx.x] += in[threadIdx.x];
  }
}

// Threads of a block wait at two barriers.
template <bool kCorrect>
__global__ void divergent_barrier(const float* in, float* out) {
  ANYCHIP_SHARED(float, values, kThreads);
  values[threadIdx.x] = in[threadIdx.x];
  if (kCorrect || threadIdx.x < 100) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

// Half of a warp waits for all of it, the other half for the block.
template <bool kCorrect>
__global__ void deadlock(const float* in, float* out) {
  float value = in[threadIdx.x];
  if (kCorrect || threadIdx.x % 32 < 16) {
    value = __shfl_xor_sync(kAllLanes, value, 1);
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = value;
}

// A shuffle from a lane that takes no part.
template <bool kCorrect>
__global__ void absent_source(const float* in, float* out) {
  float value = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) value += __shfl_xor_sync(0x0000ffffu, value, kCorrect ? 8 : 16);
  out[threadIdx.x] = value;
}

// One element behind a shared array.
template <bool kCorrect>
__global__ void shared_overrun(const float* in, float* out) {
  ANYCHIP_SHARED(float, values, kThreads);
  values[threadIdx.x + (kCorrect ? 0 : 1)] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

// Shared memory is taken for zero at the start.
template <bool kCorrect>
__global__ void uninitialized(const float* in, float* out) {
  ANYCHIP_SHARED(float, values, kThreads);
  if (kCorrect) values[threadIdx.x] = 0.0f;
  values[threadIdx.x] += in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

// 16 bytes from an address that is a multiple of 4.
template <bool kCorrect>
__global__ void misaligned(const float* in, float* out) {
  const float* first = in + threadIdx.x * 4 % 192 + (kCorrect ? 0 : 1);
  const float4 values = *reinterpret_cast<const float4*>(first);
  out[threadIdx.x] = values.x + values.y + values.z + values.w;
}

// Lanes of a warp exchange through shared memory, and nothing orders it.
template <bool kCorrect>
__global__ void no_syncwarp(const float* in, float* out) {
  ANYCHIP_SHARED(float, values, kThreads);
  values[threadIdx.x] = in[threadIdx.x];
  if (kCorrect) __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}

// The last block sums what the others have written, and nothing makes that visible.
template <bool kCorrect>
__global__ void missing_fence(const float* in, float* out) {
  ANYCHIP_SHARED(int, is_last, 1);
  auto* count = reinterpret_cast<unsigned*>(out + 512);
  if (threadIdx.x == 0) {
    out[256 + blockIdx.x] = in[blockIdx.x];
    if (kCorrect) __threadfence();
    is_last[0] = atomicAdd(count, 1u) == gridDim.x - 1;
    if (kCorrect) __threadfence();
  }
  __syncthreads();
  if (!is_last[0] || threadIdx.x > 0) return;
  float sum = 0.0f;
  for (unsigned block = 0; block < gridDim.x; ++block) sum += out[256 + block];
  out[0] = sum;
}

// Behind the end of an array in global memory.
template <bool kCorrect>
__global__ void global_overrun(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x * 4 + (kCorrect ? 0 : 4)];
}

// The mask of a warp operation does not name a lane that calls it.
template <bool kCorrect>
__global__ void caller_not_in_mask(const float* in, float* out) {
  out[threadIdx.x] = __shfl_sync(kCorrect ? kAllLanes : 0x0000ffffu, in[threadIdx.x], 0);
}

// The next two are mistakes of the host, in how it calls this.
__global__ void scale(const float* in, float* out, const float* factor) {
  out[threadIdx.x] = in[threadIdx.x] * *factor;
}

struct Buffers {
  float* in;
  float* out;
  float* factor;
};

// The kernel gets the address of a variable that the host changes after the launch.
template <bool kCorrect>
cudaError_t host_pointer(const Buffers& buffers) {
  *buffers.factor = 3.0f;
  const cudaError_t status =
      launch(scale, dim3(1), dim3(kThreads), 0, nullptr, buffers.in, buffers.out, buffers.factor);
  if (kCorrect) cudaDeviceSynchronize();
  *buffers.factor = 5.0f;
  return status;
}

// A buffer is given back before the kernel has read it.
template <bool kCorrect>
cudaError_t freed_buffer(const Buffers& buffers) {
  auto* factor = new float(3.0f);
  const cudaError_t status =
      launch(scale, dim3(1), dim3(kThreads), 0, nullptr, buffers.in, buffers.out, factor);
  if (kCorrect) cudaDeviceSynchronize();
  delete factor;
  return status;
}

// A kernel, its correct twin, its blocks, and what out[i] must be.
struct Case {
  std::function<cudaError_t(const Buffers&)> wrong, correct;
  std::function<float(const std::vector<float>&, int)> expected;
};

template <class Kernel>
std::function<cudaError_t(const Buffers&)> on_blocks(Kernel* kernel, int blocks) {
  return [=](const Buffers& buffers) {
    return launch(kernel, dim3(blocks), dim3(kThreads), 0, nullptr, buffers.in, buffers.out);
  };
}

#define KERNEL(name, blocks, expression)                                                      \
  {                                                                                           \
    #name, {                                                                                  \
      on_blocks(name<false>, blocks), on_blocks(name<true>, blocks),                          \
          [](const std::vector<float>& in, int i) -> float { return (void)in, (expression); } \
    }                                                                                         \
  }
#define CALL(name, expression)                                                                \
  {                                                                                           \
    #name, {                                                                                  \
      name<false>, name<true>,                                                                \
          [](const std::vector<float>& in, int i) -> float { return (void)in, (expression); } \
    }                                                                                         \
  }

float sum(const std::vector<float>& in, int count) {
  float total = 0.0f;
  for (int i = 0; i < count; ++i) total += in[static_cast<size_t>(i)];
  return total;
}

float at(const std::vector<float>& in, int i) { return in[static_cast<size_t>(i)]; }

const std::map<std::string, Case>& cases() {
  static const std::map<std::string, Case> all{
      KERNEL(unordered_read, 1, sum(in, kThreads) + 0.0f * static_cast<float>(i)),
      KERNEL(early_reuse, 1, 4.0f * sum(in, kThreads) + 6.0f * kThreads + 0.0f * i),
      KERNEL(lost_update, kBlocks, kBlocks * at(in, i)),
      KERNEL(divergent_barrier, 1, at(in, kThreads - 1 - i)),
      KERNEL(deadlock, 1, at(in, i ^ 1)),
      KERNEL(absent_source, 1, i % 32 < 16 ? at(in, i) + at(in, i ^ 8) : at(in, i)),
      KERNEL(shared_overrun, 1, at(in, i)),
      KERNEL(uninitialized, 1, at(in, kThreads - 1 - i)),
      KERNEL(misaligned, 1, sum(in, i * 4 % 192 + 4) - sum(in, i * 4 % 192)),
      KERNEL(no_syncwarp, 1, at(in, i ^ 1)),
      KERNEL(missing_fence, kBlocks, i == 0 ? sum(in, kBlocks) : 0.0f),
      KERNEL(global_overrun, 1, at(in, 4 * i)),
      KERNEL(caller_not_in_mask, 1, at(in, i / 32 * 32)),
      CALL(host_pointer, 3.0f * at(in, i)),
      CALL(freed_buffer, 3.0f * at(in, i)),
  };
  return all;
}

void print_outcome(const Case& chosen, bool correct) {
  std::vector<float> in(kInputs), out(kOutputs);
  for (int i = 0; i < kInputs; ++i) in[static_cast<size_t>(i)] = static_cast<float>(i * 37 % 101);
  Buffers buffers{};
  cudaMallocManaged(&buffers.in, sizeof(float) * kInputs);
  cudaMallocManaged(&buffers.out, sizeof(float) * kOutputs);
  cudaMallocManaged(&buffers.factor, sizeof(float));
  std::memcpy(buffers.in, in.data(), sizeof(float) * kInputs);
  std::memset(buffers.out, 0, sizeof(float) * kOutputs);
  cudaError_t status = (correct ? chosen.correct : chosen.wrong)(buffers);
  if (status == cudaSuccess) status = cudaDeviceSynchronize();
  if (status != cudaSuccess) {
    std::printf("error: %s\n", cudaGetErrorString(status));
  } else {
    bool right = true;
    for (int i = 0; i < kThreads; ++i) {
      // All are whole numbers that float32 holds; a NaN is not equal to any.
      right = right && buffers.out[i] == chosen.expected(in, i);
    }
    std::printf("%s\n", right ? "pass" : "wrong");
  }
  cudaFree(buffers.in);
  cudaFree(buffers.out);
  cudaFree(buffers.factor);
}

}  // namespace

int main(int count, char** words) {
  const auto found = count == 3 ? cases().find(words[1]) : cases().end();
  if (found == cases().end()) {
    std::printf("usage: seeded_bugs BUG wrong|correct\n");
    return 2;
  }
  print_outcome(found->second, std::strcmp(words[2], "correct") == 0);
  return 0;
}
