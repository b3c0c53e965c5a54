#include "loss.h"

#include "binding.h"

namespace anychip::cuda {

void bind_loss(py::module_& m) {
  m.def("cross_entropy_forward",
        [](Address logits, int64_t stride, Address target, Address loss, Address lse, int64_t rows,
           int64_t vocabulary, int64_t ignore_index, double label_smoothing, double z_loss,
           int dtype, int device, Address stream) {
          run_on("cross_entropy_forward", device, stream, [&](Place place) {
            return cross_entropy_forward(
                {at(logits), stride, dtype_of(dtype)}, at<int64_t>(target), at<float>(loss),
                at<float>(lse), {rows, vocabulary, ignore_index, label_smoothing, z_loss}, place);
          });
        });
  m.def("cross_entropy_backward",
        [](Address grad, bool per_row, Address count, Address logits, int64_t stride,
           Address target, Address lse, Address dlogits, int64_t dstride, int64_t rows,
           int64_t vocabulary, int64_t ignore_index, double label_smoothing, double z_loss,
           int dtype, int ddtype, int device, Address stream) {
          run_on("cross_entropy_backward", device, stream, [&](Place place) {
            return cross_entropy_backward(
                at<float>(grad), per_row, at<float>(count), {at(logits), stride, dtype_of(dtype)},
                at<int64_t>(target), at<float>(lse), {at(dlogits), dstride, dtype_of(ddtype)},
                {rows, vocabulary, ignore_index, label_smoothing, z_loss}, place);
          });
        });
  m.def("reduction_scratch", &reduction_scratch, py::arg("rows"));
  m.def("reduce_losses", [](Address row_loss, Address target, Address total, Address count,
                            Address scratch, int64_t rows, int64_t ignore_index, bool mean,
                            int device, Address stream) {
    run_on("reduce_losses", device, stream, [&](Place place) {
      return reduce_losses(at<float>(row_loss), at<int64_t>(target), at<float>(total),
                           at<float>(count), at<float>(scratch), rows, ignore_index, mean, place);
    });
  });
}

}  // namespace anychip::cuda
