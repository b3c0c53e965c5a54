"""What operators refuse: arguments that do not fit together, and the words that name them.

That something is refused at all, and nothing written then, is asked of every operator by the
conformance suite; arguments of another type are in ``tests/unit/dispatch/test_signature.py``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anychip import ops

X, W = torch.ones(2, 8), torch.ones(8)
Q = torch.ones(1, 3, 4, 8)
RNG = torch.tensor([1, 2])
SCALAR, TARGET = torch.ones(()), torch.tensor([1, 1])
BYTES = torch.ones(4).to(torch.int8)
RATES = (torch.tensor(0.1), torch.tensor(0.0))
ones, half = torch.ones, torch.float16

REFUSED: dict[str, list[tuple[Callable[[Any], Any], str]]] = {
    "rms_norm": [
        (lambda o: o(X, W[:7]), r"\(8,\).*\(2, 8\).*got \(7,\)"),
        (lambda o: o(X, W[None]), r"got \(1, 8\)"),
        (lambda o: o(SCALAR, W), r"last dim of x \(\)"),
    ],
    "layer_norm": [(lambda o: o(X, W, ones(9)), r"bias.*got \(9,\)")],
    "add_rms_norm": [
        (lambda o: o(X, W, W), r"residual must have the shape of x \(2, 8\)"),
        (lambda o: o(X, X, W[:3]), r"weight must have shape \(8,\)"),
    ],
    "add_layer_norm": [
        (lambda o: o(X, W, W), r"residual must have the shape of x \(2, 8\)"),
        (lambda o: o(X, X, W[:3]), r"weight must have shape \(8,\)"),
        (lambda o: o(X, X, W, W[:5]), r"bias must have shape \(8,\)"),
    ],
    "dropout_add_rms_norm": [
        (lambda o: o(X, W, W, RNG), r"residual must have the shape of x \(2, 8\)"),
        (lambda o: o(X, X, W[:2], RNG), r"weight must have shape \(8,\)"),
        (lambda o: o(X, X, W, RNG, p=1.5), r"p must be from 0 to 1, got 1\.5"),
        (lambda o: o(X, X, W, RNG[:1]), r"rng must be int64\[2\]"),
    ],
    "dropout_add_layer_norm": [
        (lambda o: o(X, W, W, RNG), r"residual must have the shape of x \(2, 8\)"),
        (lambda o: o(X, X, W[:2], RNG), r"weight must have shape \(8,\)"),
        (lambda o: o(X, X, W, RNG, p=1.5), r"p must be from 0 to 1, got 1\.5"),
        (lambda o: o(X, X, W, RNG[:1]), r"rng must be int64\[2\]"),
        (lambda o: o(X, X, W, RNG, W[:2]), r"bias must have shape \(8,\)"),
    ],
    "dropout": [
        (lambda o: o(X, RNG[:1]), r"rng.*got shape \(1,\)"),
        (lambda o: o(X, RNG.float()), "rng must be int64"),
        (lambda o: o(X, RNG, p=1.5), r"p must be.*got 1\.5"),
        (lambda o: o(X, RNG, p=float("nan")), "got nan"),
        (lambda o: o(X, RNG, RNG[:1], width=8), r"of shape \(2,\); got \(1,\)"),
        (lambda o: o(SCALAR, RNG, RNG[0], width=8), r"each row of x \(\)"),
        (lambda o: o(X, RNG, RNG.int(), width=8), "rows must be int64"),
        (lambda o: o(X, RNG, RNG, width=8, column=1), "of x; got width=8, column=1"),
        (lambda o: o(X, RNG, RNG, width=8, column=-1), "got .*column=-1"),
        (lambda o: o(X, RNG, width=8), "got width=8 .* without rows"),
        (lambda o: o(X, RNG, column=1), "column=1 without rows"),
    ],
    "bias_dropout_add": [
        (lambda o: o(X, W, RNG), r"residual must have the shape of x \(2, 8\)"),
        (lambda o: o(X, X, RNG, W[:2]), r"bias must have shape \(8,\)"),
        (lambda o: o(SCALAR, SCALAR, RNG, W[:1]), "bias must have shape"),
        (lambda o: o(X, X, RNG, p=1.5), "p must be from 0 to 1, got 1.5"),
        (lambda o: o(X, X.bfloat16(), RNG),
         "residual must be torch.float32 like x, or float32; got torch.bfloat16"),
    ],
    "gelu": [(lambda o: o(X, approximate="tan"), "approximate.*got 'tan'")],
    "bias_gelu": [
        (lambda o: o(X, W[:2]), r"bias must have shape \(8,\), the last dim of x \(2, 8"),
        (lambda o: o(SCALAR, W[:1]), "bias must have shape"),
        (lambda o: o(X, W, approximate="fast"), "must be 'none' or 'tanh', got 'fast'"),
    ],
    "geglu": [
        (lambda o: o(X, W), "gate and up must have the same shape"),
        (lambda o: o(W, W, approximate="fast"), "must be 'none' or 'tanh', got 'fast'"),
    ],
    "swiglu": [(lambda o: o(X, W), r"got \(2, 8\) and \(8,\)")],
    "softplus": [(lambda o: o(X, beta=-1.0), r"beta must be above 0, got -1\.0")],
    "softmax": [
        (lambda o: o(W, causal=True), r"\(\.\.\., queries, keys\)"),
        (lambda o: o(SCALAR), r"x must be \(\.\.\., keys\)"),
        (lambda o: o(X, ones(2, 2, 8, dtype=torch.bool)),
         r"mask must be broadcastable to x \(2, 8\), got \(2, 2, 8\)"),
        (lambda o: o(X, None, W[:2]), "bias must be broad"),
        (lambda o: o(X, W), "mask must be bool"),
    ],
    "group_norm": [
        (lambda o: o(X, W, num_groups=3), r"multiple of num_groups 3; got \(2, 8\)"),
        (lambda o: o(W, W, num_groups=1), r"\(N, C, \.\.\.\).*\(8,\)"),
        (lambda o: o(X, W, W[:7], num_groups=2), r"bias must have shape \(8,\).*\(7,\)"),
    ],
    "conv1d": [
        (lambda o: o(Q[0], ones(3, 2)), r"\(C, K\); got \(3, 4, 8\) and \(3, 2\)"),
        (lambda o: o(Q[0], ones(4, 2), W), r"bias must be \(4,\), got"),
    ],
    "conv2d": [
        (lambda o: o(Q, ones(4, 3, 1, 1), groups=3), r"\(4, 3, 1, 1\) with groups=3"),
        (lambda o: o(Q, ones(4, 1, 1, 1), groups=3), "a multiple of 3 outputs, got 4"),
        (lambda o: o(Q, ones(4, 3, 1, 1), stride=[1, 0]), r"stride .*, got \[1, 0"),
        (lambda o: o(Q, ones(4, 3, 1, 1), padding=[1, 1, 1]), "one or two numbers"),
        (lambda o: o(Q, ones(4, 3, 5, 1)), "the kernel must .* fit into x"),
        (lambda o: o(Q, ones(4, 3, 1, 1).half()), "one dtype, got torch.float32, "),
    ],
    "rope": [
        (lambda o: o(Q, Q, W, W), r"cos and sin.*\(3, 4\)"),
        (lambda o: o(Q[..., :7], Q[..., :7], ones(3, 3), ones(3, 3)), "must be even, got 7"),
        (lambda o: o(Q, Q, ones(3, 5), ones(3, 5)), r"\(3, 4\), or narrower.*got \(3, 5\)"),
    ],
    "attention": [
        (lambda o: o(Q, Q[:, :, :3], Q[:, :, :3]), "multiple of the heads"),
        (lambda o: o(Q, Q[:, :, :0], Q[:, :, :0]), "multiple of"),
        (lambda o: o(Q, Q[:, :2], Q), r"k \(1, 2, 4, 8\)"),
        (lambda o: o(Q.expand(2, -1, -1, -1), Q, Q), r"agree in batch; got q \(2, 3, 4, 8\)"),
        (lambda o: o(Q[0], Q[0], Q[0]), r"q \(3, 4, 8\)"),
        (lambda o: o(*[Q[..., :0]] * 3), "head_dim must be at least"),
        (lambda o: o(Q, Q, Q, out_dtype=half),
         "must be torch.float32, which the operands have, or float32; got torch.float16"),
    ],
    "attention_dropout": [
        (lambda o: o(Q, Q, Q, RNG[:1]), r"shape \(1,\)"),
        (lambda o: o(Q, Q, Q, RNG, p=1.5), r"got 1\.5"),
        (lambda o: o(Q, Q, Q, RNG, None, RNG, heads=4),
         r"head_index must be int64\[4\], .* of q; got shape \(2,\)"),
        (lambda o: o(Q, Q, Q, RNG, None, None, None, torch.arange(3), keys=2),
         "key_index goes with .* at least 3; got 2 with key_index"),
        (lambda o: o(Q, Q, Q, RNG, None, None, torch.arange(3)),
         "query_index goes with .* got 0 with query_index"),
        (lambda o: o(Q, Q, Q, RNG, heads=8), "got 8 without head_index"),
    ],
    "attention_varlen": [
        (lambda o: o(Q[0], Q[0], Q[0], RNG, RNG, out_dtype=torch.int8), "must be torch.float32"),
        (lambda o: o(Q, Q, Q, RNG, RNG), r"\(tokens, heads, head_dim\); got q \(1, 3, 4, 8\)"),
        (lambda o: o(Q[0], Q[0], Q[0, :2], RNG, RNG),
         r"one shape .*; got q \(3, 4, 8\), k \(3, 4, 8\), v \(2, 4, 8\)"),
        (lambda o: o(Q[0], Q[0], Q[0], RNG, RNG[:1]), r"\(sequences \+ 1,\).*\(2,\) and \(1,\)"),
        (lambda o: o(Q[0], Q[0], Q[0], RNG[:0], RNG[:0]), r"\(sequences \+ 1,\).*\(0,\) and"),
        (lambda o: o(Q[0], Q[0], Q[0], RNG, RNG.float()), "cu_seqlens_k must be int64 or int32"),
        (lambda o: o(Q[0], Q[0], Q[0], torch.tensor([0, 3, 2, 3]), torch.tensor([0, 1, 2, 3])),
         r"cu_seqlens_q.*sorted, from 0 to the 3 rows; got \[0, 3, 2, 3\]"),
        (lambda o: o(Q[0], Q[0], Q[0], RNG - 1, RNG + 2), r"cu_seqlens_k.* rows; got \[3, 4\]"),
        (lambda o: o(Q[0], Q[0], Q[0], RNG.int() - 2, RNG.int() - 1), r"_q.*got \[-1, 0\]"),
        (lambda o: o(Q[0], Q[0], Q[0], RNG, RNG), r"must start with 0, got \[1, 2\]"),
    ],
    "grouped_linear": [
        (lambda o: o(X, ones(2, 3, 7), RNG),
         r"x must be \(T, K\) and weight \(G, N, K\); got \(2, 8\) and \(2, 3, 7\)"),
        (lambda o: o(X, ones(3, 3, 8), RNG), r"must be \(3,\), the ends of the groups; got \(2,\)"),
        (lambda o: o(X, ones(2, 3, 8).half(), RNG), "one dtype, got torch.float32 and"),
        (lambda o: o(X, ones(2, 3, 8), RNG.short()), "offsets must be int64 or int32, got int16"),
        (lambda o: o(X, ones(2, 3, 8), RNG, out_dtype=half), "out_dtype must be torch.float32"),
        *((lambda o, ends=ends: o(X, ones(3, 3, 8), torch.tensor(ends)),
           r"grouped_linear: offsets must be sorted, from 0 to the 2")
          for ends in ([1, 0, 2], [0, 1, 3], [-1, 1, 2])),
    ],
    "linear": [
        (lambda o: o(X, ones(3, 7)), r"got \(2, 8\) and \(3, 7\)"),
        (lambda o: o(X, ones(3, 8), W), r"bias must be \(3,\), got \(8,\)"),
        (lambda o: o(X, ones(3, 8).half()), "one dtype, got torch.float32, torch.float16"),
        (lambda o: o(X, ones(3, 8), out_dtype=half),
         "must be torch.float32, which the operands have, or float32; got"),
        (lambda o: o(X, ones(3, 8), out_dtype=torch.int8), "out_dtype must be torch.float32"),
    ],
    "embedding": [
        (lambda o: o(RNG.int(), X), "indices must be int64, got int32"),
        (lambda o: o(RNG[:1], W), r"got \(8,\)"),
        (lambda o: o(ones(1), X), "indices must be int64"),
    ],
    "cross_entropy": [
        (lambda o: o(X, TARGET[:1]), r"\(2, 8\) and \(1,\)"),
        (lambda o: o(X[:, :0], TARGET), "V > 0"),
        (lambda o: o(X, TARGET, reduction="max"), "reduction.*got 'max'"),
        (lambda o: o(X, TARGET, label_smoothing=-0.1), r"label_smoothing.*got -0\.1"),
    ],
    "linear_cross_entropy": [
        (lambda o: o(X, ones(3, 7), RNG),
         r"x must be \(\.\.\., K\) and weight \(V, K\) with V > 0; got \(2, 8\) and \(3, 7\)"),
        (lambda o: o(X, ones(0, 8), RNG), "V > 0"),
        (lambda o: o(X, ones(3, 8), RNG[:1]), r"target must be \(2,\).*got \(1,\)"),
        (lambda o: o(X, ones(3, 8), RNG, W), r"bias must be \(3,\), got \(8,\)"),
        (lambda o: o(X, ones(3, 8).half(), RNG), "one dtype, got torch.float32, torch.float16"),
        (lambda o: o(X, ones(3, 8), RNG, z_loss=-1.0), r"z_loss must be at least 0, got -1\.0"),
    ],
    "permute": [
        (lambda o: o(W, RNG[:, None], num_experts=2), r"x must be \(T, H\), got \(8,\)"),
        (lambda o: o(X, RNG[:1, None], num_experts=2), r"indices must be \(2, K\).*\(1, 1\)"),
        (lambda o: o(X, RNG[:, None][:, :0], num_experts=2), r"K at least 1.*\(2, 0\)"),
        (lambda o: o(X, RNG[:, None], num_experts=0), "num_experts must be at least 1, got 0"),
    ],
    "unpermute": [
        (lambda o: o(X, RNG.expand(2, 2)), r"T \* K = 2, the rows of x; got \(2, 2\)"),
        (lambda o: o(X, RNG[None], X), r"weights must be \(1, 2\).*got \(2, 8\)"),
        *((lambda o, listed=listed: o(ones(4, 3), torch.tensor(listed)), f"row_map must .*{words}")
          for listed, words in (
              ([[0, 1], [2, 4]], "from 0 to 3, got 0 to 4"), ([[0, -1], [2, 3]], "got -1 to 3"),
              ([[0, 1], [1, 3]], "each of the 4 rows once"),
          )),
    ],
    "hadamard": [
        (lambda o: o(X[:, :6]), "the last dim of x must be a power of two, got 6"),
        (lambda o: o(X[:, :0]), "the last dim of x must be a power of two, got 0"),
        (lambda o: o(X[:, :6], block=3), "block must be a power of two, got 3"),
        (lambda o: o(X[:, :6], block=4), r"block must divide the last dim of x \(6\), got 4"),
        (lambda o: o(SCALAR), "at least one dim"),
    ],
    "top_k": [
        (lambda o: o(X, k=-1), r"k must be from 0 to the last dim of x \(8\), got -1"),
        (lambda o: o(X, k=9), r"k must be from 0 to the last dim of x \(8\), got 9"),
    ],
    "quantize": [
        (lambda o: o(W, format="int2"), "format must be one of int8, .* got 'int2'"),
        (lambda o: o(W, block=0), "block must be at least 1, got 0"),
        (lambda o: o(W, RNG[:1]), r"rng must be int64\[2\]"),
        (lambda o: o(W, RNG, format="nf4"), "nf4 is not rounded at random: rng must be None"),
        (lambda o: o(W, format="mx_e4m3"), "mx_e4m3 has blocks of 32, got 256"),
    ],
    "dequantize": [
        (lambda o: o(BYTES, W[:1], shape=[5]),
         r"codes of int8 for shape \(5,\) in blocks of 256 must have shape \(5,\), got \(4,\)"),
        (lambda o: o(BYTES[:3], W[:2], shape=[5], format="int4"),
         r"scales of int4 .* must have shape \(1,\), got \(2,\)"),
        (lambda o: o(BYTES, W[:1], shape=[4], format="mx_e5m2", block=32),
         "scales of mx_e5m2 must be torch.uint8, got torch.float32"),
    ],
    "l2_norm": [(lambda o: o([]), "at least one tensor expected, got none")],
    "sums_of_squares": [(lambda o: o([]), "at least one tensor expected, got none")],
    "clip": [
        (lambda o: o([W + 0], ones(1)), r"norm must be a 0-dim"),
        (lambda o: o([W + 0], SCALAR.double()), "norm must be float32, got float64"),
        (lambda o: o([W + 0], SCALAR, max_norm=0.0), r"max_norm.*0"),
        (lambda o: o([W.int()], SCALAR), r"tensors must be.*int32"),
    ],
    "unscale_and_check": [
        (lambda o: o([W + 0], ones(3), SCALAR + 0), r"scale must be a 0-dim .*, got shape \(3,\)"),
    ],
    "adamw": [
        (lambda o: o([W + 0], [], [W + 1], [W + 2], *RATES),
         r"grads must be as long as params \(1\), got 0"),
        (lambda o: o([W + 0], [W], [W + 1], [ones(4)], *RATES),
         r"exp_avg_sqs\[0\] must have the shape of params\[0\] \(8,\), got \(4,\)"),
        (lambda o: o([W + 0], [W], [W.bfloat16()], [W + 2], *RATES),
         "exp_avgs must be float32, got bfloat16"),
        (lambda o: o([W + 0], [W], [W + 1], [W + 2], *RATES, beta2=1.0),
         "beta2 must be at least 0 and below 1, got 1.0"),
    ],
    "sgd": [
        (lambda o: o([W + 0], [W], [W + 1], *RATES), "must be empty when momentum"),
        (lambda o: o([W + 0], [W], [], *RATES, momentum=0.9),
         r"momentum_buffers must be as long as params \(1\), got 0"),
        (lambda o: o([W + 0], [W], [], *RATES, nesterov=True), "nesterov needs"),
    ],
    "lion": [
        (lambda o: o([W + 0], [W], [W + 1], *RATES, beta1=1.0), "least 0 and below 1, got 1.0"),
    ],
    "lamb": [
        (lambda o: o([W + 0], [W], [W + 1], [W + 2], *RATES, trust=ones(2)),
         r"trust must have one entry per tensor, shape \(1,\), got \(2,\)"),
    ],
    "adamw_8bit": [
        (lambda o: o(*step(first=BYTES[:3].byte())), r"exp_avgs\[0\] must have the shape"),
        (lambda o: o(*step(first_scale=ones(2))), r"exp_avg_scales\[0\] .* \(1,\), got \(2,\)"),
        (lambda o: o(*step(first=ones(8))), "exp_avgs must be uint8, got float32"),
        (lambda o: o(*step()[:5], [], *RATES), r"exp_avg_sq_scales must be as long as params"),
        (lambda o: o(*step()[:6], W[:1], RATES[1]), "lr must be a 0-dim tensor"),
    ],
}  # fmt: skip


def step(**changes: Any) -> tuple[Any, ...]:
    """The arguments of AdamW with states of 8 bits for one tensor."""
    codes = torch.zeros(8, dtype=torch.uint8)
    given = {"param": W + 0, "grad": W, "first": codes, "first_scale": ones(1),
             "second": codes + 0, "second_scale": ones(1), **changes}  # fmt: skip
    return (*([tensor] for tensor in given.values()), *RATES)


@pytest.mark.parametrize("home", [ops, torch.ops.anychip], ids=["short cut", "library"])
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_refused_by_name(name: str, home: Any) -> None:
    for call, message in REFUSED[name]:
        with pytest.raises(ValueError, match=message):
            call(getattr(home, name))
