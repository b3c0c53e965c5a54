#include "norm.h"

#include "binding.h"

namespace anychip::cuda {

namespace {

void bind_dropout_add_norm(py::module_& m) {
  m.def("dropout_add_norm_forward",
        [](Address x, Address residual, Address weight, Address bias, Address y, Address total,
           Address mean, Address rstd, Address rng, int64_t rows, int hidden, double p, double eps,
           int dtype, int residual_dtype, int weight_dtype, int bias_dtype, int device,
           Address stream) {
          const NormForward args{at(x),
                                 at(residual),
                                 at(weight),
                                 at(bias),
                                 at(y),
                                 at(total),
                                 at<float>(mean),
                                 at<float>(rstd),
                                 rows,
                                 hidden,
                                 static_cast<float>(eps),
                                 dtype_of(dtype),
                                 dtype_of(residual_dtype),
                                 dtype_of(weight_dtype),
                                 dtype_of(bias_dtype)};
          const Drop drop{at<int64_t>(rng), p};
          run_on("dropout_add_norm_forward", device, stream,
                 [&](Place place) { return dropout_add_norm_forward(args, drop, place); });
        });
  m.def("dropout_add_norm_backward",
        [](Address grad, Address v, Address dtotal, Address weight, Address mean, Address rstd,
           Address dx, Address dresidual, Address dweight, Address dbias, Address partials,
           Address rng, int64_t blocks, int64_t rows, int hidden, double p, int dtype,
           int residual_dtype, int weight_dtype, int device, Address stream) {
          const NormBackward args{at(grad),
                                  at(v),
                                  at(dtotal),
                                  at(weight),
                                  at<float>(mean),
                                  at<float>(rstd),
                                  at(dx),
                                  at(dresidual),
                                  at(dweight),
                                  at(dbias),
                                  rows,
                                  hidden,
                                  dtype_of(dtype),
                                  dtype_of(residual_dtype),
                                  dtype_of(weight_dtype)};
          const NormScratch scratch{at<float>(partials), blocks};
          const Drop drop{at<int64_t>(rng), p};
          run_on("dropout_add_norm_backward", device, stream, [&](Place place) {
            return dropout_add_norm_backward(args, drop, scratch, place);
          });
        });
}

}  // namespace

void bind_norm(py::module_& m) {
  m.def("norm_forward", [](Address x, Address residual, Address weight, Address bias, Address y,
                           Address total, Address mean, Address rstd, int64_t rows, int hidden,
                           double eps, int dtype, int residual_dtype, int weight_dtype,
                           int bias_dtype, int device, Address stream) {
    const NormForward args{at(x),
                           at(residual),
                           at(weight),
                           at(bias),
                           at(y),
                           at(total),
                           at<float>(mean),
                           at<float>(rstd),
                           rows,
                           hidden,
                           static_cast<float>(eps),
                           dtype_of(dtype),
                           dtype_of(residual_dtype),
                           dtype_of(weight_dtype),
                           dtype_of(bias_dtype)};
    run_on("norm_forward", device, stream, [&](Place place) { return norm_forward(args, place); });
  });
  m.def("norm_backward",
        [](Address grad, Address v, Address dtotal, Address weight, Address mean, Address rstd,
           Address dx, Address dresidual, Address dweight, Address dbias, Address partials,
           int64_t blocks, int64_t rows, int hidden, int dtype, int residual_dtype,
           int weight_dtype, int device, Address stream) {
          const NormBackward args{at(grad),
                                  at(v),
                                  at(dtotal),
                                  at(weight),
                                  at<float>(mean),
                                  at<float>(rstd),
                                  at(dx),
                                  at(dresidual),
                                  at(dweight),
                                  at(dbias),
                                  rows,
                                  hidden,
                                  dtype_of(dtype),
                                  dtype_of(residual_dtype),
                                  dtype_of(weight_dtype)};
          const NormScratch scratch{at<float>(partials), blocks};
          run_on("norm_backward", device, stream,
                 [&](Place place) { return norm_backward(args, scratch, place); });
        });
  bind_dropout_add_norm(m);
}

}  // namespace anychip::cuda
