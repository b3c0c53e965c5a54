#include "hadamard.h"

#include "binding.h"

namespace anychip::cuda {

void bind_hadamard(py::module_& m) {
  m.attr("LONGEST_HADAMARD") = kLongestHadamard;
  m.def("hadamard",
        [](Address x, Address y, int64_t numel, int length, int dtype, int device, Address stream) {
          run_on("hadamard", device, stream, [&](Place place) {
            return hadamard(at(x), at(y), numel, length, dtype_of(dtype), place);
          });
        });
}

}  // namespace anychip::cuda
