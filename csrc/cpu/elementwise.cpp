// Dropout, GELU, SwiGLU and rotary embedding over the threads.
#include "checks.h"
#include "parallel.h"

namespace anychip::cpu {

void dropout(const Dropout& args) {
  const char* where = "dropout";
  check_sizes(where, {{"numel", args.numel}});
  check(args.p >= 0.0 && args.p <= 1.0, where,
        "expected 0 <= p <= 1, got " + std::to_string(args.p));
  check_address(where, "rng", args.rng);
  if (args.numel > 0) {
    check_address(where, "x", args.x);
    check_address(where, "y", args.y);
  }
  check_sizes(where, {{"columns", args.columns}});
  check_sizes(where, {{"width", args.width}});
  if (args.rows != nullptr) {
    const bool whole = args.columns > 0 && args.numel % args.columns == 0;
    check(whole || (args.columns == 0 && args.numel == 0), where,
          "expected whole rows, got " + std::to_string(args.numel) + " elements in rows of " +
              std::to_string(args.columns));
    check(args.column >= 0 && args.width - args.column >= args.columns, where,
          "expected rows within a width, got column " + std::to_string(args.column) + " to " +
              std::to_string(args.column + args.columns) + " of " + std::to_string(args.width));
  }
  parallel_elements(args.numel, [&](Range elements) { kernels().dropout(args, elements); });
}

void gelu_forward(const GeluForward& args) {
  const char* where = "gelu_forward";
  check_sizes(where, {{"numel", args.numel}});
  if (args.numel > 0) {
    check_address(where, "x", args.x);
    check_address(where, "y", args.y);
  }
  parallel_elements(args.numel, [&](Range elements) { kernels().gelu_forward(args, elements); });
}

void gelu_backward(const GeluBackward& args) {
  const char* where = "gelu_backward";
  check_sizes(where, {{"numel", args.numel}});
  if (args.numel > 0) {
    check_address(where, "grad", args.grad);
    check_address(where, "x", args.x);
    check_address(where, "dx", args.dx);
  }
  parallel_elements(args.numel, [&](Range elements) { kernels().gelu_backward(args, elements); });
}

void swiglu_forward(const SwigluForward& args) {
  const char* where = "swiglu_forward";
  check_sizes(where, {{"numel", args.numel}});
  if (args.numel > 0) {
    check_address(where, "gate", args.gate);
    check_address(where, "up", args.up);
    check_address(where, "y", args.y);
  }
  parallel_elements(args.numel, [&](Range elements) { kernels().swiglu_forward(args, elements); });
}

void swiglu_backward(const SwigluBackward& args) {
  const char* where = "swiglu_backward";
  check_sizes(where, {{"numel", args.numel}});
  if (args.numel > 0) {
    check_address(where, "grad", args.grad);
    check_address(where, "gate", args.gate);
    check_address(where, "up", args.up);
  }
  parallel_elements(args.numel, [&](Range elements) { kernels().swiglu_backward(args, elements); });
}

void rope(const Rope& args) {
  const char* where = "rope";
  const Size batch{"batch", args.batch}, seq{"seq", args.seq}, head_dim{"head_dim", args.head_dim};
  const int64_t of_q = check_sizes(where, {batch, seq, head_dim, {"heads", args.heads}});
  const int64_t of_k = check_sizes(where, {batch, seq, head_dim, {"kv_heads", args.kv_heads}});
  check(args.head_dim % 2 == 0, where,
        "expected an even head_dim, got " + std::to_string(args.head_dim));
  if (of_q + of_k > 0) {
    check_address(where, "cos", args.cos);
    check_address(where, "sin", args.sin);
    check((args.q == nullptr) == (args.q_out == nullptr) &&
              (args.k == nullptr) == (args.k_out == nullptr),
          where, "expected q with q_out and k with k_out, got one without the other");
  }
  const int64_t elements = (args.heads + args.kv_heads) * args.head_dim;
  parallel_items(args.batch * args.seq, elements,
                 [&](Range range) { kernels().rope(args, range); });
}

}  // namespace anychip::cpu
