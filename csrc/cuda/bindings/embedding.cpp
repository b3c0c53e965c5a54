#include "embedding.h"

#include "binding.h"

namespace anychip::cuda {

void bind_embedding(py::module_& m) {
  m.def("embedding_forward",
        [](Address indices, bool is_wide, Address weight, Address y, int64_t count,
           int64_t num_rows, int64_t width, int dtype, int device, Address stream) {
          run_on("embedding_forward", device, stream, [&](Place place) {
            return embedding_forward({at(indices), is_wide}, at(weight), at(y), count, num_rows,
                                     width, dtype_of(dtype), place);
          });
        });
  m.def("embedding_starts", &embedding_starts, py::arg("num_rows"));
  m.def("embedding_partials", &embedding_partials, py::arg("count"), py::arg("width"));
  m.def("embedding_backward",
        [](Address grad, Address sorted, bool is_wide, Address order, Address dweight,
           Address starts, Address partials, int64_t count, int64_t num_rows, int64_t width,
           int dtype, int multiprocessors, int device, Address stream) {
          run_on("embedding_backward", device, stream, [&](Place place) {
            return embedding_backward(at(grad), {at(sorted), is_wide}, at<int64_t>(order),
                                      at(dweight), at<int64_t>(starts), at<float>(partials), count,
                                      num_rows, width, dtype_of(dtype), multiprocessors, place);
          });
        });
}

}  // namespace anychip::cuda
