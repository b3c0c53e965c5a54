// Norms, clipping and unscaling over lists of tensors: each element is read once, and written once
// where the operator writes.
#include "lists.h"

#include "columns.h"
#include "squares.cuh"

namespace anychip::cuda {
namespace {

using Table = TensorTable<1, 160>;

constexpr int kNormThreads = 1024;
// Vectors of a thread that are loaded before the first is used: 64 bytes.
constexpr int kInFlight = 4;

int64_t describe(const TensorList& tensors, size_t index, Table& table, int slot) {
  const int64_t data = tensors.data[index];
  const int64_t numel = tensors.numel[index];
  const int64_t type = tensors.dtype[index];
  const int64_t bytes = element_bytes(type);
  if (numel < 0 || (numel > 0 && (data == 0 || data % bytes != 0))) return -1;
  const int64_t head = head_of(data, bytes, kAccessBytes / bytes);
  table.data[0][slot] = reinterpret_cast<void*>(data);
  table.numel[slot] = numel;
  table.traits[slot] = static_cast<uint32_t>(type | head << kHeadShift);
  return chunks_of(numel, head);
}

// body(data, values) for all elements of a part, in vectors float (&)[N] read from data + 0 to N.
template <class T, class Body>
__device__ __forceinline__ void for_each_vector(T* data, const Part& part, const Body& body) {
  constexpr int width = kWidth<T>;
  const int vectors = static_cast<int>(part.end - part.begin) / width;
  T* first = data + part.begin;
  for (int start = threadIdx.x; start < vectors; start += kListThreads * kInFlight) {
    float values[kInFlight][width];
#pragma unroll
    for (int step = 0; step < kInFlight; ++step) {
      const int vector = start + step * kListThreads;
      if (vector < vectors) load(first + vector * width, values[step]);
    }
#pragma unroll
    for (int step = 0; step < kInFlight; ++step) {
      const int vector = start + step * kListThreads;
      if (vector < vectors) body(first + vector * width, values[step]);
    }
  }
  // The head, and the tail: each shorter than a vector.
  float one[1];
  if (threadIdx.x < static_cast<unsigned>(part.head)) {
    load(data + threadIdx.x, one);
    body(data + threadIdx.x, one);
  }
  T* last = first + vectors * width + threadIdx.x;
  if (last < data + part.end) {
    load(last, one);
    body(last, one);
  }
}

// The same for what this block works on.
template <class Body>
__device__ __forceinline__ void for_each_vector(const Table& table, const Body& body) {
  int tensor;
  const Part part = part_of_block(table, tensor);
  void* data = table.data[0][tensor];
  switch (static_cast<DType>(type_of(table.traits[tensor], 0))) {
    case DType::kFloat32:
      return for_each_vector(static_cast<float*>(data), part, body);
    case DType::kBFloat16:
      return for_each_vector(static_cast<BFloat16*>(data), part, body);
    case DType::kFloat16:
      return for_each_vector(static_cast<Float16*>(data), part, body);
  }
}

// Note [Norm in two launches]: a chunk's sum goes to its own place, and one block adds them up.
// Both orders depend on the list alone, so that the bits do.
__global__ void __launch_bounds__(kListThreads)
    chunk_norms_kernel(const __grid_constant__ Table table, float* sums) {
  ANYCHIP_SHARED(float, scratch, kMaxWarps);
  float sum[4] = {};
  for_each_vector(table, [&](const auto*, const auto& values) {
    constexpr int count = sizeof(values) / sizeof(float);
#pragma unroll
    for (int i = 0; i < count; ++i) sum[i % 4] = fmaf(values[i], values[i], sum[i % 4]);
  });
  float total[1] = {(sum[0] + sum[1]) + (sum[2] + sum[3])};
  block_sum(total, scratch);
  if (threadIdx.x == 0) sums[table.chunks_before + blockIdx.x] = total[0];
}

__global__ void __launch_bounds__(kNormThreads)
    norm_kernel(const float* sums, int64_t count, float* out) {
  ANYCHIP_SHARED(float, scratch, kMaxWarps);
  float total[1] = {};
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kNormThreads) total[0] += sums[i];
  block_sum(total, scratch);
  if (threadIdx.x == 0) *out = sqrtf(total[0]);
}

// All in the first: 2 kHalf terms, the second half to the first, and so on.
template <int kHalf, int kTerms>
__device__ __forceinline__ void add_halves(double (&terms)[kTerms]) {
#pragma unroll
  for (int k = 0; k < kHalf; ++k) terms[k] += terms[k + kHalf];
  if constexpr (kHalf > 1) add_halves<kHalf / 2>(terms);
}

// A sum's digits, each from 0 to 2^32 - 1; what is above the last one is dropped, as in
// anychip.operators.squares.
struct CarriedSum {
  uint32_t digits[kInfinities];
  bool is_infinite, is_nan;

  __device__ __forceinline__ explicit CarriedSum(const int64_t* row)
      : is_infinite(row[kInfinities] > 0), is_nan(row[kNaNs] > 0) {
    int64_t carry = 0;
#pragma unroll
    for (int k = 0; k < kInfinities; ++k) {
      const int64_t digit = row[k] + carry;
      digits[k] = static_cast<uint32_t>(digit);
      carry = digit >> 32;
    }
  }

  // Rounded twice, to float64 and to float32; added in the pairs of anychip.operators.squares.root.
  __device__ __forceinline__ float root() const {
    constexpr int kPlaces = 32;
    double terms[kPlaces];
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      terms[k] = k < kInfinities ? power_of_two(32 * k + kLowest, digits[k]) : 0.0;
    }
    add_halves<kPlaces / 2>(terms);
    if (is_nan) return NAN;
    return static_cast<float>(is_infinite ? INFINITY : sqrt(terms[0]));
  }
};

// A thread has a row.
__global__ void __launch_bounds__(kListThreads) carry_kernel(int64_t* rows, int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  if (index >= count) return;
  int64_t* row = rows + index * kDigits;
  const CarriedSum sum(row);
#pragma unroll
  for (int k = 0; k < kInfinities; ++k) row[k] = sum.digits[k];
}

__global__ void __launch_bounds__(kListThreads)
    ratios_kernel(const int64_t* rows, int64_t count, float* ratios) {
  const int64_t index = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  if (index >= count) return;
  const float above = CarriedSum(rows + index * kDigits).root();
  const float below = CarriedSum(rows + (count + index) * kDigits).root();
  ratios[index] = above > 0.0f && below > 0.0f ? above / below : 1.0f;
}

__global__ void __launch_bounds__(kListThreads)
    clip_kernel(const __grid_constant__ Table table, const float* norm, float max_norm) {
  const float ratio = max_norm / (*norm + 1e-6f);
  // Multiplying by 1 would change nothing. A NaN goes on, and makes the tensors NaN.
  if (ratio >= 1.0f) return;
  for_each_vector(table, [&](auto* to, auto& values) {
    for (float& value : values) value *= ratio;
    store(to, values);
  });
}

// Of what was stored: a float16 that overflows by the division counts too.
template <class T>
__device__ __forceinline__ bool is_stored_finite(float value) {
  return fabsf(rounded<T>(value)) < INFINITY;
}

__global__ void __launch_bounds__(kListThreads)
    unscale_kernel(const __grid_constant__ Table table, const float* scale, float* found_inf) {
  const float divisor = *scale;
  bool is_finite = true;
  for_each_vector(table, [&](auto* to, auto& values) {
    for (float& value : values) {
      value /= divisor;
      is_finite = is_finite && is_stored_finite<std::decay_t<decltype(*to)>>(value);
    }
    store(to, values);
  });
  // Every block that writes writes the same; without a race, as there may be several.
  if (__syncthreads_or(!is_finite) && threadIdx.x == 0) atomicExch(found_inf, 1.0f);
}

template <class Kernel, class... Arguments>
cudaError_t launch_over(const TensorList& tensors, const Place& place, Kernel kernel,
                        Arguments... arguments) {
  return for_each_table<Table>(
      tensors.size(),
      [&](size_t index, Table& table, int slot) { return describe(tensors, index, table, slot); },
      [&](const Table& table, int64_t chunks) {
        return launch(kernel, dim3(static_cast<unsigned>(chunks)), dim3(kListThreads), 0,
                      place.stream, table, arguments...);
      });
}

struct TensorSource {
  static constexpr int kSums = 1, kAhead = 2;

  template <bool kWide>
  struct Of {
    Elements<kWide> elements;

    template <int N>
    __device__ __forceinline__ void load(int i, float (&values)[1][N]) const {
      elements.load(i, values[0]);
    }
  };

  template <class Visit>
  __device__ __forceinline__ void visit(const Table& table, int tensor, int64_t first,
                                        const Visit& visit) const {
    visit_elements(table.data[0][tensor], type_of(table.traits[tensor], 0), [&](auto elements) {
      elements.data = elements.at(first);
      visit(of(elements));
    });
  }

 private:
  template <bool kWide>
  static __device__ __forceinline__ Of<kWide> of(const Elements<kWide>& elements) {
    return {elements};
  }
};

}  // namespace

cudaError_t l2_norm(const TensorList& tensors, float* scratch, int64_t room, float* out,
                    Place place) {
  int64_t needed = 0;
  for (size_t index = 0; index < tensors.size(); ++index) {
    const int64_t bytes = element_bytes(tensors.dtype[index]);
    const int64_t head = head_of(tensors.data[index], bytes, kAccessBytes / bytes);
    needed += chunks_of(tensors.numel[index], head);
  }
  if (out == nullptr || needed > room || (needed > 0 && scratch == nullptr)) {
    return cudaErrorInvalidValue;
  }
  const cudaError_t status = launch_over(tensors, place, chunk_norms_kernel, scratch);
  if (status != cudaSuccess) return status;
  return launch(norm_kernel, dim3(1), dim3(kNormThreads), 0, place.stream, scratch, needed, out);
}

cudaError_t sums_of_squares(const TensorList& tensors, int64_t* rows, Place place) {
  if (rows == nullptr && tensors.size() > 0) return cudaErrorInvalidValue;
  return for_each_table<Table>(
      tensors.size(),
      [&](size_t index, Table& table, int slot) -> int64_t {
        const int64_t data = tensors.data[index];
        const int64_t numel = tensors.numel[index];
        const int64_t type = tensors.dtype[index];
        if (numel < 0 || (numel > 0 && data == 0)) return -1;
        const bool vectors = data % (4 * element_bytes(type)) == 0;
        table.data[0][slot] = reinterpret_cast<void*>(data);
        table.numel[slot] = numel;
        table.traits[slot] = static_cast<uint32_t>(type) | (vectors ? kVectors : 0u);
        return chunks_of_squares(numel);
      },
      [&](const Table& table, int64_t chunks) {
        return launch(squares_kernel<Table, TensorSource>, dim3(static_cast<unsigned>(chunks)),
                      dim3(kListThreads), 0, place.stream, table, TensorSource{},
                      reinterpret_cast<Digit*>(rows), int64_t{0});
      });
}

cudaError_t carry_sums(int64_t* rows, int64_t count, Place place) {
  if (count < 0 || (count > 0 && rows == nullptr)) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(count, kListThreads)));
  return launch(carry_kernel, grid, dim3(kListThreads), 0, place.stream, rows, count);
}

cudaError_t ratios_of_sums(const int64_t* rows, int64_t count, float* ratios, Place place) {
  const bool is_given = rows != nullptr && ratios != nullptr;
  if (count < 0 || (count > 0 && !is_given)) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(count, kListThreads)));
  return launch(ratios_kernel, grid, dim3(kListThreads), 0, place.stream, rows, count, ratios);
}

Part list_part(int64_t numel, int64_t head, int64_t chunk) { return part_of(numel, head, chunk); }

cudaError_t clip(const TensorList& tensors, const float* norm, float max_norm, Place place) {
  if (norm == nullptr) return cudaErrorInvalidValue;
  return launch_over(tensors, place, clip_kernel, norm, max_norm);
}

cudaError_t unscale_and_check(const TensorList& grads, const float* scale, float* found_inf,
                              Place place) {
  if (scale == nullptr || found_inf == nullptr) return cudaErrorInvalidValue;
  return launch_over(grads, place, unscale_kernel, scale, found_inf);
}

}  // namespace anychip::cuda
