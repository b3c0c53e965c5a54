"""What every operator may get wrong: sizes next to those of a machine, index types, rare numbers.

The sizes are those of :mod:`.sweeps`. What is particular to one operator stands with its oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    varlen,
)
from anychip.conformance.oracles.sweeps import (
    BEYOND_16_BITS,
    HIDDEN,
    MANY,
    QUICK,
    VOCABULARIES,
    WIDTHS,
    Edges,
    Make,
    at,
    both,
    large,
    named,
    one,
    sweep,
)

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

    return both(
        sweep(sized, "hidden", more=HIDDEN, quick=(*QUICK, *WIDTHS)),
        one("rank-6", shaped(2, 1, 3, 1, 5, 7)),
        large("300x260", shaped(300, 260)),
        one("one-row", shaped(1, 40)),
        one("no-row", shaped(40)),
        large("many-rows", shaped(BEYOND_16_BITS, 2), statistical=False),
    )


def _elements(make: Callable[[Draw, tuple[int, ...]], Arguments], *, slow: bool = False) -> Edges:
    """Of an operator that goes from element to element."""
    return both(
        sweep(lambda draw, size: make(draw, (size,)), "size", more=HIDDEN),
        one("rank-6", lambda draw: make(draw, (2, 1, 3, 2, 1, 5))),
        large("beyond-16-bits", lambda draw: make(draw, (BEYOND_16_BITS,)), full=slow),
        large("many-rows", lambda draw: make(draw, (BEYOND_16_BITS, 1)), full=True),
    )


def _activation(make: Callable[..., Arguments], **attrs: Any) -> Edges:
    def shaped(draw: Draw, shape: tuple[int, ...]) -> Arguments:
        return make(draw, partial(activation._random, shape=shape), **attrs)

    def numbers(draw: Draw, kind: str) -> Arguments:
        return make(draw, lambda draw: draw.normal(400, scale=kind), **attrs)

    return both(
        _elements(shaped, slow=attrs.get("approximate") == "none"),
        one("tiny", partial(numbers, kind="tiny"), statistical=False),
    )


def _special(make: Make, *changes: tuple[int, Any, Any], label: str = "special") -> Edges:
    return lambda: iter([special(label, make, *changes)])


def _by_form(make: Callable[..., Arguments]) -> Edges:
    forms = activation.GELU_FORMS.items()
    return both(*(named(_activation(make, **attrs), name) for name, attrs in forms))


# Scores


def _attention(draw: Draw, size: int, **changes: Any) -> Arguments:
    return attention._attend(draw, (1, size, 2, 1, 8), causal=True, **changes)


def _head_dim(draw: Draw, size: int) -> Arguments:
    return attention._attend(draw, (1, 5, 2, 1, size), causal=True)


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


def _varlen(draw: Draw, size: int) -> Arguments:
    return varlen._packed(draw, ((size, 3), 1), causal=True, heads=(2, 1), dim=8)


def _many_batches(make: Callable[..., Arguments]) -> Edges:
    """More batches than a grid's third dimension has blocks."""
    return one("many-batches", lambda draw: make(draw, (66_000, 1, 1, 1, 2)), full=True)


# Products


def _inputs(draw: Draw, size: int) -> Arguments:
    return linear._product(draw, (3,), size, 5, bias=True)


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
    return both(
        large("many-tensors", made, statistical=False, full=many_full),
        one("1100-tensors", partial(made, count=1100), statistical=False, full=True),
        one("empty-tensors", partial(_empty_step, averages=averages, **attrs)),
        one("special", special, statistical=False),
        one("mixed", partial(_mixed_step, averages=averages, **attrs), statistical=False),
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

    return both(
        large("many-tensors", call(_many), statistical=False),
        one("1100-tensors", call(partial(_many, count=1100)), statistical=False, full=True),
        one("empty-tensors", call(lambda draw: [draw.normal(0), draw.normal(2, 0)])),
        one("mixed", call(_mixed), statistical=False),
        sweep(
            lambda draw, size: call(lambda draw: [draw.normal(size), draw.normal(3)])(draw),
            "size",
            more=HIDDEN,
        ),
    )


def _large_gradients(draw: Draw, scale: float) -> Arguments:
    """Finite, and near the largest number of the type; without a scale below 1 not any more."""
    grads = [draw.normal(9), torch.full((5,), draw.format.largest / 4).to(draw.dtype)]
    return (grads, draw.scalar(scale), draw.scalar(0.0)), {}


_SGD: dict[str, Any] = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.1, "decoupled": False}
_LION: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
_ADAMW: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def _lamb_edges(take: Callable[[tuple[Any, ...]], tuple[Any, ...]], **more: Any) -> Edges:
    """take: its arguments out of adamw's; more: its other attributes."""

    def step(draw: Draw, **options: Any) -> Arguments:
        args, attrs = _list_step(draw, averages=2, **options, **_ADAMW)
        return take(args), {**attrs, **more}

    return both(
        large("many-tensors", step, statistical=False, full=True),
        one("1100-tensors", partial(step, count=1100), statistical=False, full=True),
    )


def _quantized(draw: Draw, shape: tuple[int, ...], format: str) -> Arguments:
    is_random = len(shape) > 1 and format.startswith("int")
    return quantization.arguments(draw, shape, format, offset=3 if is_random else None)


def _by_format(make: Callable[..., Arguments]) -> Edges:
    """The formats of one byte, then those of half a byte; of each kind of value one."""
    chosen = ("int8", "int4", "mx_e4m3", "nf4")
    each = {name: _elements(partial(make, format=name), slow=name != "int8") for name in chosen}
    return both(*(named(edges, name) for name, edges in each.items()))


EDGES: Mapping[str, Edges] = {
    "rms_norm": _norm_edges(bias=False, residual=False),
    "layer_norm": _norm_edges(bias=True, residual=False),
    "group_norm": both(
        sweep(lambda d, n: norm._in_groups(d, (2, n, 3), 1), "channels", top=513),
        sweep(lambda d, n: norm._in_groups(d, (2, 4, n), 2), "numbers", quick=(63, 65, 768)),
        one("rank-6", partial(norm._in_groups, shape=(2, 6, 3, 1, 5, 7), num_groups=3)),
        large("many-rows", partial(norm._in_groups, shape=(BEYOND_16_BITS, 2), num_groups=1),
               statistical=False),
    ),
    "add_rms_norm": _norm_edges(bias=False, residual=True),
    "add_layer_norm": _norm_edges(bias=True, residual=True),
    "dropout": _elements(partial(dropout._arguments, p=0.2)),
    "bias_dropout_add": _elements(partial(dropout._add_arguments, p=0.2)),
    "dropout_add_rms_norm": _norm_edges(bias=False, residual=True, dropped=True),
    "dropout_add_layer_norm": _norm_edges(bias=True, residual=True, dropped=True),
    "gelu": _by_form(activation._one_argument),
    **{name: _activation(activation._one_argument)
       for name in ("silu", "relu", "relu2", "sigmoid", "tanh")},
    "softplus": _activation(activation._one_argument, **activation.SOFTPLUS_FORMS["beta:1"]),
    "bias_gelu": _by_form(activation._bias_gelu_arguments),
    "swiglu": _activation(activation._swiglu_arguments),
    "geglu": _by_form(activation._geglu_arguments),
    "softmax": both(
        sweep(lambda d, n: softmax._plain(d, (3, n)),
              "keys", more=(*HIDDEN, *VOCABULARIES), quick=(*QUICK, *WIDTHS)),
        one("rank-6", partial(softmax._plain, shape=(2, 1, 2, 1, 3, 7))),
        large("300x260", partial(softmax._plain, shape=(300, 260))),
        # mask, bias and the triangle beyond the first 1024 keys
        large("2x3x40x1100.everything", partial(softmax._everything, shape=(2, 3, 40, 1100))),
        *(one(f"far.{name}", partial(_far_softmax, causal=name == "causal"), statistical=False,
               gradient=False) for name in ("masked", "causal")),
        one("scale:0", partial(softmax._plain, shape=(4, 9), scale=0.0)),
        large("many-rows", partial(softmax._plain, shape=(BEYOND_16_BITS, 2)), statistical=False),
    ),
    "rope": both(
        sweep(lambda d, n: rope._rope_arguments(d, (1, n, 2, 1, 8), interleaved=n % 2 == 1),
              "length"),
        sweep(lambda d, n: rope._rope_arguments(d, (1, 5, 2, 1, n), interleaved=n % 3 == 0),
              "head_dim", quick=(96, 256), top=0, more=(80, 160, 192, 320, 512)),
        _special(partial(rope._rope_arguments, sizes=(1, 5, 2, 1, 8), interleaved=False),
                 (0, (0, 1, 0, 2), math.nan), (0, (0, 3, 1, 5), math.inf),
                 (1, (0, 4, 0, 0), -math.inf)),
        _many_batches(partial(rope._rope_arguments, interleaved=False)),
    ),
    "attention": both(
        sweep(_attention, "length", top=1025, more=(2048,)),
        sweep(_head_dim, "head_dim", top=257, quick=(*QUICK, 96, 192)),
        one("far", _far(partial(_attention, size=9)), statistical=False, gradient=False),
        one("scale:0", partial(_attention, size=9, scale=0.0)),
        one("16of4096", partial(attention._cross, lengths=(16, 4096), causal=True), full=True),
        one("4096of16", partial(attention._cross, lengths=(4096, 16), causal=False), full=True),
        _many_batches(partial(attention._attend, causal=True)),
    ),
    "attention_dropout": both(
        sweep(lambda d, n: attention._dropped(d, partial(_attention, size=n), p=0.2),
              "length", top=513),
        sweep(lambda d, n: attention._dropped(d, partial(_head_dim, size=n), p=0.2),
              "head_dim", top=257, quick=(96,)),
    ),
    "attention_varlen": both(
        sweep(_varlen, "length", top=1025),
        sweep(lambda d, n: varlen._packed(d, ((3, 5), 1), causal=True, heads=(2, 1), dim=n),
              "head_dim", top=257, quick=(96,)),
        one("far", _far(partial(_varlen, size=9)), statistical=False, gradient=False),
        one("150-sequences", partial(varlen._packed, packing=((1, 2, 0) * 50, 1), causal=True,
                                      heads=(2, 1), dim=8)),
    ),
    "linear": both(
        sweep(_inputs, "inputs", more=(*HIDDEN, 1027), quick=(*QUICK, *WIDTHS)),
        one("inputs:259", partial(at, _inputs, 259)),
        sweep(lambda d, n: linear._product(d, (3,), 6, n, bias=True),
              "outputs", top=1025, more=VOCABULARIES, quick=(*QUICK, *WIDTHS)),
        sweep(lambda d, n: linear._product(d, (n,), 6, 5, bias=True), "rows", top=1025),
        one("tiles", partial(linear._product, rows=(130,), inputs=136, outputs=132, bias=True)),
        one("one-row", partial(linear._product, rows=(1,), inputs=1000, outputs=30, bias=True)),
        one("one-output", partial(linear._product, rows=(5,), inputs=257, outputs=1, bias=True)),
        one("no-input", partial(linear._product, rows=(3,), inputs=0, outputs=5, bias=True)),
        one("no-output", partial(linear._product, rows=(3,), inputs=5, outputs=0, bias=True)),
        one("rank-6", partial(linear._product, rows=(2, 1, 3, 1, 2), inputs=6, outputs=5,
                               bias=True)),
        large("many-rows", partial(linear._product, rows=(BEYOND_16_BITS,), inputs=2, outputs=2,
                                  bias=True), full=True),
        _special(partial(linear._product, rows=(4,), inputs=24, outputs=5, bias=True),
                 (0, (1, 3), math.inf), (1, (2, 7), -math.inf), (2, 4, math.nan)),
    ),
    "grouped_linear": both(
        sweep(lambda d, n: grouped._grouped(d, ((n, 2), 1, 6, 5)), "rows", top=1025),
        sweep(lambda d, n: grouped._grouped(d, ((3, 2), 1, n, 5)),
              "inputs", more=HIDDEN, quick=(*QUICK, *WIDTHS)),
        one("tiles", partial(grouped._grouped, sizes=((70, 66), 1, 96, 130))),
        # More than a table of sizes in a kernel's constant memory has entries.
        one("150-groups", partial(grouped._grouped, sizes=((1, 0, 2) * 50, 1, 4, 3))),
    ),
    "conv1d": both(
        sweep(lambda d, n: convolution._line(d, (2, 3, n), 4), "length"),
        sweep(lambda d, n: convolution._line(d, (2, 3, 70), n),
              "kernel", top=129, quick=(2, 3, 5, 64)),
        large("many-channels", partial(convolution._line, shape=(1, BEYOND_16_BITS, 2), kernel=2)),
        large("many-rows", partial(convolution._line, shape=(BEYOND_16_BITS, 1, 2), kernel=2)),
    ),
    "conv2d": both(
        sweep(lambda d, n: convolution._image(d, (1, 2, 3, n), (2, 2, 3, 3), padding=1,
                                              stride=[1, 2]), "width", top=1025),
        sweep(lambda d, n: convolution._image(d, (1, n, 4, 3), (3, n, 2, 2)),
              "inputs", top=513, quick=(16, 65, 96)),
        sweep(lambda d, n: convolution._image(d, (2, 3, 4, 3), (n, 3, 2, 2)),
              "outputs", top=513, quick=(16, 65, 96)),
        one("tiles", partial(convolution._image, shape=(2, 40, 18, 18), kernel=(72, 40, 3, 3),
                              padding=1)),
        large("many-rows", partial(convolution._image, shape=(BEYOND_16_BITS, 1, 2, 1),
                                    kernel=(1, 1, 2, 1)), full=True),
    ),
    "permute": both(
        sweep(lambda d, n: permutation._permuted(d, (5, 2, 3, n)), "hidden", more=HIDDEN),
        large("many-tokens", partial(permutation._permuted, sizes=(BEYOND_16_BITS, 1, 3, 1))),
    ),
    "unpermute": both(
        sweep(lambda d, n: permutation._unpermuted(d, (4, 2, n)), "hidden", more=HIDDEN),
        large("many-tokens", partial(permutation._unpermuted, sizes=(BEYOND_16_BITS, 1, 1))),
    ),
    "embedding": both(
        sweep(lambda draw, size: linear._lookup(draw, (7,), 9, size), "width", more=HIDDEN),
        large("row-beyond-16-bits", partial(_lookup, count=BEYOND_16_BITS, width=1)),
        large("many-indices", partial(linear._lookup, shape=(BEYOND_16_BITS,), count=9, width=1)),
        one("rank-5", partial(linear._lookup, shape=(2, 1, 2, 1, 3), count=9, width=4)),
        *(one(f"of:{count}x8", partial(_lookup, count=count, width=8), full=True)
          for count in VOCABULARIES),
        one("zeros", changed(lambda d: ((torch.tensor([2, 3, 5, 2]), d.normal(6, 10)), {}),
                             (1, 2, -0.0), (1, (3, 4), -0.0)), statistical=False),
    ),
    "cross_entropy": both(
        sweep(lambda d, n: loss._arguments(d, (3, n)), "classes"),
        large("class-beyond-16-bits", partial(at, _far_classes, BEYOND_16_BITS)),
        large("tiles", partial(loss._arguments, shape=(70, 1030))),
        one("rank-6", partial(loss._arguments, shape=(2, 1, 3, 1, 2, 5))),
        one("ignored:2p32", _ignored_class),
        # A target that a mask has ruled out: the loss is infinite, and says so.
        _special(loss._masked, (1, 2, 30), label="impossible"),
        large("many-rows", partial(loss._arguments, shape=(BEYOND_16_BITS, 2), reduction="none"),
             statistical=False),
    ),
    "linear_cross_entropy": both(
        sweep(lambda d, n: linear_cross_entropy._arguments(d, ((3,), 5, n), bias=True),
              "classes", top=2049),
        large("class-beyond-16-bits", partial(at, _far_linear_classes, BEYOND_16_BITS)),
        one("tiles", partial(linear_cross_entropy._arguments, sizes=((70,), 72, 130), bias=True)),
        one("rank-6", partial(linear_cross_entropy._arguments, sizes=((2, 1, 3, 1, 2), 6, 7))),
        one("class-of-152064", partial(at, _far_linear_classes, 152_064), full=True),
    ),
    "linear_cross_entropy_partials": sweep(linear_cross_entropy._part_of, "classes", top=2049),
    "l2_norm": _list(),
    "l2_norm_partials": _list(offsets=None, sizes=None, block=16),
    "clip": _list(lambda draw: draw.scalar(3.0), max_norm=1.0),
    "unscale_and_check": both(
        _list(lambda draw: draw.scalar(8.0), lambda draw: draw.scalar(0.0)),
        one("large", partial(_large_gradients, scale=2.0), statistical=False),
        one("overflow", partial(_large_gradients, scale=0.125), statistical=False),
    ),
    "adamw": _steps(averages=2, **_ADAMW),
    "adamw_8bit": lambda: adamw_8bit.with_codes(
        _steps(averages=2, many_full=True, **_ADAMW)()
    ),
    "sgd": _steps(averages=1, **_SGD),
    # sign(NaN) is NaN in some libraries and 0 in others.
    "lion": _steps(averages=1, nan=math.inf, **_LION),
    "lamb": _lamb_edges(lambda args: (*args, None)),
    "lamb_partials": _lamb_edges(
        lambda args: (*args[:4], *args[5:8]), offsets=None, sizes=None, block=16
    ),
    "quantize": _by_format(_quantized),
    "dequantize": _by_format(quantization.coded),
    "hadamard": both(
        large("beyond-16-bits", partial(compression._normal, shape=(BEYOND_16_BITS, 2), block=2)),
        one("rank-6", partial(compression._normal, shape=(2, 1, 3, 1, 2, 8), block=4)),
    ),
    "top_k": both(
        sweep(lambda draw, size: compression._normal(draw, (3, size), k=min(size, 5)), "size",
               more=(*HIDDEN, *VOCABULARIES)),
        one("index-beyond-16-bits", partial(compression._normal, shape=(2, BEYOND_16_BITS), k=9)),
        one("rank-6", partial(compression._normal, shape=(2, 1, 3, 1, 2, 7), k=3)),
        large("many-rows", partial(compression._normal, shape=(BEYOND_16_BITS, 2), k=1)),
        one("zeros", lambda d: ((_ZEROS.to(d.dtype),), {"k": 4}), statistical=False,
            gradient=False),
    ),
}  # fmt: skip


def with_edges(name: str, calls: Callable[[], Any]) -> Callable[[], tuple[Call, ...]]:
    """An oracle's own calls, then those of this module; made once, for every rule asks for them."""
    return cache(lambda: (*calls(), *EDGES[name]()))
