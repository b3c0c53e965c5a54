// How a row of the operator table becomes CANN's two functions.
//
//   OPERATOR(aclnnAdd, kAny, Tensor self, Tensor other, Scalar alpha, Tensor out) {
//     write(out, at::add(self, other, alpha));
//   }
//
// defines aclnnAddGetWorkspaceSize(const aclTensor*, const aclTensor*, const aclScalar*,
// const aclTensor*, uint64_t* workspace_bytes, aclOpExecutor** executor), which checks and keeps
// the arguments, and aclnnAdd(workspace, workspace_bytes, executor, stream), which queues the body.
// The arguments must be exactly CANN's, in order: a wrong one is garbage, not an error. The second
// entry is the set of dtypes that CANN documents for the first tensor. A CHECKED refuses
// arguments at the call, by EXPECT and HAS_NO before WORK_BELOW.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "emulator.h"
#include "operators/descriptors.h"

// Status codes of aclnn functions ("aclnnStatus" in the operator API reference).
constexpr int kAclnnNullArgument = 161001;
constexpr int kAclnnInvalidArgument = 161002;
constexpr int kAclnnRuntimeError = 361001;
constexpr int kAclnnInternalError = 561000;

namespace cann {

using at::Scalar;
using at::Tensor;

// Arguments of rows. What may be absent is std::optional; a list may have absent tensors.
using OptionalTensor = std::optional<Tensor>;
using OptionalScalar = std::optional<Scalar>;
using Tensors = std::vector<Tensor>;
using OptionalTensors = std::optional<std::vector<Tensor>>;
using Scalars = std::vector<Scalar>;
using Ints = std::vector<int64_t>;
using OptionalInts = std::optional<Ints>;
using Bools = std::vector<bool>;
using Text = std::string;
using Int = int64_t;
using DType = int;  // a code of CANN

// An output that is as large as its result can become; fit() says how large it is.
struct SizedTensor {
  Tensor tensor;
  std::shared_ptr<Ints> view_shape;
};

// The dtype with CANN's code; throws for one that the emulator has not.
at::ScalarType scalar_type(int code);

// Sets of dtypes, by the bit of CANN's code.
using Types = uint64_t;
constexpr Types type_bit(int code) { return uint64_t{1} << code; }
constexpr Types kAny = ~uint64_t{0};
constexpr Types kFloat32 = type_bit(0);
constexpr Types kFloat16 = type_bit(1);
constexpr Types kBFloat16 = type_bit(27);
constexpr Types kFloats = kFloat32 | kFloat16 | kBFloat16;
constexpr Types kHalves = kFloat16 | kBFloat16;
constexpr Types kInt8 = type_bit(2);

inline Tensor widened(const Tensor& value) { return value.to(at::kFloat); }
inline OptionalTensor widened(const OptionalTensor& value) {
  return value ? OptionalTensor(value->to(at::kFloat)) : std::nullopt;
}
// Which of three gradients are wanted.
inline std::array<bool, 3> mask_of(const Bools& wanted) {
  return {wanted.at(0), wanted.at(1), wanted.at(2)};
}

// Copies a result into an output of the same number of elements, in the output's dtype.
void write(const Tensor& out, const Tensor& value);
// The same for those of three gradients that are wanted and have a place.
void write(const Bools& wanted, const std::array<OptionalTensor, 3>& out,
           const std::tuple<Tensor, Tensor, Tensor>& gradients);
// The same for a result of a size that is known only now: at most the output's.
void fit(const SizedTensor& out, const Tensor& value);

// The tensor on the memory that the descriptor names. Call it where the work runs.
Tensor opened(const aclTensor& descriptor);
Scalar opened(const aclScalar& descriptor);
at::Generator generator(uint64_t seed, uint64_t offset);
// The first `count` bits of a byte mask, the lowest of a byte first, as bytes of 0 and 1.
Tensor unpacked_bits(const Tensor& mask, int64_t count);

// One argument: C is its type at the border, keep() copies what the work needs of it, open() gives
// the row's argument. `is_absent` tells a missing argument that is not optional.
template <class Argument>
struct Border {
  using C = Argument;
  using Kept = Argument;
  static bool is_absent(C) { return false; }
  static Kept keep(C value) { return value; }
  static Argument open(const Kept& value) { return value; }
};
template <>
struct Border<Tensor> {
  using C = const aclTensor*;
  using Kept = aclTensor;
  static bool is_absent(C tensor) { return tensor == nullptr; }
  static Kept keep(C tensor) { return *tensor; }
  static Tensor open(const Kept& tensor) { return opened(tensor); }
};
template <>
struct Border<OptionalTensor> {
  using C = const aclTensor*;
  using Kept = std::optional<aclTensor>;
  static bool is_absent(C) { return false; }
  static Kept keep(C tensor) { return tensor != nullptr ? Kept(*tensor) : std::nullopt; }
  // torch_npu gives an empty tensor for some that are absent.
  static OptionalTensor open(const Kept& tensor) {
    if (!tensor) return std::nullopt;
    const Tensor value = opened(*tensor);
    return value.numel() != 0 ? OptionalTensor(value) : std::nullopt;
  }
};
template <>
struct Border<SizedTensor> : Border<Tensor> {
  static SizedTensor open(const Kept& tensor) { return {opened(tensor), tensor.view_shape}; }
};
template <>
struct Border<Scalar> {
  using C = const aclScalar*;
  using Kept = aclScalar;
  static bool is_absent(C scalar) { return scalar == nullptr; }
  static Kept keep(C scalar) { return *scalar; }
  static Scalar open(const Kept& scalar) { return opened(scalar); }
};
template <>
struct Border<OptionalScalar> {
  using C = const aclScalar*;
  using Kept = std::optional<aclScalar>;
  static bool is_absent(C) { return false; }
  static Kept keep(C scalar) { return scalar != nullptr ? Kept(*scalar) : std::nullopt; }
  static OptionalScalar open(const Kept& scalar) {
    return scalar ? OptionalScalar(opened(*scalar)) : std::nullopt;
  }
};
template <>
struct Border<OptionalTensors> {
  using C = const aclTensorList*;
  using Kept = std::optional<std::vector<std::optional<aclTensor>>>;
  static bool is_absent(C) { return false; }
  static Kept keep(C list) {
    if (list == nullptr) return std::nullopt;
    std::vector<std::optional<aclTensor>> kept;
    for (const aclTensor* tensor : list->tensors) {
      kept.push_back(tensor != nullptr ? std::optional(*tensor) : std::nullopt);
    }
    return kept;
  }
  static OptionalTensors open(const Kept& list) {
    if (!list) return std::nullopt;
    Tensors tensors;
    for (const auto& tensor : *list) tensors.push_back(tensor ? opened(*tensor) : Tensor());
    return tensors;
  }
};
template <>
struct Border<Tensors> : Border<OptionalTensors> {
  static bool is_absent(C list) { return list == nullptr; }
  static Tensors open(const Kept& list) { return *Border<OptionalTensors>::open(list); }
};
template <>
struct Border<Scalars> {
  using C = const aclScalarList*;
  using Kept = std::vector<aclScalar>;
  static bool is_absent(C list) { return list == nullptr; }
  static Kept keep(C list) {
    Kept kept;
    for (const aclScalar* scalar : list->scalars) kept.push_back(*scalar);
    return kept;
  }
  static Scalars open(const Kept& list) {
    Scalars scalars;
    for (const aclScalar& scalar : list) scalars.push_back(opened(scalar));
    return scalars;
  }
};
template <>
struct Border<OptionalInts> {
  using C = const aclIntArray*;
  using Kept = OptionalInts;
  static bool is_absent(C) { return false; }
  static Kept keep(C array) { return array != nullptr ? Kept(array->values) : std::nullopt; }
  static OptionalInts open(const Kept& values) { return values; }
};
template <>
struct Border<Ints> : Border<OptionalInts> {
  static bool is_absent(C array) { return array == nullptr; }
  static Ints open(const Kept& values) { return *values; }
};
template <>
struct Border<Bools> {
  using C = const aclBoolArray*;
  using Kept = Bools;
  static bool is_absent(C array) { return array == nullptr; }
  static Kept keep(C array) { return array->values; }
  static Bools open(const Kept& values) { return values; }
};
template <>
struct Border<Text> {
  using C = const char*;
  using Kept = std::string;
  static bool is_absent(C) { return false; }
  static Kept keep(C text) { return text != nullptr ? text : ""; }
  static Text open(const Kept& text) { return text; }
};

}  // namespace cann

// What the first function hands to the second.
struct aclOpExecutor {
  const char* name;
  cann::Work work;
};

namespace cann {

// A call that CANN, or the emulator, does not take. Before WORK_BELOW it is the status of the call.
struct Refusal : std::runtime_error {
  Refusal(int code, const std::string& what) : std::runtime_error(what), status(code) {}
  int status;
};
// What CANN documents as wrong.
#define EXPECT(condition, ...) \
  if (!(condition)) throw Refusal(kAclnnInvalidArgument, c10::str("expected ", __VA_ARGS__))
// What CANN may do, and the emulator cannot.
#define HAS_NO(condition, ...) \
  if (condition) throw Refusal(kAclnnInternalError, c10::str("the emulator has no ", __VA_ARGS__))
// Ends the look at a call's arguments; they are read and written only below.
#define WORK_BELOW \
  if (cann::is_looking) return
extern thread_local bool is_looking;

// A row of the table. One that `looks` runs its body twice: at the call down to WORK_BELOW, and
// whole on the stream.
struct RowFacts {
  const char* name;
  Types types;
  bool looks;
};

// Refuses an argument that is missing, and a first tensor of a dtype that is not documented.
int checked(const char* name, size_t position, bool is_absent);
int checked_type(const RowFacts& row, const aclTensor* first);
int checked_type(const RowFacts& row, const aclTensorList* first);
template <class Other>
int checked_type(const RowFacts&, const Other&) {
  return kSuccess;
}
// Counts the call for cann_operator_calls(name), which tests ask.
void note_call(const char* name);
// Runs the body without autograd; `looks` down to WORK_BELOW.
void run_body(const Work& body, bool looks = false);
int queue_executor(aclOpExecutor* executor, Stream stream);
int planned(const RowFacts& row, Work work, uint64_t* workspace_bytes, aclOpExecutor** executor);

// What all rows of the same arguments share, so that it is compiled once.
template <class... Arguments>
struct Signature {
  static int plan(const RowFacts& row, void (*body)(Arguments...),
                  typename Border<Arguments>::C... arguments, uint64_t* workspace_bytes,
                  aclOpExecutor** executor) {
    int status = kSuccess;
    size_t position = 0;
    ((status = status != kSuccess
                   ? status
                   : checked(row.name, ++position, Border<Arguments>::is_absent(arguments))),
     ...);
    if (status == kSuccess) status = first_type(row, arguments...);
    if (status != kSuccess) return status;
    // A tuple made in place: the border's pointers are dead when the work runs.
    auto kept = std::make_shared<std::tuple<typename Border<Arguments>::Kept...>>(
        Border<Arguments>::keep(arguments)...);
    return planned(
        row, [kept, body] { call(body, *kept, std::index_sequence_for<Arguments...>()); },
        workspace_bytes, executor);
  }

 private:
  template <class First, class... Rest>
  static int first_type(const RowFacts& row, const First& first, const Rest&...) {
    return checked_type(row, first);
  }
  template <class Kept, size_t... I>
  static void call(void (*body)(Arguments...), const Kept& kept, std::index_sequence<I...>) {
    body(Border<Arguments>::open(std::get<I>(kept))...);
  }
};

template <const RowFacts& row, auto body>
struct Row;
template <const RowFacts& row, class... Arguments, void (*body)(Arguments...)>
struct Row<row, body> {
  static int plan(typename Border<Arguments>::C... arguments, uint64_t* workspace_bytes,
                  aclOpExecutor** executor) {
    return Signature<Arguments...>::plan(row, body, arguments..., workspace_bytes, executor);
  }
};

}  // namespace cann

// The first function has its own C type for each row. An indirect function takes that type from the
// row's arguments, so that no generator has to write it out.
#define CANN_ROW(name, types, looks, ...)                                            \
  static void name##_body(__VA_ARGS__);                                              \
  static constexpr cann::RowFacts name##_row{#name, types, looks};                   \
  extern "C" __attribute__((used)) int (*name##_plan())() {                          \
    return reinterpret_cast<int (*)()>(&cann::Row<name##_row, name##_body>::plan);   \
  }                                                                                  \
  CANN_API int name##GetWorkspaceSize() __attribute__((ifunc(#name "_plan")));       \
  CANN_API int name(void*, uint64_t, aclOpExecutor* executor, cann::Stream stream) { \
    return cann::queue_executor(executor, stream);                                   \
  }                                                                                  \
  static void name##_body(__VA_ARGS__)
#define OPERATOR(name, types, ...) CANN_ROW(name, types, false, __VA_ARGS__)
#define CHECKED(name, types, ...) CANN_ROW(name, types, true, __VA_ARGS__)
