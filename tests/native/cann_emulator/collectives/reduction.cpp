#include "collectives/reduction.h"

#include <algorithm>
#include <cstring>

namespace cann {
namespace {

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  BFloat16() = default;
  // Rounds to nearest, ties to even; NaN stays NaN.
  explicit BFloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    const bool is_nan = (wide & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1)) >> 16);
  }
};

// `Wide` is the type in which two elements are joined.
template <class T, class Wide = T>
void reduce_as(void* into, const void* from, size_t count, int operation) {
  T* left = static_cast<T*>(into);
  const T* right = static_cast<const T*>(from);
  for (size_t i = 0; i < count; ++i) {
    const Wide a = static_cast<Wide>(left[i]);
    const Wide b = static_cast<Wide>(right[i]);
    Wide result;
    switch (operation) {
      case kSum:
        result = static_cast<Wide>(a + b);
        break;
      case kProduct:
        result = static_cast<Wide>(a * b);
        break;
      case kMax:
        result = std::max(a, b);
        break;
      default:
        result = std::min(a, b);
    }
    left[i] = static_cast<T>(result);
  }
}

}  // namespace

size_t element_size(int type) {
  switch (type) {
    case kInt8:
    case kUint8:
      return 1;
    case kInt16:
    case kUint16:
    case kFloat16:
    case kBFloat16:
      return 2;
    case kInt32:
    case kUint32:
    case kFloat32:
      return 4;
    case kInt64:
    case kUint64:
    case kFloat64:
      return 8;
    default:
      return 0;
  }
}

bool is_reducible(int type, int operation) {
  switch (type) {
    case kInt8:
    case kInt32:
    case kInt64:
    case kFloat16:
    case kFloat32:
      return operation >= kSum && operation <= kMin;
    case kInt16:
    case kBFloat16:
      return operation >= kSum && operation <= kMin && operation != kProduct;
    default:
      return false;
  }
}

void reduce(void* into, const void* from, size_t count, int type, int operation) {
  switch (type) {
    case kInt8:
      return reduce_as<int8_t, int32_t>(into, from, count, operation);
    case kInt16:
      return reduce_as<int16_t, int32_t>(into, from, count, operation);
    case kInt32:
      return reduce_as<int32_t>(into, from, count, operation);
    case kInt64:
      return reduce_as<int64_t>(into, from, count, operation);
    case kFloat32:
      return reduce_as<float>(into, from, count, operation);
    case kFloat16:
      return reduce_as<_Float16, float>(into, from, count, operation);
    case kBFloat16:
      return reduce_as<BFloat16, float>(into, from, count, operation);
    default:
      return;
  }
}

}  // namespace cann
