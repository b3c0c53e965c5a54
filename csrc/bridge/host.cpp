// The host: what a chip's library does not compute runs there, and both kinds of calls are counted.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include <array>
#include <map>
#include <mutex>
#include <sstream>

#include "bridge.h"

namespace anychip_bridge {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

using Counts = std::map<std::string, std::atomic<int64_t>>;
std::mutex counts_mutex;

Counts& counts(bool is_native) {
  static auto* made = new std::array<Counts, 2>;
  return (*made)[is_native];
}

// Operators that draw numbers and take no generator use the host's default one: it stands in for
// the device's while they run.
void run_with_state_of(const at::Generator& inner, const c10::OperatorHandle& op, Stack* stack) {
  static auto* mutex = new std::mutex;
  std::lock_guard<std::mutex> lock(*mutex);
  at::Generator host = at::detail::getDefaultCPUGenerator();
  const auto before = host.get_state();
  host.set_state(inner.get_state());
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    host.set_state(before);
    throw;
  }
  at::Generator(inner).set_state(host.get_state());
  host.set_state(before);
}

}  // namespace

bool takes_generator(const c10::Argument& argument) {
  const auto type = argument.type();
  const auto optional = type->cast<c10::OptionalType>();
  const auto inner = optional ? optional->getElementType() : type;
  return inner->kind() == c10::TypeKind::GeneratorType;
}

c10::DeviceIndex device_of_call(const Stack& stack, size_t begin) {
  for (size_t i = begin; i < stack.size(); ++i) {
    const IValue& value = stack[i];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kChip)
      return value.toTensor().device().index();
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector())
        if (tensor.device().type() == kChip) return tensor.device().index();
    if (value.isDevice() && value.toDevice().type() == kChip && value.toDevice().has_index())
      return value.toDevice().index();
  }
  return current_device();
}

std::atomic<int64_t>& call_count(const std::string& name, bool is_native) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return counts(is_native)[name];
}

std::string calls(bool is_native, bool reset) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  std::ostringstream text;
  for (auto& [name, count] : counts(is_native))
    if (const auto found = reset ? count.exchange(0) : count.load())
      text << name << ' ' << found << '\n';
  return text.str();
}

void host_fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto name = c10::toString(op.operator_name());
  ++call_count(name, false);
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  const Timed timed("host", name.c_str(), device_of_call(*stack, begin));
  bool has_generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!takes_generator(arguments[i])) continue;
    has_generator = true;
    IValue& value = (*stack)[begin + i];
    const auto given =
        value.isNone() ? default_generator(device_of_call(*stack, begin)) : value.toGenerator();
    if (given.device().type() == kChip) value = host_generator(given);
  }
  if (!has_generator && op.hasTag(at::Tag::nondeterministic_seeded)) {
    const auto generator = default_generator(device_of_call(*stack, begin));
    return run_with_state_of(host_generator(generator), op, stack);
  }
  at::native::cpu_fallback(op, stack);
}

namespace {

// ---- convolutions reach a device by names of their own, which no fallback sees

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                   bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  ++call_count("aten::convolution_overrideable", false);
  const Timed timed("host", "aten::convolution_overrideable", input.device().index());
  std::optional<Tensor> host_bias;
  if (bias && bias->defined()) host_bias = to_host(*bias);
  return at::convolution(to_host(input), to_host(weight), host_bias, stride, padding, dilation,
                         transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  ++call_count("aten::convolution_backward_overrideable", false);
  const Timed timed("host", "aten::convolution_backward_overrideable", input.device().index());
  const int64_t channels[] = {transposed ? weight.size(1) * groups : weight.size(0)};
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      to_host(grad), to_host(input), to_host(weight), c10::IntArrayRef(channels), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  const auto back = [&](const Tensor& x) { return x.defined() ? x.to(input.device()) : x; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&host_fallback>());
}

}  // namespace
}  // namespace anychip_bridge
