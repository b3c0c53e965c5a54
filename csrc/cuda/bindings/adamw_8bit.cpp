#include "adamw_8bit.h"

#include "binding.h"
#include "list.h"

namespace anychip::cuda {
namespace {

CodedUpdate coded_update_of(const py::list& params, const py::list& numels,
                            const py::list& param_dtypes, const py::list& grads,
                            const py::list& grad_dtypes, const py::list& first_codes,
                            const py::list& first_scales, const py::list& second_codes,
                            const py::list& second_scales, const py::list& low_precision,
                            const py::list& low_dtypes) {
  CodedUpdate update;
  update.params = list_of("params", params, numels, param_dtypes);
  update.grads = numbers_of(grads);
  update.grad_dtypes = numbers_of(grad_dtypes);
  update.codes[0] = numbers_of(first_codes);
  update.scales[0] = numbers_of(first_scales);
  update.codes[1] = numbers_of(second_codes);
  update.scales[1] = numbers_of(second_scales);
  update.low_precision = numbers_of(low_precision);
  update.low_dtypes = numbers_of(low_dtypes);
  for (const int64_t code : update.grad_dtypes) dtype_of(static_cast<int>(code));
  for (const int64_t code : update.low_dtypes) dtype_of(static_cast<int>(code));
  return update;
}

}  // namespace

void bind_adamw_8bit(py::module_& m) {
  // Lists of one length, the last two perhaps empty: params, their sizes and dtypes, grads, ...
  py::class_<CodedUpdate>(m, "CodedUpdate", py::module_local()).def(py::init(&coded_update_of));

  m.def("adamw_8bit", [](const CodedUpdate& update, Address factors, double beta1, double beta2,
                         double eps, int device, Address stream) {
    run_on("adamw_8bit", device, stream, [&](Place place) {
      return adamw_8bit(update, at<const float>(factors), beta1, beta2, eps, place);
    });
  });
}

}  // namespace anychip::cuda
