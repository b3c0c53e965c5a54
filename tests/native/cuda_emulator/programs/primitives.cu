// The operations of warps and blocks against what CUDA's manual says of them, thread by thread.
//
// The same file compiled by nvcc asks a device; both must agree with the formulas below.
// Exit status 0, or 1 with a line for each of the first wrong values.
#include <cooperative_groups.h>
#if !ANYCHIP_IS_EMULATED
#include <cooperative_groups/reduce.h>
#endif

#include <cstdio>

#include "runtime.cuh"

namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 112;  // the last warp has 16 lanes
constexpr unsigned kAll = 0xffffffffu;

// Each writes one value per thread.
#define CHECKS(CHECK)                                                                             \
  CHECK(shuffle_in_segments, __shfl_sync(mask, lane, 4, 8), segment + 4)                          \
  CHECK(shuffle_wraps_in_segment, __shfl_sync(mask, lane, 13, 8), segment + 5)                    \
  CHECK(shuffle_up, __shfl_up_sync(mask, lane, 3, 8), lane - 3 < segment ? lane : lane - 3)       \
  CHECK(shuffle_down, __shfl_down_sync(mask, lane, 3, 8),                                         \
        lane + 3 >= segment + 8 ? lane : lane + 3)                                                \
  CHECK(shuffle_xor, __shfl_xor_sync(mask, lane, 5), lane ^ 5)                                    \
  CHECK(shuffle_xor_stops_at_segment, __shfl_xor_sync(mask, lane, 12, 8),                         \
        (lane ^ 12) >= segment + 8 ? lane : lane ^ 12)                                            \
  CHECK(shuffle_of_8_bytes, static_cast<int>(__shfl_xor_sync(mask, (1ll + lane) << 40, 1) >> 40), \
        1 + (lane ^ 1))                                                                           \
  CHECK(ballot, static_cast<int>(__ballot_sync(mask, lane % 3 == 0)), thirds& existing)           \
  CHECK(any, __any_sync(mask, lane == 7) * 2 + __any_sync(mask, lane == 99), 2)                   \
  CHECK(all, __all_sync(mask, lane < 32) * 2 + __all_sync(mask, lane < 15), 2)                    \
  CHECK(reduce_add, static_cast<int>(__reduce_add_sync(mask, static_cast<unsigned>(lane))),       \
        lanes*(lanes - 1) / 2)                                                                    \
  CHECK(reduce_min_signed, __reduce_min_sync(mask, lane - 9), -9)                                 \
  CHECK(reduce_max_signed, __reduce_max_sync(mask, lane - 40), lanes - 41)                        \
  CHECK(reduce_max_unsigned,                                                                      \
        static_cast<int>(__reduce_max_sync(mask, static_cast<unsigned>(lane - 1))), -1)           \
  CHECK(reduce_and, static_cast<int>(__reduce_and_sync(mask, 0xff00u | lane)), 0xff00)            \
  CHECK(reduce_or, static_cast<int>(__reduce_or_sync(mask, 1u << lane)), existing)                \
  CHECK(reduce_xor, static_cast<int>(__reduce_xor_sync(mask, 1u << lane)), existing)              \
  CHECK(match_any, static_cast<int>(__match_any_sync(mask, lane / 4)), 0xf << (lane & ~3))        \
  CHECK(match_all, static_cast<int>(__match_all_sync(mask, 5, &same)) * same, existing)           \
  CHECK(match_all_differs, static_cast<int>(__match_all_sync(mask, lane, &same)) + same, 0)       \
  CHECK(divergent_halves, half_xor(lane), lane < 16 ? lane ^ 8 : lane ^ 4)                        \
  CHECK(barrier_count, __syncthreads_count(thread % 5 == 0), 23)                                  \
  CHECK(barrier_and, __syncthreads_and(thread < 112) * 2 + __syncthreads_and(thread < 111), 2)    \
  CHECK(barrier_or, __syncthreads_or(thread == 111) * 2 + __syncthreads_or(thread > 111), 2)      \
  CHECK(tile_ballot, static_cast<int>(tile.ballot(lane % 2)), 0xaaaa)                             \
  CHECK(tile_shuffle, tile.shfl(lane, 3), (lane & 16) + 3)                                        \
  CHECK(tile_reduce,                                                                              \
        static_cast<int>(cg::reduce(tile, static_cast<float>(lane), cg::plus<float>())),          \
        lane < 16 ? 120 : 376)                                                                    \
  CHECK(byte_perm, static_cast<int>(__byte_perm(0x33221100, 0x77665544, 0x7531)), 0x77553311)     \
  CHECK(byte_perm_sign, static_cast<int>(__byte_perm(0x00008001, 0, 0x98)), 0x101ff00)            \
  CHECK(dot_product_of_bytes, __dp4a(0x01ff02fe, 0x7f028001, 5), 5 + 127 - 2 - 256 - 2)           \
  CHECK(multiply_high, static_cast<int>(__umulhi(0xD2511F53u, 0x80000000u)), 0x69288fa9)          \
  CHECK(reverse_bits, static_cast<int>(__brev(1u << lane)), static_cast<int>(1u << (31 - lane)))  \
  CHECK(leading_zeros, __clz(1 << lane) + __ffs(1 << lane) + __popc(255), 32 + 8)                 \
  CHECK(funnel_shift, static_cast<int>(__funnelshift_l(0x80000000u, 1u, 1)), 3)                   \
  CHECK(to_integer, __float2int_rn(2.5f) * 16 + __float2int_rz(-2.5f), 30)                        \
  CHECK(to_integer_saturates, __float2int_rn(3e9f), 0x7fffffff)                                   \
  CHECK(atomic_add_half, half_sums(halves, lane), 16 * 100 + 16)                                  \
  CHECK(atomic_inc, counted(counter), 4)

__device__ int half_xor(int lane) {
  return lane < 16 ? __shfl_xor_sync(0x0000ffffu, lane, 8) : __shfl_xor_sync(0xffff0000u, lane, 4);
}

// The last warp has no upper half: half_xor's second mask names nobody there.
constexpr int kLanesOfLast = kThreads % 32;

// Sixteen threads add 1 to each of two halves; the sums are whole numbers that a half holds.
__device__ int half_sums(__half2* pair, int) {
  if (threadIdx.x == 0) *pair = __floats2half2_rn(0.0f, 0.0f);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(pair, __floats2half2_rn(1.0f, 1.0f));
  __syncthreads();
  const float2 sums = __half22float2(*pair);
  return static_cast<int>(sums.x) * 100 + static_cast<int>(sums.y);
}

// 112 threads count from 0 to 8 and begin again: 112 = 12 * 9 + 4.
__device__ int counted(unsigned* counter) {
  if (threadIdx.x == 0) *counter = 0;
  __syncthreads();
  atomicInc(counter, 8u);
  __syncthreads();
  return static_cast<int>(*counter);
}

#define COUNT(name, expression, expected) +1
constexpr int kChecks = 0 CHECKS(COUNT);

__global__ void run_checks(int* results) {
  ANYCHIP_SHARED(__half2, halves, 1);
  ANYCHIP_SHARED(unsigned, counter, 1);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const unsigned mask = thread < kThreads - kLanesOfLast ? kAll : (1u << kLanesOfLast) - 1;
  const auto block = cg::this_thread_block();
  const auto tile = cg::tiled_partition<16>(block);
  int same = 0;
  int* result = results + thread * kChecks;
#define RUN(name, expression, expected) *result++ = expression;
  CHECKS(RUN)
  (void)same;
}

int wrong_values(const int* results) {
  int wrong = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    const int lane = thread % 32;
    const int segment = lane & ~7;
    const int lanes = thread < kThreads - kLanesOfLast ? 32 : kLanesOfLast;
    const int existing = lanes == 32 ? -1 : (1 << lanes) - 1;
    const int thirds = 0x49249249;
    const int* result = results + thread * kChecks;
    (void)segment;
    const auto compare = [&](const char* name, int got, int want) {
      if (got == want) return;
      if (++wrong <= 10) {
        std::printf("%s, thread %d: expected %x, got %x\n", name, thread,
                    static_cast<unsigned>(want), static_cast<unsigned>(got));
      }
    };
#define COMPARE(name, expression, expected) compare(#name, *result++, expected);
    CHECKS(COMPARE)
  }
  return wrong;
}

}  // namespace

int main() {
  int* results = nullptr;
  cudaMallocManaged(&results, sizeof(int) * kThreads * kChecks);
  cudaError_t status =
      anychip::cuda::launch(run_checks, dim3(1), dim3(kThreads), 0, nullptr, results);
  if (status == cudaSuccess) status = cudaDeviceSynchronize();
  int wrong = 1;
  if (status == cudaSuccess) {
    wrong = wrong_values(results);
  } else {
    std::printf("%s\n", cudaGetErrorString(status));
  }
  std::printf("%d checks of %d threads, %d wrong\n", kChecks, kThreads, wrong);
  cudaFree(results);
  return wrong == 0 ? 0 : 1;
}
