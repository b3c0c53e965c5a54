#include "activation.h"

#include "binding.h"

namespace anychip::cuda {
namespace {

void bind_gelu(py::module_& m) {
  m.def("gelu_forward",
        [](Address x, Address y, int64_t numel, bool tanh, int dtype, int device, Address stream) {
          run_on("gelu_forward", device, stream, [&](Place place) {
            return gelu_forward(at(x), at(y), numel, tanh, dtype_of(dtype), place);
          });
        });
  m.def("gelu_backward", [](Address grad, Address x, Address dx, int64_t numel, bool tanh,
                            int dtype, int device, Address stream) {
    run_on("gelu_backward", device, stream, [&](Place place) {
      return gelu_backward(at(grad), at(x), at(dx), numel, tanh, dtype_of(dtype), place);
    });
  });
}

void bind_bias_gelu(py::module_& m) {
  m.def("bias_gelu_forward", [](Address x, Address bias, Address y, int64_t rows, int64_t hidden,
                                bool tanh, int dtype, int bias_dtype, int device, Address stream) {
    run_on("bias_gelu_forward", device, stream, [&](Place place) {
      return bias_gelu_forward(
          {at(x), at(bias), rows, hidden, dtype_of(dtype), dtype_of(bias_dtype)}, at(y), tanh,
          place);
    });
  });
  m.def("bias_gelu_backward", [](Address grad, Address x, Address bias, Address dx, Address dbias,
                                 Address partial, int64_t rows, int64_t hidden, int64_t parts,
                                 bool tanh, int dtype, int bias_dtype, int device, Address stream) {
    run_on("bias_gelu_backward", device, stream, [&](Place place) {
      return bias_gelu_backward(
          at(grad), {at(x), at(bias), rows, hidden, dtype_of(dtype), dtype_of(bias_dtype)}, at(dx),
          at(dbias), at<float>(partial), parts, tanh, place);
    });
  });
}

void bind_gated(py::module_& m) {
  m.def("swiglu_forward", [](Address gate, Address up, Address y, int64_t numel, int dtype,
                             int device, Address stream) {
    run_on("swiglu_forward", device, stream, [&](Place place) {
      return swiglu_forward(at(gate), at(up), at(y), numel, dtype_of(dtype), place);
    });
  });
  m.def("swiglu_backward", [](Address grad, Address gate, Address up, Address dgate, Address dup,
                              int64_t numel, int dtype, int device, Address stream) {
    run_on("swiglu_backward", device, stream, [&](Place place) {
      return swiglu_backward(at(grad), at(gate), at(up), at(dgate), at(dup), numel, dtype_of(dtype),
                             place);
    });
  });
  m.def("geglu_forward", [](Address gate, Address up, Address y, int64_t numel, bool tanh,
                            int dtype, int device, Address stream) {
    run_on("geglu_forward", device, stream, [&](Place place) {
      return geglu_forward(at(gate), at(up), at(y), numel, tanh, dtype_of(dtype), place);
    });
  });
  m.def("geglu_backward", [](Address grad, Address gate, Address up, Address dgate, Address dup,
                             int64_t numel, bool tanh, int dtype, int device, Address stream) {
    run_on("geglu_backward", device, stream, [&](Place place) {
      return geglu_backward(at(grad), at(gate), at(up), at(dgate), at(dup), numel, tanh,
                            dtype_of(dtype), place);
    });
  });
}

}  // namespace

void bind_activation(py::module_& m) {
  bind_gelu(m);
  bind_bias_gelu(m);
  bind_gated(m);
}

}  // namespace anychip::cuda
