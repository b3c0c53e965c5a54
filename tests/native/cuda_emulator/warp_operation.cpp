#include "warp_operation.h"

namespace cuda_emulator {
namespace {

template <class Visit>
void for_each(uint32_t lanes, const Visit& visit) {
  for (; lanes; lanes &= lanes - 1) visit(__builtin_ctz(lanes));
}

// source(lane, argument, first, last): where a lane takes its value from, of 0 to 31. Its segment
// is first to last.
template <class Source>
void shuffle(uint32_t lanes, WarpRegisters& registers, const Source& source) {
  uint64_t given[32];
  for (int lane = 0; lane < 32; ++lane) {
    given[lane] = lanes >> lane & 1u ? registers.value[lane] : kPoison;
  }
  for_each(lanes, [&](int lane) {
    const int last_bit = registers.shuffle[lane].width - 1;
    const int argument = registers.shuffle[lane].argument;
    registers.value[lane] = given[source(lane, argument, lane & ~last_bit, lane | last_bit)];
  });
}

template <class Combine>
void reduce(uint32_t lanes, WarpRegisters& registers, const Combine& combine) {
  auto result = static_cast<uint32_t>(registers.value[__builtin_ctz(lanes)]);
  for_each(lanes & (lanes - 1), [&](int lane) {
    result = combine(result, static_cast<uint32_t>(registers.value[lane]));
  });
  for_each(lanes, [&](int lane) { registers.value[lane] = result; });
}

void ballot(uint32_t lanes, WarpRegisters& registers) {
  uint32_t votes = 0;
  for_each(lanes, [&](int lane) { votes |= uint32_t{registers.value[lane] != 0} << lane; });
  for_each(lanes, [&](int lane) { registers.value[lane] = votes; });
}

void match_any(uint32_t lanes, WarpRegisters& registers) {
  uint32_t same[32];
  for_each(lanes, [&](int lane) {
    same[lane] = 0;
    for_each(lanes, [&](int other) {
      same[lane] |= uint32_t{registers.value[other] == registers.value[lane]} << other;
    });
  });
  for_each(lanes, [&](int lane) { registers.value[lane] = same[lane]; });
}

void match_all(uint32_t lanes, WarpRegisters& registers) {
  const uint64_t first = registers.value[__builtin_ctz(lanes)];
  bool same = true;
  for_each(lanes, [&](int lane) { same = same && registers.value[lane] == first; });
  for_each(lanes, [&](int lane) { registers.value[lane] = same ? lanes : 0; });
}

int32_t as_signed(uint32_t value) { return static_cast<int32_t>(value); }

}  // namespace

void complete(WarpOperation operation, uint32_t lanes, WarpRegisters& registers) {
  switch (operation) {
    case WarpOperation::kSync:
      return;
    // Outside of the segment a lane keeps its own value; xor may read earlier segments.
    // Source: PTX ISA, "shfl.sync", with the clamp and segment mask that the functions give it.
    case WarpOperation::kShuffle:
      return shuffle(lanes, registers, [](int, int argument, int first, int last) {
        return first + (argument & (last - first));
      });
    case WarpOperation::kShuffleUp:
      return shuffle(lanes, registers, [](int lane, int argument, int first, int) {
        return lane - (argument & 31) < first ? lane : lane - (argument & 31);
      });
    case WarpOperation::kShuffleDown:
      return shuffle(lanes, registers, [](int lane, int argument, int, int last) {
        return lane + (argument & 31) > last ? lane : lane + (argument & 31);
      });
    case WarpOperation::kShuffleXor:
      return shuffle(lanes, registers, [](int lane, int argument, int, int last) {
        return (lane ^ (argument & 31)) > last ? lane : lane ^ (argument & 31);
      });
    case WarpOperation::kBallot:
      return ballot(lanes, registers);
    case WarpOperation::kMatchAny:
      return match_any(lanes, registers);
    case WarpOperation::kMatchAll:
      return match_all(lanes, registers);
    case WarpOperation::kAdd:
      return reduce(lanes, registers, [](uint32_t a, uint32_t b) { return a + b; });
    case WarpOperation::kMin:
      return reduce(lanes, registers, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
    case WarpOperation::kMax:
      return reduce(lanes, registers, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
    case WarpOperation::kMinSigned:
      return reduce(lanes, registers,
                    [](uint32_t a, uint32_t b) { return as_signed(a) < as_signed(b) ? a : b; });
    case WarpOperation::kMaxSigned:
      return reduce(lanes, registers,
                    [](uint32_t a, uint32_t b) { return as_signed(a) > as_signed(b) ? a : b; });
    case WarpOperation::kAnd:
      return reduce(lanes, registers, [](uint32_t a, uint32_t b) { return a & b; });
    case WarpOperation::kOr:
      return reduce(lanes, registers, [](uint32_t a, uint32_t b) { return a | b; });
    case WarpOperation::kXor:
      return reduce(lanes, registers, [](uint32_t a, uint32_t b) { return a ^ b; });
  }
}

}  // namespace cuda_emulator
