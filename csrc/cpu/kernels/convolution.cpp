// conv1d: each channel of a sequence with a few weights of its own, which see what came before; and
// images whose channels become innermost, as products read them.
//
// A sequence becomes float32 once, with zeros where there is nothing to see. y is a sum of `taps`
// products in order, and the bias; dx is one of as many; the gradients of weights are sums over the
// sequence as in Note [Row sums] of loops.h, and then over the batch (channels.cpp).
#include "loops.h"
#include "rows.h"
#include "table.h"
#include "transpose.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

// y[t] = start + sum over k of seen[t + k * step] weight[k].
template <class T>
ANYCHIP_INLINE void convolve(const float* seen, int64_t step, const float* weight, int64_t taps,
                             float start, T* y, int64_t length) {
  for_each_vector(0, length, [&](int64_t i, auto lanes) {
    F32 sum = fill<F32>(start);
    for (int64_t k = 0; k < taps; ++k) sum = sum + load(seen + i + k * step, lanes) * weight[k];
    store(y + i, sum, lanes);
  });
}

template <class T>
[[gnu::flatten]] void forward(const Conv1dForward& args, const float* weight, const float* bias,
                              float* scratch, Range rows) {
  const int64_t before = args.taps - 1;
  for (int64_t k = 0; k < before; ++k) scratch[k] = 0.0f;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t channel = row % args.channels, at = row * args.length;
    to_float(args.dtype, static_cast<const T*>(args.x) + at, scratch + before, args.length);
    convolve(scratch, 1, weight + channel * args.taps, args.taps, bias ? bias[channel] : 0.0f,
             static_cast<T*>(args.y) + at, args.length);
  }
}

template <class T>
[[gnu::flatten]] void backward(const Conv1dBackward& args, const float* weight, float* sums,
                               float* scratch, Range rows) {
  const int64_t before = args.taps - 1, length = args.length;
  float* seen = scratch;
  float* grad = scratch + before + length;
  for (int64_t k = 0; k < before; ++k) seen[k] = grad[length + k] = 0.0f;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    to_float(args.dtype, static_cast<const T*>(args.grad) + row * length, grad, length);
    if (args.dx) {
      convolve(grad + before, -1, weight + row % args.channels * args.taps, args.taps, 0.0f,
               static_cast<T*>(args.dx) + row * length, length);
    }
    if (!sums) continue;
    to_float(args.dtype, static_cast<const T*>(args.x) + row * length, seen + before, length);
    float* own = sums + row * (args.taps + 1);
    for (int64_t k = 0; k < args.taps; ++k) {
      own[k] = sum_over(length, [&](int64_t i, auto lanes) {
        return load(grad + i, lanes) * load(seen + i + k, lanes);
      });
    }
    own[args.taps] = sum_over(length, [&](int64_t i, auto lanes) { return load(grad + i, lanes); });
  }
}

template <class T>
[[gnu::flatten]] void turn_parts(const Turned& args, Range parts) {
  const int64_t rows = args.rows, columns = args.columns;
  const int64_t across = (columns + kTurnedColumns - 1) / kTurnedColumns;
  for (int64_t part = parts.begin; part < parts.end; ++part) {
    const int64_t first = part % across * kTurnedColumns, rest = columns - first;
    const int64_t at = part / across * rows * columns;
    turn_columns(static_cast<const T*>(args.x) + at + first, columns, rows,
                 rest < kTurnedColumns ? rest : kTurnedColumns,
                 static_cast<T*>(args.y) + at + first * rows, rows);
  }
}

}  // namespace

void conv1d_forward(const Conv1dForward& args, const float* weight, const float* bias,
                    float* scratch, Range rows) {
  visit_dtype(args.dtype, [&](auto t) { forward<decltype(t)>(args, weight, bias, scratch, rows); });
}

void conv1d_backward(const Conv1dBackward& args, const float* weight, float* sums, float* scratch,
                     Range rows) {
  visit_dtype(args.dtype,
              [&](auto t) { backward<decltype(t)>(args, weight, sums, scratch, rows); });
}

void turn(const Turned& args, Range parts) {
  visit_dtype(args.dtype, [&](auto t) { turn_parts<decltype(t)>(args, parts); });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
