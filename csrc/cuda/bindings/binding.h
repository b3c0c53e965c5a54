// What every binding file needs: addresses from Python, and errors back to it.
//
// The same files give anychip_cuda._cuda (kernels by nvcc) and the tests' _emu (by g++).
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "dtype.h"

namespace anychip::cuda {

namespace py = pybind11;

using Address = uintptr_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline void check(bool condition, const char* where, const std::string& expected_and_got) {
  if (!condition) throw std::invalid_argument(std::string(where) + ": " + expected_and_got);
}

inline DType dtype_of(int code) {
  check(is_dtype(code), "dtype",
        "expected FLOAT32 (0), BFLOAT16 (1) or FLOAT16 (2), got " + std::to_string(code));
  return static_cast<DType>(code);
}

// Calls `queue(place)` with the call's device current; its CUDA error becomes a RuntimeError that
// names the operator. Every binding ends in this.
template <class Queue>
void run_on(const char* where, int device, Address stream, Queue&& queue) {
  const DeviceGuard guard(device);
  cudaError_t status = guard.status();
  if (status == cudaSuccess) status = queue(Place{device, reinterpret_cast<cudaStream_t>(stream)});
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(where) + ": CUDA error " +
                             std::to_string(static_cast<int>(status)) + ": " +
                             cudaGetErrorString(status));
  }
}

// One per family of operators; each in a file of its name.
void bind_activation(py::module_& m);
void bind_columns(py::module_& m);
void bind_dropout(py::module_& m);
void bind_rope(py::module_& m);
void bind_softmax(py::module_& m);
void bind_updates(py::module_& m);
void bind_adamw_8bit(py::module_& m);
void bind_lists(py::module_& m);
void bind_embedding(py::module_& m);
void bind_loss(py::module_& m);
void bind_norm(py::module_& m);
void bind_quantization(py::module_& m);
void bind_hadamard(py::module_& m);
void bind_top_k(py::module_& m);
void bind_permutation(py::module_& m);

}  // namespace anychip::cuda
