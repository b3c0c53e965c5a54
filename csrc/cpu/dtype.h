// Which element types the kernels know, and how they are stored.
#pragma once

#include <cstdint>

namespace anychip::cpu {

// The codes are part of the Python interface (_native.FLOAT32 ...).
enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Storage only: arithmetic is done in float32, conversions live in kernels/vector.h.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
constexpr bool is_dtype(int code) { return code >= 0 && code <= 2; }

// Calls visit(T{}) with the element type of `dtype`.
template <class Visit>
[[gnu::always_inline]] inline void visit_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(float{});
    case DType::kBFloat16:
      return visit(BFloat16{});
    case DType::kFloat16:
      return visit(Float16{});
  }
}

}  // namespace anychip::cpu
