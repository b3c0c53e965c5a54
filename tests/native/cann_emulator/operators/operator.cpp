#include "operators/operator.h"

#include <map>
#include <mutex>

namespace cann {

at::ScalarType scalar_type(int code) {
  switch (code) {
    case 0:
      return at::kFloat;
    case 1:
      return at::kHalf;
    case 2:
      return at::kChar;
    case 3:
      return at::kInt;
    case 4:
      return at::kByte;
    case 6:
      return at::kShort;
    case 7:
      return at::kUInt16;
    case 8:
      return at::kUInt32;
    case 9:
      return at::kLong;
    case 10:
      return at::kUInt64;
    case 11:
      return at::kDouble;
    case 12:
      return at::kBool;
    case 16:
      return at::kComplexFloat;
    case 17:
      return at::kComplexDouble;
    case 27:
      return at::kBFloat16;
    case 35:
      return at::kFloat8_e5m2;
    case 36:
      return at::kFloat8_e4m3fn;
    default:
      throw std::runtime_error("the emulator has no data type " + std::to_string(code));
  }
}

void write(const Tensor& out, const Tensor& value) {
  TORCH_CHECK(out.numel() == value.numel(), "the output has shape ", out.sizes(),
              ", the result has ", value.sizes());
  if (out.numel() != 0) out.copy_(value.reshape(out.sizes()));
}

void write(const Bools& wanted, const std::array<OptionalTensor, 3>& out,
           const std::tuple<Tensor, Tensor, Tensor>& gradients) {
  const auto& [first, second, third] = gradients;
  if (wanted.at(0) && out[0]) write(*out[0], first);
  if (wanted.at(1) && out[1]) write(*out[1], second);
  if (wanted.at(2) && out[2]) write(*out[2], third);
}

void fit(const SizedTensor& out, const Tensor& value) {
  TORCH_CHECK(value.numel() <= out.tensor.numel(), "the output has shape ", out.tensor.sizes(),
              ", the result has ", value.sizes());
  if (value.numel() != 0) {
    out.tensor.flatten().narrow(0, 0, value.numel()).copy_(value.flatten());
  }
  *out.view_shape = value.sizes().vec();
}

namespace {

// Plain layouts; others (such as NZ, 29) order the elements in blocks.
bool is_plain(int format) {
  for (const int plain : {-1, 0, 1, 2, 27, 30, 32, 47}) {
    if (format == plain) return true;
  }
  return false;
}

template <class T>
T value_of(const aclScalar& scalar) {
  T value;
  memcpy(&value, scalar.value, sizeof value);
  return value;
}

}  // namespace

Tensor opened(const aclTensor& descriptor) {
  if (!is_plain(descriptor.format)) {
    throw std::runtime_error("the emulator has no tensors of format " +
                             std::to_string(descriptor.format));
  }
  const auto options = at::TensorOptions().dtype(scalar_type(descriptor.dtype));
  int64_t elements = 1;
  for (const int64_t size : descriptor.shape) elements *= size;
  if (elements == 0 || descriptor.address == nullptr) return at::empty(descriptor.shape, options);
  const int64_t bytes =
      descriptor.offset * static_cast<int64_t>(c10::elementSize(scalar_type(descriptor.dtype)));
  char* start = static_cast<char*>(reachable(descriptor.address)) + bytes;
  return at::from_blob(start, descriptor.shape, descriptor.strides, options);
}

Scalar opened(const aclScalar& scalar) {
  switch (scalar_type(scalar.dtype)) {
    case at::kFloat:
      return value_of<float>(scalar);
    case at::kHalf:
      return static_cast<float>(value_of<at::Half>(scalar));
    case at::kBFloat16:
      return static_cast<float>(value_of<at::BFloat16>(scalar));
    case at::kDouble:
      return value_of<double>(scalar);
    case at::kChar:
      return static_cast<int64_t>(value_of<int8_t>(scalar));
    case at::kByte:
      return static_cast<int64_t>(value_of<uint8_t>(scalar));
    case at::kShort:
      return static_cast<int64_t>(value_of<int16_t>(scalar));
    case at::kInt:
      return static_cast<int64_t>(value_of<int32_t>(scalar));
    case at::kLong:
      return value_of<int64_t>(scalar);
    case at::kBool:
      return value_of<bool>(scalar);
    default:
      throw std::runtime_error("the emulator has no scalar of data type " +
                               std::to_string(scalar.dtype));
  }
}

// Not the random numbers of an NPU, whose generator is not documented: only as reproducible.
at::Generator generator(uint64_t seed, uint64_t offset) {
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset);
}

Tensor unpacked_bits(const Tensor& mask, int64_t count) {
  const Tensor bytes = mask.flatten().unsqueeze(1);
  const Tensor places = at::arange(8, at::kByte).unsqueeze(0);
  const Tensor bits = at::bitwise_and(at::bitwise_right_shift(bytes, places), 1);
  return bits.flatten().narrow(0, 0, count);
}

int checked(const char* name, size_t position, bool is_absent) {
  if (!is_absent) return kSuccess;
  set_error(std::string(name) + ": argument " + std::to_string(position) + " is missing");
  return kAclnnNullArgument;
}

int checked_type(const RowFacts& row, const aclTensor* first) {
  if (first == nullptr || row.types == kAny) return kSuccess;
  const int dtype = first->dtype;
  if (dtype >= 0 && dtype < 64 && (row.types & type_bit(dtype)) != 0) return kSuccess;
  set_error(c10::str(row.name, ": data type ", dtype, " of the first tensor is not documented"));
  return kAclnnInvalidArgument;
}

int checked_type(const RowFacts& row, const aclTensorList* first) {
  for (const aclTensor* tensor : first->tensors) {
    if (const int refused = checked_type(row, tensor)) return refused;
  }
  return kSuccess;
}

namespace {
std::mutex calls_mutex;
std::map<std::string, long> calls;
}  // namespace

void note_call(const char* name) {
  const std::lock_guard<std::mutex> lock(calls_mutex);
  ++calls[name];
}

thread_local bool is_looking = false;

void run_body(const Work& body, bool looks) {
  const at::AutoDispatchBelowAutograd without_autograd;
  is_looking = looks;
  body();
}

int planned(const RowFacts& row, Work work, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  try {
    if (row.looks) run_body(work, true);
  } catch (const Refusal& refusal) {
    set_error(std::string(row.name) + ": " + refusal.what());
    return refusal.status;
  } catch (const std::exception& error) {
    set_error(std::string(row.name) + ": " + text_of(error));
    return kAclnnInvalidArgument;
  }
  note_call(row.name);
  *workspace_bytes = 0;
  *executor = new aclOpExecutor{row.name, [work = std::move(work)] { run_body(work); }};
  return kSuccess;
}

int queue_executor(aclOpExecutor* executor, Stream stream) {
  if (executor == nullptr) return kAclnnNullArgument;
  const std::unique_ptr<aclOpExecutor> owned(executor);
  return guarded(owned->name, [&] { return launch(stream, owned->name, std::move(owned->work)); });
}

}  // namespace cann

CANN_API int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return kSuccess;
}
// missing.py makes the functions that call this.
CANN_API int aclnn_not_implemented(const char* name) {
  cann::set_error(std::string(name) + ": the emulator does not implement this operator");
  return kAclnnInternalError;
}

// For tests: how often an operator was called in this process.
CANN_API long cann_operator_calls(const char* name) {
  const std::lock_guard<std::mutex> lock(cann::calls_mutex);
  const auto found = cann::calls.find(name);
  return found == cann::calls.end() ? 0 : found->second;
}
