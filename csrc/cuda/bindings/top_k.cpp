#include "top_k.h"

#include "binding.h"

namespace anychip::cuda {

void bind_top_k(py::module_& m) {
  m.def("top_k_scratch", &top_k_scratch);
  m.def("top_k",
        [](Address x, Address values, Address indices, Address scratch, int64_t rows,
           int64_t length, int64_t k, int multiprocessors, int dtype, int device, Address stream) {
          run_on("top_k", device, stream, [&](Place place) {
            return top_k(at(x), at(values), at<int64_t>(indices), at(scratch), rows, length, k,
                         multiprocessors, dtype_of(dtype), place);
          });
        });
  m.def("top_k_backward", [](Address grad, Address indices, Address dx, int64_t rows,
                             int64_t length, int64_t k, int dtype, int device, Address stream) {
    run_on("top_k_backward", device, stream, [&](Place place) {
      return top_k_backward(at(grad), at<int64_t>(indices), at(dx), rows, length, k,
                            dtype_of(dtype), place);
    });
  });
}

}  // namespace anychip::cuda
