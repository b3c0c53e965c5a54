// Element types of HCCL, and the reductions that it documents for them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cann {

// HcclDataType and HcclReduceOp of the HCCL API reference.
enum DataType : int {
  kInt8 = 0,
  kInt16 = 1,
  kInt32 = 2,
  kFloat16 = 3,
  kFloat32 = 4,
  kInt64 = 5,
  kUint64 = 6,
  kUint8 = 7,
  kUint16 = 8,
  kUint32 = 9,
  kFloat64 = 10,
  kBFloat16 = 11,
};
enum ReduceOp : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3 };

// Bytes of an element; 0 for a type that there is not.
size_t element_size(int type);

// Whether the HCCL API reference lists the type for the operation (Atlas A2: int8, int16, int32,
// int64, float16, float32, bfloat16; no product of int16 and bfloat16).
bool is_reducible(int type, int operation);

// into[i] = into[i] (op) from[i].
void reduce(void* into, const void* from, size_t count, int type, int operation);

}  // namespace cann
