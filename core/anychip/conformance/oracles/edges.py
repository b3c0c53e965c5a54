"""What every operator may get wrong: sizes next to those of a machine, index types, rare numbers.

Sizes beside powers of two are where a vector, warp, block or tile ends; multiples of 96 are widths
of models, which kernels are written for; 65,536 and 32,768 are where an index of 16 bits ends, and
a grid's second and third dimension; 110 and 256 where multi-tensor kernels start another launch.
Kernels that use tiles begin where all dims are large, and others where one dim is 1 or 0. The
largest sizes are asked for at level full. What is particular to one operator stands with its
oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip.conformance.calls import Arguments, Call, Draw
from anychip.conformance.oracles import (
    activation,
    adamw_8bit,
    attention,
    compression,
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
    varlen,
)

Make = Callable[[Draw], Arguments]
Sized = Callable[[Draw, int], Arguments]
Edges = Callable[[], Iterator[Call]]

QUICK = (15, 16, 31, 32, 63, 65, 128, 129, 256)
QUICK_IN_16_BITS = (15, 65, 129)
WIDTHS = (96, 192, 768)
"""Widths of models and of heads: a kernel of its own for each."""
FULL = (
    *range(2, 15), 17, 33, 64, 80, 127, 160, 255, 257, 320, 384, 511, 512, 513, 640, 1023, 1024,
    1025, 1280, 1536, 2047, 2048, 2049, 2560, 3072, 4095, 4096, 4097,
)  # fmt: skip
HIDDEN = (8191, 8192, 8193, 16383, 16384, 16385)
"""The largest hidden sizes."""
VOCABULARIES = (32_000, 152_064)
BEYOND_16_BITS = 70_001
MANY = 300
"""Tensors of a list."""


def _sweep(
    make: Sized,
    name: str,
    *,
    top: int = 4097,
    more: tuple[int, ...] = (),
    quick: tuple[int, ...] = QUICK,
) -> Edges:
    """A call per size."""

    def calls() -> Iterator[Call]:
        for size in (*quick, *(s for s in FULL if s <= top and s not in quick), *more):
            yield Call(
                f"{name}:{size}",
                partial(_at, make, size),
                full=size not in quick,
                full_in_16_bits=size not in QUICK_IN_16_BITS,
            )

    return calls


def _at(make: Sized, size: int, draw: Draw) -> Arguments:
    return make(draw, size)


def _one(label: str, make: Make, **options: Any) -> Edges:
    return lambda: iter([Call(label, make, **options)])


def _large(label: str, make: Make, **options: Any) -> Edges:
    """One whose size is what matters: an index counts elements, whatever their type."""
    return _one(label, make, full_in_16_bits=True, **options)


def _both(*edges: Edges) -> Edges:
    return lambda: (call for part in edges for call in part())


# Norms, elements


def _norm_edges(*, bias: bool, residual: bool, dropped: bool = False) -> Edges:
    normal = norm._add_normal if residual else norm._normal
    plain: Any = partial(normal, bias=bias)
    if dropped:
        # Half are dropped, and twice the others is exact: sizes are what is asked about here.
        plain = partial(dropout_add_norm._normal, bias=bias, p=0.5)

    def sized(draw: Draw, size: int) -> Arguments:
        args: Arguments = plain(draw, shape=(3, size))
        return args

    def shaped(*shape: int) -> Make:
        return partial(plain, shape=shape)

    return _both(
        _sweep(sized, "hidden", more=HIDDEN, quick=(*QUICK, *WIDTHS)),
        _one("rank-6", shaped(2, 1, 3, 1, 5, 7)),
        _large("300x260", shaped(300, 260)),
        _one("one-row", shaped(1, 40)),
        _one("no-row", shaped(40)),
        _large("many-rows", shaped(BEYOND_16_BITS, 2), statistical=False),
    )


def _elements(make: Callable[[Draw, tuple[int, ...]], Arguments], *, slow: bool = False) -> Edges:
    """Of an operator that goes from element to element."""
    return _both(
        _sweep(lambda draw, size: make(draw, (size,)), "size", more=HIDDEN),
        _one("rank-6", lambda draw: make(draw, (2, 1, 3, 2, 1, 5))),
        _large("beyond-16-bits", lambda draw: make(draw, (BEYOND_16_BITS,)), full=slow),
        _large("many-rows", lambda draw: make(draw, (BEYOND_16_BITS, 1)), full=True),
    )


def _activation(make: Callable[..., Arguments], **attrs: Any) -> Edges:
    def shaped(draw: Draw, shape: tuple[int, ...]) -> Arguments:
        return make(draw, partial(activation._random, shape=shape), **attrs)

    def numbers(draw: Draw, kind: str) -> Arguments:
        return make(draw, lambda draw: draw.normal(400, scale=getattr(draw, kind)), **attrs)

    return _both(
        _elements(shaped, slow=attrs.get("approximate") == "none"),
        _one("tiny", partial(numbers, kind="tiny"), statistical=False),
    )


def _named(edges: Edges, name: str) -> Edges:
    """The same calls with a name behind their labels."""

    def calls() -> Iterator[Call]:
        for call in edges():
            yield Call(f"{call.label}.{name}", call.make, full=call.full,
                       full_in_16_bits=call.full_in_16_bits,
                       statistical=call.statistical, gradient=call.gradient)  # fmt: skip

    return calls


def _by_form(make: Callable[..., Arguments]) -> Edges:
    forms = ("none", "tanh")
    return _both(*(_named(_activation(make, approximate=form), form) for form in forms))


# Scores


def _softmax(draw: Draw, size: int) -> Arguments:
    return softmax._plain(draw, (3, size))


def _attention(draw: Draw, size: int, **changes: Any) -> Arguments:
    return attention._attend(draw, (1, size, 2, 1, 8), causal=True, **changes)


def _head_dim(draw: Draw, size: int) -> Arguments:
    return attention._attend(draw, (1, 5, 2, 1, size), causal=True)


def _attention_dropout(draw: Draw, size: int) -> Arguments:
    return attention._dropped(draw, partial(_attention, size=size), p=0.2)


def _dropped_head_dim(draw: Draw, size: int) -> Arguments:
    return attention._dropped(draw, partial(_head_dim, size=size), p=0.2)


def _far(make: Make) -> Make:
    """Scores of about -22,500, which a number that stands for -inf, such as -10,000, exceeds."""

    def made(draw: Draw) -> Arguments:
        args, attrs = make(draw)
        args[0][..., 0], args[1][..., 0] = 300.0, -300.0
        return args, attrs

    return made


def _far_softmax(draw: Draw, causal: bool) -> Arguments:
    (x, mask, _), attrs = softmax._masked(draw, (3, 9, 9), (9, 9), causal=causal)
    return (x - 30_000.0, mask | torch.eye(9, dtype=torch.bool), None), attrs


def _rope_head_dim(draw: Draw, size: int) -> Arguments:
    return rope._rope_arguments(draw, (1, 5, 2, 1, size), interleaved=size % 3 == 0)


def _varlen_head_dim(draw: Draw, size: int) -> Arguments:
    return varlen._packed(draw, ((3, 5), 1), causal=True, heads=(2, 1), dim=size)


def _varlen(draw: Draw, size: int) -> Arguments:
    return varlen._packed(draw, ((size, 3), 1), causal=True, heads=(2, 1), dim=8)


def _rope(draw: Draw, size: int) -> Arguments:
    return rope._rope_arguments(draw, (1, size, 2, 1, 8), interleaved=size % 2 == 1)


def _rope_special(draw: Draw) -> Arguments:
    args, attrs = rope._rope_arguments(draw, (1, 5, 2, 1, 8), interleaved=False)
    args[0][0, 1, 0, 2], args[0][0, 3, 1, 5], args[1][0, 4, 0, 0] = math.nan, math.inf, -math.inf
    return args, attrs


def _many_batches(make: Callable[..., Arguments]) -> Edges:
    """More batches than a grid's third dimension has blocks."""
    return _one("many-batches", lambda draw: make(draw, (66_000, 1, 1, 1, 2)), full=True)


# Products


def _inputs(draw: Draw, size: int) -> Arguments:
    return linear._product(draw, (3,), size, 5, bias=True)


def _outputs(draw: Draw, size: int) -> Arguments:
    return linear._product(draw, (3,), 6, size, bias=True)


def _rows(draw: Draw, size: int) -> Arguments:
    return linear._product(draw, (size,), 6, 5, bias=True)


def _linear_special(draw: Draw) -> Arguments:
    args, attrs = linear._product(draw, (4,), 24, 5, bias=True)
    args[0][1, 3], args[1][2, 7], args[2][4] = math.inf, -math.inf, math.nan
    return args, attrs


def _many_groups(draw: Draw) -> Arguments:
    """More than a table of sizes in a kernel's constant memory has entries."""
    return grouped._grouped(draw, ((1, 0, 2) * 50, 1, 4, 3))


def _group_rows(draw: Draw, size: int) -> Arguments:
    return grouped._grouped(draw, ((size, 2), 1, 6, 5))


def _group_inputs(draw: Draw, size: int) -> Arguments:
    return grouped._grouped(draw, ((3, 2), 1, size, 5))


def _permuted_width(draw: Draw, size: int) -> Arguments:
    return permutation._permuted(draw, (5, 2, 3, size))


def _unpermuted_width(draw: Draw, size: int) -> Arguments:
    return permutation._unpermuted(draw, (4, 2, size))


def _lookup(draw: Draw, count: int, width: int) -> Arguments:
    """Indices from both ends and around 2^15 and 2^16."""
    chosen = [0, 1, count - 1, count - 2, *(i for i in (32_767, 32_768, 65_536) if i < count)]
    return (torch.tensor(chosen), draw.normal(count, width)), {}


def _zero_rows(draw: Draw) -> Arguments:
    weight = draw.normal(6, 10)
    weight[2], weight[3, 4] = -0.0, -0.0
    return (torch.tensor([2, 3, 5, 2]), weight), {}


def _zeros_of_both_signs(draw: Draw) -> Arguments:
    x = torch.tensor([[0.0, -0.0, -1.0, -0.0], [-0.0, 0.0, 0.0, 2.0]]).to(draw.dtype)
    return (x,), {"k": 4}


# Losses


def _classes(draw: Draw, size: int) -> Arguments:
    return loss._arguments(draw, (3, size))


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


def _impossible_class(draw: Draw) -> Arguments:
    """A target that a mask has ruled out: the loss is infinite, and says so."""
    (logits, target), attrs = loss._masked(draw)
    target[2] = 30
    return (logits, target), attrs


def _linear_classes(draw: Draw, size: int) -> Arguments:
    return linear_cross_entropy._arguments(draw, ((3,), 5, size), bias=True)


def _far_linear_classes(draw: Draw, size: int) -> Arguments:
    (x, weight, _, bias), attrs = linear_cross_entropy._arguments(draw, ((5,), 5, size), bias=True)
    return (x, weight, _far_targets(size), bias), attrs


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
    fixed = (draw.scalar(1e-2), draw.scalar(3.0), None, None, None, None)
    # A gradient of 0 is no reason to leave a tensor out: its averages decay.
    grads = [draw.normal(*p.shape) * float(index % 4 > 0) for index, p in enumerate(params)]
    return (params, grads, *moments, *fixed), attrs


def _mixed(draw: Draw) -> list[Tensor]:
    """In two types."""
    return [draw.normal(9), draw.normal(33, dtype=torch.float32), draw.normal(2, 5)]


def _mixed_step(draw: Draw, *, averages: int, **attrs: Any) -> Arguments:
    args, attrs = _list_step(draw, averages=averages, count=6, **attrs)
    for index in range(1, 6, 2):
        args[0][index] = args[0][index].to(draw.dtype)
        args[1][index] = args[1][index].float()
    return args, attrs


def _special_step(draw: Draw, *, averages: int, nan: float, **attrs: Any) -> Arguments:
    """What is not finite stays where it is; and gradients of 0, tiny and huge ones."""
    args, attrs = _list_step(draw, averages=averages, count=3, **attrs)
    given = torch.tensor([nan, math.inf, -math.inf, 0.0, draw.subnormal, draw.huge**0.5])
    args[1][-1][:6] = given.to(draw.dtype)
    return args, attrs


def _steps(*, averages: int, nan: float = math.nan, many_full: bool = False, **attrs: Any) -> Edges:
    made = partial(_list_step, averages=averages, **attrs)
    special = partial(_special_step, averages=averages, nan=nan, **attrs)
    return _both(
        _large("many-tensors", made, statistical=False, full=many_full),
        _one("1100-tensors", partial(made, count=1100), statistical=False, full=True),
        _one("empty-tensors", partial(_empty_step, averages=averages, **attrs)),
        _one("special", special, statistical=False),
        _one("mixed", partial(_mixed_step, averages=averages, **attrs), statistical=False),
    )


def _empty_step(draw: Draw, *, averages: int, **attrs: Any) -> Arguments:
    """Nothing but the step counts on."""
    lists = [[torch.zeros(0), torch.zeros(2, 0)] for _ in range(1 + averages)]
    grads = [t.to(draw.dtype) for t in lists[0]]
    fixed = (draw.scalar(1e-2), draw.scalar(3.0), None, None, None, None)
    return (lists[0], grads, *lists[1:], *fixed), attrs


def _list(*args: Callable[[Draw], Any], **attrs: Any) -> Edges:
    """Of an operator over one list of tensors: many, only empty ones, every length."""

    def call(tensors: Callable[[Draw], list[Tensor]]) -> Make:
        return lambda draw: ((tensors(draw), *(arg(draw) for arg in args)), attrs)

    return _both(
        _large("many-tensors", call(_many), statistical=False),
        _one("1100-tensors", call(partial(_many, count=1100)), statistical=False, full=True),
        _one("empty-tensors", call(lambda draw: [draw.normal(0), draw.normal(2, 0)])),
        _one("mixed", call(_mixed), statistical=False),
        _sweep(
            lambda draw, size: call(lambda draw: [draw.normal(size), draw.normal(3)])(draw),
            "size",
            more=HIDDEN,
        ),
    )


def _large_gradients(draw: Draw) -> Arguments:
    """Finite, and near the largest number of the type."""
    grads = [draw.normal(9), torch.full((5,), draw.format.largest / 4).to(draw.dtype)]
    return (grads, draw.scalar(2.0), draw.scalar(0.0)), {}


def _overflowing_gradients(draw: Draw) -> Arguments:
    """Finite, but not without their scale, which is below 1."""
    (grads, _, found), attrs = _large_gradients(draw)
    return (grads, draw.scalar(0.125), found), attrs


_SGD: dict[str, Any] = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.1, "decoupled": False}
_LION: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
_ADAMW: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def _lamb_step(draw: Draw, **options: Any) -> Arguments:
    args, attrs = _list_step(draw, averages=2, **options, **_ADAMW)
    return (*args, None), attrs


def _measured_step(draw: Draw, **options: Any) -> Arguments:
    args, attrs = _list_step(draw, averages=2, **options, **_ADAMW)
    return (*args[:4], *args[5:8]), {**attrs, "offsets": None, "sizes": None, "block": 16}


def _quantized(draw: Draw, shape: tuple[int, ...], bits: int) -> Arguments:
    return quantization._arguments(draw, shape, bits, offset=3 if len(shape) > 1 else None)


def _dequantized(draw: Draw, shape: tuple[int, ...], bits: int) -> Arguments:
    return quantization._coded(draw, shape, bits)


def _by_bits(make: Callable[..., Arguments]) -> Edges:
    each = {bits: _elements(partial(make, bits=bits), slow=bits == 4) for bits in (8, 4)}
    return _both(*(_named(edges, f"int{bits}") for bits, edges in each.items()))


EDGES: Mapping[str, Edges] = {
    "rms_norm": _norm_edges(bias=False, residual=False),
    "layer_norm": _norm_edges(bias=True, residual=False),
    "add_rms_norm": _norm_edges(bias=False, residual=True),
    "add_layer_norm": _norm_edges(bias=True, residual=True),
    "dropout": _elements(partial(dropout._arguments, p=0.2)),
    "bias_dropout_add": _elements(partial(dropout._add_arguments, p=0.2)),
    "dropout_add_rms_norm": _norm_edges(bias=False, residual=True, dropped=True),
    "dropout_add_layer_norm": _norm_edges(bias=True, residual=True, dropped=True),
    "gelu": _by_form(activation._gelu_arguments),
    "bias_gelu": _by_form(activation._bias_gelu_arguments),
    "swiglu": _activation(activation._swiglu_arguments),
    "geglu": _by_form(activation._geglu_arguments),
    "softmax": _both(
        _sweep(_softmax, "keys", more=(*HIDDEN, *VOCABULARIES), quick=(*QUICK, *WIDTHS)),
        _one("rank-6", partial(softmax._plain, shape=(2, 1, 2, 1, 3, 7))),
        _large("300x260", partial(softmax._plain, shape=(300, 260))),
        # mask, bias and the triangle beyond the first 1024 keys
        _large("2x3x40x1100.everything", partial(softmax._everything, shape=(2, 3, 40, 1100))),
        *(_one(f"far.{name}", partial(_far_softmax, causal=name == "causal"), statistical=False,
               gradient=False) for name in ("masked", "causal")),
        _one("scale:0", partial(softmax._plain, shape=(4, 9), scale=0.0)),
        _large("many-rows", partial(softmax._plain, shape=(BEYOND_16_BITS, 2)), statistical=False),
    ),
    "rope": _both(
        _sweep(_rope, "length"),
        _sweep(_rope_head_dim, "head_dim", quick=(96, 256), top=0, more=(80, 160, 192, 320, 512)),
        _one("special", _rope_special, statistical=False, gradient=False),
        _many_batches(partial(rope._rope_arguments, interleaved=False)),
    ),
    "attention": _both(
        _sweep(_attention, "length", top=1025, more=(2048,)),
        _sweep(_head_dim, "head_dim", top=257, quick=(*QUICK, 96, 192)),
        _one("far", _far(partial(_attention, size=9)), statistical=False, gradient=False),
        _one("scale:0", partial(_attention, size=9, scale=0.0)),
        _one("16of4096", partial(attention._cross, lengths=(16, 4096), causal=True), full=True),
        _one("4096of16", partial(attention._cross, lengths=(4096, 16), causal=False), full=True),
        _many_batches(partial(attention._attend, causal=True)),
    ),
    "attention_dropout": _both(
        _sweep(_attention_dropout, "length", top=513),
        _sweep(_dropped_head_dim, "head_dim", top=257, quick=(96,)),
    ),
    "attention_varlen": _both(
        _sweep(_varlen, "length", top=1025),
        _sweep(_varlen_head_dim, "head_dim", top=257, quick=(96,)),
        _one("far", _far(partial(_varlen, size=9)), statistical=False, gradient=False),
        _one("150-sequences", partial(varlen._packed, packing=((1, 2, 0) * 50, 1), causal=True,
                                      heads=(2, 1), dim=8)),
    ),
    "linear": _both(
        _sweep(_inputs, "inputs", more=(*HIDDEN, 1027), quick=(*QUICK, *WIDTHS)),
        _one("inputs:259", partial(_at, _inputs, 259)),
        _sweep(_outputs, "outputs", top=1025, more=VOCABULARIES, quick=(*QUICK, *WIDTHS)),
        _sweep(_rows, "rows", top=1025),
        _one("tiles", partial(linear._product, rows=(130,), inputs=136, outputs=132, bias=True)),
        _one("one-row", partial(linear._product, rows=(1,), inputs=1000, outputs=30, bias=True)),
        _one("one-output", partial(linear._product, rows=(5,), inputs=257, outputs=1, bias=True)),
        _one("no-input", partial(linear._product, rows=(3,), inputs=0, outputs=5, bias=True)),
        _one("no-output", partial(linear._product, rows=(3,), inputs=5, outputs=0, bias=True)),
        _one("rank-6", partial(linear._product, rows=(2, 1, 3, 1, 2), inputs=6, outputs=5,
                               bias=True)),
        _large("many-rows", partial(linear._product, rows=(BEYOND_16_BITS,), inputs=2, outputs=2,
                                  bias=True), full=True),
        _one("special", _linear_special, statistical=False, gradient=False),
    ),
    "grouped_linear": _both(
        _sweep(_group_rows, "rows", top=1025),
        _sweep(_group_inputs, "inputs", more=HIDDEN, quick=(*QUICK, *WIDTHS)),
        _one("tiles", partial(grouped._grouped, sizes=((70, 66), 1, 96, 130))),
        _one("150-groups", _many_groups),
    ),
    "permute": _both(
        _sweep(_permuted_width, "hidden", more=HIDDEN),
        _large("many-tokens", partial(permutation._permuted, sizes=(BEYOND_16_BITS, 1, 3, 1))),
    ),
    "unpermute": _both(
        _sweep(_unpermuted_width, "hidden", more=HIDDEN),
        _large("many-tokens", partial(permutation._unpermuted, sizes=(BEYOND_16_BITS, 1, 1))),
    ),
    "embedding": _both(
        _sweep(lambda draw, size: linear._lookup(draw, (7,), 9, size), "width", more=HIDDEN),
        _large("row-beyond-16-bits", partial(_lookup, count=BEYOND_16_BITS, width=1)),
        _large("many-indices", partial(linear._lookup, shape=(BEYOND_16_BITS,), count=9, width=1)),
        _one("rank-5", partial(linear._lookup, shape=(2, 1, 2, 1, 3), count=9, width=4)),
        *(_one(f"of:{count}x8", partial(_lookup, count=count, width=8), full=True)
          for count in VOCABULARIES),
        _one("zeros", _zero_rows, statistical=False),
    ),
    "cross_entropy": _both(
        _sweep(_classes, "classes"),
        _large("class-beyond-16-bits", partial(_at, _far_classes, BEYOND_16_BITS)),
        _large("tiles", partial(loss._arguments, shape=(70, 1030))),
        _one("rank-6", partial(loss._arguments, shape=(2, 1, 3, 1, 2, 5))),
        _one("ignored:2p32", _ignored_class),
        _one("impossible", _impossible_class, statistical=False, gradient=False),
        _large("many-rows", partial(loss._arguments, shape=(BEYOND_16_BITS, 2), reduction="none"),
             statistical=False),
    ),
    "linear_cross_entropy": _both(
        _sweep(_linear_classes, "classes", top=2049),
        _large("class-beyond-16-bits", partial(_at, _far_linear_classes, BEYOND_16_BITS)),
        _one("tiles", partial(linear_cross_entropy._arguments, sizes=((70,), 72, 130), bias=True)),
        _one("rank-6", partial(linear_cross_entropy._arguments, sizes=((2, 1, 3, 1, 2), 6, 7))),
        _one("class-of-152064", partial(_at, _far_linear_classes, 152_064), full=True),
    ),
    "l2_norm": _list(),
    "l2_norm_partials": _list(offsets=None, sizes=None, block=16),
    "clip": _list(lambda draw: draw.scalar(3.0), max_norm=1.0),
    "unscale_and_check": _both(
        _list(lambda draw: draw.scalar(8.0), lambda draw: draw.scalar(0.0)),
        _one("large", _large_gradients, statistical=False),
        _one("overflow", _overflowing_gradients, statistical=False),
    ),
    "adamw": _steps(averages=2, **_ADAMW),
    "adamw_8bit": lambda: adamw_8bit.with_codes(
        _steps(averages=2, many_full=True, **_ADAMW)()
    ),
    "sgd": _steps(averages=1, **_SGD),
    # sign(NaN) is NaN in some libraries and 0 in others.
    "lion": _steps(averages=1, nan=math.inf, **_LION),
    "lamb": _both(
        _large("many-tensors", _lamb_step, statistical=False, full=True),
        _one("1100-tensors", partial(_lamb_step, count=1100), statistical=False, full=True),
    ),
    "lamb_partials": _both(
        _large("many-tensors", _measured_step, statistical=False, full=True),
        _one("1100-tensors", partial(_measured_step, count=1100), statistical=False, full=True),
    ),
    "quantize": _by_bits(_quantized),
    "dequantize": _by_bits(_dequantized),
    "hadamard": _both(
        _large("beyond-16-bits", partial(compression._normal, shape=(BEYOND_16_BITS, 2), block=2)),
        _one("rank-6", partial(compression._normal, shape=(2, 1, 3, 1, 2, 8), block=4)),
    ),
    "top_k": _both(
        _sweep(lambda draw, size: compression._normal(draw, (3, size), k=min(size, 5)), "size",
               more=(*HIDDEN, *VOCABULARIES)),
        _one("index-beyond-16-bits", partial(compression._normal, shape=(2, BEYOND_16_BITS), k=9)),
        _one("rank-6", partial(compression._normal, shape=(2, 1, 3, 1, 2, 7), k=3)),
        _large("many-rows", partial(compression._normal, shape=(BEYOND_16_BITS, 2), k=1)),
        _one("zeros", _zeros_of_both_signs, statistical=False, gradient=False),
    ),
}  # fmt: skip


def with_edges(name: str, calls: Callable[[], Any]) -> Callable[[], Iterator[Call]]:
    """An oracle's own calls, then those of this module."""
    return lambda: (call for part in (calls, EDGES.get(name, tuple)) for call in part())
