"""What each operator may be called with: its factors, and how a call is made of their levels.

A factor is an option, a size or the kind of an argument's values; where arguments lie and who calls
are factors of every operator (:mod:`anychip.conformance.designs`). Fixed calls give some factors
what no level has (:mod:`.fixed`). Limits of sizes and values keep a call short and finite.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip.conformance.calls import Arguments, Draw
from anychip.conformance.choices import LARGEST, MOST_ROWS, OPEN, Choices, Classes
from anychip.conformance.oracles import drawn_lists, quantization, reference
from anychip.conformance.oracles.drawn_convolutions import LONG, conv1d, conv2d
from anychip.conformance.oracles.drawn_lists import SPECIAL, SQUARES
from anychip.conformance.oracles.drawn_permutations import index_dtype, permute, routed
from anychip.contract import OperatorSpec

Drawn = Callable[[Choices, Draw], Arguments]
_SEEDS = {
    "0": ((0, 0), (0, 1), (1, 0)), "ordinary": ((1234, 5), (42, 1000), (2**31, 3), (2**32, 7)),
    "at a carry": ((7, 2**32 - 3), (11, 2**31 - 2), (2**33 + 5, 3 * 2**32 - 1)),
    "far": ((-1, 2**40), (2**63 - 1, 2**60), (-(2**63), 2**48)),
}  # fmt: skip
_ABOVE = ("nan or infinite",)
"""Of functions whose limit at -inf formulas miss: inf times 0."""
_OPEN = (OPEN,)
"""Of sums of exponentials: inf - inf, or where nobody subtracts a maximum, inf. And of gelu:
torch's own is NaN at inf on some hosts. Values are of this kind where nothing else is said."""
_FORMS = ("none", "tanh")
_SMALL_EPS, _LARGE_EPS = (1e-3, 1e-4, 0.002, 5e-4), ((0.5, 0.1, 0.2, 0.05, 0.3, 0.7), (1.0, 2.0))
_SCALES = 2.0**8, 2.0**-8
"""Of weights after a norm: gradients may be made with the cube of a row's 1 / deviation, as torch
does. Further away, of huge rows, what is made in between is no normal number of float32."""


def _wide(choose: Choices, draw: Draw, factor: str) -> torch.dtype:
    """The dtype of an argument that may be wider."""
    return torch.float32 if choose.of(factor, False, True) else draw.dtype


def _weight_types(
    choose: Choices, *, bias: bool, residual: bool
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Of weight and bias; None is the own one. Read as if of one, the wider loses its digits."""
    wide, low = torch.float32, torch.bfloat16
    kinds: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {"the own type": (None, None)}
    if not residual:
        kinds["float32"] = (wide, wide)
    if bias:
        kinds["float32 and bfloat16"] = (wide, low)
    if bias and not choose.of_gradients:  # a gradient of the bias has the weight's digits
        kinds["bfloat16 and float32"] = (low, wide)
    return kinds[choose.of("weight in", *kinds) if len(kinds) > 1 else "the own type"]


def _norm(
    choose: Choices,
    draw: Draw,
    *,
    bias: bool,
    residual: bool = False,
    ends: tuple[str, str] = SQUARES,
) -> Arguments:
    shape = choose.shape()
    args: list[Tensor | None] = [choose.values("x", draw, *shape, ends=ends, more=SPECIAL)]
    if residual:
        wide = _wide(choose, draw, "residual in float32")
        args.append(choose.values("residual", draw, *shape, dtype=wide, ends=SQUARES))
    of_weight, of_bias = _weight_types(choose, bias=bias, residual=residual)
    args.append(choose.values("weight", draw, shape[-1], dtype=of_weight, ends=_SCALES))
    if bias:
        args.append(choose.optional("bias", draw, shape[-1], dtype=of_bias))
    small = (_SMALL_EPS, (0.01, 0.005, 0.03)) if bias or residual else ((1e-12,), (0.0,))
    classes = (1e-5, 1e-6, 1e-4), *small, *_LARGE_EPS
    eps = choose.eps(shape[-1], *classes, centred=bias)
    return tuple(args), {"eps": eps}


def _group_norm(choose: Choices, draw: Draw) -> Arguments:
    groups = choose.number("num_groups", (1,), (2,), (3, 5, 7, 6, 12), (8, 4, 16, 32, 64, 100, 257))
    batch = choose.number("batch", (2, 3, 4), (1,), (0,), (5, 8, 16, 17, 31, 64), LONG)
    most = 1000 if batch * groups < 16 else 8 if batch * groups < 600 else 2
    sizes = (1,), (2, 3), (4, 8, 15, 5, 16), (64, 250, 33, 500, 128, 1000, 300)
    channels = choose.number_up_to(most, "channels of a group", *sizes)
    width = choose.room(batch, groups * channels).size("width")
    inner = {"one": [width], "none": [], "two": [3, 7], "three": [2, 3, 4]}
    can = [len(sizes) < 2 or batch * groups * channels < 1 << 13 for sizes in inner.values()]
    shape = [batch, groups * channels, *inner[choose.of("dims", *inner, can=can)]]
    wide = _wide(choose, draw, "weight in float32")
    x = choose.values("x", draw, *shape, ends=SQUARES, more=SPECIAL)
    weight = choose.values("weight", draw, shape[1], dtype=wide, ends=_SCALES)
    bias = choose.optional("bias", draw, shape[1], dtype=wide)
    numbers = x.numel() // max(batch * groups, 1)
    eps = choose.eps(numbers, (1e-5, 1e-6), (*_SMALL_EPS, 0.01, 0.03), *_LARGE_EPS)
    return (x, weight, bias), {"num_groups": groups, "eps": eps}


def _rng(choose: Choices, draw: Draw) -> Tensor:
    return draw.rng(*choose.member("seed and offset", _SEEDS))


def _dropout(choose: Choices, draw: Draw) -> Arguments:
    shape = choose.shape()
    rows, place = _place(choose, draw, shape)
    x = choose.values("x", draw, *shape, ends=SQUARES, more=SPECIAL)
    return (x, _rng(choose, draw), rows), {"p": choose.probability(draw), **place}


def _place(
    choose: Choices, draw: Draw, shape: Sequence[int]
) -> tuple[Tensor | None, dict[str, int]]:
    """Which rows of a whole these are, from which column on, and how wide it is."""
    kind = choose.of("rows of a whole", "all", "some", "far", "in a row")
    if kind == "all":
        return None, {}
    column = choose.number("column", (0,), (1,), (4, 2, 3, 5, 8, 16), (64, 100, 500, 31, 2000))
    more = choose.number("columns behind", (0,), (1, 2, 3), (8, 16, 11, 700, 100, 3000))
    if math.prod(shape[:-1]) > 64:  # who draws in a simple way draws for all columns of the whole
        column, more = min(column, 1), min(more, 1)
    rows = draw.integers(1000, *shape[:-1]) + (2**40 if kind == "far" else 0)
    if kind == "in a row":  # whose numbers may be drawn together
        rows = torch.arange(rows.numel()).view(rows.shape) + choose.turn("first row") % 1000
    return rows, {"width": shape[-1] + column + more, "column": column}


def _bias_dropout_add(choose: Choices, draw: Draw) -> Arguments:
    shape = choose.shape()
    wide = _wide(choose, draw, "residual in float32")
    x = choose.values("x", draw, *shape, more=SPECIAL)
    residual = choose.values("residual", draw, *shape, dtype=wide, more=SPECIAL)
    bias = choose.optional("bias", draw, shape[-1])
    rows, place = _place(choose, draw, shape)
    attrs = {"p": choose.probability(draw), **place}
    return (x, residual, _rng(choose, draw), bias, rows), attrs


def _dropout_add_norm(choose: Choices, draw: Draw, *, bias: bool) -> Arguments:
    # What is kept is up to ten times as large, and the sum is stored in the residual's type.
    ends = ("root-huge", "root-tiny")
    (x, residual, weight, *last), attrs = _norm(choose, draw, bias=bias, residual=True, ends=ends)
    rows = _place(choose, draw, x.shape)[0]
    args = (x, residual, weight, _rng(choose, draw), *last, rows)
    return args, {"p": choose.probability(draw), **attrs}


def _element(
    choose: Choices, draw: Draw, *, more: tuple[str, ...] = _ABOVE, **options: tuple[Any, ...]
) -> Arguments:
    x = choose.values("x", draw, *choose.shape(), ends=SQUARES, more=more)
    return (x,), {name: choose.number(name, *classes) for name, classes in options.items()}


def _bias_gelu(choose: Choices, draw: Draw) -> Arguments:
    shape = choose.shape()
    x = choose.values("x", draw, *shape)
    args = x, choose.values("bias", draw, shape[-1])
    return args, {"approximate": choose.of("approximate", *_FORMS)}


def _gated(
    choose: Choices, draw: Draw, *, more: tuple[str, ...] = _ABOVE, **options: tuple[Any, ...]
) -> Arguments:
    shape = choose.shape()
    # An infinite factor of what is nearly 0 is infinite, or where it is flushed not a number.
    gate, up = (
        choose.values(name, draw, *shape, ends=("root-huge", "tiny"), more=kinds)
        for name, kinds in (("gate", more), ("up", _OPEN))
    )
    return (gate, up), {name: choose.of(name, *values) for name, values in options.items()}


def _broadcast(choose: Choices, factor: str, shape: list[int]) -> list[int] | None:
    """A shape that broadcasts to another one: dims of 1, dims left out; or None."""
    forms: dict[str, list[int] | None] = {
        "none": None, "whole": shape, "last": shape[-1:], "column": [*shape[-2:-1], 1],
        "one": [1], "rows": [1] * (len(shape) - 1) + shape[-1:],
        "all batches": [1, *shape[1:]], "heads": [1, *shape[1:-2], 1, shape[-1]][-len(shape):],
    }  # fmt: skip
    return forms[choose.of(factor, *forms)]


def _visible(choose: Choices, draw: Draw, factor: str, shape: Sequence[int]) -> Tensor:
    """Which keys are seen: any, or all but a run of them, in each row another.

    So do padding and windows hide them, and a kernel meets tiles without a visible key.
    """
    kinds = "some", "the first", "the last", "all but a run"
    kind = choose.of(factor, *kinds) if shape[-1] > 1 else "some"  # of one key all hide the same
    if kind == "some":
        return draw.uniform(*shape) < 0.7
    keys = shape[-1]
    key, edge = torch.arange(keys), (draw.uniform(*shape[:-1], 1) * keys).long()
    if kind == "the last":
        return key <= edge
    return (key >= edge) & (key <= edge + (keys if kind == "the first" else keys // 8))


def _softmax(choose: Choices, draw: Draw) -> Arguments:
    shape = choose.rows(high=1025)
    room = choose.room(*shape)
    shape += [room.size("queries"), room.size("keys", LARGEST)]
    x = choose.values("x", draw, *shape, ends=(60.0, 1e-4), more=_OPEN)
    of_mask = _broadcast(choose, "mask", shape)
    of_bias = _broadcast(choose, "bias", shape)
    mask = None if of_mask is None else _visible(choose, draw, "mask hides", of_mask)
    bias = None
    if of_bias:
        bias = draw.normal(*of_bias, dtype=_wide(choose, draw, "wide bias"))
        if choose.of("bias is -inf", False, True):
            bias.masked_fill_(~_visible(choose, draw, "bias hides", of_bias), -math.inf)
    scales = (
        (1.0,),
        (0.125, 0.5, 0.01, 0.1, 0.03, 0.25),
        (2.0, 1.5, 10.0, 3.0, 8.0),
        (-0.5, -1.0),
        (0.0,),
    )
    scale = choose.number("scale", *scales)
    return (x, mask, bias), {"scale": scale, "causal": choose.of("causal", False, True)}


def _heads(choose: Choices, most: int = 100, *, odd: bool = True) -> tuple[int, int, int]:
    """heads, key heads, head_dim, which may be odd; of the second at most so many."""
    kv_heads = choose.number_up_to(most, "key heads", (1,), (2,), (3, 4, 5, 8, 16, 33, 100))
    of_each = 2 if kv_heads > 9 else 16 if most > 8 else 4
    groups = choose.number_up_to(of_each, "heads of a key head", (1,), (2, 3, 4, 5, 8, 16))
    others = (33, 40, 7, 24, 80, 65, 48, 1, 112) if odd else (40, 24, 80, 48, 112)
    dims = (8, 4), (2,), (16, 32), others, (64, 96, 128, 256, 192)
    dim = choose.number_up_to(256 if kv_heads * groups < 17 else 16, "head_dim", *dims)
    return kv_heads * groups, kv_heads, dim


def _rope(choose: Choices, draw: Draw) -> Arguments:
    heads, kv_heads, dim = _heads(choose, odd=False)
    most = max((1 << 14) // (heads * dim), 1)
    batch = choose.number_up_to(most, "batch", (1,), (2,), (3, 4, 5, 8, 16, 20, 33), (0,), LONG)
    length = choose.room(batch, heads, dim).size("length", none=True)
    half = max(dim // choose.of("rotated", 1, 2, 4), 2) // 2
    q, k = (
        choose.values(name, draw, batch, length, count, dim, more=SPECIAL)
        for name, count in (("q", heads), ("k", kv_heads))
    )
    angle = draw.uniform(length, half, low=-math.pi, high=math.pi)
    times = choose.number("cos and sin times", (1.0,), (1.25, 0.5, 20.0))  # as YaRN scales scores
    interleaved = choose.of("interleaved", False, True)
    return (q, k, angle.cos() * times, angle.sin() * times), {"interleaved": interleaved}


def _score_attrs(choose: Choices, *, dropout: bool = False) -> dict[str, Any]:
    far = 1.0, -0.5, 2.0, -1.0, 0.5
    attrs = {
        "causal": choose.of("causal", True, False),
        "scale": choose.number("scale", (None,), (0.05, 0.1, 0.25, 0.01, 0.125), far, (0.0,)),
    }
    return attrs if dropout else {**attrs, "out_dtype": _out_dtype(choose)}


def _out_dtype(choose: Choices) -> torch.dtype | None:
    return choose.of("out_dtype", None, torch.float32)


def _attended(choose: Choices, draw: Draw, factor: str, *shape: int) -> Tensor:
    """Of any kind, scores beyond what exp takes (88) among them; in float16 normal ones. What a
    kernel may store in between in the tensors' type, such as weights after their normalisation and
    the gradients of one block of queries, would there be subnormal numbers or infinite ones, for
    which the oracle's bound does not allow. A gradient may skip a query that is NaN for keys that
    it does not see, or multiply it by 0.
    """
    ends = ("root-huge", "root-tiny") if factor == "v" else (12.0, 2.0**-12)
    more = _OPEN if factor == "q" and not choose.of_gradients else ()
    values = choose.values(factor, draw, *shape, ends=ends, more=more)
    return draw.normal(*shape) if draw.dtype == torch.float16 else values


_WHOLE = (150, 257, 300), (1000, 512)
"""Positions, heads and batches of what attention's dropout is a part of."""
_SCORES = (1 << 11,) * 7 + (1 << 14,)
"""So many scores a call has: of each a head takes a product, and a mask."""
_NUMBERS = 1 << 19
"""And so many elements queries and keys, but where the heads of one position have more."""


def _attention(choose: Choices, draw: Draw, *, dropout: bool = False) -> Arguments:
    heads, kv_heads, dim = _heads(choose, 8 if dropout else 100)
    scores = _SCORES[0 if dropout else choose.turn("scores") % len(_SCORES)]
    most = max(min(_SCORES[0] // heads, 8 if dropout else _SCORES[0]), 1)
    batch = choose.number_up_to(most, "batch", (1,), (2, 3, 4, 8, 16, 33), (0,), LONG)
    room, cross = choose.room(batch, heads, elements=scores), choose.of("cross", False, True)
    long = max(min(_NUMBERS // max(batch * heads * dim, 1), 2000), 1)
    queries = room.size("queries", long if cross else min(long, math.isqrt(room.left)), none=True)
    keys = room.size("keys", long, none=True) if cross else queries
    shapes = {"q": (queries, heads), "k": (keys, kv_heads), "v": (keys, kv_heads)}
    args = [
        _attended(choose, draw, name, batch, length, count, dim)
        for name, (length, count) in shapes.items()
    ]
    attrs = _score_attrs(choose, dropout=dropout)
    if not (attrs["causal"] or dropout or choose.of_gradients):
        # What a query does not see, or what is dropped, may be multiplied by 0, or left out.
        choose.spoil(k=args[1], v=args[2])
    if dropout:
        whole = max(choose.number("whole", *_WHOLE), batch, heads, queries, keys)
        index = [
            draw.integers(whole, n) if choose.of(f"{name} of a whole", False, True) else None
            for name, n in zip(("batch", "heads", "queries", "keys"), (batch, heads, queries, keys),
                               strict=True)
        ]  # fmt: skip
        sizes = zip(("heads", "queries", "keys"), index[1:], strict=True)
        attrs |= {"p": choose.probability(draw)} | {n: whole for n, at in sizes if at is not None}
        return (*args, _rng(choose, draw), *index), attrs
    return tuple(args), attrs


_LENGTHS: Classes = {
    "three": ((5, 3, 9),), "no group": ((),),
    "one": ((17,), (4,), (16,), (2,), (130,), (1,), (8,), (260,)),
    "an empty one first": ((0, 7, 4),), "an empty one last": ((7, 4, 0),),
    "empty ones between": ((5, 0, 0, 3), (5, 0, 8)), "only empty ones": ((0, 0), (0,)),
    "of one each": ((1,) * 7, (1,) * 2, (1,) * 33, (1,) * 16),
    "beside tiles": ((63, 65), (31, 33), (15, 17)), "two": ((16, 32), (8, 8), (2, 6), (100, 3)),
    "many": ((2, 1, 3) * 9, (0, 2, 1, 1) * 4, (0, 0, 1) * 7, (4, 8, 12, 16) * 2),
}  # fmt: skip


def _ends(
    choose: Choices, factor: str, count: int | None = None, **more: tuple[tuple[int, ...], ...]
) -> Tensor:
    """Ends of groups, empty ones among them; of so many, if their number is given."""
    lengths = choose.member(factor, {**_LENGTHS, **more})
    if count is not None:
        lengths = tuple((*lengths, 4, 0, 6) * count)[:count]
    return torch.tensor(lengths, dtype=torch.int64).cumsum(0)


def _attention_varlen(choose: Choices, draw: Draw) -> Arguments:
    heads, kv_heads, dim = _heads(choose, 16)
    of_queries = of_keys = _ends(choose, "lengths")
    if choose.of("cross", False, True):
        of_keys = _ends(choose, "lengths of keys", len(of_queries))
    ends = [
        torch.cat((t.new_zeros(1), t)).to(index_dtype(choose, f"dtype of {what} ends"))
        for what, t in (("query", of_queries), ("key", of_keys))
    ]
    padding = choose.number("padding", (0,), (1, 2, 3), (5, 8, 16))
    more = [padding * (choose.turn("padded") % 3 != side) for side in (1, 2)]  # of both, or of one
    shapes = {"q": (0, heads), "k": (1, kv_heads), "v": (1, kv_heads)}
    args = [
        _attended(choose, draw, name, int(ends[which][-1]) + more[which], count, dim)
        for name, (which, count) in shapes.items()
    ]
    # Whatever padding holds; not where two may be one tensor, and what pads one is the other's.
    is_apart = args[0].shape != args[1].shape or ends[0][-1] == ends[1][-1]
    for tensor, (which, _) in zip(args, shapes.values(), strict=True):
        tensor[int(ends[which][-1]) :] = math.nan if is_apart else 0.0
    return (*args, *ends), _score_attrs(choose)


_PRODUCTS: Classes = {
    "of any sizes": ((),),
    "large": ((224, 208, 192), (131, 259, 257), (1161, 33, 264)),
}
"""Large: of tiles and panels, of whole ones and not; over 2^23 products, once over 2^16 weights,
once of more than 8 tiles of rows."""


def _product(choose: Choices, last: str, **options: bool) -> tuple[list[int], int, int]:
    """Rows, inputs and the last size of a weight, which are small or a large product's."""
    if large := choose.member("product", _PRODUCTS, sparing=True):
        return [large[0]], large[1], large[2]
    shape = choose.rows(high=MOST_ROWS)
    inputs = choose.room(*shape).size("inputs", none=True)
    return shape, inputs, choose.room(max(inputs, math.prod(shape))).size(last, **options)


def _linear(choose: Choices, draw: Draw) -> Arguments:
    rows, inputs, outputs = _product(choose, "outputs", none=True)
    x = choose.values("x", draw, *rows, inputs, more=SPECIAL, added=True)
    weight = choose.values("weight", draw, outputs, inputs, more=SPECIAL)
    bias = choose.optional("bias", draw, outputs, added=True)
    return (x, weight, bias), {"out_dtype": _out_dtype(choose)}


def _grouped_linear(choose: Choices, draw: Draw) -> Arguments:
    offsets = _ends(choose, "lengths", large=((300, 5, 310, 16), (2048,), (5, 1000))).to(
        index_dtype(choose, "dtype of offsets")
    )
    last = int(offsets[-1]) if len(offsets) else 0
    rows = last + choose.of("rows of no group", 0, 1, 5)
    room = choose.room(max(rows, len(offsets)))
    inputs = room.size("inputs", none=True)
    outputs = choose.room(max(rows, inputs * len(offsets))).size("outputs", none=True)
    x = choose.values("x", draw, rows, inputs)
    x[last:] = math.nan  # of no group
    weight = choose.values("weight", draw, len(offsets), outputs, inputs)
    return (x, weight, offsets), {"out_dtype": _out_dtype(choose)}


def _unpermute(choose: Choices, draw: Draw) -> Arguments:
    tokens, choices, width = routed(choose)
    ascending = torch.arange(tokens * choices)
    orders = {"any": draw.uniform(tokens * choices).argsort(), "ascending": ascending,
              "descending": ascending.flip(0)}  # fmt: skip
    row_map = orders[choose.of("row_map", *orders)].view(tokens, choices)
    dtype = _wide(choose, draw, "weights in float32")
    weights = choose.optional("weights", draw, tokens, choices, dtype=dtype)
    return (choose.values("x", draw, tokens * choices, width), row_map, weights), {}


def _embedding(choose: Choices, draw: Draw) -> Arguments:
    shape = choose.rows(high=MOST_ROWS)
    count = choose.room().size("count")
    width = choose.room(max(count, math.prod(shape))).size("width", none=True)
    kind = choose.of("indices", "any", "equal", "ends", "ascending")
    indices = draw.integers(count, *shape)
    if kind == "equal":
        indices = torch.full_like(indices, choose.turn("equal indices") % count)
    elif kind == "ends":
        indices = draw.integers(2, *shape) * (count - 1)
    elif kind == "ascending":
        indices = (torch.arange(indices.numel()) % count).view(shape)
    return (indices, choose.values("weight", draw, count, width, more=SPECIAL)), {}


def _loss_attrs(choose: Choices) -> dict[str, Any]:
    return {
        "ignore_index": choose.number(
            "ignore_index",
            (-100,),
            (0,),
            (-1, -99, -(1 << 32), -2, -1000),
            (1, 2, 3, 4, 8, 50, 16, 100, 255),
        ),
        "label_smoothing": choose.number(
            "label_smoothing", (0.0,), (0.1, 0.05, 0.3, 0.01, 0.2, 0.5), (1.0,)
        ),
        "z_loss": choose.number("z_loss", (0.0,), (1e-3, 1e-4, 0.1, 1e-5, 0.01), (1.0, 0.5, 2.0)),
        "reduction": choose.of("reduction", "mean", "sum", "none"),
    }


def _targets(choose: Choices, draw: Draw, classes: int, rows: list[int], ignore: int) -> Tensor:
    kinds = {"first": 0, "last": classes - 1, "equal": choose.turn("equal targets") % classes}
    kind = choose.of("target", "any", "some ignored", "all ignored", *kinds)
    target = draw.integers(classes, *rows)
    if kind in kinds:
        target = torch.full_like(target, kinds[kind])
    if kind.endswith("ignored"):
        target.reshape(-1)[:: 1 if kind == "all ignored" else 2] = ignore
        choose.hides("target", kind == "all ignored")
    return target


def _cross_entropy(choose: Choices, draw: Draw) -> Arguments:
    rows, attrs = choose.rows(high=MOST_ROWS), _loss_attrs(choose)
    classes = choose.room(*rows).size("classes")
    target = _targets(choose, draw, classes, rows, attrs["ignore_index"])
    logits = choose.values("logits", draw, *rows, classes, ends=(60.0, 1e-4), more=_OPEN)
    return (logits, target), attrs


def _linear_cross_entropy(choose: Choices, draw: Draw) -> Arguments:
    (rows, inputs, classes), attrs = _product(choose, "classes"), _loss_attrs(choose)
    if draw.dtype == torch.float16:  # which may hold gradients of logits: of these, z_loss * logit
        attrs["z_loss"] = min(attrs["z_loss"], 1e-3)
    target = _targets(choose, draw, classes, rows, attrs["ignore_index"])
    weight = choose.values("weight", draw, classes, inputs, ends=None) * 0.125
    bias = choose.optional("bias", draw, classes, ends=None)
    x = choose.values("x", draw, *rows, inputs, ends=None)
    return (x, weight, target, bias), attrs


def _linear_cross_entropy_partials(choose: Choices, draw: Draw) -> Arguments:
    rows, inputs, classes = _product(choose, "classes")
    weight = choose.values("weight", draw, classes, inputs, ends=None) * 0.125
    bias = choose.optional("bias", draw, classes, ends=None)
    first = {"none": (0,), "one": (1,), "a part": (classes,), "two parts": (2 * classes,)}
    start = choose.member("first", first)
    # Among all classes of three parts.
    where = {"own": (start,), "first": (0,), "second": (classes,), "third": (2 * classes,)}
    target = draw.integers(classes, *rows) + choose.member("target", where)
    x = choose.values("x", draw, *rows, inputs, ends=None)
    return (x, weight, target, bias), {"first": start}


def _quantize(choose: Choices, draw: Draw) -> Arguments:
    x = choose.values("x", draw, *choose.shape(), ends=SQUARES, more=SPECIAL)
    attrs = _coding(choose)
    is_random = choose.of("random", False, True) and attrs["format"] in ("int8", "int4")
    return (x, _rng(choose, draw) if is_random else None), attrs


_LARGE = (5000, 4096, 1000, 1024, 2048)


def _coding(choose: Choices) -> dict[str, Any]:
    format = choose.of("format", *quantization.FORMATS)
    block = choose.number(
        "block", (32, 16), (1, 2), (3, 5, 7), (64, 128), (256, 512), (5000, 4096, 1000, 1024, 2048)
    )
    return {"format": format, "block": 32 if format.startswith("mx_") else block}


def _dequantize(choose: Choices, draw: Draw) -> Arguments:
    (codes, scales), attrs = quantization.coded(draw, tuple(choose.shape()), **_coding(choose))
    is_exponent = scales.dtype == torch.uint8
    kinds = {"ordinary": 1, "some 0": 0, "some NaN": 255 if is_exponent else math.nan}
    kind = choose.of("scales", *kinds, can=(True, not is_exponent, True))
    choose.hides("scales", kind == "some NaN")
    if kind != "ordinary":  # of blocks of zeros, or with what is not finite
        scales[choose.turn("scales") % 2 :: 2] = kinds[kind]
    return (codes, scales), attrs


def _hadamard(choose: Choices, draw: Draw) -> Arguments:
    rows, whole = choose.rows(), choose.of("whole", True, False)
    block = 2 ** choose.number("block", (3,), (0,), (1,), (2,), (5, 4, 6), (8, 7, 9), (10, 11))
    last = block if whole else block * choose.number("blocks", (2,), (1,), (3, 5))
    x = choose.values("x", draw, *rows, last, more=SPECIAL)
    return (x,), {"block": None if whole else block}


def _top_k(choose: Choices, draw: Draw) -> Arguments:
    # Of gradients an infinity would stand for NaN, and among those is chosen by their place.
    x = choose.values("x", draw, *choose.shape(), more=() if choose.of_gradients else SPECIAL)
    last = x.shape[-1]
    few, many = 2 + choose.turn("few") % 8, 10 + choose.turn("many") % 40
    count = {"one": min(1, last), "all": last, "half": last // 2, "few": min(few, last), "none": 0,
             "many": min(many, last)}  # fmt: skip
    return (x,), {"k": count[choose.of("k", *count)]}


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
    "gelu": partial(_element, more=_OPEN, approximate=(("none",), ("tanh",))),
    **dict.fromkeys(("silu", "relu", "relu2", "sigmoid", "tanh"), _element),
    "softplus": partial(
        _element,
        beta=((1.0,), (2.0, 1.5, 10.0, 3.0, 5.0, 20.0), (0.5, 0.1, 0.2, 0.25)),
        threshold=((20.0, 10.0, 30.0), (1.0, 0.5, 2.0, 5.0), (90.0, 200.0), (0.01, 0.1, 0.0, 0.2)),
    ),
    "bias_gelu": _bias_gelu,
    "swiglu": _gated,
    "geglu": partial(_gated, more=_OPEN, approximate=_FORMS),
    "softmax": _softmax,
    "rope": _rope,
    "attention": _attention,
    "attention_dropout": partial(_attention, dropout=True),
    "attention_varlen": _attention_varlen,
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "conv1d": conv1d,
    "conv2d": conv2d,
    "permute": permute,
    "unpermute": _unpermute,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_partials": _linear_cross_entropy_partials,
    **drawn_lists.DRAWN,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "hadamard": _hadamard,
    "top_k": _top_k,
}


def drawn_of(spec: OperatorSpec) -> Drawn:
    """How calls of an operator are made; of anybody else's operator one of its samples."""
    if spec.namespace == "anychip" and spec.name in DRAWN:
        return DRAWN[spec.name]
    return partial(reference.drawn, spec)
