#include "dropout.h"

#include "binding.h"

namespace anychip::cuda {

void bind_dropout(py::module_& m) {
  m.def("dropout", [](Address x, Address rng, Address y, int64_t numel, double p, int dtype,
                      int device, Address stream) {
    run_on("dropout", device, stream, [&](Place place) {
      return dropout(at(x), at(y), numel, {at<int64_t>(rng), p}, dtype_of(dtype), place);
    });
  });
  m.def("dropout_rows",
        [](Address x, Address rng, Address y, Address at_rows, int64_t rows, int64_t columns,
           int64_t width, int64_t column, double p, int dtype, int device, Address stream) {
          run_on("dropout_rows", device, stream, [&](Place place) {
            return dropout_rows(at(x), at(y), {at<int64_t>(at_rows), rows, columns, width, column},
                                {at<int64_t>(rng), p}, dtype_of(dtype), place);
          });
        });
  m.def("bias_dropout_add_forward",
        [](Address x, Address residual, Address rng, Address bias, Address y, int64_t rows,
           int64_t hidden, double p, int dtype, int stream_dtype, int bias_dtype, int device,
           Address stream) {
          run_on("bias_dropout_add_forward", device, stream, [&](Place place) {
            return bias_dropout_add_forward(at(x), at(residual), at(bias), at(y), rows, hidden,
                                            {at<int64_t>(rng), p}, dtype_of(dtype),
                                            dtype_of(stream_dtype), dtype_of(bias_dtype), place);
          });
        });
  m.def("bias_dropout_add_backward",
        [](Address grad, Address rng, Address dx, Address dresidual, Address dbias, Address partial,
           int64_t rows, int64_t hidden, int64_t parts, double p, int dtype, int device,
           Address stream) {
          run_on("bias_dropout_add_backward", device, stream, [&](Place place) {
            return bias_dropout_add_backward(at(grad), at(dx), at(dresidual), at<float>(dbias),
                                             at<float>(partial), rows, hidden, parts,
                                             {at<int64_t>(rng), p}, dtype_of(dtype), place);
          });
        });
}

}  // namespace anychip::cuda
