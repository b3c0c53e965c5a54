// quantize and dequantize, a group of whole blocks at a time: every number of a group is read once
// from memory, and then from the first cache.
//
// Formats, scales and roundings are those of anychip.operators.codes, bit for bit.
#include "codes.h"
#include "philox.h"
#include "rows.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

// How the codes of a format stand for numbers. A step is a number divided by its block's scale.

template <int kCodeBits, int kLargestStep>
struct Integers {
  static constexpr int kBits = kCodeBits;
  static constexpr float kLargest = kLargestStep;
  static constexpr uint32_t kZero = 0;

  // Adding this rounds to an integer and leaves it in the low bits.
  ANYCHIP_INLINE static U32 encode(F32 step) { return bits_of(step + 0x1.8p23f); }
  // The sign bit the other way round is an offset; 2^23 holds both in its low bits.
  ANYCHIP_INLINE static F32 decode(U32 code) {
    constexpr uint32_t kSign = 1u << (kBits - 1);
    return float_of((code ^ kSign) | 0x4b000000u) - (0x1p23f + static_cast<float>(kSign));
  }
};

// Codes from kSpecial on are infinity, where the fraction is 0, and NaN.
template <int kExponent, int kFraction, int kLargestStep, uint32_t kSpecial>
struct Floats {
  using Sizes = SmallFloat<kFraction, (1 << (kExponent - 1)) - 1>;
  static constexpr int kBits = 1 + kExponent + kFraction;
  static constexpr float kLargest = kLargestStep;
  static constexpr uint32_t kZero = 0;
  static constexpr uint32_t kSign = 1u << (kBits - 1);

  ANYCHIP_INLINE static U32 encode(F32 step) {
    const U32 sign = (bits_of(step) >> (32 - kBits)) & kSign;
    return Sizes::encode(minimum(abs(step), fill<F32>(kLargest))) | sign;
  }
  ANYCHIP_INLINE static F32 decode(U32 code) {
    const U32 size = code & (kSign - 1);
    const U32 sign = (code & kSign) << (32 - kBits);
    const U32 special = (size << Sizes::kShift) | 0x7f800000u;
    return float_of(select(size >= kSpecial, special, bits_of(Sizes::decode(size))) | sign);
  }
};

constexpr double kNormalFloats[16] = {-1.0,
                                      -0.6961928009986877,
                                      -0.5250730514526367,
                                      -0.39491748809814453,
                                      -0.28444138169288635,
                                      -0.18477343022823334,
                                      -0.09105003625154495,
                                      0.0,
                                      0.07958029955625534,
                                      0.16093020141124725,
                                      0.24611230194568634,
                                      0.33791524171829224,
                                      0.44070982933044434,
                                      0.5626170039176941,
                                      0.7229568362236023,
                                      1.0};

ANYCHIP_INLINE RegisterF look_up(const float* table, RegisterU index) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(index), _mm512_loadu_ps(table));
#else
  RegisterF found;
  for (int k = 0; k < kRegisterLanes; ++k) found[k] = table[index[k]];
  return found;
#endif
}
template <class H>
ANYCHIP_INLINE auto look_up(const float* table, Pair<H> index) {
  return Pair<decltype(look_up(table, index.low))>{look_up(table, index.low),
                                                   look_up(table, index.high)};
}

struct NormalFloats {
  static constexpr int kBits = 4;
  static constexpr float kLargest = 1.0f;
  static constexpr uint32_t kZero = 7;

  // How many middles between neighbours are below: a half goes to the lower code.
  ANYCHIP_INLINE static U32 encode(F32 step) {
    U32 code{};
    for (uint32_t k = 1; k < 16; ++k) {
      const auto middle = static_cast<float>((kNormalFloats[k - 1] + kNormalFloats[k]) / 2);
      code = select(step > middle, fill<U32>(k), code);
    }
    return code;
  }
  ANYCHIP_INLINE static F32 decode(U32 code) {
    float table[16];
    for (int k = 0; k < 16; ++k) table[k] = static_cast<float>(kNormalFloats[k]);
    return look_up(table, code);
  }
};

// visit(codes of the format, whether scales are powers of two)
template <class Visit>
ANYCHIP_INLINE void visit_format(CodeFormat format, const Visit& visit) {
  switch (format) {
    case CodeFormat::kInt8:
      return visit(Integers<8, 127>{}, false);
    case CodeFormat::kInt4:
      return visit(Integers<4, 7>{}, false);
    case CodeFormat::kNF4:
      return visit(NormalFloats{}, false);
    case CodeFormat::kE4M3:
    case CodeFormat::kMXE4M3:
      return visit(Floats<4, 3, 448, 0x7f>{}, format == CodeFormat::kMXE4M3);
    case CodeFormat::kE5M2:
    case CodeFormat::kMXE5M2:
      return visit(Floats<5, 2, 57344, 0x7c>{}, format == CodeFormat::kMXE5M2);
    case CodeFormat::kMXE2M1:
      return visit(Floats<2, 1, 6, 8>{}, true);
  }
}

// Scales that are powers of two, as exponents; 255 for a block with infinities or NaN.

ANYCHIP_INLINE uint8_t exponent_scale(uint32_t top_bits, float largest) {
  const int exponent = static_cast<int>(top_bits >> 23);
  if (exponent == 255) return 255;
  const int scale = exponent - __builtin_ilogbf(largest);
  return static_cast<uint8_t>(scale < 1 ? 1 : scale);
}
ANYCHIP_INLINE float power_of(uint8_t scale) {
  if (scale == 0) return 0x1p-127f;
  return scale == 255 ? __builtin_nanf("") : float_of_bits(uint32_t{scale} << 23);
}

// One of the two whole numbers next to each step: the upper one where 24 bits of its word are below
// the fraction.
template <class Lanes>
ANYCHIP_INLINE F32 drawn(F32 step, const uint32_t* words, Lanes lanes, float largest) {
  U32 word;
  read(word, words);  // past the last lanes there is room
  (void)lanes;
  const F32 nearest = (step + 0x1.8p23f) - 0x1.8p23f;
  const F32 below = select(nearest > step, nearest - 1.0f, nearest);
  // Exact: 24 bits, taken as two halves of which each is a float's fraction.
  const F32 high = float_of((word >> 20) | 0x4b000000u) - 0x1p23f;
  const F32 low = float_of(((word >> 8) & 0xfffu) | 0x4b000000u) - 0x1p23f;
  const F32 value = high * 4096.0f + low;
  const F32 up = select(value < (step - below) * 0x1p24f, fill<F32>(1.0f), F32{});
  return maximum(fill<F32>(-largest), minimum(fill<F32>(largest), below + up));
}

template <class Codes>
ANYCHIP_INLINE void encode_block(const float* x, int64_t n, float factor, const uint32_t* words,
                                 uint8_t* codes) {
  const auto encode = [&](const auto& step_of) {
    for_each_vector(0, n, [&](int64_t i, auto lanes) {
      store_bytes(codes + i, Codes::encode(step_of(i, lanes)), lanes);
    });
  };
  if (factor == 0.0f) {
    for_each_vector(0, n, [&](int64_t i, auto lanes) {
      store_bytes(codes + i, fill<U32>(Codes::kZero), lanes);
    });
  } else if (words) {
    encode([&](int64_t i, auto lanes) {
      return drawn(load(x + i, lanes) / factor, words + i, lanes, Codes::kLargest);
    });
  } else {
    encode([&](int64_t i, auto lanes) { return load(x + i, lanes) / factor; });
  }
}

// Two codes to a byte, the first in its low half. There is a code of 0 behind an odd number.
ANYCHIP_INLINE void pack(const uint8_t* codes, int64_t n, uint8_t* out) {
  for_each_vector(0, (n + 1) / 2, [&](int64_t i, auto lanes) {
    U32 pair;
    read(pair, reinterpret_cast<const uint16_t*>(codes + 2 * i));
    store_bytes(out + i, (pair & 0xfu) | ((pair >> 4) & 0xf0u), lanes);
  });
}
ANYCHIP_INLINE void unpack(const uint8_t* packed, int64_t n, uint8_t* codes) {
  for_each_vector(0, (n + 1) / 2, [&](int64_t i, auto lanes) {
    const U32 pair = load_bytes(packed + i, lanes);
    write(reinterpret_cast<uint16_t*>(codes + 2 * i), (pair & 0xfu) | ((pair & 0xf0u) << 4));
  });
}

// The words of the elements from `begin` on: from that address.
ANYCHIP_INLINE const uint32_t* draw(const int64_t* rng, Range elements, uint32_t* words) {
  const auto seed = static_cast<uint64_t>(rng[0]);
  const uint64_t counter =
      static_cast<uint64_t>(rng[1]) + static_cast<uint64_t>(elements.begin / 4);
  const int64_t skipped = elements.begin % 4, n = elements.end - elements.begin + skipped;
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
    philox_words(seed, counter + static_cast<uint64_t>(i / 4), words + i);
  }
  return words + skipped;
}

// body(first element of a block, its length, its number) for the blocks of a group.
template <class Body>
ANYCHIP_INLINE void for_each_block(Range elements, int64_t block, const Body& body) {
  int64_t number = elements.begin / block;
  for (int64_t begin = elements.begin; begin < elements.end; begin += block, ++number) {
    body(begin, begin + block < elements.end ? block : elements.end - begin, number);
  }
}

}  // namespace

[[gnu::flatten]] void quantize(const Quantize& args, const QuantizeScratch& scratch,
                               Range elements) {
  const int64_t begin = elements.begin, n = elements.end - begin;
  const float* x = float_row(row_of(args.x, args.dtype, begin), args.dtype, n, scratch.values);
  const uint32_t* words = args.rng ? draw(args.rng, elements, scratch.words) : nullptr;
  visit_format(args.format, [&](auto format, bool is_mx) {
    using Codes = decltype(format);
    uint8_t* codes = Codes::kBits == 8 ? args.codes + begin : scratch.codes;
    for_each_block(elements, args.block, [&](int64_t first, int64_t length, int64_t number) {
      const float* values = x + (first - begin);
      const uint32_t top = largest_magnitude(values, length);
      float factor = 0.0f;
      if (is_mx) {
        const uint8_t scale = exponent_scale(top, Codes::kLargest);
        static_cast<uint8_t*>(args.scales)[number] = scale;
        if (top >= 0x00800000u && scale != 255) factor = power_of(scale);
      } else {
        const BlockScale found = block_scale(top, Codes::kLargest);
        static_cast<float*>(args.scales)[number] = found.scale;
        factor = found.factor;
      }
      encode_block<Codes>(values, length, factor, words ? words + (first - begin) : nullptr,
                          codes + (first - begin));
    });
    if (Codes::kBits == 4) {
      codes[n] = 0;
      pack(codes, n, args.codes + begin / 2);
    }
  });
}

[[gnu::flatten]] void dequantize(const Dequantize& args, uint8_t* scratch, Range elements) {
  const int64_t begin = elements.begin;
  visit_format(args.format, [&](auto format, bool is_mx) {
    using Codes = decltype(format);
    const uint8_t* codes = args.codes + begin;
    if (Codes::kBits == 4) {
      unpack(args.codes + begin / 2, elements.end - begin, scratch);
      codes = scratch;
    }
    for_each_block(elements, args.block, [&](int64_t first, int64_t length, int64_t number) {
      const float scale = is_mx ? power_of(static_cast<const uint8_t*>(args.scales)[number])
                                : static_cast<const float*>(args.scales)[number];
      const uint8_t* from = codes + (first - begin);
      float* y = args.y + first;
      for_each_vector(0, length, [&](int64_t i, auto lanes) {
        store(y + i, Codes::decode(load_bytes(from + i, lanes)) * scale, lanes);
      });
    });
  });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
