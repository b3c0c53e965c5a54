// From Python's arguments to the struct that a native operator takes.
//
// A struct is read off its fields: each takes one argument, in their order and of their types, and
// those of a struct within it likewise; the last ones may be left out. The binding names them.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.h"
#include "operators.h"

namespace anychip::cpu {

namespace py = pybind11;

// An enum's names in Python, where they are constants, by number.
template <class Enum>
struct Names;
template <>
struct Names<DType> {
  static constexpr const char* kind = "dtype";
  static constexpr std::array all = {"FLOAT32", "BFLOAT16", "FLOAT16"};
};
template <>
struct Names<Reduction> {
  static constexpr const char* kind = "reduction";
  static constexpr std::array all = {"REDUCTION_NONE", "REDUCTION_MEAN", "REDUCTION_SUM"};
};
template <>
struct Names<CodeFormat> {
  static constexpr const char* kind = "format";
  static constexpr std::array all = {"INT8", "INT4",    "NF4",     "E4M3",
                                     "E5M2", "MX_E4M3", "MX_E5M2", "MX_E2M1"};
};
template <>
struct Names<Activation> {
  static constexpr const char* kind = "activation";
  static constexpr std::array all = {"GELU",  "GELU_TANH", "SILU", "RELU",
                                     "RELU2", "SIGMOID",   "TANH", "SOFTPLUS"};
};

template <class Enum>
Enum enum_of(int64_t code) {
  using Of = Names<Enum>;
  const auto count = static_cast<int64_t>(Of::all.size());
  check(code >= 0 && code < count, Of::kind,
        std::string("expected ") + Of::all.front() + " (0) to " + Of::all.back() + " (" +
            std::to_string(count - 1) + "), got " + std::to_string(code));
  return static_cast<Enum>(code);
}

inline int64_t whole_number(PyObject* value) {
  const int64_t found = PyLong_AsLongLong(value);
  if (found == -1 && PyErr_Occurred()) throw py::error_already_set();
  return found;
}
template <class T = void>
T* pointer_to(PyObject* address) {
  void* found = PyLong_AsVoidPtr(address);
  if (!found && PyErr_Occurred()) throw py::error_already_set();
  return static_cast<T*>(found);
}

// A list that Python holds as an object.
struct Tensors {
  std::vector<TensorRef> list;
};

// One argument, which becomes what its field is. Without a value it is 0 or nothing at all, and
// says what it would be.
class Argument {
 public:
  explicit Argument(PyObject* value, const char** kind = nullptr) : value_(value), kind_(kind) {}

  template <class T>
  operator T*() const {
    return is("address") ? pointer_to<T>(value_) : nullptr;
  }
  template <class Enum, std::enable_if_t<std::is_enum_v<Enum>, int> = 0>
  operator Enum() const {
    return is(Names<Enum>::kind) ? enum_of<Enum>(whole_number(value_)) : Enum{};
  }
  operator int64_t() const { return is("int") ? whole_number(value_) : 0; }
  operator bool() const { return is("bool") && PyObject_IsTrue(value_) == 1; }
  operator double() const {
    if (!is("float")) return 0.0;
    const double found = PyFloat_AsDouble(value_);
    if (found == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return found;
  }
  operator const Update&() const { return held<Update>("Update"); }
  operator const std::vector<TensorRef>&() const { return held<Tensors>("Tensors").list; }

 private:
  template <class Held>
  const Held& held(const char* kind) const {
    static const Held nothing{};
    return is(kind) ? py::cast<const Held&>(py::handle(value_)) : nothing;
  }
  bool is(const char* kind) const {
    if (kind_) *kind_ = kind;
    return value_ != nullptr;
  }

  PyObject* value_;
  const char** kind_;
};

// What a function is called with: names, of which those that end in = may be left out.
class Signature {
 public:
  Signature(const char* function, std::initializer_list<const char*> names);

  // In the order of the names; null where one is left out. keywords: the names of the last ones, a
  // tuple or null. Throws py::type_error for what does not fit.
  void read(PyObject* const* arguments, size_t positional, PyObject* keywords,
            PyObject** values) const;
  const std::string& function() const { return function_; }
  std::string text(const char* const* kinds) const;

 private:
  std::string function_;
  std::vector<std::string> names_;
  size_t required_ = 0;
};

// Makes the exception that is being handled Python's.
void set_error() noexcept;

template <class Struct>
struct Bound {
  Signature signature;
  void (*function)(const Struct&);
  std::string text;
  PyMethodDef method;
};

template <class Struct, size_t... i>
Struct made_of(PyObject* const* values, const char** kinds, std::index_sequence<i...>) {
  return Struct{Argument(values[i], kinds ? kinds + i : nullptr)...};
}

template <class Struct, size_t count>
PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t positional,
               PyObject* keywords) noexcept {
  const auto* bound = static_cast<const Bound<Struct>*>(PyCapsule_GetPointer(self, nullptr));
  try {
    PyObject* values[count] = {};
    bound->signature.read(arguments, static_cast<size_t>(positional), keywords, values);
    const Struct given = made_of<Struct>(values, nullptr, std::make_index_sequence<count>{});
    const py::gil_scoped_release release;
    bound->function(given);
  } catch (...) {
    set_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

// module.name(...) calls the function without the GIL, with its struct made of the arguments. By
// Python's own interface: pybind11 makes a tuple and a dict for every call.
template <class Struct, class... Name>
void bind(py::module_& module, const char* name, void (*function)(const Struct&), Name... names) {
  constexpr size_t count = sizeof...(Name);
  PyObject* nothing[count] = {};
  const char* kinds[count] = {};
  made_of<Struct>(nothing, kinds, std::make_index_sequence<count>{});
  // As long as the process lasts, like the module.
  auto* bound = new Bound<Struct>{Signature(name, {names...}), function, {}, {}};
  bound->text = bound->signature.text(kinds);
  bound->method = {
      bound->signature.function().c_str(),
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call<Struct, count>)),
      METH_FASTCALL | METH_KEYWORDS, bound->text.c_str()};
  const auto self = py::reinterpret_steal<py::object>(PyCapsule_New(bound, nullptr, nullptr));
  module.add_object(name, py::reinterpret_steal<py::object>(PyCFunction_NewEx(
                              &bound->method, self.ptr(), module.attr("__name__").ptr())));
}

}  // namespace anychip::cpu
