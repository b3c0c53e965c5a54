// Lists of tensors from Python: lists of numbers of one length.
#pragma once

#include "binding.h"
#include "tensor_list.h"

namespace anychip::cuda {

// A thousand tensors are several thousand numbers: read without pybind's conversions.
inline std::vector<int64_t> numbers_of(const py::list& list) {
  std::vector<int64_t> numbers(list.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = PyLong_AsLongLong(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)));
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  return numbers;
}

inline TensorList list_of(const char* where, const py::list& data, const py::list& numel,
                          const py::list& dtype) {
  TensorList list{numbers_of(data), numbers_of(numel), numbers_of(dtype)};
  check(list.numel.size() == list.size() && list.dtype.size() == list.size(), where,
        "expected sizes and dtypes of " + std::to_string(list.size()) + " tensors, got " +
            std::to_string(list.numel.size()) + " and " + std::to_string(list.dtype.size()));
  for (const int64_t code : list.dtype) dtype_of(static_cast<int>(code));
  return list;
}

}  // namespace anychip::cuda
