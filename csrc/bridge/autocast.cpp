// Autocast: torch's own lists of operators, by one boxed kernel per rule instead of one per
// operator.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <string>

#include "bridge.h"

namespace anychip_bridge {
namespace {

enum class Rule { kLower, kFloat32, kSetDtype, kPromote };

template <class Visit>
void each_tensor(torch::jit::Stack& stack, size_t begin, Visit&& visit) {
  for (size_t i = begin; i < stack.size(); ++i) {
    auto& value = stack[i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = visit(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(visit(tensor));
      value = list;
    }
  }
}

template <Rule rule>
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  auto dtype = rule == Rule::kLower || rule == Rule::kPromote
                   ? at::autocast::get_autocast_dtype(kChip)
                   : at::kFloat;
  bool applies = true;
  if (rule == Rule::kPromote) {
    each_tensor(*stack, begin, [&](const at::Tensor& tensor) {
      dtype = at::autocast::prioritize(dtype, tensor, kChip);
      return tensor;
    });
  } else if (rule == Rule::kSetDtype) {
    // Sums and softmax widen inside: only the result's dtype is asked for, where nobody has.
    applies = at::autocast::is_eligible((*stack)[begin].toTensor(), kChip);
    bool was_set = false;
    for (size_t i = 0; applies && i < arguments.size(); ++i) {
      if (arguments[i].name() != "dtype") continue;
      if ((*stack)[begin + i].isNone()) (*stack)[begin + i] = at::kFloat;
      was_set = true;
    }
    applies = applies && !was_set;
  }
  if (applies) {
    each_tensor(*stack, begin, [&](const at::Tensor& tensor) {
      return at::autocast::cached_cast(dtype, tensor, kChip);
    });
  }
  op.callBoxed(stack);
}

// "conv1d, padding" is the operator conv1d.padding.
std::string operator_name(const char* listed) {
  std::string name;
  for (const char* c = listed; *c; ++c) {
    if (*c == ',') name += '.';
    if (*c != ',' && *c != ' ') name += *c;
  }
  return name;
}

template <Rule rule>
void add(torch::Library& library, const char* listed) {
  const auto name = "aten::" + operator_name(listed);
  const auto dot = name.find('.');
  const c10::OperatorName found(name.substr(0, dot),
                                dot == std::string::npos ? "" : name.substr(dot + 1));
  if (!c10::Dispatcher::singleton().findSchema(found)) return;
  library.impl(operator_name(listed).c_str(),
               torch::CppFunction::makeFromBoxedFunction<&cast<rule>>());
}

#define ANYCHIP_LOWER(...) add<Rule::kLower>(library, #__VA_ARGS__);
#define ANYCHIP_FLOAT32(...) add<Rule::kFloat32>(library, #__VA_ARGS__);
#define ANYCHIP_SET_DTYPE(...) add<Rule::kSetDtype>(library, #__VA_ARGS__);
#define ANYCHIP_PROMOTE(...) add<Rule::kPromote>(library, #__VA_ARGS__);

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  AT_FORALL_LOWER_PRECISION_FP(ANYCHIP_LOWER)
  AT_FORALL_FP32(ANYCHIP_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(ANYCHIP_SET_DTYPE)
  AT_FORALL_PROMOTE(ANYCHIP_PROMOTE)
  for (const char* norm : {"norm.Scalar", "norm.ScalarOpt_dim"}) add<Rule::kFloat32>(library, norm);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace anychip_bridge
