// Operators: what the library lists by name runs there.
//
// Nothing here knows an operator, but for three whose tag torch leaves off. A name stands for a
// functional ATen operator; its in-place and .out forms are found by their schemas, shapes and
// dtypes of results by torch's meta kernels.

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "bridge.h"

namespace anychip_bridge {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Arguments = c10::ArrayRef<IValue>;
using Tensors = c10::SmallVector<Tensor, 4>;

enum class Form { kFunctional, kInPlace, kOut };

// Of a list; undefined where an optional one is left out.
std::vector<Tensor> tensors_of(const IValue& list) {
  if (list.isTensorList()) return list.toTensorVector();
  std::vector<Tensor> found;
  for (const std::optional<Tensor>& tensor : list.toOptionalTensorVector())
    found.push_back(tensor.value_or(Tensor()));
  return found;
}

// Pointers to what is in it hold. A few are in place: to allocate them takes longer than a small
// operator.
template <class T, size_t kFew = 8>
class Steady {
 public:
  Steady() = default;
  Steady(const Steady&) = delete;
  Steady& operator=(const Steady&) = delete;
  ~Steady() {
    while (num_few_ > 0) few()[--num_few_].~T();
  }
  template <class... Given>
  T& emplace_back(Given&&... given) {
    if (num_few_ == kFew) return more_.emplace_back(std::forward<Given>(given)...);
    return *new (few() + num_few_++) T(std::forward<Given>(given)...);
  }

 private:
  T* few() { return reinterpret_cast<T*>(bytes_); }

  alignas(T) std::byte bytes_[kFew * sizeof(T)];
  size_t num_few_ = 0;
  std::list<T> more_;
};

// Descriptors of one call.
struct Call {
  explicit Call(c10::DeviceIndex on) : device(on) {}

  c10::DeviceIndex device;
  Steady<IValue> kept;  // what is made for the call lives until that is queued
  Steady<anychip_tensor> tensors;
  Steady<anychip_argument> described;
  c10::SmallVector<const anychip_argument*, 8> arguments;
  std::list<std::vector<const anychip_tensor*>> lists;
  std::list<std::vector<int64_t>> ints;
  std::list<std::vector<double>> floats;
  std::list<std::string> strings;

  const anychip_tensor* describe(const Tensor& tensor) {
    if (!tensor.defined()) return nullptr;
    auto& into = tensors.emplace_back();
    const auto place = !tensor.numel()   ? Place{}
                       : tensor.is_cpu() ? place_of_number(tensor)
                                         : place_of(tensor);
    into.struct_size = sizeof into;
    into.dtype = static_cast<int32_t>(tensor.scalar_type());
    into.device = device;
    into.ndim = static_cast<int32_t>(tensor.dim());
    into.memory = place.memory;
    into.byte_offset = place.offset;
    std::copy(tensor.sizes().begin(), tensor.sizes().end(), into.size);
    std::copy(tensor.strides().begin(), tensor.strides().end(), into.stride);
    return &into;
  }

  Place place_of_number(const Tensor& number) {
    if (const auto place = number_on(device, number)) return *place;
    const auto moved = number.as_strided({}, {}).to(c10::Device(kChip, device));
    return place_of(kept.emplace_back(moved).toTensor());
  }

  // The value lives until the call is queued.
  void add(const IValue& value) {
    auto& into = described.emplace_back();
    arguments.push_back(&into);
    into.struct_size = sizeof into;
    into.kind = ANYCHIP_ARG_NONE;
    if (value.isTensor() && value.toTensor().defined()) {
      into.kind = ANYCHIP_ARG_TENSOR;
      into.v.tensor = describe(value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      auto& list = lists.emplace_back();
      for (const Tensor& tensor : tensors_of(value)) list.push_back(describe(tensor));
      into.kind = ANYCHIP_ARG_TENSORS;
      into.n = list.size();
      into.v.tensors = list.data();
    } else if (value.isBool()) {
      into.kind = ANYCHIP_ARG_BOOL;
      into.v.i = value.toBool();
    } else if (value.isInt()) {
      into.kind = ANYCHIP_ARG_INT;
      into.v.i = value.toInt();
    } else if (value.isDouble()) {
      into.kind = ANYCHIP_ARG_FLOAT;
      into.v.f = value.toDouble();
    } else if (value.isIntList()) {
      const auto& list = ints.emplace_back(value.toIntVector());
      into.kind = ANYCHIP_ARG_INTS;
      into.n = list.size();
      into.v.ints = list.data();
    } else if (value.isDoubleList()) {
      const auto& list = floats.emplace_back(value.toDoubleVector());
      into.kind = ANYCHIP_ARG_FLOATS;
      into.n = list.size();
      into.v.floats = list.data();
    } else if (value.isString()) {
      into.kind = ANYCHIP_ARG_STRING;
      into.v.string = strings.emplace_back(value.toStringRef()).c_str();
    }
  }

  // false: the library does not do this one, and has written nothing.
  bool run(anychip_operator function, const char* name, c10::ArrayRef<Tensor> results) {
    Timed timed("native", name, device);
    c10::SmallVector<const anychip_tensor*, 4> result_pointers;
    for (const Tensor& result : results) result_pointers.push_back(describe(result));
    anychip_call call{};
    call.struct_size = sizeof call;
    call.device = device;
    call.stream = current_stream(device);
    call.num_arguments = static_cast<uint32_t>(arguments.size());
    call.num_results = static_cast<uint32_t>(result_pointers.size());
    call.arguments = arguments.data();
    call.results = result_pointers.data();
    auto status = function(&call);
    release_scratch();
    if (status == ANYCHIP_ENOMEM) {  // once more, without caches
      allocator()->emptyCache({0, 0});
      status = function(&call);
      release_scratch();
    }
    if (status == ANYCHIP_ENOTSUP) return timed.drop(), false;
    check(status, name, device);
    return true;
  }
};

// What a result looks like.
struct Shape {
  c10::DimVector sizes, strides;
  c10::ScalarType dtype;
};
using Shapes = c10::SmallVector<Shape, 1>;

bool is_servable(const Tensor& tensor, c10::DeviceIndex device) {
  if (!tensor.defined()) return true;
  if (tensor.dim() > ANYCHIP_MAX_DIMS || tensor.layout() != c10::kStrided || tensor.is_conj() ||
      tensor.is_neg())
    return false;
  // A number that Python made a tensor of, or a scalar tensor of the host.
  if (tensor.is_cpu()) return tensor.dim() == 0;
  return tensor.device() == c10::Device(kChip, device);
}

bool are_servable(const Stack& stack, size_t begin, size_t end, c10::DeviceIndex device) {
  for (size_t i = begin; i < end; ++i) {
    const IValue& value = stack[i];
    if (value.isTensor()) {
      if (!is_servable(value.toTensor(), device)) return false;
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const Tensor& tensor : tensors_of(value))
        if (!is_servable(tensor, device)) return false;
    } else if (value.isComplexDouble()) {
      return false;
    }
  }
  return true;
}

// A number stays what it is: some meta kernels are written in Python and want it as one.
Tensor as_meta(const Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// How many arguments are not .out ones.
size_t num_read(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  return std::count_if(arguments.begin(), arguments.end(),
                       [](const c10::Argument& argument) { return !argument.is_out(); });
}

// One of the forms of an operator that the library has.
class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(c10::OperatorHandle functional, Form form, anychip_operator function)
      : functional_(std::move(functional)),
        form_(form),
        function_(function),
        name_(c10::toString(functional_.operator_name())),
        num_arguments_(num_read(functional_.schema())),
        num_results_(functional_.schema().returns().size()),
        is_pointwise_(num_results_ == 1 &&
                      (functional_.hasTag(at::Tag::pointwise) || is_untagged())),
        count_(call_count(name_, true)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    if (!runs(op, stack)) host_fallback(op, stack);
  }

 private:
  bool runs(const c10::OperatorHandle& op, Stack* stack) {
    const size_t num_given = op.schema().arguments().size(), begin = stack->size() - num_given;
    const auto device = device_of_call(*stack, begin);
    if (!are_servable(*stack, begin, stack->size(), device)) return false;
    const at::AutoDispatchBelowADInplaceOrView below;
    const Arguments arguments(stack->data() + begin, num_arguments_);
    Tensors given, results;
    if (form_ == Form::kInPlace) given.push_back((*stack)[begin].toTensor());
    if (form_ == Form::kOut)
      for (size_t i = num_arguments_; i < num_given; ++i)
        given.push_back((*stack)[begin + i].toTensor());
    auto shapes = is_pointwise_ ? pointwise_shape(arguments) : std::nullopt;
    if (!shapes) shapes = inferred_shapes(arguments, given);
    if (!shapes) return false;  // wrong arguments: the host has the words for it
    if (!make_results(*shapes, given, device, arguments, results)) return false;
    Call call(device);
    for (const IValue& value : arguments)
      call.add(is_ready(value, (*shapes)[0])
                   ? value
                   : call.kept.emplace_back(prepared(value, (*shapes)[0], arguments)));
    if (!(is_pointwise_ && results[0].numel() == 0) && !call.run(function_, name_.c_str(), results))
      return false;
    ++count_;
    for (size_t i = 0; i < given.size(); ++i)
      if (!given[i].is_same(results[i])) given[i].copy_(results[i]);
    torch::jit::drop(*stack, num_given);
    for (auto& result : given.empty() ? results : given) stack->emplace_back(std::move(result));
    return true;
  }

  // Those that torch leaves the tag off.
  bool is_untagged() const {
    return name_.rfind("aten::fill.", 0) == 0 || name_ == "aten::zero" ||
           name_ == "aten::rsub.Tensor";
  }

  // What torch's promotion makes of the arguments' types.
  static c10::ScalarType common_dtype(Arguments arguments) {
    at::native::ResultTypeState state{};
    for (const IValue& value : arguments) {
      if (value.isTensor() && value.toTensor().defined())
        state = at::native::update_result_type_state(value.toTensor(), state);
    }
    return at::native::result_type(state);
  }

  // Whether an argument is as the library wants it: of the result's shape where that is the rule,
  // and no number.
  bool is_ready(const IValue& value, const Shape& shape) const {
    if (!value.isTensor() || !value.toTensor().defined()) return true;
    const Tensor& tensor = value.toTensor();
    return !tensor.is_cpu() && !(is_pointwise_ && tensor.sizes() != shape.sizes);
  }

  // A number in the type that torch's promotion finds.
  IValue prepared(const IValue& value, const Shape& shape, Arguments arguments) const {
    Tensor tensor = value.toTensor();
    if (tensor.is_cpu()) tensor = tensor.to(common_dtype(arguments));
    return is_pointwise_ && tensor.sizes() != shape.sizes ? tensor.expand(shape.sizes) : tensor;
  }

  // The tensors to be written: those given where they fit, else new ones.
  bool make_results(const Shapes& shapes, const Tensors& given, c10::DeviceIndex device,
                    Arguments arguments, Tensors& results) const {
    if (!given.empty() && given.size() != shapes.size()) return false;
    for (size_t i = 0; i < given.size(); ++i) {
      if (form_ == Form::kInPlace && given[i].sizes() != shapes[i].sizes) return false;
      if (!c10::canCast(shapes[i].dtype, given[i].scalar_type())) return false;
      at::assert_no_internal_overlap(given[i]);
    }
    for (size_t i = 0; i < shapes.size(); ++i) {
      const Shape& shape = shapes[i];
      if (!given.empty()) {
        if (form_ == Form::kOut) at::native::resize_output(given[i], shape.sizes);
        if (given[i].scalar_type() == shape.dtype && !overlaps(given[i], arguments)) {
          results.push_back(given[i]);
          continue;
        }
      }
      results.push_back(
          empty_strided_on(c10::Device(kChip, device), shape.sizes, shape.strides, shape.dtype));
    }
    return true;
  }

  // Whether writing the result would change an argument before it is read.
  bool overlaps(const Tensor& result, Arguments arguments) const {
    const auto is_hit = [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage() || !tensor.is_alias_of(result)) return false;
      const bool is_same_view = tensor.sizes() == result.sizes() &&
                                tensor.strides() == result.strides() &&
                                tensor.storage_offset() == result.storage_offset() &&
                                tensor.scalar_type() == result.scalar_type();
      return !(is_pointwise_ && is_same_view);
    };
    for (const IValue& value : arguments) {
      if (value.isTensor() && is_hit(value.toTensor())) return true;
      if (value.isTensorList())
        for (const Tensor& tensor : value.toTensorVector())
          if (is_hit(tensor)) return true;
    }
    return false;
  }

  // Without a meta kernel's microseconds: the dtype of a call with such arguments is known, and
  // all tensors lie alike.
  std::optional<Shapes> pointwise_shape(Arguments arguments) {
    std::string key;
    const Tensor* first = nullptr;
    for (const IValue& value : arguments) {
      if (value.isTensor() && value.toTensor().defined()) {
        const Tensor& tensor = value.toTensor();
        key +=
            static_cast<char>(static_cast<int>(tensor.scalar_type()) * 4 + (tensor.dim() == 0) * 2 +
                              tensor.unsafeGetTensorImpl()->is_wrapped_number());
        if (tensor.dim() == 0) continue;
        if (first && (first->sizes() != tensor.sizes() || first->strides() != tensor.strides()))
          return std::nullopt;
        first = &tensor;
      } else if (value.isBool() || value.isDouble() || value.isInt()) {
        key += value.isBool() ? 'B' : value.isInt() ? 'I' : 'D';
        key += '\xff';
      } else {
        return std::nullopt;  // a dtype or a mode, by which the result may differ
      }
    }
    if (!first || !first->is_non_overlapping_and_dense()) return std::nullopt;
    std::optional<c10::ScalarType> dtype;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (const auto found = dtypes_.find(key); found != dtypes_.end()) dtype = found->second;
    }
    if (!dtype) {
      const auto shapes = inferred_shapes(arguments, {});
      if (!shapes) return std::nullopt;
      dtype = (*shapes)[0].dtype;
      std::lock_guard<std::mutex> lock(mutex_);
      dtypes_[key] = *dtype;
    }
    return Shapes{{c10::DimVector(first->sizes()), c10::DimVector(first->strides()), *dtype}};
  }

  std::optional<Shapes> inferred_shapes(Arguments arguments, const Tensors& given) const {
    Stack stack;
    for (const IValue& value : arguments) {
      if (value.isTensor()) {
        stack.emplace_back(as_meta(value.toTensor()));
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(as_meta(tensor));
        stack.emplace_back(std::move(list));
      } else {
        stack.push_back(value);
      }
    }
    // Of an operator that has only the .out form, such a tensor's shape is what it is resized to.
    for (size_t i = num_arguments_; i < functional_.schema().arguments().size(); ++i)
      stack.emplace_back(as_meta(given[i - num_arguments_]));
    try {
      functional_.callBoxed(&stack);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    Shapes shapes;
    for (const IValue& value : stack) {
      if (!value.isTensor() || !value.toTensor().defined()) return std::nullopt;
      const Tensor& result = value.toTensor();
      shapes.push_back(
          {c10::DimVector(result.sizes()), c10::DimVector(result.strides()), result.scalar_type()});
    }
    return shapes;
  }

  c10::OperatorHandle functional_;
  Form form_;
  anychip_operator function_;
  std::string name_;
  size_t num_arguments_, num_results_;
  bool is_pointwise_;
  std::atomic<int64_t>& count_;
  std::mutex mutex_;
  std::unordered_map<std::string, c10::ScalarType> dtypes_;
};

// An operator of no library of torch's, in the schema that Python gave it: its arguments, then the
// tensors to be written, then whether the library did so.
class OwnKernel final : public c10::OperatorKernel {
 public:
  OwnKernel(std::string name, anychip_operator function)
      : name_(std::move(name)), function_(function), count_(call_count(name_, true)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const size_t num_given = op.schema().arguments().size(), begin = stack->size() - num_given;
    const auto device = device_of_call(*stack, begin);
    bool is_done = are_servable(*stack, begin, stack->size(), device);
    if (is_done) {
      Call call(device);
      for (size_t i = begin; i + 1 < stack->size(); ++i) call.add((*stack)[i]);
      is_done = call.run(function_, name_.c_str(), tensors_of(stack->back()));
    }
    if (is_done) ++count_;
    torch::jit::drop(*stack, num_given);
    stack->emplace_back(is_done);
  }

 private:
  std::string name_;
  anychip_operator function_;
  std::atomic<int64_t>& count_;
};

// Which form of `functional` a schema of the same name is, if it is one.
std::optional<Form> form_of(const c10::FunctionSchema& schema,
                            const c10::FunctionSchema& functional) {
  const auto &given = schema.arguments(), &wanted = functional.arguments();
  const auto num_out = given.size() - wanted.size();
  if (given.size() < wanted.size() || (num_out && num_out != functional.returns().size()))
    return std::nullopt;
  for (size_t i = 0; i < wanted.size(); ++i)
    if (*given[i].type() != *wanted[i].type() || given[i].name() != wanted[i].name())
      return std::nullopt;
  const auto is_written = [&](size_t i) {
    return given[i].alias_info() && given[i].alias_info()->isWrite();
  };
  for (size_t i = 1; i < wanted.size(); ++i)
    if (is_written(i)) return std::nullopt;
  if (num_out == 0) return is_written(0) ? Form::kInPlace : Form::kFunctional;
  for (size_t i = wanted.size(); i < given.size(); ++i)
    if (!given[i].is_out()) return std::nullopt;
  return Form::kOut;
}

// Whether a library may have it: it writes nothing that it reads, and draws no numbers.
bool is_eligible(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (schema.arguments().empty() || schema.returns().empty()) return false;
  const auto is_aliased = [](const c10::Argument& a) { return a.alias_info() && !a.is_out(); };
  for (const auto& argument : schema.arguments())
    if (is_aliased(argument) || takes_generator(argument)) return false;
  for (const auto& result : schema.returns())
    if (result.type()->kind() != c10::TypeKind::TensorType) return false;
  // Made of other operators, which autograd knows: those are the ones to serve.
  return !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

void register_kernel(const c10::OperatorHandle& op, const c10::OperatorHandle& functional,
                     Form form, anychip_operator function) {
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>;
  libraries->push_back(std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__));
  const auto& name = op.operator_name();
  const auto text = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
  libraries->back()->impl(text.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                            std::make_unique<Kernel>(functional, form, function)));
}

anychip_operator copy_function = nullptr;

}  // namespace

void register_operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::map<std::string, std::vector<c10::OperatorName>> forms;
  for (const auto& name : dispatcher.getAllOpNames()) forms[name.name].push_back(name);
  for (const char* const* next = chip.operators; next && *next; ++next) {
    const auto function = chip.find_operator(*next);
    if (!function) continue;
    const std::string text = *next, base = "aten::" + text.substr(0, text.find('.'));
    if (text == "copy") {
      copy_function = function;
      continue;
    }
    const auto dot = text.find('.');
    const auto found =
        dispatcher.findSchema({base, dot == std::string::npos ? "" : text.substr(dot + 1)});
    if (!found || !is_eligible(*found)) continue;
    const bool has_out = num_read(found->schema()) < found->schema().arguments().size();
    register_kernel(*found, *found, has_out ? Form::kOut : Form::kFunctional, function);
    if (has_out) continue;
    for (const auto& names : {forms[base], forms[base + "_"]}) {
      for (const auto& name : names) {
        const auto other = dispatcher.findSchema(name);
        if (!other || other->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
          continue;
        const auto form = form_of(other->schema(), found->schema());
        if (form && *form != Form::kFunctional) register_kernel(*other, *found, *form, function);
      }
    }
  }
}

void serve(const std::string& name, const std::string& schema) {
  const auto function = chip.operators ? chip.find_operator(name.c_str()) : nullptr;
  TORCH_CHECK(function, chip.name, " lists ", name, ", and has no function for it");
  static auto* library = new torch::Library(torch::Library::FRAGMENT, "anychip_library",
                                            std::nullopt, __FILE__, __LINE__);
  library->def(schema.c_str());
  library->impl(schema.substr(0, schema.find('(')).c_str(),
                torch::dispatch(kChip, torch::CppFunction::makeFromBoxedFunctor(
                                           std::make_unique<OwnKernel>(name, function))));
}

bool native_copy(const Tensor& target, const Tensor& source) {
  const auto device = target.device().index();
  if (!copy_function || !is_servable(target, device) || !is_servable(source, device)) return false;
  if (target.is_alias_of(source)) return false;
  Call call(device);
  const IValue argument(source);
  call.add(argument);
  return call.run(copy_function, "copy", {target});
}

}  // namespace anychip_bridge
