// What torch_npu describes its arguments with. It only holds pointers to them, so the fields are
// ours.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

struct aclTensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements
  int64_t offset;                // in elements, from `address`
  int dtype;                     // CANN's code: scalar_type() in operator.h
  int format;
  void* address;  // as torch_npu knows it: cann::reachable() before use
  // The shape that aclGetViewShape tells. Work whose result has a size of its own sets it.
  std::shared_ptr<std::vector<int64_t>> view_shape;
};
struct aclScalar {
  int dtype;
  unsigned char value[16];
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};
struct aclScalarList {
  std::vector<const aclScalar*> scalars;
};
