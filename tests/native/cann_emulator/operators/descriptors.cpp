// Making and ending of descriptors.
#include "operators/descriptors.h"

#include <cstdlib>

#include "emulator.h"

CANN_API aclTensor* aclCreateTensor(const int64_t* shape, uint64_t dims, int dtype,
                                    const int64_t* strides, int64_t offset, int format,
                                    const int64_t*, uint64_t, void* address) {
  auto* tensor = new aclTensor{
      std::vector<int64_t>(shape, shape + dims), {}, offset, dtype, format, address, nullptr};
  if (strides != nullptr) {
    tensor->strides.assign(strides, strides + dims);
  } else {
    tensor->strides.assign(dims, 1);
    for (uint64_t d = dims; d > 1; --d) {
      tensor->strides[d - 2] = tensor->strides[d - 1] * tensor->shape[d - 1];
    }
  }
  tensor->view_shape = std::make_shared<std::vector<int64_t>>(tensor->shape);
  return tensor;
}
// `value` has the size that the dtype says: complex128 has the most, 16 bytes.
CANN_API aclScalar* aclCreateScalar(void* value, int dtype) {
  constexpr int kComplex128 = 17, kComplex64 = 16, kDouble = 11, kUint64 = 10, kInt64 = 9;
  constexpr int kBool = 12, kInt8 = 2, kUint8 = 4, kFloat = 0, kInt32 = 3, kUint32 = 8;
  size_t size = 2;
  if (dtype == kComplex128) size = 16;
  if (dtype == kComplex64 || dtype == kDouble || dtype == kUint64 || dtype == kInt64) size = 8;
  if (dtype == kFloat || dtype == kInt32 || dtype == kUint32) size = 4;
  if (dtype == kBool || dtype == kInt8 || dtype == kUint8) size = 1;
  auto* scalar = new aclScalar{dtype, {}};
  memcpy(scalar->value, value, size);
  return scalar;
}
// A list owns what is in it; an array has nothing that must end.
namespace {
template <class Descriptor>
int ended(const Descriptor* descriptor) {
  if (descriptor == nullptr) return kSuccess;
  if constexpr (requires { descriptor->tensors; }) {
    for (const aclTensor* tensor : descriptor->tensors) delete tensor;
  } else if constexpr (requires { descriptor->scalars; }) {
    for (const aclScalar* scalar : descriptor->scalars) delete scalar;
  }
  delete descriptor;
  return kSuccess;
}
template <class Descriptor, class Value>
Descriptor* made(const Value* values, uint64_t count) {
  auto* descriptor = new Descriptor;
  auto& [all] = *descriptor;
  all.assign(values, values + count);
  return descriptor;
}
}  // namespace

#define ENDS(Kind) \
  CANN_API int aclDestroy##Kind(const acl##Kind* descriptor) { return ended(descriptor); }
#define MAKES(Kind, Value)                                                   \
  CANN_API acl##Kind* aclCreate##Kind(const Value* values, uint64_t count) { \
    return made<acl##Kind>(values, count);                                   \
  }                                                                          \
  ENDS(Kind)

ENDS(Tensor)
ENDS(Scalar)
MAKES(IntArray, int64_t)
MAKES(FloatArray, float)
MAKES(BoolArray, bool)
MAKES(TensorList, aclTensor* const)
MAKES(ScalarList, aclScalar* const)

// The caller frees *shape by delete[].
CANN_API int aclGetViewShape(const aclTensor* tensor, int64_t** shape, uint64_t* dims) {
  const std::vector<int64_t>& now = *tensor->view_shape;
  *dims = now.size();
  *shape = new int64_t[now.size()];
  memcpy(*shape, now.data(), now.size() * sizeof(int64_t));
  return kSuccess;
}

// A cache of large pages for the calling thread: nothing to do here.
CANN_API int InitHugeMemThreadLocal(void*, bool) { return kSuccess; }
CANN_API void UnInitHugeMemThreadLocal(void*, bool) {}
CANN_API void ReleaseHugeMem(void*, bool) {}
