/* The operators: tables of names and expressions, and how each call becomes launches of kernels.
 * What a kernel cannot do (another type, too many dims, sizes past 31 bits) is ENOTSUP, and the
 * host does it. */
#define _POSIX_C_SOURCE 200809L
#include "operators.h"

#include <limits.h>
#include <math.h>
#include <string.h>

/* Element by element: name in C, name in torch, in what it computes (F float; I integers; A float
 * if a tensor is, else integers), and of tensors a, b, c and numbers s, t what it gives. */
#define POINTWISE(X)                                                                           \
  X(add, "add.Tensor", A, "a + s * b")                                                         \
  X(sub, "sub.Tensor", A, "a - s * b")                                                         \
  X(rsub, "rsub.Tensor", A, "b - s * a")                                                       \
  X(mul, "mul.Tensor", A, "a * b")                                                             \
  X(divide, "div.Tensor", F, "a / b")                                                          \
  X(neg, "neg", A, "-a")                                                                       \
  X(absolute, "abs", A, "a < 0 ? -a : a == 0 ? 0 : a")                                         \
  X(sqrt_, "sqrt", F, "sqrt(a)")                                                               \
  X(rsqrt, "rsqrt", F, "1 / sqrt(a)")                                                          \
  X(reciprocal, "reciprocal", F, "1 / a")                                                      \
  X(exp_, "exp", F, "exp(a)")                                                                  \
  X(expm1_, "expm1", F, "expm1(a)")                                                            \
  X(log_, "log", F, "log(a)")                                                                  \
  X(log1p_, "log1p", F, "log1p(a)")                                                            \
  X(log2_, "log2", F, "log2(a)")                                                               \
  X(sin_, "sin", F, "sin(a)")                                                                  \
  X(cos_, "cos", F, "cos(a)")                                                                  \
  X(tanh_, "tanh", F, "tanh(a)")                                                               \
  X(erf_, "erf", F, "erf(a)")                                                                  \
  X(floor_, "floor", F, "floor(a)")                                                            \
  X(ceil_, "ceil", F, "ceil(a)")                                                               \
  X(round_, "round", F, "rint(a)")                                                             \
  X(sigmoid, "sigmoid", F, "1 / (1 + exp(-a))")                                                \
  X(sigmoid_backward, "sigmoid_backward", F, "a * (1 - b) * b")                                \
  X(tanh_backward, "tanh_backward", F, "a * (1 - b * b)")                                      \
  X(silu, "silu", F, "a / (1 + exp(-a))")                                                      \
  X(silu_backward, "silu_backward", F, "a * silu_slope(b)")                                    \
  X(gelu, "gelu", F, "gelu(a, s != 0)")                                                        \
  X(gelu_backward, "gelu_backward", F, "a * gelu_slope(b, s != 0)")                            \
  X(relu, "relu", A, "a > 0 || a != a ? a : 0")                                                \
  X(threshold_backward, "threshold_backward", A, "b <= s ? 0 : a")                             \
  X(power, "pow.Tensor_Scalar", F, "s == 2 ? a * a : s == 0.5f ? sqrt(a) : pow(a, s)")         \
  X(power_of_tensor, "pow.Tensor_Tensor", F, "pow(a, b)")                                      \
  X(power_of_number, "pow.Scalar", F, "pow(s, a)")                                             \
  X(eq_tensor, "eq.Tensor", A, "a == b")                                                       \
  X(ne_tensor, "ne.Tensor", A, "a != b")                                                       \
  X(lt_tensor, "lt.Tensor", A, "a < b")                                                        \
  X(le_tensor, "le.Tensor", A, "a <= b")                                                       \
  X(gt_tensor, "gt.Tensor", A, "a > b")                                                        \
  X(ge_tensor, "ge.Tensor", A, "a >= b")                                                       \
  X(eq, "eq.Scalar", A, "a == s")                                                              \
  X(ne, "ne.Scalar", A, "a != s")                                                              \
  X(lt, "lt.Scalar", A, "a < s")                                                               \
  X(le, "le.Scalar", A, "a <= s")                                                              \
  X(gt, "gt.Scalar", A, "a > s")                                                               \
  X(ge, "ge.Scalar", A, "a >= s")                                                              \
  X(is_nan, "isnan", A, "a != a")                                                              \
  X(is_neginf, "isneginf", F, "a == -INFINITY")                                                \
  X(is_posinf, "isposinf", F, "a == INFINITY")                                                 \
  X(logical_not, "logical_not", A, "a == 0")                                                   \
  X(logical_and, "logical_and", A, "a != 0 && b != 0")                                         \
  X(logical_or, "logical_or", A, "a != 0 || b != 0")                                           \
  X(bitwise_not, "bitwise_not", I, "tr == 11 ? a == 0 : ~a")                                   \
  X(bitwise_and, "bitwise_and.Tensor", I, "a & b")                                             \
  X(bitwise_or, "bitwise_or.Tensor", I, "a | b")                                               \
  X(bitwise_xor, "bitwise_xor.Tensor", I, "a ^ b")                                             \
  X(shift_left, "__lshift__.Scalar", I, "a << s")                                              \
  X(shift_right, "__rshift__.Scalar", I, "a >> s")                                             \
  X(shift_left_tensor, "__lshift__.Tensor", I, "a << b")                                       \
  X(shift_right_tensor, "__rshift__.Tensor", I, "a >> b")                                      \
  X(maximum, "maximum", A, "a != a || a > b ? a : b")                                          \
  X(minimum, "minimum", A, "a != a || a < b ? a : b")                                          \
  X(clamp, "clamp", A, "a < s ? s : a > t ? t : a")                                            \
  X(where, "where.self", A, "a != 0 ? b : c")                                                  \
  X(masked_fill, "masked_fill.Scalar", A, "b != 0 ? s : a")                                    \
  X(masked_fill_tensor, "masked_fill.Tensor", A, "b != 0 ? c : a")                             \
  X(addcmul, "addcmul", F, "a + s * b * c")                                                    \
  X(addcdiv, "addcdiv", F, "a + s * b / c")                                                    \
  X(lerp, "lerp.Scalar", F, "fabs(s) < 0.5f ? a + s * (b - a) : b - (b - a) * (1 - s)")        \
  X(lerp_tensor, "lerp.Tensor", F, "fabs(c) < 0.5f ? a + c * (b - a) : b - (b - a) * (1 - c)") \
  X(fill, "fill.Scalar", A, "s")                                                               \
  X(fill_tensor, "fill.Tensor", A, "b")                                                        \
  X(zero, "zero", A, "0")                                                                      \
  X(copy, "copy", A, "a")

/* Along dims: which argument lists them, in what, what is made of each a, how two are combined,
 * from what on, and what is made of the combination x of n. */
#define REDUCTIONS(X)                                                          \
  X(sum, "sum.dim_IntList", 1, A, "a", "x + y", "0", "x")                      \
  X(sum_all, "sum", NONE, A, "a", "x + y", "0", "x")                           \
  X(mean, "mean.dim", 1, F, "a", "x + y", "0", "x / n")                        \
  X(mean_all, "mean", NONE, F, "a", "x + y", "0", "x / n")                     \
  X(amax, "amax", 1, F, "a", "x != x || x > y ? x : y", "-INFINITY", "x")      \
  X(amin, "amin", 1, F, "a", "x != x || x < y ? x : y", "INFINITY", "x")       \
  X(max_all, "max", NONE, F, "a", "x != x || x > y ? x : y", "-INFINITY", "x") \
  X(min_all, "min", NONE, F, "a", "x != x || x < y ? x : y", "INFINITY", "x")  \
  X(all_dim, "all.dim", 1, A, "a != 0", "x != 0 && y != 0", "1", "x")          \
  X(all_dims, "all.dims", 1, A, "a != 0", "x != 0 && y != 0", "1", "x")        \
  X(all_all, "all", NONE, A, "a != 0", "x != 0 && y != 0", "1", "x")           \
  X(any_dim, "any.dim", 1, A, "a != 0", "x != 0 || y != 0", "0", "x")          \
  X(any_dims, "any.dims", 1, A, "a != 0", "x != 0 || y != 0", "0", "x")        \
  X(any_all, "any", NONE, A, "a != 0", "x != 0 || y != 0", "0", "x")           \
  X(vector_norm, "linalg_vector_norm", 2, F, "a * a", "x + y", "0", "sqrt(x)")

/* Those with a function of their own below. */
#define OTHERS(X)                                         \
  X(mm, "mm")                                             \
  X(bmm, "bmm")                                           \
  X(addmm, "addmm")                                       \
  X(cat, "cat")                                           \
  X(softmax, "_softmax")                                  \
  X(log_softmax, "_log_softmax")                          \
  X(softmax_backward, "_softmax_backward_data")           \
  X(log_softmax_backward, "_log_softmax_backward_data")   \
  X(nll_loss, "nll_loss_forward")                         \
  X(nll_loss_backward, "nll_loss_backward")               \
  X(index_select, "index_select")                         \
  X(index_add, "index_add")                               \
  X(embedding_backward, "embedding_dense_backward")       \
  X(gather, "gather")                                     \
  X(scatter_add, "scatter_add")                           \
  X(arange, "arange.start_out")                           \
  X(tril, "tril")                                         \
  X(triu, "triu")                                         \
  X(rms_norm, "anychip::rms_norm")                        \
  X(rms_norm_backward, "anychip::rms_norm.backward")      \
  X(layer_norm, "anychip::layer_norm")                    \
  X(layer_norm_backward, "anychip::layer_norm.backward")  \
  X(masked_softmax, "anychip::softmax")                   \
  X(masked_softmax_backward, "anychip::softmax.backward") \
  X(adamw, "anychip::adamw")

/* A table's kernels for what it computes in: NAME_f and NAME_i. */
#define F(macro, name, ...) macro "(op_" #name "_f, float, f, " __VA_ARGS__ ")\n"
#define I(macro, name, ...) macro "(op_" #name "_i, long, i, " __VA_ARGS__ ")\n"
#define A(macro, name, ...) F(macro, name, __VA_ARGS__) I(macro, name, __VA_ARGS__)

const char* const kernel_tables[] = {
#define X(function, name, kind, expression) kind("POINTWISE", function, expression)
    POINTWISE(X)
#undef X
        "",
#define X(function, name, at, kind, value, combination, start, finish) \
  kind("REDUCTION", function, value ", " combination ", " start ", " finish)
    REDUCTIONS(X)
#undef X
        "",
    NULL};

/* ------------------------------------------------------------------------ from the tables */

enum { IN_F, IN_I, IN_A, NONE = ANYCHIP_MAX_DIMS };

static anychip_status pointwise(const anychip_call* call, int kind, const char* in_float,
                                const char* in_int) {
  tensor *given[3] = {NULL, NULL, NULL}, *r = call->results[0];
  double numbers[2] = {-INFINITY, INFINITY};
  int64_t integers[2] = {INT64_MIN, INT64_MAX};
  int num_tensors = 0, num_numbers = 0, computes_float = is_float(r) || kind == IN_F;
  layout l;
  if (!are_known(call)) return ANYCHIP_ENOTSUP;
  for (uint32_t i = 0; i < call->num_arguments; ++i) {
    const anychip_argument* argument = call->arguments[i];
    if (argument->kind == ANYCHIP_ARG_TENSOR) {
      computes_float |= is_float(argument->v.tensor);
      given[num_tensors++] = argument->v.tensor;
      continue;
    }
    if (argument->kind == ANYCHIP_ARG_STRING) {
      numbers[num_numbers] = !strcmp(argument->v.string, "tanh");
    } else if (argument->kind != ANYCHIP_ARG_NONE) {
      computes_float |= argument->kind == ANYCHIP_ARG_FLOAT;
      numbers[num_numbers] = number_at(call, i);
      integers[num_numbers] = argument->v.i;
    }
    ++num_numbers;
  }
  if ((kind == IN_I && computes_float) || !lay_all(&l, given[0], given[1], given[2], r))
    return ANYCHIP_ENOTSUP;
  if (computes_float)
    return launch(call, in_float, ELEMENTS(l.count), "ttttyff", given[0], given[1], given[2], r, &l,
                  numbers[0], numbers[1]);
  return launch(call, in_int, ELEMENTS(l.count), "ttttyll", given[0], given[1], given[2], r, &l,
                integers[0], integers[1]);
}

/* Bits of the dims that a reduction is along: those listed, or all. */
static uint32_t reduced_dims(const anychip_call* call, uint32_t at, int ndim) {
  const anychip_argument* dims = at < call->num_arguments ? call->arguments[at] : NULL;
  uint32_t found = 0;
  if (dims && dims->kind == ANYCHIP_ARG_INT) found = 1u << wrapped(dims->v.i, ndim);
  for (uint64_t i = 0; dims && dims->kind == ANYCHIP_ARG_INTS && i < dims->n; ++i)
    found |= 1u << wrapped(dims->v.ints[i], ndim);
  return found ? found : ~0u;
}

static anychip_status reduction(const anychip_call* call, int kind, const char* in_float,
                                const char* in_int, uint32_t dims_at) {
  tensor *a = tensor_at(call, 0), *r = call->results[0];
  anychip_tensor kept = *a; /* the result, with the dims of a */
  int inner_dims[ANYCHIP_MAX_DIMS], outer_dims[ANYCHIP_MAX_DIMS], num_inner = 0, num_outer = 0;
  uint32_t reduced = reduced_dims(call, dims_at, a->ndim);
  int computes_float = kind == IN_F || is_float(a) || is_float(r);
  layout outer, inner;
  if (!are_known(call) || (kind == IN_F && !(is_float(a) && is_float(r)))) return ANYCHIP_ENOTSUP;
  if (dims_at == 2 && number_at(call, 1) != 2) return ANYCHIP_ENOTSUP; /* another order of norm */
  for (int d = 0, next = 0; d < a->ndim; ++d) {
    if (reduced >> d & 1) {
      inner_dims[num_inner++] = d;
      continue;
    }
    kept.stride[d] = r->stride[r->ndim == a->ndim ? d : next++];
    outer_dims[num_outer++] = d;
  }
  if (!lay(&outer, a, outer_dims, num_outer, (tensor* const[]){a, NULL, NULL, &kept}) ||
      !lay(&inner, a, inner_dims, num_inner, (tensor* const[]){a, NULL, NULL, NULL}))
    return ANYCHIP_ENOTSUP;
  if (computes_float)
    return launch(call, in_float, ROWS(outer.count), "ttyyf", a, r, &outer, &inner,
                  (double)inner.count);
  return launch(call, in_int, ROWS(outer.count), "ttyyl", a, r, &outer, &inner,
                (int64_t)inner.count);
}

#define X(function, name, kind, expression)                                        \
  static anychip_status function##_op(const anychip_call* call) {                  \
    return pointwise(call, IN_##kind, "op_" #function "_f", "op_" #function "_i"); \
  }
POINTWISE(X)
#undef X

#define X(function, name, at, kind, value, combination, start, finish)                 \
  static anychip_status function##_op(const anychip_call* call) {                      \
    return reduction(call, IN_##kind, "op_" #function "_f", "op_" #function "_i", at); \
  }
REDUCTIONS(X)
#undef X

/* --------------------------------------------------------------------------------- products */

/* r = beta d + alpha a b, of matrices or batches of them. */
static anychip_status multiply(const anychip_call* call, tensor* a, tensor* b, tensor* d,
                               double alpha, double beta) {
  tensor* r = call->results[0];
  int first = r->ndim - 2;
  int64_t batch = first ? r->size[0] : 1;
  tensor* const all[] = {a, b, r, d};
  product s;
  cl_int* strides[] = {s.a, s.b, s.r, s.d};
  if (!are_float(call, UINT32_MAX)) return ANYCHIP_ENOTSUP;
  memset(&s, 0, sizeof s);
  for (int i = 0; i < (d ? 4 : 3); ++i) {
    int missing = r->ndim - all[i]->ndim;
    for (int n = 0; n < r->ndim; ++n) {
      int64_t size = n < missing ? 1 : all[i]->size[n - missing];
      int64_t stride = size == 1 ? 0 : all[i]->stride[n - missing];
      if (size > INT_MAX || stride > INT_MAX) return ANYCHIP_ENOTSUP;
      strides[i][3 - r->ndim + n] = (cl_int)stride;
    }
  }
  s.m = (cl_int)r->size[first], s.n = (cl_int)r->size[first + 1], s.k = (cl_int)a->size[first + 1];
  s.alpha = (cl_float)alpha, s.beta = (cl_float)beta;
  return launch(call, "matmul",
                (const size_t[3]){(size_t)(s.n + 31) / 32, (size_t)(s.m + 31) / 32, (size_t)batch},
                (const size_t[3]){8, 8, 1}, "ttttp", a, b, d, r, &s);
}

static anychip_status mm_op(const anychip_call* call) {
  return multiply(call, tensor_at(call, 0), tensor_at(call, 1), NULL, 1, 0);
}

static anychip_status bmm_op(const anychip_call* call) { return mm_op(call); }

static anychip_status addmm_op(const anychip_call* call) {
  return multiply(call, tensor_at(call, 1), tensor_at(call, 2), tensor_at(call, 0),
                  number_at(call, 4), number_at(call, 3));
}

/* --------------------------------------------------------------------------------- rows */

/* r = a, of its shape. */
static anychip_status copied(const anychip_call* call, tensor* a, tensor* r) {
  layout l;
  if (!lay_all(&l, a, NULL, NULL, r)) return ANYCHIP_ENOTSUP;
  if (!is_float(r))
    return launch(call, "op_copy_i", ELEMENTS(l.count), "ttttyll", a, NULL, NULL, r, &l, (int64_t)0,
                  (int64_t)0);
  return launch(call, "op_copy_f", ELEMENTS(l.count), "ttttyff", a, NULL, NULL, r, &l, 0.0, 0.0);
}

static anychip_status cat_op(const anychip_call* call) {
  const anychip_argument* list = call->arguments[0];
  tensor* r = call->results[0];
  int64_t dim = wrapped(int_at(call, 1), r->ndim), done = 0;
  layout l;
  if (!are_known(call)) return ANYCHIP_ENOTSUP;
  for (uint64_t i = 0; i < list->n; ++i) {
    tensor* a = list->v.tensors[i];
    if (a->dtype != r->dtype || a->ndim != r->ndim || !lay_all(&l, a, NULL, NULL, r))
      return ANYCHIP_ENOTSUP;
  }
  for (uint64_t i = 0; i < list->n; ++i) {
    tensor* a = list->v.tensors[i];
    anychip_tensor part = *r;
    anychip_status status;
    part.size[dim] = a->size[dim];
    part.byte_offset += done * r->stride[dim] * item_size(r->dtype);
    done += a->size[dim];
    status = copied(call, a, &part);
    if (status) return status;
  }
  return ANYCHIP_OK;
}

static anychip_status softmax_of(const anychip_call* call, int is_log) {
  tensor *a = tensor_at(call, 0), *r = call->results[0];
  int64_t dim = wrapped(int_at(call, 1), a->ndim);
  layout outer;
  if (!is_float(a) || !is_float(r) || !lay_but(&outer, r, dim, a, NULL, r)) return ANYCHIP_ENOTSUP;
  return launch(call, "softmax", ROWS(outer.count), "ttyilli", a, r, &outer, (int)size_of(a, dim),
                stride_of(a, dim), stride_of(r, dim), is_log);
}

static anychip_status softmax_op(const anychip_call* call) { return softmax_of(call, 0); }
static anychip_status log_softmax_op(const anychip_call* call) { return softmax_of(call, 1); }

static anychip_status softmax_slope(const anychip_call* call, int64_t dim, int is_log,
                                    double scale) {
  tensor *a = tensor_at(call, 0), *b = tensor_at(call, 1), *r = call->results[0];
  layout outer;
  dim = wrapped(dim, a->ndim);
  if (!is_float(a) || !is_float(b) || !is_float(r) || !lay_but(&outer, r, dim, a, b, r))
    return ANYCHIP_ENOTSUP;
  return launch(call, "softmax_backward", ROWS(outer.count), "tttyilllif", a, b, r, &outer,
                (int)size_of(a, dim), stride_of(a, dim), stride_of(b, dim), stride_of(r, dim),
                is_log, scale);
}

static anychip_status softmax_backward_op(const anychip_call* call) {
  return softmax_slope(call, int_at(call, 2), 0, 1);
}

static anychip_status log_softmax_backward_op(const anychip_call* call) {
  return softmax_slope(call, int_at(call, 2), 1, 1);
}

static anychip_status nll_loss_op(const anychip_call* call) {
  tensor *a = tensor_at(call, 0), *b = tensor_at(call, 1), *r = call->results[0];
  int is_batch = a->ndim == 2;
  if (!are_float(call, 1) || numel(a) > INT_MAX) return ANYCHIP_ENOTSUP;
  return launch(call, "nll", ROWS(1),
                "tttttiilllll"
                "i",
                a, b, tensor_at(call, 2), r, call->results[1], (int)(is_batch ? a->size[0] : 1),
                (int)a->size[is_batch], is_batch ? a->stride[0] : 0, a->stride[is_batch],
                stride_of(b, 0), stride_of(r, 0), int_at(call, 4), (int)int_at(call, 3));
}

static anychip_status nll_loss_backward_op(const anychip_call* call) {
  tensor *g = tensor_at(call, 0), *b = tensor_at(call, 2), *r = call->results[0];
  int is_batch = r->ndim == 2;
  if (!are_float(call, 2) || numel(r) > INT_MAX) return ANYCHIP_ENOTSUP;
  return launch(call, "nll_backward", ELEMENTS(numel(r)),
                "tttttiilllll"
                "i",
                g, b, tensor_at(call, 3), tensor_at(call, 6), r, (int)(is_batch ? r->size[0] : 1),
                (int)r->size[is_batch], stride_of(g, 0), stride_of(b, 0),
                is_batch ? r->stride[0] : 0, r->stride[is_batch], int_at(call, 5),
                (int)int_at(call, 4));
}

/* r at ... i ... = a at ... index[i] ... along a dim. */
static anychip_status index_select_op(const anychip_call* call) {
  tensor *a = tensor_at(call, 0), *b = tensor_at(call, 2), *r = call->results[0];
  int64_t dim = wrapped(int_at(call, 1), a->ndim);
  anychip_tensor rows, indices; /* both with the result's shape, the index along dim only */
  layout l;
  if (!a->ndim || is_float(b) || !are_known(call)) return ANYCHIP_ENOTSUP;
  rows = *a, indices = *b;
  memcpy(rows.size, r->size, sizeof rows.size);
  rows.stride[dim] = 0;
  memset(indices.stride, 0, sizeof indices.stride);
  memcpy(indices.size, r->size, sizeof indices.size);
  indices.ndim = r->ndim;
  indices.stride[dim] = stride_of(b, 0);
  if (!lay_all(&l, &rows, &indices, NULL, r)) return ANYCHIP_ENOTSUP;
  return launch(call, "take", ELEMENTS(l.count), "tttyli", a, b, r, &l, a->stride[dim],
                (int)a->size[dim]);
}

static anychip_status gather_op(const anychip_call* call) {
  tensor *a = tensor_at(call, 0), *b = tensor_at(call, 2), *r = call->results[0];
  int64_t dim = wrapped(int_at(call, 1), a->ndim);
  anychip_tensor rows = *a;
  layout l;
  if (!a->ndim || !are_known(call)) return ANYCHIP_ENOTSUP;
  memcpy(rows.size, r->size, sizeof rows.size);
  rows.stride[dim] = 0;
  if (!lay_all(&l, &rows, b, NULL, r)) return ANYCHIP_ENOTSUP;
  return launch(call, "take", ELEMENTS(l.count), "tttyli", a, b, r, &l, a->stride[dim],
                (int)a->size[dim]);
}

/* r = self, and then source's rows on those that the index names; of scatter_add the index has the
 * shape of the source. */
static anychip_status add_rows(const anychip_call* call, double alpha) {
  tensor *a = tensor_at(call, 3), *b = tensor_at(call, 2), *r = call->results[0];
  int64_t dim = wrapped(int_at(call, 1), r->ndim);
  int has_rows = b->ndim == a->ndim && b->ndim > 1;
  anychip_tensor shape;
  layout l;
  anychip_status status;
  if (!r->ndim || a->ndim != r->ndim || b->ndim == 0 || a->dtype != r->dtype ||
      tensor_at(call, 0)->dtype != r->dtype || !are_known(call) ||
      (r->dtype != ANYCHIP_FLOAT32 && r->dtype != ANYCHIP_INT64))
    return ANYCHIP_ENOTSUP;
  shape = has_rows ? *b : *a;
  if (!lay_but(&l, &shape, dim, a, has_rows ? b : NULL, r)) return ANYCHIP_ENOTSUP;
  status = copied(call, tensor_at(call, 0), r);
  if (status) return status;
  return launch(call, "add_rows", ELEMENTS(l.count),
                "tttyillli"
                "fl",
                a, b, r, &l, (int)shape.size[dim], a->stride[dim],
                has_rows ? b->stride[dim] : b->stride[0], r->stride[dim], (int)r->size[dim], alpha,
                (int64_t)-1);
}

static anychip_status index_add_op(const anychip_call* call) {
  if (tensor_at(call, 2)->ndim != 1) return ANYCHIP_ENOTSUP;
  return add_rows(call, number_at(call, 4));
}

static anychip_status scatter_add_op(const anychip_call* call) { return add_rows(call, 1); }

static anychip_status embedding_backward_op(const anychip_call* call) {
  tensor *g = tensor_at(call, 0), *b = tensor_at(call, 1), *r = call->results[0];
  int64_t rows = numel(b), width = r->size[1];
  anychip_tensor flat = *g, column = *r;
  anychip_status status;
  layout l;
  if (!are_float(call, 1) || int_at(call, 4) || !is_contiguous(g) || !is_contiguous(b) ||
      !is_contiguous(r) || rows > INT_MAX || width > INT_MAX)
    return ANYCHIP_ENOTSUP;
  flat.ndim = column.ndim = 1;
  flat.size[0] = column.size[0] = width;
  flat.stride[0] = column.stride[0] = 1;
  if (!lay_all(&l, NULL, NULL, NULL, r)) return ANYCHIP_ENOTSUP;
  status =
      launch(call, "op_zero_f", ELEMENTS(l.count), "ttttyff", NULL, NULL, NULL, r, &l, 0.0, 0.0);
  if (status || !lay_all(&l, &flat, NULL, NULL, &column)) return status;
  return launch(call, "add_rows", ELEMENTS(width),
                "tttyillli"
                "fl",
                g, b, r, &l, (int)rows, width, (int64_t)1, width, (int)r->size[0], 1.0,
                int_at(call, 3));
}

static anychip_status arange_op(const anychip_call* call) {
  tensor* r = call->results[0];
  layout l;
  if (!are_known(call) || (is_float(r) && r->dtype != ANYCHIP_FLOAT32) ||
      !lay_all(&l, NULL, NULL, NULL, r))
    return ANYCHIP_ENOTSUP;
  for (uint32_t i = 0; i < 3; i += 2) /* of integers that floats have, integers are made */
    if (!is_float(r) && call->arguments[i]->kind == ANYCHIP_ARG_FLOAT) return ANYCHIP_ENOTSUP;
  return launch(call, "arange", ELEMENTS(l.count), "tyffll", r, &l, number_at(call, 0),
                number_at(call, 2), int_at(call, 0), int_at(call, 2));
}

static anychip_status triangle(const anychip_call* call, int is_upper) {
  tensor *a = tensor_at(call, 0), *r = call->results[0];
  layout l;
  if (!are_known(call) || (!is_float(a) && item_size(a->dtype) > 1) ||
      !lay_all(&l, a, NULL, NULL, r))
    return ANYCHIP_ENOTSUP;
  return launch(call, "triangle", ELEMENTS(l.count), "ttyiili", a, r, &l, (int)r->size[r->ndim - 2],
                (int)r->size[r->ndim - 1], int_at(call, 1), is_upper);
}

static anychip_status tril_op(const anychip_call* call) { return triangle(call, 0); }
static anychip_status triu_op(const anychip_call* call) { return triangle(call, 1); }

/* ---------------------------------------------------------------------- anychip's own, by name */

static int are_plain(const anychip_call* call) {
  for (uint32_t i = 0; i < call->num_arguments; ++i)
    if (tensor_at(call, i) && !is_contiguous(tensor_at(call, i))) return 0;
  for (uint32_t i = 0; i < call->num_results; ++i)
    if (call->results[i] && (!is_contiguous(call->results[i]) || numel(call->results[i]) > INT_MAX))
      return 0;
  return 1;
}

/* x, weight, (bias,) eps -> y, (mean,) rstd */
static anychip_status norm(const anychip_call* call, int is_centred) {
  tensor *x = tensor_at(call, 0), *rstd = call->results[is_centred ? 2 : 1];
  int64_t n = x->ndim ? x->size[x->ndim - 1] : 0;
  if (!n || !are_float(call, UINT32_MAX) || !are_plain(call)) return ANYCHIP_ENOTSUP;
  return launch(call, "norm", ROWS(numel(x) / n), "ttttttifi", x, tensor_at(call, 1),
                is_centred ? tensor_at(call, 2) : NULL, call->results[0],
                is_centred ? call->results[1] : NULL, rstd, (int)n,
                number_at(call, is_centred ? 3 : 2), is_centred);
}

/* grad, x, weight, (mean,) rstd, eps -> gradients of x, weight (and bias); NULL where not wanted */
static anychip_status norm_backward(const anychip_call* call, int is_centred) {
  tensor *g = tensor_at(call, 0), *x = tensor_at(call, 1), *w = tensor_at(call, 2);
  tensor *mean = is_centred ? tensor_at(call, 3) : NULL, *rstd = tensor_at(call, 3 + is_centred);
  tensor* of_bias = is_centred ? call->results[2] : NULL;
  int64_t n = x->ndim ? x->size[x->ndim - 1] : 0;
  anychip_status status = ANYCHIP_OK;
  if (!n || !are_float(call, UINT32_MAX) || !are_plain(call) || numel(x) > INT_MAX)
    return ANYCHIP_ENOTSUP;
  if (call->results[0])
    status = launch(call, "norm_backward", ROWS(numel(x) / n), "tttttti", g, x, w, mean, rstd,
                    call->results[0], (int)n);
  if (status || (!call->results[1] && !of_bias)) return status;
  return launch(call, "norm_columns", ROWS(n), "ttttttii", g, x, mean, rstd, call->results[1],
                of_bias, (int)n, (int)(numel(x) / n));
}

static anychip_status rms_norm_op(const anychip_call* call) { return norm(call, 0); }
static anychip_status layer_norm_op(const anychip_call* call) { return norm(call, 1); }
static anychip_status rms_norm_backward_op(const anychip_call* call) {
  return norm_backward(call, 0);
}
static anychip_status layer_norm_backward_op(const anychip_call* call) {
  return norm_backward(call, 1);
}

/* x, mask, bias, scale, causal -> y */
static anychip_status masked_softmax_op(const anychip_call* call) {
  tensor *x = tensor_at(call, 0), *m = tensor_at(call, 1), *b = tensor_at(call, 2);
  tensor* r = call->results[0];
  int64_t keys = r->ndim ? r->size[r->ndim - 1] : 0,
          queries = r->ndim > 1 ? r->size[r->ndim - 2] : 1;
  layout l;
  if (!keys || !are_float(call, 1) || !lay_all(&l, x, m, b, r)) return ANYCHIP_ENOTSUP;
  return launch(call, "masked_softmax", ROWS(numel(r) / keys), "ttttyiifi", x, m, b, r, &l,
                (int)queries, (int)keys, number_at(call, 3), (int)int_at(call, 4));
}

/* grad, y, bias, scale, causal -> gradients of x and bias */
static anychip_status masked_softmax_backward_op(const anychip_call* call) {
  if (call->results[1] || !call->results[0] || !call->results[0]->ndim) return ANYCHIP_ENOTSUP;
  return softmax_slope(call, -1, 0, number_at(call, 3));
}

enum {
  PARAMS,
  GRADS,
  AVERAGES,
  SQUARES,
  RATE,
  STEP,
  SCALE,
  CLIP,
  FOUND_INF,
  LOW,
  BETA1,
  BETA2,
  EPS,
  DECAY
};

static tensor* in_list(const anychip_call* call, uint32_t i, uint64_t n) {
  const anychip_argument* list = call->arguments[i];
  return list->kind == ANYCHIP_ARG_TENSORS && n < list->n ? list->v.tensors[n] : NULL;
}

/* Everything is asked before the first tensor is written. */
static int moves(const anychip_call* call) {
  for (uint64_t n = 0; n < call->arguments[PARAMS]->n; ++n) {
    tensor* p = in_list(call, PARAMS, n);
    if (numel(p) > INT_MAX) return 0;
    for (uint32_t i = PARAMS; i <= LOW; ++i) {
      tensor* t = in_list(call, i, n);
      if (t && !is_contiguous(t)) return 0;
      if (t && i <= SQUARES && i != GRADS && t->dtype != ANYCHIP_FLOAT32) return 0;
    }
  }
  return are_float(call, UINT32_MAX);
}

static anychip_status adamw_op(const anychip_call* call) {
  double beta1 = number_at(call, BETA1), beta2 = number_at(call, BETA2);
  tensor *rate = tensor_at(call, RATE), *step = tensor_at(call, STEP);
  tensor *scale = tensor_at(call, SCALE), *clip = tensor_at(call, CLIP);
  tensor* found_inf = tensor_at(call, FOUND_INF);
  anychip_status status = ANYCHIP_OK;
  if (!moves(call)) return ANYCHIP_ENOTSUP;
  for (uint64_t n = 0; n < call->arguments[PARAMS]->n && !status; ++n) {
    tensor* p = in_list(call, PARAMS, n);
    status = launch(call, "adamw", ELEMENTS(numel(p)),
                    "tttttttttt"
                    "iffffffff",
                    p, in_list(call, GRADS, n), in_list(call, AVERAGES, n),
                    in_list(call, SQUARES, n), in_list(call, LOW, n), rate, step, scale, clip,
                    found_inf, (int)numel(p), beta1, 1 - beta1, log(beta1), beta2, 1 - beta2,
                    log(beta2), number_at(call, EPS), number_at(call, DECAY));
  }
  return status ? status : launch(call, "count_step", ROWS(1), "tt", step, found_inf);
}

/* ----------------------------------------------------------------------------------- by name */

static const struct {
  const char* name;
  anychip_operator function;
} operators[] = {
#define X(function, name, ...) {name, function##_op},
    POINTWISE(X) REDUCTIONS(X) OTHERS(X)
#undef X
};

const char* const operator_names[] = {
#define X(function, name, ...) name,
    POINTWISE(X) REDUCTIONS(X) OTHERS(X)
#undef X
        NULL};

anychip_operator find_operator(const char* name) {
  for (size_t i = 0; i < sizeof operators / sizeof *operators; ++i)
    if (!strcmp(operators[i].name, name)) return operators[i].function;
  return NULL;
}
