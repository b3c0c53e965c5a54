#include "rope.h"

#include <array>

#include "binding.h"

namespace anychip::cuda {
namespace {

using Strides = std::array<int64_t, 3>;

Heads heads_of(Address x, Address y, int64_t count, const Strides& strides) {
  return {at(x), at(y), count, strides[0], strides[1], strides[2]};
}

}  // namespace

void bind_rope(py::module_& m) {
  m.def("rope", [](Address q, Address q_out, int64_t q_heads, const Strides& q_strides, Address k,
                   Address k_out, int64_t k_heads, const Strides& k_strides, Address cos,
                   Address sin, int64_t batch, int64_t seq, int64_t head_dim, int64_t rotary_dim,
                   bool interleaved, bool inverse, int dtype, int device, Address stream) {
    run_on("rope", device, stream, [&](Place place) {
      return rope(
          heads_of(q, q_out, q_heads, q_strides), heads_of(k, k_out, k_heads, k_strides),
          {at<float>(cos), at<float>(sin), batch, seq, head_dim, rotary_dim, interleaved, inverse},
          dtype_of(dtype), place);
    });
  });
}

}  // namespace anychip::cuda
