// Random numbers. Not those of an NPU, whose generator is not documented: only as reproducible
// from seed and offset.
#include "operators/operator.h"

using namespace cann;

namespace {

int64_t product(const Ints& sizes) {
  int64_t all = 1;
  for (const int64_t size : sizes) all *= size;
  return all;
}

}  // namespace

OPERATOR(aclnnInplaceNormal, kAny, Tensor self, float mean, float deviation, Int seed, Int offset) {
  self.normal_(mean, deviation, generator(seed, offset));
}
OPERATOR(aclnnInplaceUniform, kAny, Tensor self, double from, double to, uint64_t seed,
         uint64_t offset) {
  self.uniform_(from, to, generator(seed, offset));
}
OPERATOR(aclnnInplaceRandom, kAny, Tensor self, Int from, Int to, Int seed, Int offset) {
  self.random_(from, to, generator(seed, offset));
}
OPERATOR(aclnnRandperm, kAny, Int count, Int seed, Int offset, Tensor out) {
  write(out, at::randperm(count, generator(seed, offset), at::kLong));
}
// A mask of one bit for each element, the lowest bit of a byte first; 1 keeps the element.
OPERATOR(aclnnDropoutGenMaskV2, kAny, Ints shape, double probability, Int seed, Int offset, DType,
         Tensor mask) {
  const int64_t count = product(shape);
  Tensor bits = at::zeros({mask.numel() * 8}, at::kByte);
  if (probability < 1) {
    const Tensor draws = at::rand({count}, generator(seed, offset), at::kFloat);
    bits.narrow(0, 0, count).copy_(draws >= probability);
  }
  const Tensor places = at::bitwise_left_shift(at::ones({8}, at::kByte), at::arange(8, at::kByte));
  write(mask, (bits.reshape({-1, 8}) * places).sum(1).to(at::kByte));
}
OPERATOR(aclnnDropoutDoMask, kFloats, Tensor self, Tensor mask, double probability, Tensor out) {
  if (probability >= 1) {
    out.zero_();
    return;
  }
  const Tensor keep = unpacked_bits(mask, self.numel()).reshape(self.sizes());
  write(out, self * keep.to(self.scalar_type()) / (1 - probability));
}
