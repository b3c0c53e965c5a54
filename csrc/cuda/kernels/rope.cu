// Rotary position embedding (Su et al. 2021, equation 34).
//
// Note: One position, its heads
//   All heads of q and k share a position's angles: a thread keeps the cosines and sines of its
//   part of a head in registers while it walks over the heads. A head is cut into units: first
//   those that are rotated (two vectors of the half layout, one of the interleaved layout), then
//   vectors that are copied.
#include "rope.h"

#include "vector.cuh"

namespace anychip::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kHeadsAhead = 2;  // heads of a thread that are loaded before the first is stored

// How the threads of a block divide the work: units of a head, then heads, then positions. The
// three are powers of two whose product is kThreads.
struct Lanes {
  int units;
  int heads;
  int positions;
};

int power_of_two(int64_t at_least, int at_most) {
  int found = 1;
  while (found < at_most && found < at_least) found *= 2;
  return found;
}

Lanes lanes_of(int64_t units, int64_t heads) {
  Lanes made;
  made.units = power_of_two(units, kThreads);
  made.heads = power_of_two((heads + kHeadsAhead - 1) / kHeadsAhead, kThreads / made.units);
  made.positions = kThreads / made.units / made.heads;
  return made;
}

struct Turned {
  float first, second;
};

// Which product is rounded is written out: left to the compiler, vectors and scalars would differ.
__device__ __forceinline__ Turned turn(float first, float second, float cos, float sin) {
  return {fmaf(first, cos, -(second * sin)), fmaf(second, cos, first * sin)};
}

// What one thread has of a head. A pair is (i, i + rotary_dim / 2) of two vectors.
template <class T, int N, bool kInterleaved>
struct Unit {
  static constexpr int kElements = N;
  static constexpr int kPairs = N;
  Adjacent<N, T> first, second;

  __device__ __forceinline__ void load(const T* from, int64_t half) {
    first = load_adjacent<N>(from);
    second = load_adjacent<N>(from + half);
  }
  __device__ __forceinline__ void store_rotated(T* to, int64_t half, const float (&cos)[kPairs],
                                                const float (&sin)[kPairs]) const {
    float left[N];
    float right[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Turned turned = turn(first[i], second[i], cos[i], sin[i]);
      left[i] = turned.first;
      right[i] = turned.second;
    }
    store(to, left);
    store(to + half, right);
  }
};

// Interleaved, a pair is (2 i, 2 i + 1): both numbers are in one vector, or two scalars.
template <class T, int N>
struct Unit<T, N, true> {
  static constexpr int kElements = N == 1 ? 2 : N;
  static constexpr int kPairs = kElements / 2;
  Adjacent<N, T> parts[kElements / N];

  __device__ __forceinline__ void load(const T* from, int64_t) {
#pragma unroll
    for (int i = 0; i < kElements / N; ++i) parts[i] = load_adjacent<N>(from + i * N);
  }
  __device__ __forceinline__ void store_rotated(T* to, int64_t, const float (&cos)[kPairs],
                                                const float (&sin)[kPairs]) const {
    float turned[kElements / N][N];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int even = 2 * i;
      const int odd = 2 * i + 1;
      const Turned pair = turn(parts[even / N][even % N], parts[odd / N][odd % N], cos[i], sin[i]);
      turned[even / N][even % N] = pair.first;
      turned[odd / N][odd % N] = pair.second;
    }
#pragma unroll
    for (int i = 0; i < kElements / N; ++i) store(to + i * N, turned[i]);
  }
};

template <int N>
__device__ __forceinline__ void load_angles(const float* __restrict__ from, float (&to)[N]) {
  if constexpr (N % kWidth<float> == 0) {
    load(from, to);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = from[i];
  }
}

struct Position {
  int64_t batch;
  int64_t place;  // in its sequence
};

// Where head number `head` of q's and then k's heads is read and written.
template <class T>
struct HeadAddress {
  const T* from;
  T* to;

  __device__ __forceinline__ HeadAddress(const Heads& q, const Heads& k, const Rotation& rotation,
                                         const Position& position, int64_t head) {
    const bool is_q = head < q.count;
    const Heads& own = is_q ? q : k;
    const int64_t at = is_q ? head : head - q.count;
    from = static_cast<const T*>(own.x) + position.batch * own.batch_stride +
           position.place * own.seq_stride + at * own.head_stride;
    const int64_t index = position.batch * rotation.seq + position.place;
    to = static_cast<T*>(own.y) + (index * own.count + at) * rotation.head_dim;
  }
};

// The heads from `lane` on in steps of lanes.heads: unit number `unit` of each.
template <class T, int N, bool kInterleaved>
__device__ __forceinline__ void rotate_unit(const Heads& q, const Heads& k,
                                            const Rotation& rotation, const Position& position,
                                            int64_t unit, int64_t lane, int64_t step) {
  using Own = Unit<T, N, kInterleaved>;
  const int64_t half = rotation.rotary_dim / 2;
  const int64_t angle = position.place * half + unit * Own::kPairs;
  float cos[Own::kPairs];
  float sin[Own::kPairs];
  load_angles(rotation.cos + angle, cos);
  load_angles(rotation.sin + angle, sin);
#pragma unroll
  for (int i = 0; i < Own::kPairs; ++i) sin[i] = rotation.inverse ? -sin[i] : sin[i];

  const int64_t heads = q.count + k.count;
  for (int64_t first = lane; first < heads; first += kHeadsAhead * step) {
    Own units[kHeadsAhead];
#pragma unroll
    for (int ahead = 0; ahead < kHeadsAhead; ++ahead) {
      const int64_t head = first + ahead * step;
      if (head >= heads) continue;
      const HeadAddress<T> address(q, k, rotation, position, head);
      units[ahead].load(address.from + unit * Own::kElements, half);
    }
#pragma unroll
    for (int ahead = 0; ahead < kHeadsAhead; ++ahead) {
      const int64_t head = first + ahead * step;
      if (head >= heads) continue;
      const HeadAddress<T> address(q, k, rotation, position, head);
      units[ahead].store_rotated(address.to + unit * Own::kElements, half, cos, sin);
    }
  }
}

template <class T, int N, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, 4)
    rope_kernel(Heads q, Heads k, Rotation rotation, Lanes lanes, unsigned blocks_per_sequence,
                int64_t rotated, int64_t copied) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t lane = thread / lanes.units % lanes.heads;
  // Divided in 32 bits: a 64-bit division is a call, around which registers are spilled.
  const Position position{blockIdx.x / blocks_per_sequence,
                          int64_t{blockIdx.x % blocks_per_sequence} * lanes.positions +
                              thread / lanes.units / lanes.heads};
  if (position.place >= rotation.seq) return;
  for (int64_t unit = thread % lanes.units; unit < rotated + copied; unit += lanes.units) {
    if (unit < rotated) {
      rotate_unit<T, N, kInterleaved>(q, k, rotation, position, unit, lane, lanes.heads);
      continue;
    }
    const int64_t at = rotation.rotary_dim + (unit - rotated) * N;
    for (int64_t head = lane; head < q.count + k.count; head += lanes.heads) {
      const HeadAddress<T> address(q, k, rotation, position, head);
      store_adjacent(address.to + at, load_adjacent<N>(address.from + at));
    }
  }
}

// Whether every vector of a tensor's heads is aligned.
template <class T>
bool is_aligned(const Heads& heads) {
  constexpr int64_t size = sizeof(T);
  return heads.count == 0 ||
         (is_vectorizable(heads.x, heads.batch_stride * size) && is_vectorizable(heads.y) &&
          is_vectorizable(heads.x, heads.seq_stride * size) &&
          is_vectorizable(heads.x, heads.head_stride * size));
}

template <class T, int N, bool kInterleaved>
cudaError_t launch_rope(const Heads& q, const Heads& k, const Rotation& rotation,
                        const Place& place) {
  using Own = Unit<T, N, kInterleaved>;
  const int64_t rotated = rotation.rotary_dim / (2 * Own::kPairs);
  const int64_t copied = (rotation.head_dim - rotation.rotary_dim) / N;
  const Lanes lanes = lanes_of(rotated + copied, q.count + k.count);
  const int64_t blocks = (rotation.seq + lanes.positions - 1) / lanes.positions;
  const dim3 grid(static_cast<unsigned>(rotation.batch * blocks));
  return launch(rope_kernel<T, N, kInterleaved>, grid, dim3(kThreads), 0, place.stream, q, k,
                rotation, lanes, static_cast<unsigned>(blocks), rotated, copied);
}

template <class T, bool kInterleaved>
cudaError_t launch_widest(const Heads& q, const Heads& k, const Rotation& rotation,
                          const Place& place) {
  constexpr int N = kWidth<T>;
  constexpr int kPairs = Unit<T, N, kInterleaved>::kPairs;
  const bool is_whole = rotation.rotary_dim % (2 * kPairs) == 0 && rotation.head_dim % N == 0 &&
                        rotation.rotary_dim % N == 0;
  if (is_whole && is_aligned<T>(q) && is_aligned<T>(k) && is_vectorizable(rotation.cos) &&
      is_vectorizable(rotation.sin)) {
    return launch_rope<T, N, kInterleaved>(q, k, rotation, place);
  }
  return launch_rope<T, 1, kInterleaved>(q, k, rotation, place);
}

}  // namespace

cudaError_t rope(const Heads& q, const Heads& k, const Rotation& rotation, DType dtype,
                 Place place) {
  const int64_t positions = rotation.batch * rotation.seq;
  const int64_t heads = q.count + k.count;
  if (q.count < 0 || k.count < 0 || positions < 0 || rotation.rotary_dim < 0 ||
      rotation.rotary_dim > rotation.head_dim || rotation.rotary_dim % 2 != 0) {
    return cudaErrorInvalidValue;
  }
  if (positions * heads * rotation.head_dim == 0) return cudaSuccess;
  return visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return rotation.interleaved ? launch_widest<T, true>(q, k, rotation, place)
                                : launch_widest<T, false>(q, k, rotation, place);
  });
}

}  // namespace anychip::cuda
