// Activations and dropout for Python.
#include "bindings.h"

namespace anychip::cpu {
namespace {

void bind_dropout(py::module_& m, NoGil no_gil) {
  m.def(
      "dropout",
      [](Address x, Address rng, Address y, int64_t numel, double p, int dtype, Address row_index,
         int64_t columns, int64_t width, int64_t column) {
        dropout({at(x),
                 at(y),
                 numel,
                 columns,
                 dtype_of(dtype),
                 {at<int64_t>(rng), p, at<int64_t>(row_index), width, column}});
      },
      py::arg("x"), py::arg("rng"), py::arg("y"), py::arg("numel"), py::arg("p"), py::arg("dtype"),
      py::arg("row_index") = 0, py::arg("columns") = 0, py::arg("width") = 0, py::arg("column") = 0,
      no_gil);
  m.def(
      "bias_dropout_add",
      [](Address x, Address residual, Address bias, Address y, int64_t rows, int64_t hidden,
         int dtype, int residual_dtype, int bias_dtype, Address rng, double p, Address row_index,
         int64_t width, int64_t column) {
        bias_dropout_add({at(x),
                          at(residual),
                          at(bias),
                          at(y),
                          rows,
                          hidden,
                          dtype_of(dtype),
                          dtype_of(residual_dtype),
                          dtype_of(bias_dtype),
                          {at<int64_t>(rng), p, at<int64_t>(row_index), width, column}});
      },
      py::arg("x"), py::arg("residual"), py::arg("bias"), py::arg("y"), py::arg("rows"),
      py::arg("hidden"), py::arg("dtype"), py::arg("residual_dtype"), py::arg("bias_dtype"),
      py::arg("rng"), py::arg("p"), py::arg("row_index") = 0, py::arg("width") = 0,
      py::arg("column") = 0, no_gil);
  m.def(
      "bias_dropout_backward",
      [](Address grad, Address dx, Address dbias, int64_t rows, int64_t hidden, int dtype,
         Address rng, double p, Address row_index, int64_t width, int64_t column) {
        bias_dropout_backward({at(grad),
                               at(dx),
                               at<float>(dbias),
                               rows,
                               hidden,
                               dtype_of(dtype),
                               {at<int64_t>(rng), p, at<int64_t>(row_index), width, column}});
      },
      py::arg("grad"), py::arg("dx"), py::arg("dbias"), py::arg("rows"), py::arg("hidden"),
      py::arg("dtype"), py::arg("rng"), py::arg("p"), py::arg("row_index") = 0,
      py::arg("width") = 0, py::arg("column") = 0, no_gil);
}

void bind_gelu(py::module_& m, NoGil no_gil) {
  m.def(
      "gelu_forward",
      [](Address x, Address y, int64_t numel, bool tanh, int dtype) {
        gelu_forward({at(x), at(y), numel, tanh, dtype_of(dtype)});
      },
      py::arg("x"), py::arg("y"), py::arg("numel"), py::arg("tanh"), py::arg("dtype"), no_gil);
  m.def(
      "gelu_backward",
      [](Address grad, Address x, Address dx, int64_t numel, bool tanh, int dtype) {
        gelu_backward({at(grad), at(x), at(dx), numel, tanh, dtype_of(dtype)});
      },
      py::arg("grad"), py::arg("x"), py::arg("dx"), py::arg("numel"), py::arg("tanh"),
      py::arg("dtype"), no_gil);
  m.def(
      "bias_gelu_forward",
      [](Address x, Address bias, Address y, int64_t rows, int64_t hidden, bool tanh, int dtype,
         int bias_dtype) {
        bias_gelu_forward(
            {at(x), at(bias), at(y), rows, hidden, tanh, dtype_of(dtype), dtype_of(bias_dtype)});
      },
      py::arg("x"), py::arg("bias"), py::arg("y"), py::arg("rows"), py::arg("hidden"),
      py::arg("tanh"), py::arg("dtype"), py::arg("bias_dtype"), no_gil);
  m.def(
      "bias_gelu_backward",
      [](Address grad, Address x, Address bias, Address dx, Address dbias, int64_t rows,
         int64_t hidden, bool tanh, int dtype, int bias_dtype) {
        bias_gelu_backward({at(grad), at(x), at(bias), at(dx), at(dbias), rows, hidden, tanh,
                            dtype_of(dtype), dtype_of(bias_dtype)});
      },
      py::arg("grad"), py::arg("x"), py::arg("bias"), py::arg("dx"), py::arg("dbias"),
      py::arg("rows"), py::arg("hidden"), py::arg("tanh"), py::arg("dtype"), py::arg("bias_dtype"),
      no_gil);
}

void bind_gated(py::module_& m, NoGil no_gil) {
  m.def(
      "swiglu_forward",
      [](Address gate, Address up, Address y, int64_t numel, int dtype) {
        swiglu_forward({at(gate), at(up), at(y), numel, dtype_of(dtype)});
      },
      py::arg("gate"), py::arg("up"), py::arg("y"), py::arg("numel"), py::arg("dtype"), no_gil);
  m.def(
      "swiglu_backward",
      [](Address grad, Address gate, Address up, Address dgate, Address dup, int64_t numel,
         int dtype) {
        swiglu_backward({at(grad), at(gate), at(up), at(dgate), at(dup), numel, dtype_of(dtype)});
      },
      py::arg("grad"), py::arg("gate"), py::arg("up"), py::arg("dgate"), py::arg("dup"),
      py::arg("numel"), py::arg("dtype"), no_gil);
  m.def(
      "geglu_forward",
      [](Address gate, Address up, Address y, int64_t numel, bool tanh, int dtype) {
        geglu_forward({at(gate), at(up), at(y), numel, tanh, dtype_of(dtype)});
      },
      py::arg("gate"), py::arg("up"), py::arg("y"), py::arg("numel"), py::arg("tanh"),
      py::arg("dtype"), no_gil);
  m.def(
      "geglu_backward",
      [](Address grad, Address gate, Address up, Address dgate, Address dup, int64_t numel,
         bool tanh, int dtype) {
        geglu_backward(
            {at(grad), at(gate), at(up), at(dgate), at(dup), numel, tanh, dtype_of(dtype)});
      },
      py::arg("grad"), py::arg("gate"), py::arg("up"), py::arg("dgate"), py::arg("dup"),
      py::arg("numel"), py::arg("tanh"), py::arg("dtype"), no_gil);
}

}  // namespace

void bind_elementwise(py::module_& m, NoGil no_gil) {
  bind_dropout(m, no_gil);
  bind_gelu(m, no_gil);
  bind_gated(m, no_gil);
}

}  // namespace anychip::cpu
