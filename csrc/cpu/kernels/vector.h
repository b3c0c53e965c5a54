// Sixteen float32 lanes that mean the same on every instruction set.
//
// A kernel file is compiled once per instruction set into a namespace of its own (ANYCHIP_ISA). A
// register of that set holds 4, 8 or 16 lanes; wider vectors are pairs of narrower ones, so that
// F32 and U32 always have 16. Sums are taken lane by lane and combined in one written order, and
// nothing is contracted to a fused multiply-add (-ffp-contract=off).
//
// Note [Same bits]: a kernel gives the same bits on every instruction set and with every number of
// threads; only the sign and payload of a NaN may differ. The tests compare them.
//
// Note [No shared symbols]: a function that is not inlined must not be merged by the linker with
// the copy of another instruction set. All of it lives in the namespace of the set, and kernels use
// no templates of the standard library (a test reads the symbol tables).
#pragma once

#include <cstdint>
#include <utility>

#include "../dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef ANYCHIP_ISA
#error "ANYCHIP_ISA, the namespace of this instruction set, is defined by csrc/cpu/CMakeLists.txt"
#endif

#define ANYCHIP_INLINE [[gnu::always_inline]] inline

namespace anychip::cpu::ANYCHIP_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX2__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif

typedef float RegisterF __attribute__((vector_size(4 * kRegisterLanes)));
typedef uint32_t RegisterU __attribute__((vector_size(4 * kRegisterLanes)));
typedef int32_t RegisterI __attribute__((vector_size(4 * kRegisterLanes)));
typedef uint16_t RegisterH __attribute__((vector_size(2 * kRegisterLanes)));
typedef uint8_t RegisterB __attribute__((vector_size(kRegisterLanes)));
typedef double RegisterD __attribute__((vector_size(4 * kRegisterLanes)));

template <class Half>
struct Pair {
  Half low, high;
};

template <class Register, int count>
struct Repeat {
  using Type = Pair<typename Repeat<Register, count / 2>::Type>;
};
template <class Register>
struct Repeat<Register, 1> {
  using Type = Register;
};

using F32 = Repeat<RegisterF, kLanes / kRegisterLanes>::Type;
using U32 = Repeat<RegisterU, kLanes / kRegisterLanes>::Type;
using Mask = Repeat<RegisterI, kLanes / kRegisterLanes>::Type;  // a lane is 0 or -1

template <class V>
struct ScalarOf;
template <>
struct ScalarOf<RegisterF> {
  using Type = float;
};
template <>
struct ScalarOf<RegisterU> {
  using Type = uint32_t;
};
template <>
struct ScalarOf<RegisterI> {
  using Type = int32_t;
};
template <>
struct ScalarOf<RegisterH> {
  using Type = uint16_t;
};
template <>
struct ScalarOf<RegisterD> {
  using Type = double;
};
template <class H>
struct ScalarOf<Pair<H>> : ScalarOf<H> {};
template <class V>
using Scalar = typename ScalarOf<V>::Type;
template <class V>
constexpr int64_t kLanesOf = sizeof(V) / sizeof(Scalar<V>);

// Registers have the compiler's operators; pairs get the same ones, with a scalar on either side.
#define ANYCHIP_PAIR_OPERATOR(op)                                            \
  template <class H>                                                         \
  ANYCHIP_INLINE auto operator op(Pair<H> a, Pair<H> b) {                    \
    return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high}; \
  }                                                                          \
  template <class H>                                                         \
  ANYCHIP_INLINE auto operator op(Pair<H> a, Scalar<H> b) {                  \
    return Pair<decltype(a.low op b)>{a.low op b, a.high op b};              \
  }                                                                          \
  template <class H>                                                         \
  ANYCHIP_INLINE auto operator op(Scalar<H> a, Pair<H> b) {                  \
    return Pair<decltype(a op b.low)>{a op b.low, a op b.high};              \
  }
ANYCHIP_PAIR_OPERATOR(+)
ANYCHIP_PAIR_OPERATOR(-)
ANYCHIP_PAIR_OPERATOR(*)
ANYCHIP_PAIR_OPERATOR(/)
ANYCHIP_PAIR_OPERATOR(&)
ANYCHIP_PAIR_OPERATOR(|)
ANYCHIP_PAIR_OPERATOR(^)
ANYCHIP_PAIR_OPERATOR(<)
ANYCHIP_PAIR_OPERATOR(>)
ANYCHIP_PAIR_OPERATOR(>=)
ANYCHIP_PAIR_OPERATOR(==)
ANYCHIP_PAIR_OPERATOR(<<)
ANYCHIP_PAIR_OPERATOR(>>)
#undef ANYCHIP_PAIR_OPERATOR

// All lanes equal to `value` (value - 0 is value, also for -0).
template <class V>
ANYCHIP_INLINE V fill(Scalar<V> value) {
  return value - V{};
}

// Lanes 0, 1, ... kLanes - 1.
ANYCHIP_INLINE void count_lanes(RegisterU& out, uint32_t first) {
  for (int k = 0; k < kRegisterLanes; ++k) out[k] = first + k;
}
template <class H>
ANYCHIP_INLINE void count_lanes(Pair<H>& out, uint32_t first) {
  count_lanes(out.low, first);
  count_lanes(out.high, first + sizeof(H) / 4);
}

ANYCHIP_INLINE RegisterU bits_of(RegisterF v) { return reinterpret_cast<RegisterU>(v); }
ANYCHIP_INLINE RegisterF float_of(RegisterU v) { return reinterpret_cast<RegisterF>(v); }
template <class H>
ANYCHIP_INLINE auto bits_of(Pair<H> v) {
  return Pair<decltype(bits_of(v.low))>{bits_of(v.low), bits_of(v.high)};
}
template <class H>
ANYCHIP_INLINE auto float_of(Pair<H> v) {
  return Pair<decltype(float_of(v.low))>{float_of(v.low), float_of(v.high)};
}

// mask ? a : b, lane by lane.
ANYCHIP_INLINE RegisterF select(RegisterI mask, RegisterF a, RegisterF b) { return mask ? a : b; }
ANYCHIP_INLINE RegisterU select(RegisterI mask, RegisterU a, RegisterU b) { return mask ? a : b; }
template <class M, class H>
ANYCHIP_INLINE Pair<H> select(Pair<M> mask, Pair<H> a, Pair<H> b) {
  return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
}

ANYCHIP_INLINE RegisterF sqrt(RegisterF v) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(v);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(v);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(v);
#else
  for (int k = 0; k < kRegisterLanes; ++k) v[k] = __builtin_sqrtf(v[k]);
  return v;
#endif
}
template <class H>
ANYCHIP_INLINE Pair<H> sqrt(Pair<H> v) {
  return {sqrt(v.low), sqrt(v.high)};
}

ANYCHIP_INLINE F32 abs(F32 v) { return float_of(bits_of(v) & 0x7fffffffu); }

// a > b ? a : b and a < b ? a : b: the second argument where one is NaN. x86 has exactly these.
ANYCHIP_INLINE RegisterF maximum(RegisterF a, RegisterF b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return select(a > b, a, b);
#endif
}
ANYCHIP_INLINE RegisterF minimum(RegisterF a, RegisterF b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return select(a < b, a, b);
#endif
}
template <class H>
ANYCHIP_INLINE Pair<H> maximum(Pair<H> a, Pair<H> b) {
  return {maximum(a.low, b.low), maximum(a.high, b.high)};
}
template <class H>
ANYCHIP_INLINE Pair<H> minimum(Pair<H> a, Pair<H> b) {
  return {minimum(a.low, b.low), minimum(a.high, b.high)};
}

// Lane k of the result is lane Pattern::source(k) of a, or, past its end, of b.
template <class Pattern, class Register, int... k>
ANYCHIP_INLINE Register shuffle(Register a, Register b, std::integer_sequence<int, k...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Pattern::source(k)...);
#else
  return __builtin_shuffle(a, b, RegisterI{Pattern::source(k)...});
#endif
}
template <class Pattern, class Register>
ANYCHIP_INLINE Register shuffle(Register a, Register b) {
  return shuffle<Pattern>(a, b, std::make_integer_sequence<int, kRegisterLanes>{});
}

// Each lane gets the other lane of its pair: 1, 0, 3, 2, ...
struct OtherOfPair {
  static constexpr int source(int k) { return k ^ 1; }
};
ANYCHIP_INLINE RegisterF swap_neighbours(RegisterF v) { return shuffle<OtherOfPair>(v, v); }
template <class H>
ANYCHIP_INLINE Pair<H> swap_neighbours(Pair<H> v) {
  return {swap_neighbours(v.low), swap_neighbours(v.high)};
}

// fused() without an instruction for it. The product is exact in float64, and the sum, rounded to
// odd there, rounds to float32 as the exact one does (Boldo and Melquiond 2008, IEEE Transactions
// on Computers 57). Called, because in each place where it is inlined it takes the compiler long.
[[gnu::noinline]] inline RegisterF fused_by_doubles(RegisterF a, RegisterF b, RegisterF c) {
  typedef double Doubles __attribute__((vector_size(8 * kRegisterLanes)));
  typedef int64_t Bits __attribute__((vector_size(8 * kRegisterLanes)));
  const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
  const Doubles added = __builtin_convertvector(c, Doubles), sum = product + added;
  const Doubles most = sum - product, rest = (product - (sum - most)) + (added - most);
  const Bits bits = reinterpret_cast<Bits>(sum), even = (bits & 1) - 1;
  const Bits larger = ((rest > 0.0) ^ (sum < 0.0)) & 2;
  const Bits odd = bits + (((rest > 0.0) | (rest < 0.0)) & even & (larger - 1));
  return __builtin_convertvector(reinterpret_cast<Doubles>(odd), RegisterF);
}

// a * b + c, rounded once.
ANYCHIP_INLINE RegisterF fused(RegisterF a, RegisterF b, RegisterF c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__FP_FAST_FMAF)
  for (int k = 0; k < kRegisterLanes; ++k) c[k] = __builtin_fmaf(a[k], b[k], c[k]);
  return c;
#else
  return fused_by_doubles(a, b, c);
#endif
}
template <class H>
ANYCHIP_INLINE Pair<H> fused(Pair<H> a, Pair<H> b, Pair<H> c) {
  return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
}

// Memory. The address needs no alignment beyond that of its element.
ANYCHIP_INLINE void read(RegisterF& v, const float* p) { __builtin_memcpy(&v, p, sizeof v); }
ANYCHIP_INLINE void read(RegisterU& v, const uint32_t* p) { __builtin_memcpy(&v, p, sizeof v); }
// Narrow numbers by hand: GCC 12 takes many of them through a register one by one.
ANYCHIP_INLINE void read(RegisterU& v, const uint16_t* p) {
  RegisterH half;
  __builtin_memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)
  v = reinterpret_cast<RegisterU>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(half)));
#elif defined(__AVX2__)
  v = reinterpret_cast<RegisterU>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(half)));
#else
  v = __builtin_convertvector(half, RegisterU);
#endif
}
ANYCHIP_INLINE void read(RegisterU& v, const uint8_t* p) {
#if defined(__AVX512F__)
  v = reinterpret_cast<RegisterU>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  v = reinterpret_cast<RegisterU>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  RegisterB bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  v = __builtin_convertvector(bytes, RegisterU);
#endif
}
ANYCHIP_INLINE void write(float* p, RegisterF v) { __builtin_memcpy(p, &v, sizeof v); }
ANYCHIP_INLINE void write(uint32_t* p, RegisterU v) { __builtin_memcpy(p, &v, sizeof v); }
// Lanes below 2^16 as halves.
ANYCHIP_INLINE RegisterH halves(RegisterU v) {
#if defined(__AVX512F__)
  return reinterpret_cast<RegisterH>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const auto low = reinterpret_cast<__m256i>(v);
  return reinterpret_cast<RegisterH>(
      _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
  return __builtin_convertvector(v, RegisterH);
#endif
}
template <class H>
ANYCHIP_INLINE auto halves(Pair<H> v) {
  return Pair<decltype(halves(v.low))>{halves(v.low), halves(v.high)};
}
ANYCHIP_INLINE void write(uint16_t* p, RegisterH v) { __builtin_memcpy(p, &v, sizeof v); }
ANYCHIP_INLINE void write(uint16_t* p, RegisterU v) { write(p, halves(v)); }
#if defined(__AVX2__) && !defined(__AVX512F__)
// Two registers at once, which takes fewer instructions.
typedef uint16_t TwoRegistersH __attribute__((vector_size(4 * kRegisterLanes)));
ANYCHIP_INLINE TwoRegistersH halves(Pair<RegisterU> v) {
  const __m256i packed =
      _mm256_packus_epi32(reinterpret_cast<__m256i>(v.low), reinterpret_cast<__m256i>(v.high));
  return reinterpret_cast<TwoRegistersH>(_mm256_permute4x64_epi64(packed, 0xd8));
}
ANYCHIP_INLINE void write(uint16_t* p, TwoRegistersH v) { __builtin_memcpy(p, &v, sizeof v); }
#endif
// The low byte of each lane.
ANYCHIP_INLINE void write(uint8_t* p, RegisterU v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m256i low = reinterpret_cast<__m256i>(v & 0xffu);
  const __m128i half =
      _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(half, half));
#else
  const RegisterB bytes = __builtin_convertvector(v, RegisterB);
  __builtin_memcpy(p, &bytes, sizeof bytes);
#endif
}

// bfloat16 is the upper half of a float32. To bfloat16: round to nearest even; NaN as torch has it.
ANYCHIP_INLINE F32 from_bfloat16(U32 half) { return float_of(half << 16); }
// Rounded, with the rest of its bits below.
ANYCHIP_INLINE U32 round_upper_half(U32 bits) {
#if defined(__AVX512F__)
  return select((bits & 0x10000u) == 0u, bits + 0x7fffu, bits + 0x8000u);  // an addition by a mask
#else
  return bits + 0x7fffu + ((bits >> 16) & 1u);
#endif
}
ANYCHIP_INLINE U32 to_bfloat16(F32 v) {
  return select(v == v, round_upper_half(bits_of(v)) >> 16, fill<U32>(0x7fc0u));
}

// float16, by instructions that the levels of AVX-512 and of AVX2 both have, or else: exponents
// differ by 112; the subtraction of 2^-14 makes float16's subnormal numbers normal. To float16:
// round to nearest even; the addition of 1/2 rounds those that become subnormal.
#if defined(__AVX512F__)
ANYCHIP_INLINE void read(RegisterF& v, const Float16* p) {
  v = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
ANYCHIP_INLINE RegisterH to_float16(RegisterF v) {
  return reinterpret_cast<RegisterH>(
      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__F16C__)
ANYCHIP_INLINE void read(RegisterF& v, const Float16* p) {
  v = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
ANYCHIP_INLINE RegisterH to_float16(RegisterF v) {
  return reinterpret_cast<RegisterH>(
      _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
ANYCHIP_INLINE void read(RegisterF& v, const Float16* p) {
  RegisterU half;
  read(half, &p->bits);
  const RegisterU exponent_and_fraction = (half & 0x7fffu) << 13;
  const RegisterU exponent = exponent_and_fraction & 0x0f800000u;
  const RegisterU normal = exponent_and_fraction + 0x38000000u;
  const RegisterU subnormal = bits_of(float_of(normal + 0x00800000u) - 0x1p-14f);
  const RegisterU special = normal + 0x38000000u;  // infinity and NaN
  const RegisterU magnitude =
      select(exponent == 0u, subnormal, select(exponent == 0x0f800000u, special, normal));
  v = float_of(magnitude | ((half & 0x8000u) << 16));
}
ANYCHIP_INLINE RegisterH to_float16(RegisterF v) {
  const RegisterU bits = bits_of(v);
  const RegisterU magnitude = bits & 0x7fffffffu;
  const RegisterU normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  const RegisterU subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const RegisterU special =
      select(magnitude > 0x7f800000u, fill<RegisterU>(0x7e00u), fill<RegisterU>(0x7c00u));
  const RegisterU half =
      select(magnitude >= 0x47800000u, special, select(magnitude < 0x38800000u, subnormal, normal));
  return halves(half | ((bits >> 16) & 0x8000u));
}
#endif
template <class H>
ANYCHIP_INLINE auto to_float16(Pair<H> v) {
  return Pair<decltype(to_float16(v.low))>{to_float16(v.low), to_float16(v.high)};
}

template <class H, class T>
ANYCHIP_INLINE void read(Pair<H>& v, const T* p) {
  read(v.low, p);
  read(v.high, p + kLanesOf<H>);
}
template <class H, class T>
ANYCHIP_INLINE void write(T* p, Pair<H> v) {
  write(p, v.low);
  write(p + kLanesOf<H>, v.high);
}

// Which lanes a load or store touches.
struct AllLanes {};
struct FirstLanes {
  int64_t count;  // 1 ... kLanes - 1
};

ANYCHIP_INLINE F32 load(const float* p, AllLanes) {
  F32 v;
  read(v, p);
  return v;
}
ANYCHIP_INLINE F32 load(const BFloat16* p, AllLanes) {
  U32 half;
  read(half, &p->bits);
  return from_bfloat16(half);
}
ANYCHIP_INLINE F32 load(const Float16* p, AllLanes) {
  F32 v;
  read(v, p);
  return v;
}
ANYCHIP_INLINE void store(float* p, F32 v, AllLanes) { write(p, v); }
ANYCHIP_INLINE void store(BFloat16* p, F32 v, AllLanes) { write(&p->bits, halves(to_bfloat16(v))); }
ANYCHIP_INLINE void store(Float16* p, F32 v, AllLanes) { write(&p->bits, to_float16(v)); }

// The same past the caches, to a multiple of the vector's size: Note [Past the caches] in cache.h.
template <class Register>
ANYCHIP_INLINE void write_past(void* p, Register v) {
#if defined(__AVX512F__)
  if constexpr (sizeof v == 64) {
    return _mm512_stream_si512(static_cast<__m512i*>(p), reinterpret_cast<__m512i>(v));
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof v == 32) {
    return _mm256_stream_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(v));
  }
#endif
#if defined(__SSE2__)
  if constexpr (sizeof v == 16) {
    return _mm_stream_si128(static_cast<__m128i*>(p), reinterpret_cast<__m128i>(v));
  }
#endif
  __builtin_memcpy(p, &v, sizeof v);
}
template <class H>
ANYCHIP_INLINE void write_past(void* p, Pair<H> v) {
  write_past(p, v.low);
  write_past(static_cast<char*>(p) + sizeof v.low, v.high);
}
ANYCHIP_INLINE void store_past(float* p, F32 v) { write_past(p, v); }
ANYCHIP_INLINE void store_past(BFloat16* p, F32 v) { write_past(p, halves(to_bfloat16(v))); }
ANYCHIP_INLINE void store_past(Float16* p, F32 v) { write_past(p, to_float16(v)); }

// A store past the caches or not; after the last one a thread calls finish_stores.
template <class T>
ANYCHIP_INLINE void store(T* p, F32 v, AllLanes lanes, bool past) {
  past ? store_past(p, v) : store(p, v, lanes);
}
ANYCHIP_INLINE void finish_stores(bool past) {
#if defined(__SSE2__)
  if (past) _mm_sfence();  // what other threads read is there when they hear of it
#endif
}

// Of 32 bfloat16 numbers those at even and at odd places, as two vectors. A shift or a mask makes
// float32 of them, and they are stored without being narrowed, which takes fewer instructions than
// what lies side by side.
template <class T>
constexpr bool kHasTwoVectors = false;
struct EvenLanes {};
struct OddLanes {};
struct TwoVectors {};
template <class V>
ANYCHIP_INLINE Pair<V> joined(V even, V odd) {
  return {even, odd};
}
#if defined(__AVX512F__)
template <>
constexpr bool kHasTwoVectors<BFloat16> = true;
ANYCHIP_INLINE F32 load(const BFloat16* p, EvenLanes) {
  U32 both;
  read(both, reinterpret_cast<const uint32_t*>(p));
  return float_of(both << 16);
}
ANYCHIP_INLINE F32 load(const BFloat16* p, OddLanes) {
  U32 both;
  read(both, reinterpret_cast<const uint32_t*>(p));
  return float_of(both & 0xffff0000u);
}
ANYCHIP_INLINE void store(BFloat16* p, Pair<F32> v, TwoVectors, bool past) {
  const U32 odd =
      select(v.high == v.high, round_upper_half(bits_of(v.high)), fill<U32>(0x7fc00000u));
  const U32 both = to_bfloat16(v.low) | (odd & 0xffff0000u);
  past ? write_past(p, both) : write(reinterpret_cast<uint32_t*>(p), both);
}
#endif

// The first `count` of kLanes numbers, by moves of fixed sizes: a copy of any size is a call.
template <class T>
ANYCHIP_INLINE void copy_first(T* to, const T* from, int64_t count) {
  static_assert(kLanes == 16);
  int64_t at = 0;
  if (count & 8) __builtin_memcpy(to, from, 8 * sizeof(T)), at = 8;
  if (count & 4) __builtin_memcpy(to + at, from + at, 4 * sizeof(T)), at += 4;
  if (count & 2) __builtin_memcpy(to + at, from + at, 2 * sizeof(T)), at += 2;
  if (count & 1) __builtin_memcpy(to + at, from + at, sizeof(T));
}

// Lanes that are not loaded are 0; memory past the last one is not touched.
template <class T>
ANYCHIP_INLINE F32 load(const T* p, FirstLanes lanes) {
  T buffer[kLanes] = {};
  copy_first(buffer, p, lanes.count);
  return load(buffer, AllLanes{});
}
template <class T>
ANYCHIP_INLINE void store(T* p, F32 v, FirstLanes lanes) {
  T buffer[kLanes];
  store(buffer, v, AllLanes{});
  copy_first(p, buffer, lanes.count);
}
#if defined(__AVX512F__)
ANYCHIP_INLINE uint16_t mask_of(FirstLanes lanes) {
  return static_cast<uint16_t>((1u << lanes.count) - 1u);
}
ANYCHIP_INLINE F32 load(const float* p, FirstLanes lanes) {
  return _mm512_maskz_loadu_ps(mask_of(lanes), p);
}
ANYCHIP_INLINE F32 load(const BFloat16* p, FirstLanes lanes) {
  return from_bfloat16(
      reinterpret_cast<U32>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask_of(lanes), p))));
}
ANYCHIP_INLINE F32 load(const Float16* p, FirstLanes lanes) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask_of(lanes), p));
}
ANYCHIP_INLINE void store(float* p, F32 v, FirstLanes lanes) {
  _mm512_mask_storeu_ps(p, mask_of(lanes), v);
}
ANYCHIP_INLINE void store(BFloat16* p, F32 v, FirstLanes lanes) {
  const RegisterH half = halves(to_bfloat16(v));
  _mm256_mask_storeu_epi16(p, mask_of(lanes), reinterpret_cast<__m256i>(half));
}
ANYCHIP_INLINE void store(Float16* p, F32 v, FirstLanes lanes) {
  _mm256_mask_storeu_epi16(p, mask_of(lanes), reinterpret_cast<__m256i>(to_float16(v)));
}
#elif defined(__AVX2__)
ANYCHIP_INLINE F32 load(const float* p, FirstLanes lanes) {
  U32 index;
  count_lanes(index, 0);
  const Mask mask = index < static_cast<uint32_t>(lanes.count);
  return {_mm256_maskload_ps(p, reinterpret_cast<__m256i>(mask.low)),
          _mm256_maskload_ps(p + kRegisterLanes, reinterpret_cast<__m256i>(mask.high))};
}
#endif
template <class T>
ANYCHIP_INLINE void store(T* p, F32 v, FirstLanes lanes, bool) {
  store(p, v, lanes);
}

// As T stores them.
template <class T>
ANYCHIP_INLINE F32 rounded(F32 v) {
  T buffer[kLanes];
  store(buffer, v, AllLanes{});
  return load(buffer, AllLanes{});
}

// The lanes that are not among `lanes` become `value`.
ANYCHIP_INLINE F32 replace_rest(F32 v, AllLanes, float) { return v; }
ANYCHIP_INLINE F32 replace_rest(F32 v, FirstLanes lanes, float value) {
  U32 index;
  count_lanes(index, 0);
  return select(index < static_cast<uint32_t>(lanes.count), v, fill<F32>(value));
}

ANYCHIP_INLINE float load_one(const float* p) { return *p; }
template <class T>
ANYCHIP_INLINE float load_one(const T* p) {
  float lanes[kLanes];
  store(lanes, load(p, FirstLanes{1}), AllLanes{});
  return lanes[0];
}

}  // namespace anychip::cpu::ANYCHIP_ISA
