#include "lists.h"

#include "binding.h"
#include "list.h"

namespace anychip::cuda {

void bind_lists(py::module_& m) {
  m.attr("LIST_CHUNK") = kChunk;
  // (head, begin, end) of a chunk: what a block works on.
  m.def("list_part", [](int64_t numel, int64_t head, int64_t chunk) {
    const Part part = list_part(numel, head, chunk);
    return py::make_tuple(part.head, part.begin, part.end);
  });
  m.def("l2_norm", [](const py::list& data, const py::list& numel, const py::list& dtype,
                      Address scratch, int64_t room, Address out, int device, Address stream) {
    const TensorList tensors = list_of("l2_norm", data, numel, dtype);
    run_on("l2_norm", device, stream, [&](Place place) {
      return l2_norm(tensors, at<float>(scratch), room, at<float>(out), place);
    });
  });
  m.def("sums_of_squares", [](const py::list& data, const py::list& numel, const py::list& dtype,
                              Address rows, int device, Address stream) {
    const TensorList tensors = list_of("sums_of_squares", data, numel, dtype);
    run_on("sums_of_squares", device, stream,
           [&](Place place) { return sums_of_squares(tensors, at<int64_t>(rows), place); });
  });
  m.def("carry_sums", [](Address rows, int64_t count, int device, Address stream) {
    run_on("carry_sums", device, stream,
           [&](Place place) { return carry_sums(at<int64_t>(rows), count, place); });
  });
  m.def("ratios_of_sums",
        [](Address rows, int64_t count, Address ratios, int device, Address stream) {
          run_on("ratios_of_sums", device, stream, [&](Place place) {
            return ratios_of_sums(at<const int64_t>(rows), count, at<float>(ratios), place);
          });
        });
  m.def("clip", [](const py::list& data, const py::list& numel, const py::list& dtype, Address norm,
                   float max_norm, int device, Address stream) {
    const TensorList tensors = list_of("clip", data, numel, dtype);
    run_on("clip", device, stream,
           [&](Place place) { return clip(tensors, at<const float>(norm), max_norm, place); });
  });
  m.def("unscale_and_check", [](const py::list& data, const py::list& numel, const py::list& dtype,
                                Address scale, Address found_inf, int device, Address stream) {
    const TensorList grads = list_of("unscale_and_check", data, numel, dtype);
    run_on("unscale_and_check", device, stream, [&](Place place) {
      return unscale_and_check(grads, at<const float>(scale), at<float>(found_inf), place);
    });
  });
}

}  // namespace anychip::cuda
