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

// For a row of so many, whose last ones are stored as a whole vector of 16.
inline AlignedFloats whole_vectors(int64_t numel) { return aligned_floats((numel + 15) / 16 * 16); }

// Room that its thread keeps: asked for anew in every call, it would come as fresh pages.
class Room {
 public:
  template <class Number>
  Number* of(int64_t numel) {
    const int64_t floats = numel * static_cast<int64_t>(sizeof(Number)) / 4 + 1;
    if (floats > size_) {
      floats_ = aligned_floats(floats);
      size_ = floats;
    }
    return reinterpret_cast<Number*>(floats_.get());
  }

 private:
  AlignedFloats floats_;
  int64_t size_ = 0;
};

}  // namespace anychip::cpu
