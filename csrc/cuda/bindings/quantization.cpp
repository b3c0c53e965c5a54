#include "quantization.h"

#include "binding.h"

namespace anychip::cuda {

void bind_quantization(py::module_& m) {
  m.def("quantize", [](Address x, Address rng, Address codes, Address scales, int64_t numel,
                       int64_t block, int bits, int dtype, int device, Address stream) {
    run_on("quantize", device, stream, [&](Place place) {
      return quantize(at(x), at<int64_t>(rng), at(codes), at<float>(scales), numel, block, bits,
                      dtype_of(dtype), place);
    });
  });
  m.def("dequantize", [](Address codes, Address scales, Address y, int64_t numel, int64_t block,
                         int bits, int device, Address stream) {
    run_on("dequantize", device, stream, [&](Place place) {
      return dequantize(at(codes), at<float>(scales), at<float>(y), numel, block, bits, place);
    });
  });
}

}  // namespace anychip::cuda
