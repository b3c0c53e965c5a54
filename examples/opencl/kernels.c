/* The kernels, in OpenCL C 1.2: compiled by the device's driver when the first operator is called.
 * A tensor arrives as its buffer, the number of its first element, and its type of elements: what
 * is read is converted to float or long, in which a kernel computes. Groups have 64 work items. */
#include "operators.h"

/* clang-format off */
const char* const kernel_prelude =
  "#pragma OPENCL FP_CONTRACT OFF\n"
  "#define GROUP 64\n"
  "#define IN(x) global const void *p##x, long o##x, int t##x\n"
  "#define OUT(x) global void *p##x, long o##x, int t##x\n"
  "typedef struct { int ndim, count, size[8], stride[4][8]; } layout;\n"
  "typedef struct { int m, n, k, a[3], b[3], d[3], r[3]; float alpha, beta; } product;\n"

  "#define LOAD(T) switch (type) {\\\n"
  "  case 0: return (T)((global const uchar *)p)[i];\\\n"
  "  case 1: return (T)((global const char *)p)[i];\\\n"
  "  case 2: return (T)((global const short *)p)[i];\\\n"
  "  case 3: return (T)((global const int *)p)[i];\\\n"
  "  case 4: return (T)((global const long *)p)[i];\\\n"
  "  case 5: return (T)vload_half(i, (global const half *)p);\\\n"
  "  case 6: return (T)((global const float *)p)[i];\\\n"
  "  case 11: return (T)((global const uchar *)p)[i];\\\n"
  "  case 15: return (T)as_float((uint)((global const ushort *)p)[i] << 16);\\\n"
  "  default: return 0; }\n"
  "float load_f(global const void *p, int type, long i) { LOAD(float) }\n"
  "long load_i(global const void *p, int type, long i) { LOAD(long) }\n"

  "ushort bfloat16(float v) {\n"
  "  uint bits = as_uint(v);\n"
  "  uint kept = bits >> 16;\n" /* of a NaN that was made of 16 bits: a copy is one of bits */
  "  if (isnan(v)) return (ushort)(bits & 0x7f0000 ? kept : kept | 0x40);\n"
  "  return (ushort)((bits + 0x7fff + (kept & 1)) >> 16);\n"
  "}\n"
  "#define STORE switch (type) {\\\n"
  "  case 0: ((global uchar *)p)[i] = (uchar)(long)v; break;\\\n"
  "  case 1: ((global char *)p)[i] = (char)(long)v; break;\\\n"
  "  case 2: ((global short *)p)[i] = (short)(long)v; break;\\\n"
  "  case 3: ((global int *)p)[i] = (int)(long)v; break;\\\n"
  "  case 4: ((global long *)p)[i] = (long)v; break;\\\n"
  "  case 5: vstore_half_rte((float)v, i, (global half *)p); break;\\\n"
  "  case 6: ((global float *)p)[i] = (float)v; break;\\\n"
  "  case 11: ((global uchar *)p)[i] = v != 0; break;\\\n"
  "  case 15: ((global ushort *)p)[i] = bfloat16((float)v); break; }\n"
  "void store_f(global void *p, int type, long i, float v) { STORE }\n"
  "void store_i(global void *p, int type, long i, long v) { STORE }\n"

  /* The place of element i of operand n. */
  "long at(const layout *l, int n, int i) {\n"
  "  long place = 0;\n"
  "  for (int d = l->ndim - 1; d > 0; --d) {\n"
  "    place += (long)(i % l->size[d]) * l->stride[n][d];\n"
  "    i /= l->size[d];\n"
  "  }\n"
  "  return l->ndim ? place + (long)i * l->stride[n][0] : 0;\n"
  "}\n"

  /* The gelu that torch has, and its derivative; the derivative of silu. (1 + tanh(u)) / 2 is the
     sigmoid of 2 u, which is 0 and 1 at its ends whatever the device's tanh is there. */
  "float tanh_gate(float x) {\n"
  "  return 1 / (1 + exp(-1.5957691216f * (x + 0.044715f * x * x * x)));\n"
  "}\n"
  "float gelu(float x, int tanh_) {\n"
  "  return tanh_ ? x * tanh_gate(x) : 0.5f * x * (1 + erf(x * 0.7071067812f));\n"
  "}\n"
  "float gelu_slope(float x, int tanh_) {\n"
  "  float g = tanh_gate(x), u = 1.5957691216f * (1 + 3 * 0.044715f * x * x);\n"
  "  float rest = g == 0 || g == 1 ? 0 : x * g * (1 - g) * u;\n" /* not 0 times infinity */
  "  return tanh_ ? g + rest\n"
  "    : 0.5f * (1 + erf(x * 0.7071067812f)) + x * 0.3989422804f * exp(-0.5f * x * x);\n"
  "}\n"
  "float silu_slope(float x) {\n"
  "  float s = 1 / (1 + exp(-x));\n"
  "  return s * (1 + x * (1 - s));\n"
  "}\n"

  /* One element for each work item. */
  "#define POINTWISE(name, T, x, expression)\\\n"
  "kernel void name(IN(a), IN(b), IN(c), OUT(r), layout l, T s, T t) {\\\n"
  "  int i = get_global_id(0);\\\n"
  "  if (i >= l.count) return;\\\n"
  "  T a = load_##x(pa, ta, oa + at(&l, 0, i)), b = load_##x(pb, tb, ob + at(&l, 1, i)),\\\n"
  "    c = load_##x(pc, tc, oc + at(&l, 2, i));\\\n"
  "  store_##x(pr, tr, or + at(&l, 3, i), (expression));\\\n"
  "}\n"

  /* All items of a group get the combination of their values, in an order that never changes. */
  "#define COMBINE(T, name, combination)\\\n"
  "T name(T x, local T *shared) {\\\n"
  "  int me = get_local_id(0);\\\n"
  "  barrier(CLK_LOCAL_MEM_FENCE);\\\n"
  "  shared[me] = x;\\\n"
  "  for (int half_ = GROUP / 2; half_; half_ /= 2) {\\\n"
  "    barrier(CLK_LOCAL_MEM_FENCE);\\\n"
  "    if (me < half_) { T x = shared[me], y = shared[me + half_]; shared[me] = combination; }\\\n"
  "  }\\\n"
  "  barrier(CLK_LOCAL_MEM_FENCE);\\\n"
  "  return shared[0];\\\n"
  "}\n"
  "COMBINE(float, group_sum, x + y)\n"
  "COMBINE(float, group_max, x != x || x > y ? x : y)\n"

  /* One result for each group: of outer's operands 3, the result, and 0; over the elements that
     inner's operand 0 adds. */
  "#define REDUCTION(name, T, x_, value, combination, start, finish)\\\n"
  "COMBINE(T, name##_combine, combination)\\\n"
  "kernel void name(IN(a), OUT(r), layout outer, layout inner, T n) {\\\n"
  "  local T shared[GROUP];\\\n"
  "  int o = get_group_id(0);\\\n"
  "  long base = oa + at(&outer, 0, o);\\\n"
  "  T x = start;\\\n"
  "  for (int i = get_local_id(0); i < inner.count; i += GROUP) {\\\n"
  "    T a = load_##x_(pa, ta, base + at(&inner, 0, i)), y = value;\\\n"
  "    x = combination;\\\n"
  "  }\\\n"
  "  x = name##_combine(x, shared);\\\n"
  "  if (get_local_id(0) == 0) store_##x_(pr, tr, or + at(&outer, 3, o), (finish));\\\n"
  "}\n";

#define CL(...) #__VA_ARGS__
const char* const kernel_text[] = {

/* r = beta d + alpha a b: a group computes 32 x 32 results, an item 4 x 4 of them. */
CL(
kernel __attribute__((reqd_work_group_size(8, 8, 1)))
void matmul(IN(a), IN(b), IN(d), OUT(r), product s) {
  local float as[32][17];
  local float bs[16][33];
  int z = get_group_id(2), x = get_local_id(0), y = get_local_id(1), me = y * 8 + x;
  int row0 = get_group_id(1) * 32, column0 = get_group_id(0) * 32;
  float sums[4][4] = {{0}};
  for (int k0 = 0; k0 < s.k; k0 += 16) {
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = me; i < 512; i += 64) {
      int row = row0 + i / 16, inner = k0 + i % 16;
      as[i / 16][i % 16] = row < s.m && inner < s.k ? load_f(pa, ta, oa + (long)z * s.a[0] +
        (long)row * s.a[1] + (long)inner * s.a[2]) : 0;
      int column = column0 + i % 32;
      inner = k0 + i / 32;
      bs[i / 32][i % 32] = column < s.n && inner < s.k ? load_f(pb, tb, ob + (long)z * s.b[0] +
        (long)inner * s.b[1] + (long)column * s.b[2]) : 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = 0; k < 16; ++k)
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) sums[i][j] += as[y * 4 + i][k] * bs[k][x * 4 + j];
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) {
      int row = row0 + y * 4 + i, column = column0 + x * 4 + j;
      if (row >= s.m || column >= s.n) continue;
      float value = s.alpha * sums[i][j];
      if (s.beta != 0) value += s.beta * load_f(pd, td, od + (long)z * s.d[0] +
        (long)row * s.d[1] + (long)column * s.d[2]);
      store_f(pr, tr, or + (long)z * s.r[0] + (long)row * s.r[1] + (long)column * s.r[2], value);
    }
}
),

/* Rows of n elements: outer's operands 0 and 3 are where a row of a and of r begins. */
CL(
kernel void softmax(IN(a), OUT(r), layout outer, int n, long sa, long sr, int is_log) {
  local float shared[GROUP];
  int o = get_group_id(0), me = get_local_id(0);
  long from = oa + at(&outer, 0, o), to = or + at(&outer, 3, o);
  float most = -INFINITY, sum = 0;
  for (int i = me; i < n; i += GROUP) {
    float v = load_f(pa, ta, from + i * sa);
    most = v != v || v > most ? v : most;
  }
  most = group_max(most, shared);
  for (int i = me; i < n; i += GROUP) sum += exp(load_f(pa, ta, from + i * sa) - most);
  sum = group_sum(sum, shared);
  float log_sum = log(sum);
  for (int i = me; i < n; i += GROUP) {
    float v = load_f(pa, ta, from + i * sa) - most;
    store_f(pr, tr, to + i * sr, is_log ? v - log_sum : exp(v) / sum);
  }
}

/* From the gradient a and the result b; times scale. */
kernel void softmax_backward(IN(a), IN(b), OUT(r), layout outer, int n, long sa, long sb, long sr,
                             int is_log, float scale) {
  local float shared[GROUP];
  int o = get_group_id(0), me = get_local_id(0);
  long a0 = oa + at(&outer, 0, o), b0 = ob + at(&outer, 1, o), to = or + at(&outer, 3, o);
  float sum = 0;
  for (int i = me; i < n; i += GROUP)
    sum += load_f(pa, ta, a0 + i * sa) * (is_log ? 1 : load_f(pb, tb, b0 + i * sb));
  sum = group_sum(sum, shared);
  for (int i = me; i < n; i += GROUP) {
    float grad = load_f(pa, ta, a0 + i * sa), y = load_f(pb, tb, b0 + i * sb);
    store_f(pr, tr, to + i * sr, (is_log ? grad - exp(y) * sum : y * (grad - sum)) * scale);
  }
}

float score(IN(x), IN(m), IN(b), const layout *l, long i, int key, int last, float scale) {
  float v = load_f(px, tx, ox + at(l, 0, i)) * scale;
  if (tb >= 0) v += load_f(pb, tb, ob + at(l, 2, i));
  return key > last || (tm >= 0 && !load_i(pm, tm, om + at(l, 1, i))) ? -INFINITY : v;
}

/* anychip's softmax: a mask m, a bias b, causality; a row without a visible key is 0. Operands of l
   are x, m, b, r. */
kernel void masked_softmax(IN(x), IN(m), IN(b), OUT(r), layout l, int queries, int keys,
                           float scale, int causal) {
  local float shared[GROUP];
  int me = get_local_id(0), o = get_group_id(0);
  long first = (long)o * keys;
  int last = causal ? o % queries + keys - queries : keys;
  float most = -INFINITY, sum = 0;
  for (int i = me; i < keys; i += GROUP) {
    float v = score(px, ox, tx, pm, om, tm, pb, ob, tb, &l, first + i, i, last, scale);
    most = v != v || v > most ? v : most;
  }
  most = group_max(most, shared);
  int is_hidden = most == -INFINITY;
  for (int i = me; i < keys && !is_hidden; i += GROUP)
    sum += exp(score(px, ox, tx, pm, om, tm, pb, ob, tb, &l, first + i, i, last, scale) - most);
  sum = group_sum(sum, shared);
  for (int i = me; i < keys; i += GROUP) {
    float v = score(px, ox, tx, pm, om, tm, pb, ob, tb, &l, first + i, i, last, scale);
    store_f(pr, tr, or + at(&l, 3, first + i), is_hidden ? 0 : exp(v - most) / sum);
  }
}
),

/* Normalisation of contiguous rows of n: over the mean (is_centred), with a bias (tb >= 0). */
CL(
kernel void norm(IN(x), IN(w), IN(b), OUT(y), OUT(m), OUT(s), int n, float eps, int is_centred) {
  local float shared[GROUP];
  int me = get_local_id(0), row = get_group_id(0);
  long first = ox + (long)row * n;
  float mean = 0, sum = 0;
  if (is_centred) {
    for (int i = me; i < n; i += GROUP) sum += load_f(px, tx, first + i);
    mean = group_sum(sum, shared) / n;
    sum = 0;
  }
  for (int i = me; i < n; i += GROUP) {
    float v = load_f(px, tx, first + i) - mean;
    sum += v * v;
  }
  float rstd = 1 / sqrt(group_sum(sum, shared) / n + eps);
  for (int i = me; i < n; i += GROUP) {
    float v = (load_f(px, tx, first + i) - mean) * rstd * load_f(pw, tw, ow + i);
    store_f(py, ty, oy + (long)row * n + i, v + (tb >= 0 ? load_f(pb, tb, ob + i) : 0));
  }
  if (me == 0 && is_centred) store_f(pm, tm, om + row, mean);
  if (me == 0) store_f(ps, ts, os + row, rstd);
}

kernel void norm_backward(IN(g), IN(x), IN(w), IN(m), IN(s), OUT(d), int n) {
  local float shared[GROUP];
  int me = get_local_id(0), row = get_group_id(0);
  long first = (long)row * n;
  float mean = tm >= 0 ? load_f(pm, tm, om + row) : 0, rstd = load_f(ps, ts, os + row);
  float sum = 0, product_sum = 0;
  for (int i = me; i < n; i += GROUP) {
    float scaled = load_f(pg, tg, og + first + i) * load_f(pw, tw, ow + i);
    sum += scaled;
    product_sum += scaled * (load_f(px, tx, ox + first + i) - mean) * rstd;
  }
  sum = tm >= 0 ? group_sum(sum, shared) / n : 0;
  product_sum = group_sum(product_sum, shared) / n;
  for (int i = me; i < n; i += GROUP) {
    float scaled = load_f(pg, tg, og + first + i) * load_f(pw, tw, ow + i);
    float normed = (load_f(px, tx, ox + first + i) - mean) * rstd;
    store_f(pd, td, od + first + i, (scaled - sum - normed * product_sum) * rstd);
  }
}

/* Gradients of the weight (td >= 0) and of the bias (tq >= 0): a group for each column. */
kernel void norm_columns(IN(g), IN(x), IN(m), IN(s), OUT(d), OUT(q), int n, int rows) {
  local float shared[GROUP];
  int column = get_group_id(0);
  float of_weight = 0, of_bias = 0;
  for (int row = get_local_id(0); row < rows; row += GROUP) {
    float grad = load_f(pg, tg, og + (long)row * n + column);
    float mean = tm >= 0 ? load_f(pm, tm, om + row) : 0;
    float x = load_f(px, tx, ox + (long)row * n + column);
    of_weight += grad * (x - mean) * load_f(ps, ts, os + row);
    of_bias += grad;
  }
  of_weight = group_sum(of_weight, shared);
  of_bias = group_sum(of_bias, shared);
  if (get_local_id(0)) return;
  if (td >= 0) store_f(pd, td, od + column, of_weight);
  if (tq >= 0) store_f(pq, tq, oq + column, of_bias);
}
),

/* One tensor of AdamW's; n holds the number of steps before. rest is 1 - beta, ln its logarithm. */
CL(
kernel void adamw(OUT(p), IN(g), OUT(m), OUT(v), OUT(q), IN(l), IN(n), IN(z), IN(c), IN(f),
                  int count, float beta1, float rest1, float ln1, float beta2, float rest2,
                  float ln2, float eps, float decay) {
  int i = get_global_id(0);
  if (i >= count || (tf >= 0 && load_f(pf, tf, of) != 0)) return;
  float rate = load_f(pl, tl, ol), step = load_f(pn, tn, on) + 1;
  float grad = load_f(pg, tg, og + i);
  if (tz >= 0) grad /= load_f(pz, tz, oz);
  if (tc >= 0) grad *= load_f(pc, tc, oc);
  float first = beta1 * load_f(pm, tm, om + i) + rest1 * grad;
  float second = beta2 * load_f(pv, tv, ov + i) + rest2 * grad * grad;
  float corrected1 = first / -expm1(step * ln1), corrected2 = second / -expm1(step * ln2);
  float param = load_f(pp, tp, op + i) * (1 - rate * decay);
  param -= rate * corrected1 / (sqrt(corrected2) + eps);
  store_f(pm, tm, om + i, first);
  store_f(pv, tv, ov + i, second);
  store_f(pp, tp, op + i, param);
  if (tq >= 0) store_f(pq, tq, oq + i, load_f(pp, tp, op + i));
}

kernel void count_step(OUT(n), IN(f)) {
  if (get_global_id(0) == 0 && (tf < 0 || load_f(pf, tf, of) == 0))
    store_f(pn, tn, on, load_f(pn, tn, on) + 1);
}
),

/* Rows by an index. Operands of l: source or target at row 0, index, -, the other; the row's stride
   comes apart. */
CL(
kernel void take(IN(a), IN(b), OUT(r), layout l, long stride, int size) {
  int i = get_global_id(0);
  if (i >= l.count) return;
  long row = load_i(pb, tb, ob + at(&l, 1, i));
  if (row < 0) row += size;
  if (row < 0 || row >= size) return;
  long from = oa + at(&l, 0, i) + row * stride, to = or + at(&l, 3, i);
  if (ta == 6) ((global float *)pr)[to] = ((global const float *)pa)[from];
  else if (ta == 5 || ta == 15) ((global ushort *)pr)[to] = ((global const ushort *)pa)[from];
  else store_i(pr, tr, to, load_i(pa, ta, from));
}

/* r[row of index] += alpha a, for the elements of l; an item does all n rows of one element, in
   order: the same bits each time. skip: this row is left out. */
kernel void add_rows(IN(a), IN(b), OUT(r), layout l, int n, long sa, long sb, long sr, int size,
                     float alpha, long skip) {
  int i = get_global_id(0);
  if (i >= l.count) return;
  for (int j = 0; j < n; ++j) {
    long row = load_i(pb, tb, ob + at(&l, 1, i) + j * sb);
    if (row < 0 || row >= size || row == skip) continue;
    long to = or + at(&l, 3, i) + row * sr;
    long from = oa + at(&l, 0, i) + j * sa;
    if (tr == 4) store_i(pr, tr, to, load_i(pr, tr, to) + (long)alpha * load_i(pa, ta, from));
    else store_f(pr, tr, to, load_f(pr, tr, to) + alpha * load_f(pa, ta, from));
  }
}

kernel void arange(OUT(r), layout l, float start, float step, long first, long stride) {
  int i = get_global_id(0);
  if (i >= l.count) return;
  long to = or + at(&l, 3, i);
  if (tr == 6) store_f(pr, tr, to, start + step * i);
  else store_i(pr, tr, to, first + stride * i);
}

/* Of a matrix in the last two dims: what is above or below a diagonal is 0. */
kernel void triangle(IN(a), OUT(r), layout l, int rows, int columns, long diagonal, int is_upper) {
  int i = get_global_id(0);
  if (i >= l.count) return;
  long ahead = i % columns - i / columns % rows - diagonal;
  float v = load_f(pa, ta, oa + at(&l, 0, i));
  store_f(pr, tr, or + at(&l, 3, i), (is_upper ? ahead >= 0 : ahead <= 0) ? v : 0);
}

/* Losses of rows of log probabilities a under targets b, weights w; reduction 0 none, 1 mean, 2
   sum. One group. */
kernel void nll(IN(a), IN(b), IN(w), OUT(r), OUT(n), int rows, int classes, long sa, long sc,
                long sb, long sr, long ignored, int reduction) {
  local float shared[GROUP];
  float sum = 0, total = 0;
  for (int i = get_local_id(0); i < rows; i += GROUP) {
    long target = load_i(pb, tb, ob + i * sb);
    int counts = target != ignored && target >= 0 && target < classes;
    float weight = !counts ? 0 : tw >= 0 ? load_f(pw, tw, ow + target) : 1;
    float loss = counts ? -load_f(pa, ta, oa + i * sa + target * sc) * weight : 0;
    if (reduction == 0) store_f(pr, tr, or + i * sr, loss);
    sum += loss;
    total += weight;
  }
  sum = group_sum(sum, shared);
  total = group_sum(total, shared);
  if (get_local_id(0)) return;
  if (reduction) store_f(pr, tr, or, reduction == 1 ? sum / total : sum);
  store_f(pn, tn, on, reduction ? total : 0);
}

kernel void nll_backward(IN(g), IN(b), IN(w), IN(n), OUT(r), int rows, int classes, long sg,
                         long sb, long sr, long sc, long ignored, int reduction) {
  int i = get_global_id(0);
  if (i >= rows * classes) return;
  int row = i / classes, column = i % classes;
  long target = load_i(pb, tb, ob + row * sb);
  float v = 0;
  if (target == column && target != ignored) {
    v = -load_f(pg, tg, og + (reduction ? 0 : row * sg)) * (tw >= 0 ? load_f(pw, tw, ow + column) : 1);
    if (reduction == 1) v /= load_f(pn, tn, on);
  }
  store_f(pr, tr, or + row * sr + column * sc, v);
}
),
0};
