"""Random calls of each operator: any shape, value and attribute that its specification allows.

What an operator is known to get wrong stands as fixed calls with its oracle; these are for the
rest. The limits of sizes and values keep a call short and its float32 intermediates finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip.conformance.calls import Arguments, Draw
from anychip.conformance.choices import Choices
from anychip.conformance.oracles import adamw_8bit, quantization

Drawn = Callable[[Choices, Draw], Arguments]
_SEEDS = ((0, 0), (1234, 5), (7, 2**32 - 3), (-1, 2**40))


def _norm(choose: Choices, draw: Draw, *, bias: bool, residual: bool = False) -> Arguments:
    shape = choose.shape(choose.of(2, 1, 3, 4))
    wide = torch.float32 if choose.of(False, False, False, True) else draw.dtype
    args = [choose.values(draw, *shape)]
    if residual:
        args.append(choose.values(draw, *shape, dtype=wide))
    args.append(choose.values(draw, shape[-1], dtype=draw.dtype if residual else wide))
    if bias:
        last = None if choose.of(False, True) else choose.values(draw, shape[-1])
        args.append(last)  # type: ignore[arg-type]
        if last is not None and not residual:
            args[-1] = last.to(wide)
    return tuple(args), {"eps": choose.of(1e-5, 1e-3, 0.5)}


def _group_norm(choose: Choices, draw: Draw) -> Arguments:
    groups = choose.of(1, 2, 3, 8)
    shape = choose.shape(choose.of(3, 2, 4))
    shape[1] = groups * choose.of(1, 2, 4)
    wide = torch.float32 if choose.of(False, False, False, True) else draw.dtype
    x, weight = choose.values(draw, *shape), choose.values(draw, shape[1], dtype=wide)
    bias = None if choose.of(False, True) else choose.values(draw, shape[1], dtype=wide)
    return (x, weight, bias), {"num_groups": groups, "eps": choose.of(1e-5, 1e-3, 0.5)}


def _rng(choose: Choices, draw: Draw) -> Tensor:
    return draw.rng(*choose.of(*_SEEDS))


def _probability(choose: Choices) -> float:
    return choose.of(0.1, 0.0, 0.5, 0.25, 0.9, 1.0)


def _dropout(choose: Choices, draw: Draw) -> Arguments:
    shape = choose.shape(choose.of(1, 2, 3, 0))
    rows, place = _rows(choose, draw, shape) if shape else (None, {})
    x = choose.values(draw, *shape)
    return (x, _rng(choose, draw), rows), {"p": _probability(choose), **place}


def _rows(
    choose: Choices, draw: Draw, shape: Sequence[int]
) -> tuple[Tensor | None, dict[str, int]]:
    """Which rows of a whole these are, from which column on, and how wide it is."""
    if choose.of(True, False):
        return None, {}
    column = choose.of(0, 1, 4, 64)
    width = shape[-1] + column + choose.of(0, 1, 8)
    return draw.integers(1000, *shape[:-1]), {"width": width, "column": column}


def _bias_dropout_add(choose: Choices, draw: Draw) -> Arguments:
    shape = choose.shape(choose.of(2, 1, 3))
    wide = torch.float32 if choose.of(False, False, False, True) else draw.dtype
    bias = None if choose.of(False, True) else choose.values(draw, shape[-1])
    x, residual = choose.values(draw, *shape), choose.values(draw, *shape, dtype=wide)
    rows, place = _rows(choose, draw, shape)
    return (x, residual, _rng(choose, draw), bias, rows), {"p": _probability(choose), **place}


def _dropout_add_norm(choose: Choices, draw: Draw, *, bias: bool) -> Arguments:
    (x, residual, weight, *last), attrs = _norm(choose, draw, bias=bias, residual=True)
    attrs = {"p": _probability(choose), **attrs}
    rows = _rows(choose, draw, x.shape)[0]
    return (x, residual, weight, _rng(choose, draw), *last, rows), attrs


def _approximate(choose: Choices) -> dict[str, Any]:
    return {"approximate": choose.of("none", "tanh")}


def _element(choose: Choices, draw: Draw, **options: tuple[Any, ...]) -> Arguments:
    x = choose.values(draw, *choose.shape(choose.of(1, 2, 3, 0)))
    return (x,), {name: choose.of(*values) for name, values in options.items()}


def _bias_gelu(choose: Choices, draw: Draw) -> Arguments:
    shape = choose.shape(choose.of(2, 1, 3))
    args = choose.values(draw, *shape), choose.values(draw, shape[-1])
    return args, _approximate(choose)


def _gated(choose: Choices, draw: Draw, *, approximate: bool) -> Arguments:
    shape = choose.shape(choose.of(2, 1, 3, 0))
    args = choose.values(draw, *shape), choose.values(draw, *shape)
    return args, _approximate(choose) if approximate else {}


def _broadcast(choose: Choices, shape: list[int]) -> list[int]:
    """A shape that broadcasts to another one: dims of 1, dims left out."""
    kept = [choose.of(size, 1) for size in shape]
    return kept[choose.of(0, 1, len(shape) - 1) :]


def _softmax(choose: Choices, draw: Draw) -> Arguments:
    shape = choose.shape(choose.of(2, 3, 4))
    x = choose.values(draw, *shape)
    mask = draw.uniform(*_broadcast(choose, shape)) < 0.7 if choose.of(False, True) else None
    bias = choose.values(draw, *_broadcast(choose, shape)) if choose.of(False, True) else None
    attrs = {"scale": choose.of(1.0, 0.125, 2.0, -0.5), "causal": choose.of(False, True)}
    return (x, mask, bias), attrs


def _heads(choose: Choices) -> tuple[int, int, int]:
    """heads, key heads, head_dim."""
    kv_heads, groups = choose.of(1, 2, 3), choose.of(1, 2, 4)
    return kv_heads * groups, kv_heads, choose.of(8, 4, 16, 32, 12, 40, 64, 2)


def _rope(choose: Choices, draw: Draw) -> Arguments:
    heads, kv_heads, dim = _heads(choose)
    batch, length = choose.of(1, 2, 3), choose.size(65)
    half = choose.of(dim, dim // 2, 2) // 2
    q, k = (choose.values(draw, batch, length, count, dim) for count in (heads, kv_heads))
    angle = draw.uniform(length, half, low=-math.pi, high=math.pi)
    return (q, k, angle.cos(), angle.sin()), {"interleaved": choose.of(False, True)}


def _score_attrs(choose: Choices, *, dropout: bool = False) -> dict[str, Any]:
    attrs = {"causal": choose.of(True, False), "scale": choose.of(None, 0.05, 0.5)}
    return attrs if dropout else {**attrs, "out_dtype": choose.of(None, None, torch.float32)}


def _attended(choose: Choices, draw: Draw, *shape: int) -> Tensor:
    """Of any kind; in float16 normal ones. What a kernel may store in between in the tensors' type,
    such as weights after their normalisation and the gradients of one block of queries, would there
    be subnormal numbers or infinite ones, for which the oracle's bound does not allow.
    """
    values = choose.values(draw, *shape)
    return draw.normal(*shape) if draw.dtype == torch.float16 else values


def _attention(choose: Choices, draw: Draw, *, dropout: bool = False) -> Arguments:
    heads, kv_heads, dim = _heads(choose)
    batch, queries, keys = choose.of(1, 2, 3), choose.size(65), choose.size(65)
    keys = queries if choose.of(True, True, False) else keys
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    args: tuple[Tensor | None, ...] = tuple(
        _attended(choose, draw, batch, length, count, dim) for length, count in shapes
    )
    attrs = _score_attrs(choose, dropout=dropout)
    if dropout:
        index = [
            draw.integers(80, n) if choose.of(False, False, True) else None
            for n in (batch, heads, queries, keys)
        ]
        sizes = zip(("heads", "queries", "keys"), index[1:], strict=True)
        attrs |= {"p": _probability(choose)} | {n: 80 for n, given in sizes if given is not None}
        args = (*args, _rng(choose, draw), *index)
    return args, attrs


def _ends(choose: Choices, high: int, count: int | None = None) -> Tensor:
    """Ends of so many groups, or of up to seven, empty ones among them."""
    count = choose.of(1, 2, 3, 0, 5, 7) if count is None else count
    lengths = [choose.of(choose.size(high), 0) for _ in range(count)]
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    return ends.to(choose.of(torch.int64, torch.int32))


def _attention_varlen(choose: Choices, draw: Draw) -> Arguments:
    heads, kv_heads, dim = _heads(choose)
    of_queries = _ends(choose, 33)
    of_keys = _ends(choose, 33, len(of_queries)) if choose.of(False, True) else of_queries
    ends = [torch.cat((t.new_zeros(1), t)) for t in (of_queries, of_keys)]
    tokens = [int(t[-1]) + choose.of(0, 0, 1, 5) for t in ends]
    shapes = ((tokens[0], heads), (tokens[1], kv_heads), (tokens[1], kv_heads))
    args = (_attended(choose, draw, *shape, dim) for shape in shapes)
    return (*args, *ends), _score_attrs(choose)


def _linear(choose: Choices, draw: Draw) -> Arguments:
    rows = choose.shape(choose.of(1, 2, 0), elements=128)
    inputs, outputs = choose.size(513), choose.size(129)
    bias = choose.values(draw, outputs) if choose.of(False, True) else None
    args = choose.values(draw, *rows, inputs), choose.values(draw, outputs, inputs), bias
    return args, {"out_dtype": choose.of(None, None, torch.float32)}


def _conv1d(choose: Choices, draw: Draw) -> Arguments:
    channels, kernel = choose.size(33), choose.of(4, 1, 2, 3, 7, 64)
    x = choose.values(draw, choose.of(1, 2, 3, 0), channels, choose.of(choose.size(129), 0))
    bias = choose.values(draw, channels) if choose.of(False, True) else None
    return (x, choose.values(draw, channels, kernel), bias), {}


def _conv2d(choose: Choices, draw: Draw) -> Arguments:
    """Kernels that fit: an image is as large as what its kernel spans, or larger."""
    groups = choose.of(1, 2, 4)
    inputs, outputs = groups * choose.of(1, 3, 16), groups * choose.of(1, 2, 17)
    kernel, dilation = ([choose.of(1, 2, 3), choose.of(1, 3, 2)] for _ in range(2))
    sizes = [(k - 1) * d + choose.of(1, 2, 5, 9) for k, d in zip(kernel, dilation, strict=True)]
    x = choose.values(draw, choose.of(1, 2, 0), inputs, *sizes)
    weight = choose.values(draw, outputs, inputs // groups, *kernel)
    bias = choose.values(draw, outputs) if choose.of(False, True) else None
    stride = [choose.of(1, 2, 3), choose.of(1, 2, 4)]
    padding = [choose.of(0, 1, 2), choose.of(0, 1, 3)]
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (x, weight, bias), attrs


def _grouped_linear(choose: Choices, draw: Draw) -> Arguments:
    offsets = _ends(choose, 33)
    rows = (int(offsets[-1]) if len(offsets) else 0) + choose.of(0, 0, 1, 5)
    inputs, outputs = choose.size(129), choose.size(65)
    weight = choose.values(draw, len(offsets), outputs, inputs)
    attrs = {"out_dtype": choose.of(None, None, torch.float32)}
    return (choose.values(draw, rows, inputs), weight, offsets), attrs


def _permute(choose: Choices, draw: Draw) -> Arguments:
    tokens, choices, experts = choose.size(65), choose.of(2, 1, 3, 8), choose.size(65)
    outside = choose.of(0, 0, 1)
    indices = draw.integers(experts + 2 * outside, tokens, choices) - outside
    x, dtypes = choose.values(draw, tokens, choose.size(129)), (torch.int64, torch.int32)
    key = draw.integers(9, tokens).to(choose.of(*dtypes)) if choose.of(False, True) else None
    count = draw.integers(tokens + 2, 1)[0] if choose.of(False, True) else None
    return (x, indices.to(choose.of(*dtypes)), key, count), {"num_experts": experts}


def _unpermute(choose: Choices, draw: Draw) -> Arguments:
    tokens, choices = choose.size(65), choose.of(2, 1, 3, 8)
    row_map = draw.uniform(tokens * choices).argsort().view(tokens, choices)
    dtype = choose.of(draw.dtype, torch.float32)
    weights = choose.values(draw, tokens, choices, dtype=dtype)
    x = choose.values(draw, tokens * choices, choose.size(129))
    return (x, row_map, choose.of(weights, None)), {}


def _embedding(choose: Choices, draw: Draw) -> Arguments:
    count, width = choose.size(), choose.size(129)
    indices = draw.integers(count, *choose.shape(choose.of(1, 2, 0), elements=128))
    return (indices, choose.values(draw, count, width)), {}


def _loss_attrs(choose: Choices) -> dict[str, Any]:
    return {
        "ignore_index": choose.of(-100, 0, -1),
        "label_smoothing": choose.of(0.0, 0.1, 1.0),
        "z_loss": choose.of(0.0, 1e-3),
        "reduction": choose.of("mean", "sum", "none"),
    }


def _targets(choose: Choices, draw: Draw, classes: int, rows: list[int], ignore: int) -> Tensor:
    target = draw.integers(classes, *rows)
    target.reshape(-1)[:: choose.of(1000, 3, 2)] = ignore
    return target


def _cross_entropy(choose: Choices, draw: Draw) -> Arguments:
    rows, attrs = choose.shape(choose.of(1, 2, 0), elements=32), _loss_attrs(choose)
    classes = choose.size()
    target = _targets(choose, draw, classes, rows, attrs["ignore_index"])
    return (choose.values(draw, *rows, classes), target), attrs


def _linear_cross_entropy(choose: Choices, draw: Draw) -> Arguments:
    rows, attrs = choose.shape(choose.of(1, 2, 0), elements=32), _loss_attrs(choose)
    inputs, classes = choose.size(129), choose.size(257)
    target = _targets(choose, draw, classes, rows, attrs["ignore_index"])
    weight = choose.values(draw, classes, inputs) * 0.125
    bias = choose.values(draw, classes) if choose.of(False, True) else None
    return (choose.values(draw, *rows, inputs), weight, target, bias), attrs


def _linear_cross_entropy_partials(choose: Choices, draw: Draw) -> Arguments:
    (x, weight, target, bias), _ = _linear_cross_entropy(choose, draw)
    classes = weight.shape[0]
    first = choose.of(0, 1, classes, 2 * classes)
    # Among all classes of three parts.
    return (x, weight, target + choose.of(0, first, classes), bias), {"first": first}


def _shapes(choose: Choices) -> list[list[int]]:
    """Shapes of the tensors of a list: one, a few; scalars and empty ones among them."""
    count = choose.of(1, 2, 3, 7, 12)
    return [choose.shape(choose.of(1, 2, 3, 0), elements=600) for _ in range(count)]


def _l2_norm(choose: Choices, draw: Draw) -> Arguments:
    return ([choose.values(draw, *shape) for shape in _shapes(choose)],), {}


def _clip(choose: Choices, draw: Draw) -> Arguments:
    tensors = [choose.values(draw, *shape) for shape in _shapes(choose)]
    norm = draw.scalar(choose.of(3.0, 0.5, 0.0, 1e6))
    return (tensors, norm), {"max_norm": choose.of(1.0, 0.25, 8.0)}


def _unscale(choose: Choices, draw: Draw) -> Arguments:
    grads = [choose.values(draw, *shape) for shape in _shapes(choose)]
    filled = [g.view(-1) for g in grads if g.numel()]
    if choose.of(False, True) and len(filled):
        flat = filled[choose.of(0, -1)]
        flat[choose.of(0, -1, len(flat) // 2)] = choose.of(math.inf, math.nan, -math.inf)
    scale = draw.scalar(choose.of(2.0, 1024.0, 3.0, 1.0))
    return (grads, scale, draw.scalar(choose.of(0.0, 0.0, 1.0))), {}


def _step(choose: Choices, draw: Draw, *, averages: int, **rule: Any) -> Arguments:
    """A step of an update rule; the decay and the rates of averages of every rule are alike."""
    shapes, wide = _shapes(choose), torch.float32
    params = [choose.values(draw, *s, dtype=choose.of(wide, draw.dtype)) for s in shapes]
    grads = [choose.values(draw, *shape) for shape in shapes]
    moments = [[choose.values(draw, *s, dtype=wide) * 0.1 for s in shapes] for _ in range(averages)]
    moments[1:] = [[m.square() for m in squares] for squares in moments[1:]]
    scalars = [
        None if value is None else draw.scalar(value)
        for value in (
            choose.of(None, 8.0, 1024.0),
            choose.of(None, 0.25),
            choose.of(None, 0.0, 1.0),
        )
    ]
    low = choose.of(None, torch.bfloat16, torch.float16)
    copies = None if low is None else [p.to(low, copy=True) for p in params]
    fixed = (draw.scalar(choose.of(1e-2, 0.5)), draw.scalar(choose.of(3.0, 0.0, 1000.0)))
    attrs = {**rule, "weight_decay": choose.of(0.1, 0.0, 2.0)}
    return (params, grads, *moments, *fixed, *scalars, copies), attrs


def _betas(choose: Choices) -> dict[str, Any]:
    return {"beta1": choose.of(0.9, 0.0, 0.5), "beta2": choose.of(0.999, 0.5, 0.95)}


def _adamw(choose: Choices, draw: Draw) -> Arguments:
    return _step(choose, draw, averages=2, **_betas(choose), eps=choose.of(1e-8, 1e-3))


def _adamw_8bit(choose: Choices, draw: Draw) -> Arguments:
    return adamw_8bit.coded(partial(_adamw, choose), draw)


def _lion(choose: Choices, draw: Draw) -> Arguments:
    return _step(choose, draw, averages=1, **_betas(choose))


def _sgd(choose: Choices, draw: Draw) -> Arguments:
    momentum = choose.of(0.0, 0.9)
    rule = {
        "momentum": momentum,
        "nesterov": bool(momentum) and choose.of(False, True),
        "decoupled": choose.of(False, True),
    }
    args, attrs = _step(choose, draw, averages=1, **rule)
    return (args if momentum else (*args[:2], [], *args[3:])), attrs


def _lamb(choose: Choices, draw: Draw) -> Arguments:
    args, attrs = _step(choose, draw, averages=2, **_betas(choose), eps=choose.of(1e-6, 1e-3))
    trust = draw.uniform(len(args[0]), low=0.1, high=4.0) if choose.of(False, True) else None
    return (*args, trust), attrs


def _lamb_sums_of_squares(choose: Choices, draw: Draw) -> Arguments:
    args, attrs = _step(choose, draw, averages=2, **_betas(choose), eps=choose.of(1e-6, 1e-3))
    return (*args[:4], *args[5:8]), attrs


def _quantize(choose: Choices, draw: Draw) -> Arguments:
    x = choose.values(draw, *choose.shape(choose.of(1, 2, 3, 0)))
    attrs = _coding(choose)
    is_random = attrs["format"] in ("int8", "int4") and choose.of(False, True)
    return (x, _rng(choose, draw) if is_random else None), attrs


def _coding(choose: Choices) -> dict[str, Any]:
    format = choose.of(*quantization.FORMATS)
    blocks = (32,) if format.startswith("mx_") else (32, 1, 3, 64, 256, 5000)
    return {"format": format, "block": choose.of(*blocks)}


def _dequantize(choose: Choices, draw: Draw) -> Arguments:
    shape = tuple(choose.shape(choose.of(1, 2, 3, 0)))
    return quantization.coded(draw, shape, **_coding(choose))


def _hadamard(choose: Choices, draw: Draw) -> Arguments:
    block, whole = 2 ** choose.of(3, 0, 1, 2, 5, 8, 9), choose.of(True, False)
    last = block if whole else block * choose.of(2, 1, 3)
    x = choose.values(draw, *choose.shape(choose.of(2, 1, 3), last=last))
    return (x,), {"block": None if whole else block}


def _top_k(choose: Choices, draw: Draw) -> Arguments:
    x = choose.values(draw, *choose.shape(choose.of(2, 1, 3)))
    last = x.shape[-1]
    return (x,), {"k": choose.of(1, last, last // 2, min(3, last), 0)}


DRAWN: Mapping[str, Drawn] = {
    "rms_norm": partial(_norm, bias=False),
    "layer_norm": partial(_norm, bias=True),
    "group_norm": _group_norm,
    "add_rms_norm": partial(_norm, bias=False, residual=True),
    "add_layer_norm": partial(_norm, bias=True, residual=True),
    "dropout": _dropout,
    "bias_dropout_add": _bias_dropout_add,
    "dropout_add_rms_norm": partial(_dropout_add_norm, bias=False),
    "dropout_add_layer_norm": partial(_dropout_add_norm, bias=True),
    "gelu": partial(_element, approximate=("none", "tanh")),
    **dict.fromkeys(("silu", "relu", "relu2", "sigmoid", "tanh"), _element),
    "softplus": partial(_element, beta=(1.0, 2.0, 0.5), threshold=(20.0, 1.0, 90.0)),
    "bias_gelu": _bias_gelu,
    "swiglu": partial(_gated, approximate=False),
    "geglu": partial(_gated, approximate=True),
    "softmax": _softmax,
    "rope": _rope,
    "attention": _attention,
    "attention_dropout": partial(_attention, dropout=True),
    "attention_varlen": _attention_varlen,
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "conv1d": _conv1d,
    "conv2d": _conv2d,
    "permute": _permute,
    "unpermute": _unpermute,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_partials": _linear_cross_entropy_partials,
    "l2_norm": _l2_norm,
    "sums_of_squares": _l2_norm,
    "clip": _clip,
    "unscale_and_check": _unscale,
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "sgd": _sgd,
    "lion": _lion,
    "lamb_sums_of_squares": _lamb_sums_of_squares,
    "lamb": _lamb,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "hadamard": _hadamard,
    "top_k": _top_k,
}
