// Matrix products, alone and by groups. The last argument says which lower precision the cube unit
// may take; the emulator always takes the tensors' own.
#include <algorithm>
#include <limits>

#include "operators/operator.h"

using namespace cann;

namespace {

// Where each group ends on the axis of groups. list_type 0: the ends themselves; 1: the sizes.
Ints ends_of(const Tensor& list, Int list_type) {
  const Tensor ends = (list_type == 0 ? list : list.cumsum(0)).to(at::kLong).contiguous();
  const Int* start = ends.data_ptr<int64_t>();
  const Ints all(start, start + ends.numel());
  TORCH_CHECK(all.front() >= 0 && std::is_sorted(all.begin(), all.end()), "sorted ends expected");
  return all;
}

Tensor product(const Tensor& a, const Tensor& b) {
  return at::mm(a.to(at::kFloat), b.to(at::kFloat));
}

// group_type 0: rows of x belong to groups, and each has its own weight.
void group_rows(const Tensor& x, const Tensor& weight, const Ints& ends, const Tensor& out) {
  TORCH_CHECK(ends.back() == x.size(0), "the last group ends at row ", ends.back(), " of ",
              x.size(0));
  Int row = 0;
  for (size_t group = 0; group < ends.size(); ++group) {
    const Int rows = ends[group] - row;
    write(out.narrow(0, row, rows), product(x.narrow(0, row, rows), weight[group]));
    row = ends[group];
  }
}

// group_type 2: columns of x and rows of weight belong to groups; each group is a product. Nobody
// documents what an empty one leaves.
void group_columns(const Tensor& x, const Tensor& weight, const Ints& ends, const Tensor& out) {
  TORCH_CHECK(ends.back() == weight.size(0), "the last group ends at row ", ends.back(), " of ",
              weight.size(0));
  Int row = 0;
  for (size_t group = 0; group < ends.size(); ++group) {
    const Int rows = ends[group] - row;
    if (rows == 0) {
      out[group].fill_(std::numeric_limits<float>::quiet_NaN());
    } else {
      write(out[group], product(x.narrow(1, row, rows), weight.narrow(0, row, rows)));
    }
    row = ends[group];
  }
}

bool is_given(const OptionalTensors& list) { return list && !list->empty(); }

}  // namespace

OPERATOR(aclnnMm, kFloats, Tensor self, Tensor other, Tensor out, int8_t) {
  write(out, at::mm(self, other));
}
OPERATOR(aclnnDot, kFloats, Tensor self, Tensor other, Tensor out) {
  write(out, at::dot(self, other));
}
OPERATOR(aclnnMv, kFloats, Tensor self, Tensor other, Tensor out, int8_t) {
  write(out, at::mv(self, other));
}
OPERATOR(aclnnMatmul, kFloats, Tensor self, Tensor other, Tensor out, int8_t) {
  write(out, at::matmul(self, other));
}
OPERATOR(aclnnBatchMatMul, kFloats, Tensor self, Tensor other, Tensor out, int8_t) {
  write(out, at::bmm(self, other));
}
OPERATOR(aclnnAddmm, kFloats, Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha,
         Tensor out, int8_t) {
  write(out, at::addmm(self, a, b, beta, alpha));
}
OPERATOR(aclnnBaddbmm, kFloats, Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha,
         Tensor out, int8_t) {
  write(out, at::baddbmm(self, a, b, beta, alpha));
}

// One tensor each of x, weight and out, not quantised. Sums are float32.
CHECKED(aclnnGroupedMatmulV5, kFloats, Tensors x, Tensors weight, OptionalTensors bias,
        OptionalTensors scale, OptionalTensors offset, OptionalTensors antiquant_scale,
        OptionalTensors antiquant_offset, OptionalTensors token_scale, OptionalTensor group_list,
        OptionalTensors, OptionalTensors, OptionalTensors, Int split_item, Int group_type,
        Int list_type, Int activation, OptionalInts, Tensors out, OptionalTensors,
        OptionalTensors) {
  HAS_NO(is_given(bias) || is_given(scale) || is_given(offset) || is_given(antiquant_scale) ||
             is_given(antiquant_offset) || is_given(token_scale) || activation != 0,
         "bias, quantisation or activation of grouped products");
  HAS_NO(x.size() != 1 || weight.size() != 1 || out.size() != 1 || split_item < 2,
         "grouped products of lists of tensors");
  HAS_NO(group_type != 0 && group_type != 2, "group_type but 0 (rows) and 2 (columns), got ",
         group_type);
  EXPECT(group_list && list_type >= 0 && list_type <= 1, "group_list of type 0 or 1");
  EXPECT(group_type == 0 || x[0].stride(0) == 1, "x transposed for groups of columns");
  EXPECT(x[0].scalar_type() == weight[0].scalar_type(), "one data type of x and weight");
  WORK_BELOW;
  const Ints ends = ends_of(*group_list, list_type);
  (group_type == 0 ? group_rows : group_columns)(x[0], weight[0], ends, out[0]);
}
