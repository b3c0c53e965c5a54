// The older interface by operator names, of which torch_npu still uses two on the 910B: Identity
// and ApplyAdamW. libopapi.so computes; what it does not know is refused with a message.
#include <dlfcn.h>

#include <map>
#include <string>
#include <vector>

#include "aclop.h"

struct aclTensorDesc {
  int dtype;
  int format;
  std::vector<int64_t> shape;
};
struct aclDataBuffer {
  void* address;
  size_t size;
};
struct aclopAttr {
  std::map<std::string, std::string> values;
};

CANN_API aclDataBuffer* aclCreateDataBuffer(void* address, size_t size) {
  return new aclDataBuffer{address, size};
}
CANN_API int aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return kSuccess;
}
CANN_API aclTensorDesc* aclCreateTensorDesc(int dtype, int dims, const int64_t* shape, int format) {
  return new aclTensorDesc{dtype, format, std::vector<int64_t>(shape, shape + dims)};
}
CANN_API void aclDestroyTensorDesc(const aclTensorDesc* tensor) { delete tensor; }
CANN_API int aclGetTensorDescDimV2(const aclTensorDesc* tensor, size_t dim, int64_t* size) {
  if (dim >= tensor->shape.size()) return kInvalidParameter;
  *size = tensor->shape[dim];
  return kSuccess;
}
CANN_API int aclGetTensorDescFormat(const aclTensorDesc* tensor) { return tensor->format; }
CANN_API size_t aclGetTensorDescNumDims(const aclTensorDesc* tensor) {
  return tensor->shape.size();
}
CANN_API int aclGetTensorDescType(const aclTensorDesc* tensor) { return tensor->dtype; }
CANN_API void aclSetTensorDescName(aclTensorDesc*, const char*) {}
CANN_API int aclSetTensorFormat(aclTensorDesc*, int) { return kSuccess; }
CANN_API int aclSetTensorPlaceMent(aclTensorDesc*, int) { return kSuccess; }
CANN_API int aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return kSuccess; }

CANN_API aclopAttr* aclopCreateAttr() { return new aclopAttr; }
CANN_API void aclopDestroyAttr(const aclopAttr* attributes) { delete attributes; }
CANN_API int aclopSetAttrBool(aclopAttr* attributes, const char* name, uint8_t value) {
  attributes->values[name] = value != 0 ? "1" : "0";
  return kSuccess;
}
CANN_API int aclopSetAttrInt(aclopAttr* attributes, const char* name, int64_t value) {
  attributes->values[name] = std::to_string(value);
  return kSuccess;
}
CANN_API int aclopSetAttrFloat(aclopAttr* attributes, const char* name, float value) {
  attributes->values[name] = std::to_string(value);
  return kSuccess;
}
CANN_API int aclopSetAttrString(aclopAttr* attributes, const char* name, const char* value) {
  attributes->values[name] = value;
  return kSuccess;
}
CANN_API int aclopSetAttrDataType(aclopAttr*, const char*, int) { return kSuccess; }
CANN_API int aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return kSuccess; }
CANN_API int aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return kSuccess; }
CANN_API int aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return kSuccess; }
CANN_API int aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*,
                                     const int64_t* const*) {
  return kSuccess;
}

namespace {

constexpr int kOperatorNotFound = 500001;

cann::NamedTensor tensor_of(const aclTensorDesc* tensor, const aclDataBuffer* buffer) {
  return {tensor->dtype, tensor->shape, buffer->address, buffer->size};
}

// libopapi.so is loaded by torch_npu itself; it is asked for when the first such call comes.
cann::RunNamedOperator implementation() {
  static const auto function = [] {
    void* library = dlopen("libopapi.so", RTLD_NOW);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "cann_run_named_operator");
    return reinterpret_cast<cann::RunNamedOperator>(symbol);
  }();
  return function;
}

}  // namespace

CANN_API int aclopCompileAndExecute(const char* name, int num_inputs,
                                    const aclTensorDesc* const inputs[],
                                    const aclDataBuffer* const input_data[], int num_outputs,
                                    const aclTensorDesc* const outputs[],
                                    aclDataBuffer* const output_data[], const aclopAttr* attributes,
                                    int, int, const char*, cann::Stream stream) {
  return cann::guarded(name, [&]() -> int {
    cann::NamedCall call{name, {}, {}, {}};
    for (int i = 0; i < num_inputs; ++i) call.inputs.push_back(tensor_of(inputs[i], input_data[i]));
    for (int i = 0; i < num_outputs; ++i) {
      call.outputs.push_back(tensor_of(outputs[i], output_data[i]));
    }
    if (attributes != nullptr) call.attributes = attributes->values;
    const auto run = implementation();
    if (run != nullptr && run(call, stream)) return kSuccess;
    cann::set_error(std::string("the emulator has no operator ") + name + " (aclop)");
    return kOperatorNotFound;
  });
}
