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
CANN_API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new aclIntArray{std::vector<int64_t>(values, values + count)};
}
CANN_API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t count) {
  return new aclFloatArray{std::vector<float>(values, values + count)};
}
CANN_API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
  return new aclBoolArray{std::vector<bool>(values, values + count)};
}
CANN_API aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t count) {
  return new aclTensorList{std::vector<const aclTensor*>(tensors, tensors + count)};
}
CANN_API aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t count) {
  return new aclScalarList{std::vector<const aclScalar*>(scalars, scalars + count)};
}

CANN_API int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return kSuccess;
}
CANN_API int aclDestroyScalar(const aclScalar* scalar) {
  delete scalar;
  return kSuccess;
}
CANN_API int aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return kSuccess;
}
CANN_API int aclDestroyFloatArray(const aclFloatArray* array) {
  delete array;
  return kSuccess;
}
CANN_API int aclDestroyBoolArray(const aclBoolArray* array) {
  delete array;
  return kSuccess;
}
// A list owns what is in it.
CANN_API int aclDestroyTensorList(const aclTensorList* list) {
  if (list == nullptr) return kSuccess;
  for (const aclTensor* tensor : list->tensors) delete tensor;
  delete list;
  return kSuccess;
}
CANN_API int aclDestroyScalarList(const aclScalarList* list) {
  if (list == nullptr) return kSuccess;
  for (const aclScalar* scalar : list->scalars) delete scalar;
  delete list;
  return kSuccess;
}

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
