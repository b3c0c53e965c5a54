// Rows of a norm in float32, and what a norm of x + residual does before and after.
#pragma once

#include "dropping.h"
#include "loops.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {

ANYCHIP_INLINE int64_t bytes_of(DType dtype, int64_t numel) { return numel * element_size(dtype); }

ANYCHIP_INLINE const void* row_of(const void* rows, DType dtype, int64_t offset) {
  return static_cast<const char*>(rows) + bytes_of(dtype, offset);
}
ANYCHIP_INLINE void* row_of(void* rows, DType dtype, int64_t offset) {
  return static_cast<char*>(rows) + bytes_of(dtype, offset);
}

// The row itself, or its values converted into `buffer`: once, however often they are read. It has
// room for whole vectors, and gets whole ones: what reads the last part would wait for a store of a
// part to be in the cache.
ANYCHIP_INLINE const float* float_row(const void* row, DType dtype, int64_t hidden, float* buffer) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(row);
  visit_dtype(dtype, [&](auto t) {
    const auto* x = static_cast<const decltype(t)*>(row);
    for_each_vector(0, hidden, [&](int64_t i, auto lanes) {
      store(buffer + i, load(x + i, lanes), AllLanes{});
    });
  });
  return buffer;
}

// What is normed of the row at `offset`: x, or x + residual after it was stored.
template <class Args>
ANYCHIP_INLINE const float* normed_row(const Args& args, int64_t offset, float* buffer) {
  const ResidualSum& sum = args.sum;
  const void* x = row_of(args.x, args.dtype, offset);
  if (!sum.residual) return float_row(x, args.dtype, args.hidden, buffer);
  const void* residual = row_of(sum.residual, sum.dtype, offset);
  void* total = row_of(sum.total, sum.dtype, offset);
  const bool is_read = sum.dtype == DType::kFloat32 && args.hidden % kLanes == 0;
  visit_dtype(args.dtype, [&](auto t) {
    visit_dtype(sum.dtype, [&](auto r) {
      using R = decltype(r);
      const auto* a = static_cast<const decltype(t)*>(x);
      const auto* b = static_cast<const R*>(residual);
      auto* c = static_cast<R*>(total);
      for_each_vector(0, args.hidden, [&](int64_t i, auto lanes) {
        const F32 v = rounded<R>(load(a + i, lanes) + load(b + i, lanes));
        store(c + i, v, lanes);
        if (!is_read) store(buffer + i, v, AllLanes{});
      });
    });
  });
  return is_read ? static_cast<const float*>(total) : buffer;
}

// body(grad, x, dtotal, dx, dresidual) for each row of a backward, each of its type. x and
// dresidual are of dtotal's type; without a sum dtotal and dresidual are null. What is null among
// dx and dresidual is not wanted.
template <class T, class R, class Args, class Body>
ANYCHIP_INLINE void for_each_row(const Args& args, Range rows, const Body& body) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t at = row * args.hidden;
    body(row, static_cast<const T*>(args.grad) + at, static_cast<const R*>(args.x) + at,
         args.sum.dtotal ? static_cast<const R*>(args.sum.dtotal) + at : nullptr,
         args.dx ? static_cast<T*>(args.dx) + at : nullptr,
         args.sum.dresidual ? static_cast<R*>(args.sum.dresidual) + at : nullptr);
  }
}

// visit(T{}, R{}) with the types of grad and x.
template <class Args, class Visit>
ANYCHIP_INLINE void visit_backward(const Args& args, const Visit& visit) {
  visit_dtype(args.dtype, [&](auto t) {
    if (!args.sum.dtotal) return visit(t, t);
    visit_dtype(args.sum.dtype, [&](auto r) { visit(t, r); });
  });
}

// What is left of dx: all of it, where nothing is dropped.
class GradientDrop {
 public:
  ANYCHIP_INLINE GradientDrop(const Drop& drop, Range rows, int64_t hidden)
      : dropping_(drop), is_whole_(!drop.rng), end_(rows.end), hidden_(hidden) {}

  // body(i, lanes, word) over the columns of a row; word is of the first lane, or null.
  template <class Body>
  ANYCHIP_INLINE void for_each_column(int64_t row, const Body& body) {
    if (is_whole_) {
      for_each_vector(0, hidden_, [&](int64_t i, auto lanes) {
        body(i, lanes, static_cast<const uint32_t*>(nullptr));
      });
      return;
    }
    dropping_.for_each_part(row, 0, hidden_, hidden_, (end_ - row) * hidden_,
                            [&](int64_t first, int64_t n, const uint32_t* words) {
                              for_each_vector(first, first + n, [&](int64_t i, auto lanes) {
                                body(i, lanes, words + (i - first));
                              });
                            });
  }

  ANYCHIP_INLINE F32 apply(F32 gradient, const uint32_t* word) const {
    return word ? dropping_.apply(gradient, word) : gradient;
  }

 private:
  Dropping dropping_;
  bool is_whole_;
  int64_t end_, hidden_;
};

// Rounds a gradient, after dtotal is added, to the types of dx and dresidual.
template <class T, class R, class Lanes>
ANYCHIP_INLINE void store_gradient(F32 gradient, const R* dtotal, T* dx, R* dresidual, int64_t i,
                                   Lanes lanes, const GradientDrop& drop, const uint32_t* word) {
  if (dtotal) gradient = gradient + load(dtotal + i, lanes);
  if (dx) store(dx + i, drop.apply(gradient, word), lanes);
  if (dresidual) store(dresidual + i, gradient, lanes);
}

}  // namespace anychip::cpu::ANYCHIP_ISA
