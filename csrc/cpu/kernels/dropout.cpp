// Dropout, alone and before a residual's sum: one pass, float32 inside, each result rounded once.
#include "dropping.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

// body(first element, its column, how many, their words) for runs of elements of a row each.
template <class Body>
ANYCHIP_INLINE void for_each_run(Dropping& dropping, int64_t width, Range elements,
                                 const Body& body) {
  for (int64_t at = elements.begin, n; at < elements.end; at += n) {
    const int64_t row = at / width, column = at - row * width, left = elements.end - at;
    n = width - column < left ? width - column : left;
    dropping.for_each_part(row, column, n, width, left,
                           [&](int64_t first, int64_t count, const uint32_t* words) {
                             body(at - column + first, first, count, words);
                           });
  }
}

template <class T>
[[gnu::flatten]] void dropout_elements(const Dropout& args, Range elements) {
  Dropping dropping(args.drop);
  // Without numbers of rows the whole is one.
  const int64_t width = args.drop.rows ? args.columns : args.numel;
  for_each_run(dropping, width, elements,
               [&](int64_t at, int64_t, int64_t n, const uint32_t* words) {
                 const T* x = static_cast<const T*>(args.x) + at;
                 T* y = static_cast<T*>(args.y) + at;
                 for_each_vector(0, n, [&](int64_t i, auto lanes) {
                   store(y + i, dropping.apply(load_ahead(x + i, lanes), words + i), lanes);
                 });
               });
}

template <class T, class R>
[[gnu::flatten]] void add(const BiasDropoutAdd& args, const float* bias, Range elements) {
  Dropping dropping(args.drop);
  for_each_run(dropping, args.hidden, elements,
               [&](int64_t at, int64_t column, int64_t n, const uint32_t* words) {
                 const T* x = static_cast<const T*>(args.x) + at;
                 const R* residual = static_cast<const R*>(args.residual) + at;
                 R* y = static_cast<R*>(args.y) + at;
                 for_each_vector(0, n, [&](int64_t i, auto lanes) {
                   F32 v = load_ahead(x + i, lanes);
                   if (bias) v = v + load(bias + column + i, lanes);
                   v = dropping.apply(v, words + i) + load_ahead(residual + i, lanes);
                   store(y + i, v, lanes);
                 });
               });
}

template <class T>
[[gnu::flatten]] void backward(const BiasDropoutBackward& args, float* dbias, Range elements) {
  Dropping dropping(args.drop);
  for_each_run(dropping, args.hidden, elements,
               [&](int64_t at, int64_t column, int64_t n, const uint32_t* words) {
                 const T* grad = static_cast<const T*>(args.grad) + at;
                 T* dx = args.dx ? static_cast<T*>(args.dx) + at : nullptr;
                 float* sum = dbias ? dbias + column : nullptr;
                 for_each_vector(0, n, [&](int64_t i, auto lanes) {
                   const F32 v = dropping.apply(load_ahead(grad + i, lanes), words + i);
                   if (dx) store(dx + i, v, lanes);
                   if (sum) store(sum + i, load(sum + i, lanes) + v, lanes);
                 });
               });
}

}  // namespace

void dropout(const Dropout& args, Range elements) {
  visit_dtype(args.dtype, [&](auto t) { dropout_elements<decltype(t)>(args, elements); });
}

void bias_dropout_add(const BiasDropoutAdd& args, const float* bias, Range elements) {
  visit_dtype(args.dtype, [&](auto t) {
    visit_dtype(args.residual_dtype,
                [&](auto r) { add<decltype(t), decltype(r)>(args, bias, elements); });
  });
}

void bias_dropout_backward(const BiasDropoutBackward& args, float* dbias, Range elements) {
  visit_dtype(args.dtype, [&](auto t) { backward<decltype(t)>(args, dbias, elements); });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
