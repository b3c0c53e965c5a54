// The Python module of the kernels: ANYCHIP_MODULE is _cuda, or _emu for the emulator.
#include "binding.h"

namespace anychip::cuda {
namespace {

// Raised whenever a signature changes its meaning; Python reads it as build_info()["abi"].
constexpr int kInterfaceVersion = 5;

py::dict build_info() {
  py::dict info;
  info["abi"] = kInterfaceVersion;
  info["version"] = ANYCHIP_VERSION;
  info["compiler"] = ANYCHIP_COMPILER;
  info["architectures"] = ANYCHIP_CUDA_ARCHITECTURES;
  info["emulated"] = static_cast<bool>(ANYCHIP_IS_EMULATED);
  return info;
}

// Of a device, as the runtime tells it; RuntimeError without a driver.
int multiprocessors(int device) {
  int count = 0;
  run_on("multiprocessors", device, 0, [&](Place place) {
    return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, place.device);
  });
  return count;
}

}  // namespace

PYBIND11_MODULE(ANYCHIP_MODULE, m, py::mod_gil_not_used()) {
  m.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
  m.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
  m.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
  m.def("build_info", &build_info);
  m.def("multiprocessors", &multiprocessors, py::arg("device"));
  bind_activation(m);
  bind_columns(m);
  bind_dropout(m);
  bind_rope(m);
  bind_softmax(m);
  bind_updates(m);
  bind_adamw_8bit(m);
  bind_lists(m);
  bind_embedding(m);
  bind_loss(m);
  bind_norm(m);
  bind_quantization(m);
  bind_hadamard(m);
  bind_top_k(m);
  bind_permutation(m);
}

}  // namespace anychip::cuda
