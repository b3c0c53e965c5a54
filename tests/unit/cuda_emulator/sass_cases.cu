// Kernels with one thing each that benchmarks/check_sass.py is there to see.

// As it should be: 16 bytes at a time.
__global__ void __launch_bounds__(256) good_vector_kernel(const float4* in, float4* out) {
  out[threadIdx.x] = in[threadIdx.x];
}

// Says vector, and moves 4 bytes at a time.
__global__ void __launch_bounds__(256) narrow_vector_kernel(const float* in, float* out) {
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = in[threadIdx.x * 4 + i] + 1.0f;
}

__global__ void __launch_bounds__(256) double_kernel(const float* in, float* out) {
  out[threadIdx.x] = static_cast<float>(in[threadIdx.x] * 3.14159265358979);
}

// Two blocks of 1,024 threads leave 32 registers to a thread; 64 values are alive at the barrier.
__global__ void __launch_bounds__(1024, 2) spilling_kernel(const float* in, float* out) {
  float values[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) values[i] = in[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) out[threadIdx.x + 1024 * i] = values[i] * values[63 - i];
}

// 40 KiB for 64 threads: on sm_90 five blocks fit, 320 of 2,048 threads.
__global__ void __launch_bounds__(64) crowded_kernel(const float* in, float* out) {
  __shared__ float values[10240];
  for (int i = threadIdx.x; i < 10240; i += 64) values[i] = in[i];
  __syncthreads();
  for (int i = threadIdx.x; i < 10240; i += 64) out[i] = values[10239 - i];
}
