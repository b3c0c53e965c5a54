// Room for what a kernel copies, at a cache line.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace anychip::cpu {

struct FreeAligned {
  void operator()(float* floats) const { operator delete[](floats, std::align_val_t{64}); }
};
using AlignedFloats = std::unique_ptr<float[], FreeAligned>;

inline AlignedFloats aligned_floats(int64_t numel) {
  return AlignedFloats(new (std::align_val_t{64}) float[static_cast<size_t>(numel)]);
}

}  // namespace anychip::cpu
