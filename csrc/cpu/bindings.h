// What the files of the module anychip_cpu._native share: addresses and codes from Python.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "checks.h"
#include "operators.h"

namespace anychip::cpu {

namespace py = pybind11;

using Address = uintptr_t;
using NoGil = py::call_guard<py::gil_scoped_release>;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline DType dtype_of(int code) {
  check(is_dtype(code), "dtype",
        "expected FLOAT32 (0), BFLOAT16 (1) or FLOAT16 (2), got " + std::to_string(code));
  return static_cast<DType>(code);
}

void bind_elementwise(py::module_& m, NoGil no_gil);

}  // namespace anychip::cpu
