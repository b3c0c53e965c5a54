#include "softmax.h"

#include <algorithm>
#include <array>

#include "binding.h"

namespace anychip::cuda {
namespace {

using Dims = std::array<int64_t, kRowDims>;

void copy(const Dims& from, int64_t (&to)[kRowDims]) { std::copy(from.begin(), from.end(), to); }

// Mask and bias as (address, strides, key_stride).
Broadcast broadcast_of(const std::tuple<Address, Dims, int64_t>& given) {
  Broadcast made{at(std::get<0>(given)), {}, std::get<2>(given)};
  copy(std::get<1>(given), made.strides);
  return made;
}

}  // namespace

void bind_softmax(py::module_& m) {
  using Given = std::tuple<Address, Dims, int64_t>;
  m.def("softmax_forward",
        [](Address x, Address y, const Given& mask, const Given& bias, const Dims& sizes,
           int64_t rows, int64_t queries, int64_t keys, double scale, bool causal, int dtype,
           int bias_dtype, int device, Address stream) {
          run_on("softmax_forward", device, stream, [&](Place place) {
            Softmax call{rows,
                         keys,
                         queries,
                         {},
                         broadcast_of(mask),
                         broadcast_of(bias),
                         static_cast<float>(scale),
                         causal,
                         dtype_of(dtype),
                         dtype_of(bias_dtype)};
            copy(sizes, call.sizes);
            return softmax_forward(at(x), at(y), call, place);
          });
        });
  m.def("softmax_backward", [](Address grad, Address y, Address dx, Address inner, Address row_sums,
                               int64_t rows, int64_t queries, int64_t keys, double scale,
                               bool causal, int dtype, int device, Address stream) {
    run_on("softmax_backward", device, stream, [&](Place place) {
      const Softmax call{rows,
                         keys,
                         queries,
                         {},
                         {},
                         {},
                         static_cast<float>(scale),
                         causal,
                         dtype_of(dtype),
                         dtype_of(dtype)};
      const SoftmaxGradients wanted{at(dx), at<float>(inner), at<float>(row_sums)};
      return softmax_backward(at(grad), at(y), wanted, call, place);
    });
  });
  m.def("softmax_bias_gradient",
        [](Address grad, Address y, Address inner, const Dims& sizes, const Dims& strides,
           const Dims& reduced_sizes, const Dims& reduced_strides, int64_t keys, Address partial,
           int64_t parts, Address dbias, int dtype, int bias_dtype, int device, Address stream) {
          run_on("softmax_bias_gradient", device, stream, [&](Place place) {
            SharedRows shared{};
            copy(sizes, shared.sizes);
            copy(strides, shared.strides);
            copy(reduced_sizes, shared.reduced_sizes);
            copy(reduced_strides, shared.reduced_strides);
            return softmax_bias_gradient(at(grad), at(y), at<float>(inner), shared, keys,
                                         at<float>(partial), parts, at(dbias), dtype_of(dtype),
                                         dtype_of(bias_dtype), place);
          });
        });
}

}  // namespace anychip::cuda
