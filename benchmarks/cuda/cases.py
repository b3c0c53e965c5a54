"""Each memory-bound kernel at training sizes, with torch's way and other projects' to the same.

A case is made for some rows and columns; which sizes are measured is :mod:`.bandwidth`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anychip.bench import updates
from anychip.bench.case import Case
from anychip.contract import SampleMaker
from benchmarks.cuda.stage import Stage

VOCABULARY = 50_304
"""Rows of an embedding's table: GPT-2's, filled up to a multiple of 64."""
EXPERTS, CHOICES = 64, 2
HEAD = 128
BLOCK = 256


def usable(stage: Stage, ways: dict[str, Callable[..., Any]], case: Case) -> Case:
    """The case with those ways of others that are installed and run once, forward and back."""
    kept: dict[str, Callable[..., Any]] = {}
    for name, way in ways.items():
        try:
            args = [_leaf(argument) for argument in case.args]
            y = way(*args, **case.attrs)
            outputs = [y] if isinstance(y, Tensor) else list(y)
            slopes = [t for t in outputs if t.requires_grad]
            torch.autograd.backward(slopes, [torch.ones_like(t) for t in slopes])
        except Exception as error:  # another project's way is left out, and the run goes on
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            stage.notes.append(f"{name} is left out: {reason}")
            continue
        kept[name] = way
    stage.notes = list(dict.fromkeys(stage.notes))
    return Case(args=case.args, attrs=case.attrs, eager=case.eager, peers=kept)


def _leaf(argument: Any) -> Any:
    floating = isinstance(argument, Tensor) and argument.is_floating_point()
    return argument.detach().clone().requires_grad_() if floating else argument


def _liger(function: str) -> Callable[..., Any]:
    return getattr(import_module("liger_kernel.transformers.functional"), function)  # type: ignore[no-any-return]


def _quack(function: str) -> Callable[..., Any]:
    return getattr(import_module("quack"), function)  # type: ignore[no-any-return]


def _rms_norm(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    ways = {
        "Liger": lambda x, w, *, eps: _liger("liger_rms_norm")(x, w, eps),
        "QuACK": lambda x, w, *, eps: _quack("rmsnorm")(x, w, eps=eps),
    }
    args = (m.normal(rows, width), m.normal(width))
    return usable(stage, ways, Case(args=args, attrs={"eps": 1e-6}, eager=eager))


def _layer_norm(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    ways = {"Liger": lambda x, w, b, *, eps: _liger("liger_layer_norm")(x, w, b, eps)}
    args = (m.normal(rows, width), m.normal(width), m.normal(width))
    return usable(stage, ways, Case(args=args, attrs={"eps": 1e-5}, eager=eager))


def _group_norm(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, weight: Tensor, bias: Tensor, *, num_groups: int, eps: float) -> Tensor:
        return functional.group_norm(x, num_groups, weight, bias, eps)

    args = (m.normal(rows, width), m.normal(width), m.normal(width))
    return Case(args=args, attrs={"num_groups": 4, "eps": 1e-5}, eager=eager)


def _add_rms_norm(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.rms_norm(total, (x.shape[-1],), weight, eps), total

    ways = {"Liger": lambda x, r, w, *, eps: _liger("liger_fused_add_rms_norm")(x, r, w, eps)}
    args = (m.normal(rows, width), m.normal(rows, width), m.normal(width))
    return usable(stage, ways, Case(args=args, attrs={"eps": 1e-6}, eager=eager))


def _add_layer_norm(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.layer_norm(total, (x.shape[-1],), weight, bias, eps), total

    args = (m.normal(rows, width), m.normal(rows, width), m.normal(width), m.normal(width))
    return Case(args=args, attrs={"eps": 1e-5}, eager=eager)


def _dropout_add_rms_norm(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(
        x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, *, p: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = residual + functional.dropout(x, p)
        return functional.rms_norm(total, (x.shape[-1],), weight, eps), total

    args = (m.normal(rows, width), m.normal(rows, width), m.normal(width), m.rng(1, 0))
    return Case(args=args, attrs={"p": 0.1, "eps": 1e-6}, eager=eager)


def _dropout_add_layer_norm(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(
        x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, bias: Tensor, **attrs: float
    ) -> tuple[Tensor, Tensor]:
        total = residual + functional.dropout(x, attrs["p"])
        return functional.layer_norm(total, (x.shape[-1],), weight, bias, attrs["eps"]), total

    x, residual = m.normal(rows, width), m.normal(rows, width)
    args = (x, residual, m.normal(width), m.rng(1, 0), m.normal(width))
    return Case(args=args, attrs={"p": 0.1, "eps": 1e-5}, eager=eager)


def _bias_dropout_add(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, residual: Tensor, rng: Tensor, bias: Tensor, *, p: float) -> Tensor:
        return residual + functional.dropout(x + bias, p)

    args = (m.normal(rows, width), m.normal(rows, width), m.rng(1, 0), m.normal(width))
    return Case(args=args, attrs={"p": 0.1}, eager=eager)


def _dropout(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    args = (m.normal(rows, width), m.rng(1, 0))
    return Case(args=args, attrs={"p": 0.1}, eager=lambda x, rng, *, p: functional.dropout(x, p))


def _softmax(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, mask: None, bias: None, *, scale: float, causal: bool) -> Tensor:
        return functional.softmax(x * scale, -1)

    ways = {"QuACK": lambda x, *_, **__: _quack("softmax")(x)}
    args, attrs = (m.normal(rows, width), None, None), {"scale": 1.0, "causal": False}
    return usable(stage, ways, Case(args=args, attrs=attrs, eager=eager))


def _gelu(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    args = (m.normal(rows, width),)
    return Case(args=args, attrs={"approximate": "tanh"}, eager=functional.gelu)


def _bias_gelu(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
        return functional.gelu(x + bias, approximate=approximate)

    args = (m.normal(rows, width), m.normal(width))
    return Case(args=args, attrs={"approximate": "tanh"}, eager=eager)


def _swiglu(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    ways = {"Liger": lambda gate, up: _liger("liger_swiglu")(gate, up)}
    args = (m.normal(rows, width), m.normal(rows, width))
    case = Case(args=args, attrs={}, eager=lambda gate, up: functional.silu(gate) * up)
    return usable(stage, ways, case)


def _geglu(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
        return functional.gelu(gate, approximate=approximate) * up

    ways = {"Liger": lambda gate, up, **_: _liger("liger_geglu")(gate, up)}
    args = (m.normal(rows, width), m.normal(rows, width))
    return usable(stage, ways, Case(args=args, attrs={"approximate": "tanh"}, eager=eager))


def _cross_entropy(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    ways = {
        "Liger": lambda x, target: _liger("liger_cross_entropy")(x, target),
        "QuACK": lambda x, target: _quack("cross_entropy")(x, target).mean(),
    }
    args = (m.normal(rows, width), m.integers(width, rows))
    return usable(stage, ways, Case(args=args, attrs={}, eager=functional.cross_entropy))


def _rope(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    """One sequence, whose heads together are as wide as a row."""
    angles = m.normal(rows, HEAD // 2, dtype=torch.float32)
    q, k = (m.normal(1, rows, max(1, width // HEAD), HEAD) for _ in range(2))

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def eager(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None].to(q.dtype), sin[:, None].to(q.dtype)
        return turn(q, cos, sin), turn(k, cos, sin)

    ways = {
        "Liger": lambda q, k, cos, sin, **_: _liger("liger_rope")(
            *(x.transpose(1, 2) for x in (q, k)),
            *(torch.cat((x, x), -1)[None].to(q.dtype) for x in (cos, sin)),
        )
    }
    args = (q, k, angles.cos(), angles.sin())
    return usable(stage, ways, Case(args=args, attrs={"interleaved": False}, eager=eager))


def _embedding(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    vocabulary = 100 if stage.tiny else VOCABULARY
    args = (m.integers(vocabulary, rows), m.normal(vocabulary, width))
    return Case(args=args, attrs={}, eager=functional.embedding)


def _permute(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, indices: Tensor, *_: None, num_experts: int) -> tuple[Tensor, ...]:
        order = torch.sort(indices.reshape(-1), stable=True).indices
        offsets = torch.bincount(indices.reshape(-1), minlength=num_experts).cumsum(0)
        return x[order // CHOICES], order.argsort().view(indices.shape), offsets

    args = (m.normal(rows, width), m.integers(EXPERTS, rows, CHOICES))
    return Case(args=args, attrs={"num_experts": EXPERTS}, eager=eager)


def _unpermute(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, row_map: Tensor, weights: Tensor) -> Tensor:
        return (x[row_map] * weights.unsqueeze(-1)).sum(1)

    row_map = m.normal(rows * CHOICES, dtype=torch.float32).argsort().view(-1, CHOICES)
    args = (m.normal(rows * CHOICES, width), row_map, m.normal(rows, CHOICES))
    return Case(args=args, attrs={}, eager=eager)


def _blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits and scales of blocks; torch has no quantizer of blocks of its own."""
    blocks = x.float().view(-1, BLOCK)
    scales = blocks.abs().amax(1) / 127
    return (blocks / scales[:, None]).round().to(torch.int8).flatten(), scales


def _quantize(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    attrs = {"format": "int8", "block": BLOCK}
    args = (m.normal(rows * width), None)
    return Case(args=args, attrs=attrs, eager=lambda x, rng, *, format, block: _blocks(x))


def _dequantize(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(codes: Tensor, scales: Tensor, *, block: int, **_: Any) -> Tensor:
        return (codes.float().view(-1, block) * scales[:, None]).flatten()

    attrs = {"shape": [rows * width], "format": "int8", "block": BLOCK}
    return Case(args=_blocks(m.normal(rows * width)), attrs=attrs, eager=eager)


def _hadamard(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    """torch has the product with the whole matrix."""
    block = min(BLOCK, width)
    matrix = torch.ones(1, 1, device=m.device, dtype=m.dtype)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix / math.sqrt(block)

    def eager(x: Tensor, *, block: int) -> Tensor:
        return (x.view(-1, block) @ matrix).view(x.shape)

    return Case(args=(m.normal(rows, width),), attrs={"block": block}, eager=eager)


def _top_k(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    """One percent of a gradient."""

    def eager(x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
        indices = torch.topk(x.abs(), k).indices
        return x.gather(-1, indices), indices

    return Case(args=(m.normal(rows * width),), attrs={"k": rows * width // 100}, eager=eager)


MAKES: dict[str, dict[str, Callable[..., Case]]] = {
    "norms": {
        "rms_norm": _rms_norm,
        "layer_norm": _layer_norm,
        "group_norm": _group_norm,
        "add_rms_norm": _add_rms_norm,
    },
    "gates": {"swiglu": _swiglu, "geglu": _geglu, "gelu": _gelu, "bias_gelu": _bias_gelu},
    "logits": {"cross_entropy": _cross_entropy, "softmax": _softmax},
    "sums": {
        "add_layer_norm": _add_layer_norm,
        "dropout_add_rms_norm": _dropout_add_rms_norm,
        "dropout_add_layer_norm": _dropout_add_layer_norm,
        "bias_dropout_add": _bias_dropout_add,
        "dropout": _dropout,
    },
    "rows": {
        "rope": _rope,
        "embedding": _embedding,
        "permute": _permute,
        "unpermute": _unpermute,
        "hadamard": _hadamard,
        "quantize": _quantize,
        "dequantize": _dequantize,
        "top_k": _top_k,
    },
}
"""Operators by what their sizes are."""

LISTS = ("l2_norm", *(n for n in updates.cases() if not any(n in kind for kind in MAKES.values())))
"""Operators on lists of tensors: anychip.bench has their cases, and torch's ways."""
