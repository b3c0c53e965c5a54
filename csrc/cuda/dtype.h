// Which element types the kernels know, by the numbers that Python gives them.
#pragma once

#include "runtime.cuh"

namespace anychip::cuda {

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

// The codes are part of the Python interface (_cuda.FLOAT32 ...).
enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr bool is_dtype(int code) { return code >= 0 && code <= 2; }

// Returns visit(T{}) with the element type of `dtype`.
template <class Visit>
cudaError_t visit_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(float{});
    case DType::kBFloat16:
      return visit(BFloat16{});
    case DType::kFloat16:
      return visit(Float16{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace anychip::cuda
