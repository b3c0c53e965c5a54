#include "norm.h"

#include "binding.h"

namespace anychip::cuda {

namespace {

// A forward function of rows: the arguments that all have, then `more`, which `launch(args,
// more..., place)` takes too.
template <class... More, class Launch>
void def_forward(py::module_& m, const char* name, Launch launch) {
  m.def(name, [name, launch](Address x, Address residual, Address weight, Address bias, Address y,
                             Address total, Address mean, Address rstd, int64_t rows, int hidden,
                             double eps, int dtype, int residual_dtype, int weight_dtype,
                             int bias_dtype, More... more, int device, Address stream) {
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
    run_on(name, device, stream, [&](Place place) { return launch(args, more..., place); });
  });
}

// The same of a backward function, which is launch(args, scratch, more..., place).
template <class... More, class Launch>
void def_backward(py::module_& m, const char* name, Launch launch) {
  m.def(name, [name, launch](Address grad, Address v, Address dtotal, Address weight, Address mean,
                             Address rstd, Address dx, Address dresidual, Address dweight,
                             Address dbias, Address partials, int64_t blocks, int64_t rows,
                             int hidden, int dtype, int residual_dtype, int weight_dtype,
                             More... more, int device, Address stream) {
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
    run_on(name, device, stream,
           [&](Place place) { return launch(args, scratch, more..., place); });
  });
}

}  // namespace

void bind_norm(py::module_& m) {
  def_forward<>(m, "norm_forward", &norm_forward);
  def_backward<>(m, "norm_backward", &norm_backward);
  def_forward<Address, double>(m, "dropout_add_norm_forward",
                               [](const NormForward& args, Address rng, double p, Place place) {
                                 return dropout_add_norm_forward(args, {at<int64_t>(rng), p},
                                                                 place);
                               });
  def_backward<Address, double>(
      m, "dropout_add_norm_backward",
      [](const NormBackward& args, const NormScratch& scratch, Address rng, double p, Place place) {
        return dropout_add_norm_backward(args, {at<int64_t>(rng), p}, scratch, place);
      });
  using Size = int64_t;
  def_forward<Size, Size, Size>(
      m, "group_norm_forward",
      [](const NormForward& args, Size groups, Size channels, Size spatial, Place place) {
        return group_norm_forward(args, {groups, channels, spatial}, place);
      });
  def_backward<Size, Size, Size, Size>(
      m, "group_norm_backward",
      [](const NormBackward& args, const NormScratch& scratch, Size groups, Size channels,
         Size spatial, Size parts, Place place) {
        const GroupScratch own{scratch.partials, scratch.blocks, parts};
        return group_norm_backward(args, {groups, channels, spatial}, own, place);
      });
}

}  // namespace anychip::cuda
