"""What every operator may get wrong where a design does not go: ends of index types, rare numbers.

65,536 and 32,768 are where an index of 16 bits ends, and a grid's second and third dimension; 110
and 256 where multi-tensor kernels start another launch. Kernels that use tiles begin where all dims
are large, and others where one dim is 0. What is particular to one operator stands with its oracle;
other sizes are levels of the designs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from anychip.conformance.calls import Arguments, Call, Draw, changed, special
from anychip.conformance.oracles import (
    activation,
    adamw_8bit,
    attention,
    compression,
    convolution,
    dropout,
    dropout_add_norm,
    grouped,
    linear,
    linear_cross_entropy,
    loss,
    norm,
    permutation,
    quantization,
    rope,
    softmax,
    update,
    varlen,
)

BEYOND_16_BITS = 70_001
VOCABULARY = 152_064
MANY = 300
"""Tensors of a list."""
Edges = Callable[[], Iterator[Call]]
Make = Callable[..., Arguments]
_FLAGS = ("full", "full_in_16_bits", "statistical", "gradient")


def one(label: str, make: Make, **options: Any) -> Edges:
    """A call with options of ``make``, and flags of the call."""
    flags = {name: options.pop(name) for name in _FLAGS if name in options}
    return lambda: iter([Call(label, partial(make, **options), **flags)])


def large(label: str, make: Make, **options: Any) -> Edges:
    """One whose size is what matters: an index counts elements, whatever their type."""
    return one(label, make, full_in_16_bits=True, **options)


def both(*edges: Edges) -> Edges:
    return lambda: (call for part in edges for call in part())


def named(edges: Edges, name: str) -> Edges:
    """The same calls with a name behind their labels."""
    return lambda: (replace(call, label=f"{call.label}.{name}") for call in edges())


# Norms, elements


def _norm_edges(make: Make, *, bias: bool, **options: Any) -> Edges:
    plain = partial(make, bias=bias, **options)
    return both(
        large("300x260", plain, shape=(300, 260)),
        large("many-rows", plain, shape=(BEYOND_16_BITS, 2), statistical=False),
    )


def _elements(make: Make, *, slow: bool = False, **options: Any) -> Edges:
    """Of an operator that goes from element to element."""
    plain = partial(make, **options)
    return both(
        large("beyond-16-bits", plain, shape=(BEYOND_16_BITS,), full=slow),
        large("many-rows", plain, shape=(BEYOND_16_BITS, 1), full=True),
    )


def _activation(make: Make, **attrs: Any) -> Edges:
    def shaped(draw: Draw, shape: tuple[int, ...]) -> Arguments:
        return make(draw, partial(activation._random, shape=shape), **attrs)

    def tiny(draw: Draw) -> Arguments:
        return make(draw, lambda draw: draw.normal(400, scale="tiny"), **attrs)

    slow = attrs.get("approximate") == "none"
    return both(_elements(shaped, slow=slow), one("tiny", tiny, statistical=False))


def _special(make: Make, *changes: tuple[int, Any, Any], label: str = "special") -> Edges:
    return lambda: iter([special(label, make, *changes)])


def _by_form(make: Make) -> Edges:
    forms = activation.GELU_FORMS.items()
    return both(*(named(_activation(make, **attrs), name) for name, attrs in forms))


# Scores


def _far(make: Make) -> Edges:
    """Scores of about -22,500, which a number that stands for -inf, such as -10,000, exceeds."""

    def made(draw: Draw) -> Arguments:
        args, attrs = make(draw)
        args[0][..., 0], args[1][..., 0] = 300.0, -300.0
        return args, attrs

    return one("far", made, statistical=False, gradient=False)


def _far_softmax(draw: Draw, causal: bool) -> Arguments:
    (x, mask, _), attrs = softmax._masked(draw, (3, 9, 9), (9, 9), causal=causal)
    return (x - 30_000.0, mask | torch.eye(9, dtype=torch.bool), None), attrs


def _many_batches(make: Make, **options: Any) -> Edges:
    """More batches than a grid's third dimension has blocks."""
    return one("many-batches", make, sizes=(66_000, 1, 1, 1, 2), full=True, **options)


_ATTEND = partial(attention._attend, causal=True)
_PACK = partial(varlen._packed, padded=1, heads=(2, 1))

# Products


_LINEAR = partial(linear._product, bias=True)


def _lookup(draw: Draw, count: int, width: int) -> Arguments:
    """Indices from both ends and around 2^15 and 2^16."""
    chosen = [0, 1, count - 1, count - 2, *(i for i in (32_767, 32_768, 65_536) if i < count)]
    return (torch.tensor(chosen), draw.normal(count, width)), {}


_ZEROS = torch.tensor([[0.0, -0.0, -1.0, -0.0], [-0.0, 0.0, 0.0, 2.0]])


# Losses


def _far_targets(size: int) -> Tensor:
    """The last one, and those that are -100, which is ignored, in 8 and in 16 bits."""
    return torch.tensor([size - 1, size // 2, 40_000 % size, -100 % 2**8, -100 % 2**16])


def _far_classes(draw: Draw, size: int) -> Arguments:
    (logits, _), attrs = loss._arguments(draw, (5, size), reduction="none")
    return (logits, _far_targets(size)), attrs


def _ignored_class(draw: Draw) -> Arguments:
    """What is ignored is one of the classes, but for the upper half of 64 bits."""
    (logits, _), attrs = loss._arguments(draw, (4, 20), ignore_index=2**32 + 3)
    return (logits, torch.tensor([3, 2**32 + 3, 5, 0])), attrs


def _far_linear_classes(draw: Draw, size: int) -> Arguments:
    (x, weight, _, bias), attrs = linear_cross_entropy._arguments(draw, (5,), 5, size, bias=True)
    return (x, weight, _far_targets(size), bias), attrs


_HEAD = linear_cross_entropy._arguments

# Lists


def _many(draw: Draw, count: int = MANY) -> list[Tensor]:
    """Empty and small tensors, the last one longer than a chunk of any multi-tensor kernel."""
    sizes = [0, *(index * 7 % 5 for index in range(count - 2)), BEYOND_16_BITS]
    return [draw.normal(size) for size in sizes]


def _list_step(draw: Draw, *, averages: int, count: int = MANY, **attrs: Any) -> Arguments:
    params = [p.float() for p in _many(draw, count)]
    moments = [[0.1 * draw.normal(*p.shape, dtype=torch.float32) for p in params]
               for _ in range(averages)]  # fmt: skip
    moments[1:] = [[m.square() for m in squares] for squares in moments[1:]]
    # A gradient of 0 is no reason to leave a tensor out: its averages decay.
    grads = [draw.normal(*p.shape) * float(index % 4 > 0) for index, p in enumerate(params)]
    return (params, grads, *moments, *_scalars(draw)), attrs


def _scalars(draw: Draw) -> tuple[Any, ...]:
    return (draw.scalar(1e-2), draw.scalar(3.0), None, None, None, None)


def _mixed_step(draw: Draw, **options: Any) -> Arguments:
    args, attrs = _list_step(draw, count=6, **options)
    for index in range(1, 6, 2):
        args[0][index] = args[0][index].to(draw.dtype)
        args[1][index] = args[1][index].float()
    return args, attrs


def _special_step(draw: Draw, *, nan: float, **options: Any) -> Arguments:
    """What is not finite stays where it is; and gradients of 0, tiny and huge ones."""
    args, attrs = _list_step(draw, count=3, **options)
    given = torch.tensor([nan, math.inf, -math.inf, 0.0, draw.subnormal, draw.huge**0.5])
    args[1][-1][:6] = given.to(draw.dtype)
    return args, attrs


def _empty_step(draw: Draw, *, averages: int, **attrs: Any) -> Arguments:
    """Nothing but the step counts on."""
    lists = [[torch.zeros(0), torch.zeros(2, 0)] for _ in range(1 + averages)]
    grads = [t.to(draw.dtype) for t in lists[0]]
    return (lists[0], grads, *lists[1:], *_scalars(draw)), attrs


def _steps(
    averages: int, rule: dict[str, Any], *, nan: float = math.nan, many_full: bool = False
) -> Edges:
    given = {"averages": averages, **rule}
    return both(
        large("many-tensors", _list_step, statistical=False, full=many_full, **given),
        one("1100-tensors", _list_step, count=1100, statistical=False, full=True, **given),
        one("empty-tensors", _empty_step, **given),
        one("special", _special_step, nan=nan, statistical=False, **given),
        one("mixed", _mixed_step, statistical=False, **given),
    )


def _list(*args: Callable[[Draw], Any], **attrs: Any) -> Edges:
    """Of an operator over one list of tensors: many, only empty ones, two types, every length."""

    def call(draw: Draw, tensors: Callable[[Draw], list[Tensor]]) -> Arguments:
        return (tensors(draw), *(arg(draw) for arg in args)), attrs

    def mixed(draw: Draw) -> list[Tensor]:
        return [draw.normal(9), draw.normal(33, dtype=torch.float32), draw.normal(2, 5)]

    many = partial(_many, count=1100)
    return both(
        large("many-tensors", call, tensors=_many, statistical=False),
        one("1100-tensors", call, tensors=many, statistical=False, full=True),
        one("empty-tensors", call, tensors=lambda draw: [draw.normal(0), draw.normal(2, 0)]),
        one("mixed", call, tensors=mixed, statistical=False),
    )


def _large_gradients(draw: Draw, scale: float) -> Arguments:
    """Finite, and near the largest number of the type; without a scale below 1 not any more."""
    grads = [draw.normal(9), torch.full((5,), draw.format.largest / 4).to(draw.dtype)]
    return (grads, draw.scalar(scale), draw.scalar(0.0)), {}


def _lamb_edges(take: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Edges:
    """take: its arguments out of adamw's."""

    def step(draw: Draw, **options: Any) -> Arguments:
        args, attrs = _list_step(draw, averages=2, **options, **update.ADAMW_ATTRS)
        return take(args), attrs

    return both(
        large("many-tensors", step, statistical=False, full=True),
        one("1100-tensors", step, count=1100, statistical=False, full=True),
    )


def _quantized(draw: Draw, shape: tuple[int, ...], format: str) -> Arguments:
    is_random = len(shape) > 1 and format.startswith("int")
    return quantization.arguments(draw, shape, format, offset=3 if is_random else None)


def _by_format(make: Make) -> Edges:
    """The formats of one byte, then those of half a byte; of each kind of value one."""
    chosen = ("int8", "int4", "mx_e4m3", "nf4")
    each = {name: _elements(make, slow=name != "int8", format=name) for name in chosen}
    return both(*(named(edges, name) for name, edges in each.items()))


EDGES: Mapping[str, Edges] = {
    "rms_norm": _norm_edges(norm._normal, bias=False),
    "layer_norm": _norm_edges(norm._normal, bias=True),
    "group_norm": both(
        large("many-rows", norm._in_groups, shape=(BEYOND_16_BITS, 2), num_groups=1,
              statistical=False),
    ),
    "add_rms_norm": _norm_edges(norm._add_normal, bias=False),
    "add_layer_norm": _norm_edges(norm._add_normal, bias=True),
    "dropout": _elements(dropout._arguments, p=0.2),
    "bias_dropout_add": _elements(dropout._add_arguments, p=0.2),
    # Half are dropped, and twice the others is exact: sizes are what is asked about here.
    "dropout_add_rms_norm": _norm_edges(dropout_add_norm._normal, bias=False, p=0.5),
    "dropout_add_layer_norm": _norm_edges(dropout_add_norm._normal, bias=True, p=0.5),
    "gelu": _by_form(activation._one_argument),
    **{name: _activation(activation._one_argument)
       for name in ("silu", "relu", "relu2", "sigmoid", "tanh")},
    "softplus": _activation(activation._one_argument, **activation.SOFTPLUS_FORMS["beta:1"]),
    "bias_gelu": _by_form(activation._bias_gelu_arguments),
    "swiglu": _activation(activation._gated),
    "geglu": _by_form(activation._gated),
    "softmax": both(
        large("300x260", softmax._plain, shape=(300, 260)),
        one("vocabulary", softmax._plain, shape=(3, VOCABULARY), full=True),
        # mask, bias and the triangle beyond the first 1024 keys
        large("2x3x40x1100.everything", softmax._everything, shape=(2, 3, 40, 1100)),
        *(one(f"far.{name}", _far_softmax, causal=name == "causal", statistical=False,
              gradient=False) for name in ("masked", "causal")),
        one("scale:0", softmax._plain, shape=(4, 9), scale=0.0),
        large("many-rows", softmax._plain, shape=(BEYOND_16_BITS, 2), statistical=False),
    ),
    "rope": both(
        _special(partial(rope._rope_arguments, sizes=(1, 5, 2, 1, 8), interleaved=False),
                 (0, (0, 1, 0, 2), math.nan), (0, (0, 3, 1, 5), math.inf),
                 (1, (0, 4, 0, 0), -math.inf)),
        _many_batches(rope._rope_arguments, interleaved=False),
    ),
    "attention": both(
        _far(partial(_ATTEND, sizes=(1, 9, 2, 1, 8))),
        one("scale:0", _ATTEND, sizes=(1, 9, 2, 1, 8), scale=0.0),
        one("16of4096", attention._cross, queries=16, keys=4096, causal=True, full=True),
        one("4096of16", attention._cross, queries=4096, keys=16, causal=False, full=True),
        _many_batches(_ATTEND),
    ),
    "attention_varlen": both(
        _far(partial(_PACK, lengths=(9, 3), dim=8)),
        one("150-sequences", _PACK, lengths=(1, 2, 0) * 50, dim=8),
    ),
    "linear": both(
        one("inputs:259", _LINEAR, shape=(3,), inputs=259, outputs=5),
        one("tiles", _LINEAR, shape=(130,), inputs=136, outputs=132),
        one("one-output", _LINEAR, shape=(5,), inputs=257, outputs=1),
        one("vocabulary", _LINEAR, shape=(3,), inputs=6, outputs=VOCABULARY, full=True),
        one("no-input", _LINEAR, shape=(3,), inputs=0, outputs=5),
        one("no-output", _LINEAR, shape=(3,), inputs=5, outputs=0),
        large("many-rows", _LINEAR, shape=(BEYOND_16_BITS,), inputs=2, outputs=2, full=True),
        _special(partial(_LINEAR, shape=(4,), inputs=24, outputs=5),
                 (0, (1, 3), math.inf), (1, (2, 7), -math.inf), (2, 4, math.nan)),
    ),
    "grouped_linear": both(
        one("tiles", grouped._grouped, lengths=(70, 66), rest=1, inputs=96, outputs=130),
        # More than a table of sizes in a kernel's constant memory has entries.
        one("150-groups", grouped._grouped, lengths=(1, 0, 2) * 50, rest=1, inputs=4, outputs=3),
    ),
    "conv1d": both(
        large("many-channels", convolution._line, shape=(1, BEYOND_16_BITS, 2), kernel=2),
        large("many-rows", convolution._line, shape=(BEYOND_16_BITS, 1, 2), kernel=2),
    ),
    "conv2d": both(
        one("tiles", convolution._image, shape=(2, 40, 18, 18), kernel=(72, 40, 3, 3), padding=1),
        large("many-rows", convolution._image, shape=(BEYOND_16_BITS, 1, 2, 1),
              kernel=(1, 1, 2, 1), full=True),
    ),
    "permute": both(
        large("many-tokens", permutation._permuted, tokens=BEYOND_16_BITS, hidden=1, choices=1,
              experts=3),
    ),
    "unpermute": both(
        large("many-tokens", permutation._unpermuted, tokens=BEYOND_16_BITS, hidden=1, choices=1),
    ),
    "embedding": both(
        large("row-beyond-16-bits", _lookup, count=BEYOND_16_BITS, width=1),
        large("many-indices", linear._lookup, shape=(BEYOND_16_BITS,), count=9, width=1),
        one("of-a-vocabulary", _lookup, count=VOCABULARY, width=8, full=True),
        one("zeros", changed(lambda d: ((torch.tensor([2, 3, 5, 2]), d.normal(6, 10)), {}),
                             (1, 2, -0.0), (1, (3, 4), -0.0)), statistical=False),
    ),
    "cross_entropy": both(
        large("class-beyond-16-bits", _far_classes, size=BEYOND_16_BITS),
        large("tiles", loss._arguments, shape=(70, 1030)),
        one("ignored:2p32", _ignored_class),
        # A target that a mask has ruled out: the loss is infinite, and says so.
        _special(loss._masked, (1, 2, 30), label="impossible"),
        large("many-rows", loss._arguments, shape=(BEYOND_16_BITS, 2), reduction="none",
              statistical=False),
    ),
    "linear_cross_entropy": both(
        large("class-beyond-16-bits", _far_linear_classes, size=BEYOND_16_BITS),
        one("tiles", _HEAD, shape=(70,), inputs=72, classes=130, bias=True),
        one("class-of-a-vocabulary", _far_linear_classes, size=VOCABULARY, full=True),
    ),
    "l2_norm": _list(),
    "sums_of_squares": _list(),
    "clip": _list(lambda draw: draw.scalar(3.0), max_norm=1.0),
    "unscale_and_check": both(
        _list(lambda draw: draw.scalar(8.0), lambda draw: draw.scalar(0.0)),
        one("large", _large_gradients, scale=2.0, statistical=False),
        one("overflow", _large_gradients, scale=0.125, statistical=False),
    ),
    "adamw": _steps(2, update.ADAMW_ATTRS),
    "adamw_8bit": lambda: adamw_8bit.with_codes(_steps(2, update.ADAMW_ATTRS, many_full=True)()),
    "sgd": _steps(1, update.SGD_ATTRS),
    # sign(NaN) is NaN in some libraries and 0 in others.
    "lion": _steps(1, update.LION_ATTRS, nan=math.inf),
    "lamb": _lamb_edges(lambda args: (*args, None)),
    "lamb_sums_of_squares": _lamb_edges(lambda args: (*args[:4], *args[5:8])),
    "quantize": _by_format(_quantized),
    "dequantize": _by_format(quantization.coded),
    "hadamard": both(
        large("beyond-16-bits", compression._normal, shape=(BEYOND_16_BITS, 2), block=2),
    ),
    "top_k": both(
        one("vocabulary", compression._normal, shape=(3, VOCABULARY), k=5, full=True),
        one("index-beyond-16-bits", compression._normal, shape=(2, BEYOND_16_BITS), k=9),
        large("many-rows", compression._normal, shape=(BEYOND_16_BITS, 2), k=1),
        one("zeros", lambda d: ((_ZEROS.to(d.dtype),), {"k": 4}), statistical=False,
            gradient=False),
    ),
}  # fmt: skip


def with_edges(name: str, calls: Callable[[], Any]) -> Callable[[], tuple[Call, ...]]:
    """An oracle's own calls, then those of this module; made once, for every rule asks for them."""
    return cache(lambda: (*calls(), *EDGES.get(name, both())()))
