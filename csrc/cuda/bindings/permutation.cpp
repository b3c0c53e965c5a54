#include "permutation.h"

#include "binding.h"

namespace anychip::cuda {

void bind_permutation(py::module_& m) {
  m.attr("MOST_EXPERTS") = kMostExperts;
  m.def("permutation_scratch", &permutation_scratch);
  m.def("permutation_map",
        [](Address indices, bool wide, Address row_map, Address offsets, Address scratch,
           int64_t entries, int num_experts, int device, Address stream) {
          run_on("permutation_map", device, stream, [&](Place place) {
            return permutation_map(at(indices), wide, at<int64_t>(row_map), at<int64_t>(offsets),
                                   at<int>(scratch), entries, num_experts, place);
          });
        });
  m.def("permute_rows", [](Address x, Address row_map, Address y, int64_t tokens, int choices,
                           int64_t row_bytes, int device, Address stream) {
    run_on("permute_rows", device, stream, [&](Place place) {
      return permute_rows(at(x), at<int64_t>(row_map), at(y), tokens, choices, row_bytes, place);
    });
  });
  m.def("combine_rows",
        [](Address x, Address row_map, Address weights, Address y, int64_t tokens, int choices,
           int64_t hidden, int dtype, int weight_dtype, int device, Address stream) {
          run_on("combine_rows", device, stream, [&](Place place) {
            return combine_rows(at(x), at<int64_t>(row_map), at(weights), at(y), tokens, choices,
                                hidden, dtype_of(dtype), dtype_of(weight_dtype), place);
          });
        });
  m.def("combine_rows_backward",
        [](Address grad, Address x, Address row_map, Address weights, Address dx, Address dweights,
           int64_t tokens, int choices, int64_t hidden, int dtype, int weight_dtype, int device,
           Address stream) {
          run_on("combine_rows_backward", device, stream, [&](Place place) {
            return combine_rows_backward(at(grad), at(x), at<int64_t>(row_map), at(weights), at(dx),
                                         at(dweights), tokens, choices, hidden, dtype_of(dtype),
                                         dtype_of(weight_dtype), place);
          });
        });
}

}  // namespace anychip::cuda
