// Activations and rotary embedding over the threads.
#include "cache.h"
#include "checks.h"
#include "row_blocks.h"

namespace anychip::cpu {

namespace {

template <class Args>
int64_t check_activation(const char* where, const Args& args) {
  const int64_t numel = check_sizes(where, {{"rows", args.rows}, {"hidden", args.hidden}});
  check(!args.up || !args.bias, where, "expected up or bias, got both");
  check(!args.up || args.function <= Activation::kSilu, where, "expected GELU or SILU with up");
  check(!args.bias || args.function <= Activation::kGeluTanh, where, "expected GELU with a bias");
  if (numel > 0) check_address(where, "x", args.x);
  return numel;
}

// Those that wait for memory and for nothing else; they have neither up nor bias.
bool is_light(Activation function) {
  return function == Activation::kRelu || function == Activation::kRelu2;
}

}  // namespace

void activation_forward(const ActivationForward& args) {
  const char* where = "activation_forward";
  const int64_t numel = check_activation(where, args);
  if (numel == 0) return;
  check_address(where, "y", args.y);
  const int64_t nbytes = 2 * numel * element_size(args.dtype);
  const bool past = is_light(args.function) && is_past_caches(nbytes, {args.y}, kVectorElements);
  if (!args.bias) {
    return parallel_elements(numel, [&](Range elements) {
      kernels().activation_forward(args, nullptr, past, elements);
    });
  }
  const WideRows rows(args.bias, args.bias_dtype, args.rows, args.hidden);
  ActivationForward wide = args;
  wide.hidden = rows.width();
  rows.run(
      [&](Range elements) { kernels().activation_forward(wide, rows.bias(), false, elements); });
}

void activation_backward(const ActivationBackward& args) {
  const char* where = "activation_backward";
  const int64_t numel = check_activation(where, args);
  if (numel > 0) check_address(where, "grad", args.grad);
  const int64_t nbytes = 3 * numel * element_size(args.dtype);
  const bool past = is_light(args.function) && is_past_caches(nbytes, {args.dx}, kVectorElements);
  if (!args.bias) {
    return parallel_elements(numel, [&](Range elements) {
      kernels().activation_backward(args, nullptr, nullptr, past, elements);
    });
  }
  if (args.hidden == 0) return;
  const WideRows rows(args.bias, args.bias_dtype, args.rows, args.hidden);
  ActivationBackward wide = args;
  wide.hidden = rows.width();
  const auto run = [&](Range elements, float* dbias) {
    kernels().activation_backward(wide, rows.bias(), dbias, false, elements);
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
  const int64_t nbytes = 2 * args.batch * args.seq * elements * element_size(args.dtype);
  const bool past = is_past_caches(nbytes, {args.q_out, args.k_out}, args.head_dim / 2);
  parallel_items(args.batch * args.seq, elements,
                 [&](Range range) { kernels().rope(args, past, range); });
}

}  // namespace anychip::cpu
