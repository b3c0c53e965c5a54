// Copies, fills, shapes, selection.
#include "operators/operator.h"

using namespace cann;

namespace {

// An absent index stands for the whole dimension; torch_npu gives an empty tensor for it.
c10::List<std::optional<Tensor>> index_list(const Tensors& indices) {
  c10::List<std::optional<Tensor>> list;
  for (const Tensor& index : indices) {
    list.push_back(index.defined() && index.numel() != 0 ? std::optional(index) : std::nullopt);
  }
  return list;
}

}  // namespace

OPERATOR(aclnnInplaceCopy, kAny, Tensor self, Tensor source) { self.copy_(source); }
OPERATOR(aclnnCast, kAny, Tensor self, DType dtype, Tensor out) {
  write(out, self.to(scalar_type(dtype)));
}
OPERATOR(aclnnInplaceZero, kAny, Tensor self) { self.zero_(); }
OPERATOR(aclnnInplaceOne, kAny, Tensor self) { self.fill_(1); }
OPERATOR(aclnnInplaceFillScalar, kAny, Tensor self, Scalar value) { self.fill_(value); }
OPERATOR(aclnnInplaceFillTensor, kAny, Tensor self, Tensor value) { self.fill_(value.reshape({})); }
OPERATOR(aclnnArange, kAny, Scalar start, Scalar end, Scalar step, Tensor out) {
  write(out, at::arange(start, end, step, out.options()).narrow(0, 0, out.numel()));
}
OPERATOR(aclnnLinspace, kAny, Scalar start, Scalar end, Int steps, Tensor out) {
  write(out, at::linspace(start, end, steps, out.options()));
}
OPERATOR(aclnnEye, kAny, Int rows, Int columns, Tensor out) {
  write(out, at::eye(rows, columns, out.options()));
}
OPERATOR(aclnnComplex, kAny, Tensor real, Tensor imaginary, Tensor out) {
  write(out, at::complex(real, imaginary));
}

OPERATOR(aclnnCat, kAny, Tensors tensors, Int dim, Tensor out) {
  write(out, at::cat(tensors, dim));
}
OPERATOR(aclnnStack, kAny, Tensors tensors, Int dim, Tensor out) {
  write(out, at::stack(tensors, dim));
}
OPERATOR(aclnnChunkCat, kAny, Tensors tensors, Int dim, Int chunks, Tensor out) {
  write(out, at::_chunk_cat(tensors, dim, chunks));
}
OPERATOR(aclnnConstantPadNd, kAny, Tensor self, Ints padding, Scalar value, Tensor out) {
  write(out, at::constant_pad_nd(self, padding, value));
}
OPERATOR(aclnnRepeat, kAny, Tensor self, Ints repeats, Tensor out) {
  write(out, self.repeat(repeats));
}
OPERATOR(aclnnFlip, kAny, Tensor self, Ints dims, Tensor out) { write(out, at::flip(self, dims)); }

OPERATOR(aclnnTril, kAny, Tensor self, Int diagonal, Tensor out) {
  write(out, at::tril(self, diagonal));
}
OPERATOR(aclnnTriu, kAny, Tensor self, Int diagonal, Tensor out) {
  write(out, at::triu(self, diagonal));
}
OPERATOR(aclnnInplaceTril, kAny, Tensor self, Int diagonal) { self.tril_(diagonal); }
OPERATOR(aclnnInplaceTriu, kAny, Tensor self, Int diagonal) { self.triu_(diagonal); }
OPERATOR(aclnnInplaceMaskedFillScalar, kAny, Tensor self, Tensor mask, Scalar value) {
  self.masked_fill_(mask, value);
}
OPERATOR(aclnnInplaceMaskedFillTensor, kAny, Tensor self, Tensor mask, Tensor value) {
  self.masked_fill_(mask, value.reshape({}));
}

OPERATOR(aclnnMaskedSelect, kAny, Tensor self, Tensor mask, SizedTensor out) {
  fit(out, at::masked_select(self, mask));
}
OPERATOR(aclnnNonzero, kAny, Tensor self, SizedTensor out) { fit(out, at::nonzero(self)); }
// A row of places per dim.
OPERATOR(aclnnNonzeroV2, kAny, Tensor self, SizedTensor out) { fit(out, at::nonzero(self).t()); }
OPERATOR(aclnnIndex, kAny, Tensor self, Tensors indices, Tensor out) {
  write(out, at::index(self, index_list(indices)));
}
OPERATOR(aclnnIndexPutImpl, kAny, Tensor self, Tensors indices, Tensor values, bool accumulate,
         bool) {
  self.index_put_(index_list(indices), values, accumulate);
}
OPERATOR(aclnnIndexSelect, kAny, Tensor self, Int dim, Tensor index, Tensor out) {
  write(out, at::index_select(self, dim, index));
}
OPERATOR(aclnnGather, kAny, Tensor self, Int dim, Tensor index, Tensor out) {
  write(out, at::gather(self, dim, index));
}
OPERATOR(aclnnScatterAdd, kAny, Tensor self, Int dim, Tensor index, Tensor source, Tensor out) {
  write(out, at::scatter_add(self, dim, index, source));
}
OPERATOR(aclnnIndexAdd, kAny, Tensor self, Int dim, Tensor index, Tensor source, Scalar alpha,
         Tensor out) {
  write(out, at::index_add(self, dim, index, source, alpha));
}
CHECKED(aclnnSearchSorted, kAny, Tensor sorted, Tensor self, bool is_int32, bool right,
        OptionalTensor sorter, Tensor out) {
  HAS_NO(sorter, "sorter of searchsorted");
  WORK_BELOW;
  write(out, at::searchsorted(sorted, self, is_int32, right));
}
OPERATOR(aclnnEmbedding, kAny, Tensor weight, Tensor indices, Tensor out) {
  write(out, at::embedding(weight, indices.to(at::kLong)));
}
OPERATOR(aclnnEmbeddingDenseBackward, kFloats, Tensor grad, Tensor indices, uint64_t rows,
         uint64_t padding, bool is_scaled, Tensor out) {
  write(out, at::embedding_dense_backward(grad, indices.to(at::kLong), static_cast<int64_t>(rows),
                                          static_cast<int64_t>(padding), is_scaled));
}
OPERATOR(aclnnTopk, kAny, Tensor self, Int k, Int dim, bool largest, bool sorted, Tensor values,
         Tensor indices) {
  const auto [top, places] = at::topk(self, k, dim, largest, sorted);
  write(values, top);
  write(indices, places);
}
OPERATOR(aclnnSort, kAny, Tensor self, bool stable, Int dim, bool descending, Tensor values,
         Tensor indices) {
  const auto [sorted, places] = at::sort(self, stable, dim, descending);
  write(values, sorted);
  write(indices, places);
}
OPERATOR(aclnnUnique2, kAny, Tensor self, bool sorted, bool inverse, bool counted,
         SizedTensor values, SizedTensor places, SizedTensor counts) {
  const auto [unique, indices, numbers] = at::_unique2(self, sorted, inverse, counted);
  fit(values, unique);
  if (inverse) fit(places, indices);
  if (counted) fit(counts, numbers);
}
// Without a dim: of the flattened tensor.
OPERATOR(aclnnRepeatInterleave, kAny, Tensor self, Tensor repeats, Int, Tensor out) {
  write(out, at::repeat_interleave(self, repeats));
}
OPERATOR(aclnnRepeatInterleaveIntWithDim, kAny, Tensor self, Int repeats, Int dim, Int,
         Tensor out) {
  write(out, at::repeat_interleave(self, repeats, dim));
}

namespace {

// 0 puts, 1 adds, 2 multiplies.
void scatter(Tensor target, Int dim, const Tensor& index, const Tensor& source, Int reduction) {
  if (reduction == 0) {
    target.scatter_(dim, index, source);
  } else {
    target.scatter_(dim, index, source, reduction == 1 ? "add" : "multiply");
  }
}

}  // namespace

OPERATOR(aclnnScatter, kAny, Tensor self, Int dim, Tensor index, Tensor source, Int reduction,
         Tensor out) {
  Tensor result = self.clone();
  scatter(result, dim, index, source, reduction);
  write(out, result);
}
OPERATOR(aclnnInplaceScatter, kAny, Tensor self, Int dim, Tensor index, Tensor source,
         Int reduction) {
  scatter(self, dim, index, source, reduction);
}
OPERATOR(aclnnScatterValue, kAny, Tensor self, Int dim, Tensor index, Scalar value, Int reduction,
         Tensor out) {
  Tensor result = self.clone();
  scatter(result, dim, index, at::full_like(index, value, self.options()), reduction);
  write(out, result);
}
OPERATOR(aclnnInplaceScatterValue, kAny, Tensor self, Int dim, Tensor index, Scalar value,
         Int reduction) {
  scatter(self, dim, index, at::full_like(index, value, self.options()), reduction);
}
