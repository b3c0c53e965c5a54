#include "quantization.h"

#include <string>

#include "binding.h"

namespace anychip::cuda {
namespace {

CodeFormat format_of(const std::string& name) {
  CodeFormat found{};
  if (!find_format(name.c_str(), found)) throw py::value_error("no format " + name);
  return found;
}

}  // namespace

void bind_quantization(py::module_& m) {
  m.def("quantize",
        [](Address x, Address rng, Address codes, Address scales, int64_t numel, int64_t block,
           const std::string& name, int dtype, int device, Address stream) {
          const CodeFormat format = format_of(name);
          run_on("quantize", device, stream, [&](Place place) {
            return quantize(at(x), at<int64_t>(rng), at(codes), at(scales), numel, block, format,
                            dtype_of(dtype), place);
          });
        });
  m.def("dequantize", [](Address codes, Address scales, Address y, int64_t numel, int64_t block,
                         const std::string& name, int device, Address stream) {
    const CodeFormat format = format_of(name);
    run_on("dequantize", device, stream, [&](Place place) {
      return dequantize(at(codes), at(scales), at<float>(y), numel, block, format, place);
    });
  });
}

}  // namespace anychip::cuda
