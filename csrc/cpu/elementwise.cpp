// Activations and rotary embedding over the threads.
#include "checks.h"
#include "row_blocks.h"

namespace anychip::cpu {

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

void geglu_forward(const GegluForward& args) {
  const char* where = "geglu_forward";
  check_sizes(where, {{"numel", args.numel}});
  if (args.numel > 0) {
    check_address(where, "gate", args.gate);
    check_address(where, "up", args.up);
    check_address(where, "y", args.y);
  }
  parallel_elements(args.numel, [&](Range elements) { kernels().geglu_forward(args, elements); });
}

void geglu_backward(const GegluBackward& args) {
  const char* where = "geglu_backward";
  check_sizes(where, {{"numel", args.numel}});
  if (args.numel > 0) {
    check_address(where, "grad", args.grad);
    check_address(where, "gate", args.gate);
    check_address(where, "up", args.up);
  }
  parallel_elements(args.numel, [&](Range elements) { kernels().geglu_backward(args, elements); });
}

void bias_gelu_forward(const BiasGeluForward& args) {
  const char* where = "bias_gelu_forward";
  if (check_sizes(where, {{"rows", args.rows}, {"hidden", args.hidden}}) == 0) return;
  check_address(where, "x", args.x);
  check_address(where, "bias", args.bias);
  check_address(where, "y", args.y);
  const WideRows rows(args.bias, args.bias_dtype, args.rows, args.hidden);
  BiasGeluForward wide = args;
  wide.hidden = rows.width();
  rows.run([&](Range elements) { kernels().bias_gelu_forward(wide, rows.bias(), elements); });
}

void bias_gelu_backward(const BiasGeluBackward& args) {
  const char* where = "bias_gelu_backward";
  if (check_sizes(where, {{"rows", args.rows}, {"hidden", args.hidden}}) > 0) {
    check_address(where, "grad", args.grad);
    check_address(where, "x", args.x);
    check_address(where, "bias", args.bias);
  }
  if (args.hidden == 0) return;
  const WideRows rows(args.bias, args.bias_dtype, args.rows, args.hidden);
  BiasGeluBackward wide = args;
  wide.hidden = rows.width();
  const auto run = [&](Range elements, float* dbias) {
    kernels().bias_gelu_backward(wide, rows.bias(), dbias, elements);
  };
  if (args.dbias) return rows.run_sum(args.bias_dtype, args.dbias, run);
  rows.run([&](Range elements) { run(elements, nullptr); });
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
