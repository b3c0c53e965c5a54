#include "updates.h"

#include <cmath>

#include "binding.h"
#include "list.h"

namespace anychip::cuda {
namespace {

Update update_of(const py::list& params, const py::list& numels, const py::list& param_dtypes,
                 const py::list& grads, const py::list& grad_dtypes, const py::list& first_states,
                 const py::list& second_states, const py::list& low_precision,
                 const py::list& low_dtypes) {
  Update update;
  update.params = list_of("params", params, numels, param_dtypes);
  update.grads = numbers_of(grads);
  update.grad_dtypes = numbers_of(grad_dtypes);
  update.states[0] = numbers_of(first_states);
  update.states[1] = numbers_of(second_states);
  update.low_precision = numbers_of(low_precision);
  update.low_dtypes = numbers_of(low_dtypes);
  for (const int64_t code : update.grad_dtypes) dtype_of(static_cast<int>(code));
  for (const int64_t code : update.low_dtypes) dtype_of(static_cast<int>(code));
  return update;
}

float log_of(double beta) { return static_cast<float>(std::log(beta)); }

}  // namespace

void bind_updates(py::module_& m) {
  m.attr("STEP_FACTORS") = kStepFactors;
  // Lists of one length, or empty: params, their sizes and dtypes, grads, ...
  // Local: the kernels for the host, in the same process, have such a class too.
  py::class_<Update>(m, "Update", py::module_local()).def(py::init(&update_of));

  m.def("begin_step", [](Address lr, Address step, Address scale, Address clip, Address found_inf,
                         double beta1, double beta2, double weight_decay, bool counts,
                         Address factors, int device, Address stream) {
    run_on("begin_step", device, stream, [&](Place place) {
      const StepScalars scalars{at<const float>(lr), at<float>(step), at<const float>(scale),
                                at<const float>(clip), at<const float>(found_inf)};
      return begin_step(scalars, log_of(beta1), log_of(beta2), static_cast<float>(weight_decay),
                        counts, at<float>(factors), place);
    });
  });
  m.def("adamw", [](const Update& update, Address factors, double beta1, double beta2, double eps,
                    int device, Address stream) {
    run_on("adamw", device, stream, [&](Place place) {
      return adamw(update, at<const float>(factors), beta1, beta2, eps, place);
    });
  });
  m.def("sgd", [](const Update& update, Address factors, double momentum, bool nesterov,
                  double weight_decay, bool decoupled, int device, Address stream) {
    run_on("sgd", device, stream, [&](Place place) {
      return sgd(update, at<const float>(factors), momentum, nesterov, weight_decay, decoupled,
                 place);
    });
  });
  m.def("lion", [](const Update& update, Address factors, double beta1, double beta2, int device,
                   Address stream) {
    run_on("lion", device, stream, [&](Place place) {
      return lion(update, at<const float>(factors), beta1, beta2, place);
    });
  });
  m.def("lamb", [](const Update& update, Address factors, Address trust, double beta1, double beta2,
                   double eps, double weight_decay, int device, Address stream) {
    run_on("lamb", device, stream, [&](Place place) {
      return lamb(update, at<const float>(factors), at<const float>(trust), beta1, beta2, eps,
                  weight_decay, place);
    });
  });
  m.def("lamb_sums_of_squares",
        [](const Update& update, Address factors, double beta1, double beta2, double eps,
           double weight_decay, Address rows, int device, Address stream) {
          run_on("lamb_sums_of_squares", device, stream, [&](Place place) {
            return lamb_sums_of_squares(update, at<const float>(factors), beta1, beta2, eps,
                                        weight_decay, at<int64_t>(rows), place);
          });
        });
}

}  // namespace anychip::cuda
