#include "columns.h"

#include "binding.h"

namespace anychip::cuda {

void bind_columns(py::module_& m) {
  m.def("column_parts", [](int64_t rows, int64_t hidden, int dtype, int multiprocessors) {
    return column_parts(rows, hidden, dtype_of(dtype), multiprocessors);
  });
  m.def("column_sums", [](Address x, Address sums, Address partial, int64_t rows, int64_t hidden,
                          int64_t parts, int dtype, int sums_dtype, int device, Address stream) {
    run_on("column_sums", device, stream, [&](Place place) {
      return column_sums(at(x), at(sums), at<float>(partial), rows, hidden, parts, dtype_of(dtype),
                         dtype_of(sums_dtype), place);
    });
  });
}

}  // namespace anychip::cuda
