"""Which calls of an operator are made whatever its design: points that no class of a factor holds.

What tells precisions apart, at lengths where one class lower must fail; what an index of 16 bits
does not hold, and tiles in all dims at once; vocabularies of models; long lists. A call is made
like those of a design (:mod:`.drawn`): some factors have what is given here, all others their first
level. ``PLAIN`` are small calls of ordinary numbers, for rules that do not depend on the values.

65,536 and 32,768 are where an index of 16 bits ends, and a grid's second and third dimension; 110
and 256 where multi-tensor kernels start another launch.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from anychip.conformance.calls import Arguments, Call, Draw, Layouts
from anychip.conformance.choices import Given
from anychip.conformance.oracles import fixed_values as values
from anychip.conformance.oracles import quantization
from anychip.conformance.oracles.drawn import DRAWN

BEYOND_16_BITS = 70_001
VOCABULARY = 152_064
WIDE = {"out_dtype": torch.float32}


class Point(NamedTuple):
    """Of an operator's factors, and how it is asked.

    Attributes:
        label: part of the case's id.
        change: of the arguments, in place: what no factor says.
        layout: how all tensors of floats lie, or some by name.
        statistical: the statistical limits hold, if all values are ordinary.
    """

    label: str
    given: Mapping[str, object]
    change: Callable[..., None] | None = None
    telling: bool = False
    full: bool = False
    full_in_16_bits: bool = False
    statistical: bool = True
    gradient: bool = True
    one_sign: bool = False
    layout: Layouts = "contiguous"

    def call(self, operator: str) -> Call:
        """The call of an operator."""
        choose = Given(self.given)
        return Call(
            self.label,
            partial(_made, operator, self),
            telling=self.telling,
            full=self.full,
            full_in_16_bits=self.full_in_16_bits,
            statistical=self.statistical and choose.is_random,
            gradient=self.gradient and choose.is_finite,
            one_sign=self.one_sign,
            layout=self.layout,
        )


def _made(operator: str, point: Point, draw: Draw) -> Arguments:
    choose = Given(point.given)
    args, attrs = DRAWN[operator](choose, draw)
    choose.check()
    if point.change is not None:
        point.change(args)
    return args, attrs


Points = tuple[Point, ...]


def sized(text: str, *names: str, end: str = "", **options: Any) -> Points:
    """A point for each of some words: ``2x3x8`` has the sizes of some factors, by name.

    Args:
        names: of which ``rows`` has all that is left for it, as a shape.
        end: of the labels.
        options: of every point; ``given`` besides the sizes.
    """
    more, found = options.pop("given", {}), []
    for word in text.split():
        numbers = tuple(map(int, re.findall(r"\d+", word)))
        cut = len(numbers) - len(names) + 1
        values = (numbers[:cut], *numbers[cut:]) if names[0] == "rows" else numbers
        sizes = dict(zip(names, values, strict=True))
        found.append(Point(word + end, {**sizes, **more}, **options))
    return tuple(found)


telling = partial(sized, telling=True)


def large(label: str, given: Mapping[str, object], **options: Any) -> Point:
    """One whose size is what matters: an index counts elements, whatever their type."""
    return Point(label, given, full_in_16_bits=True, **options)


def changed(label: str, given: Mapping[str, object], change: Callable[..., None]) -> Point:
    """One with values that no level has, of which no gradient is asked."""
    return Point(label, given, change, statistical=False, gradient=False)


def _far(label: str, change: Callable[..., None]) -> Point:
    """Many elements of such values, and gradients."""
    return Point(label, {"rows": (4,), "width": 300}, change, statistical=False)


def many_rows(width: int, name: str = "width", **options: Any) -> Point:
    """Of few numbers each, which share their errors."""
    given = {"rows": (BEYOND_16_BITS,), name: width}
    return large("many-rows", given, statistical=False, one_sign=True, **options)


SHAPED = ("rows", "width")
PRODUCT = ("rows", "inputs", "outputs")
CLASSES = ("rows", "inputs", "classes")
SCORES = ("rows", "queries", "keys")
HEADS = ("heads of a key head", "key heads", "head_dim")

# Shapes: round and beside powers of two and vector widths (4, 8, 16, 64); longer than a block.
_SEQUENCE_FIRST = Point("sequence-first", {"rows": (3, 4)}, layout="swapped")
_NORM = telling("4x8 3x17 5x64 4x1000 3x4096", *SHAPED)
_FAR = {"rows": (3,), "width": 5000}
_NORM_ENDS = (_SEQUENCE_FIRST,
              Point("far-from-0", _FAR, values.far_from_zero),
              large("300x260", {"rows": (300,), "width": 260}), many_rows(2),
              Point("eps:0", {"rows": (5,), "width": 64, "eps": 0.0}))  # fmt: skip
_TWO_DIMS = large("70x75", {"rows": (70,), "width": 75})  # transposed by tiles
_ELEMENTS = (
    _SEQUENCE_FIRST,
    _TWO_DIMS,
    *telling("17 1025", *SHAPED),
    large("beyond-16-bits", {"rows": (), "width": BEYOND_16_BITS}),
    _far("far", values.far_inputs),
)
_BY_FORM = tuple(
    point
    for form in ("none", "tanh")
    for point in telling("17 1025", *SHAPED, end=f".{form}", given={"approximate": form})
)


_CHUNK: tuple[tuple[int, ...], ...] = ((1000,), (17,), (4, 5), (), (0, 3), (3, 7, 9), (1,))
"""Lengths of a list's tensors: beside vector widths, none, and more elements than one chunk."""


def _many(count: int) -> dict[str, object]:
    """Empty and small tensors, one of some length before them, and behind them one longer than a
    chunk of any multi-tensor kernel.
    """
    short = ((i * 7 % 5,) for i in range(count - 2))
    return {"tensors": count, "shapes": ((1027,), *short, (BEYOND_16_BITS,))}


def _of_list(**given: object) -> dict[str, object]:
    return {"tensors": len(_CHUNK), "shapes": _CHUNK, **given}


_MANY = (
    large("many-tensors", _many(300), statistical=False),
    Point("1100-tensors", _many(1100), full=True, statistical=False),
)
_ALIKE = Point("73-tensors", {"tensors": 73, "shapes": ((3,),) * 73}, statistical=False)
_STEPS = (
    Point("plain", _of_list(), telling=True),
    Point("scale-clip", _of_list(scale=512.0, clip=0.25, found_inf=0.0), telling=True),
    *(point._replace(change=values.no_gradients) for point in _MANY),
    _ALIKE,
)
_LATE = tuple(Point(f"step:{n:g}", _of_list(step=n), telling=True) for n in (258.0, 1e5))
"""A count that 8 bits do not hold, and one after which no average is corrected any more."""
_PACKED = {"heads of a key head": 2, "key heads": 2, "head_dim": 16}
_CHUNKS = large("530x5x2000", {"rows": (530,), "inputs": 5, "classes": 2000})
"""More than 2^20 logits: more than one chunk of rows, whatever their size."""
_HEAD_LARGE = Point("tiles", {"rows": (70,), "inputs": 72, "classes": 130})
_WITH_FORM = (
    *_BY_FORM,
    _SEQUENCE_FIRST,
    _TWO_DIMS,
    large("beyond-16-bits", {"rows": (), "width": BEYOND_16_BITS, "approximate": "tanh"}),
)
_TO_FLOAT32: dict[str, Any] = {"given": WIDE, "end": ".to-float32"}
_OPTIONS = Point(
    "options", {"rows": (9,), "target": "some ignored", "label_smoothing": 0.2, "z_loss": 0.25}
)
_NONE: dict[str, Any] = {"given": {"reduction": "none"}, "end": ".none"}

# Each may have a kernel of its own; of the others a block is always 32, and a scale a power of two.
_FORMATS = [format for format in quantization.FORMATS if not format.startswith("mx_")]
# Blocks that kernels are made for.
_LARGE_BLOCKS = tuple(
    Point(f"{block}.{format}", {"rows": (2,), "width": 4099, "format": format, "block": block},
          full_in_16_bits=True)
    for format in _FORMATS
    for block in (512, 1024, 2048, 4096)
)  # fmt: skip

FIXED: Mapping[str, Points] = {
    **dict.fromkeys(
        ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"), (*_NORM, *_NORM_ENDS)
    ),
    # With half dropped twice the others is exact: of the ends sizes and eps are asked, not p.
    **{
        name: (*telling("4x8 3x17 5x64 4x1000", *SHAPED, given={"p": 0.1}),
               *(p._replace(given={**p.given, "p": 0.5}) for p in _NORM_ENDS))
        for name in ("dropout_add_rms_norm", "dropout_add_layer_norm")
    },
    "group_norm": (
        *telling("2x1x17 2x24x72 1x1x4096", "batch", "channels of a group", "width",
                 given={"num_groups": 3}),
        Point("eps:0", {"num_groups": 3, "channels of a group": 8, "eps": 0.0}),
        Point("far-from-0", {"num_groups": 2, "channels of a group": 16, "width": 300},
              values.far_from_zero),
        Point("channels-last", {"num_groups": 3, "batch": 40, "channels of a group": 4,
                                "dims": "two"}, telling=True, layout="channels last"),
        large("many-rows", {"batch": BEYOND_16_BITS, "channels of a group": 2, "width": 1},
              statistical=False),
        large("large-groups", {"num_groups": 2, "batch": 1, "width": BEYOND_16_BITS}),
    ),
    "dropout": _ELEMENTS,
    "bias_dropout_add": (*_ELEMENTS, many_rows(2)),
    **dict.fromkeys(("silu", "relu", "relu2", "sigmoid", "tanh"), _ELEMENTS),
    "swiglu": (*_ELEMENTS, _far("far-gates", values.far_gates)),
    "gelu": _WITH_FORM,
    "bias_gelu": (*_WITH_FORM, many_rows(2), _far("far", values.far_sums)),
    "geglu": (*_WITH_FORM, _far("far", values.far_gates)),
    "softplus": (*_ELEMENTS, Point("at-threshold", {"width": 65, "x": "repeated", "threshold": 2.0},
                                   statistical=False)),
    "softmax": (
        *telling("7x1x257 3x1x1000", *SCORES),
        *telling("1x65x65", *SCORES, end=".causal", given={"causal": True}),
        *telling("500x96", *SCORES, end=".bias", given={"bias": "last"}),
        *telling("3x4x23", *SCORES, end=".bias", given={"bias": "whole"}),
        large("300x260", {"rows": (), "queries": 300, "keys": 260}),
        # mask, bias and the triangle beyond the first 1024 keys
        large("2x3x40x1100.everything", {"rows": (2, 3), "queries": 40, "keys": 1100,
                                         "mask": "rows", "bias": "whole", "causal": True}),
        changed("far.masked", {"rows": (), "queries": 9, "keys": 9, "mask": "whole"},
                values.far_softmax),
        changed("far.scaled", {"queries": 9, "keys": 9, "scale": 3.0}, values.far_scaled),
        Point("far.negative", {"queries": 9, "keys": 33, "scale": -1.0, "x": "huge"}),
        changed("far.causal", {"queries": 9, "keys": 9, "causal": True}, values.far_softmax),
        Point("vocabulary", {"queries": 3, "keys": VOCABULARY}, full=True),
        large("long-rows", {"rows": (), "queries": 2, "keys": 20_000}),
        Point("square-mask-turned", {"rows": (), "queries": 9, "keys": 9, "mask": "whole",
                                     "bias": "whole"}, layout={"mask": "transposed"}),
        Point("bias-of-heads", {"rows": (2, 3), "queries": 4, "keys": 9, "bias": "heads"}),
        large("many-rows", {"rows": (), "queries": BEYOND_16_BITS, "keys": 2}, statistical=False),
    ),
    "rope": (
        *telling("17x2x2x16", "length", *HEADS, given={"batch": 1}),
        *telling("129x1x1x64", "length", *HEADS, end=".interleaved", given={"interleaved": True}),
        Point("many-batches", {"batch": 66_000, "head_dim": 2, "length": 1}, full=True),
        large("many-positions", {"batch": 1, "head_dim": 2, "length": BEYOND_16_BITS}),
        Point("wide-head", {"batch": 1, "head_dim": 320, "length": 3}),
    ),
    "attention": (
        *telling("1x17x2x2x16 1x130x2x1x32 2x64x2x2x64", "batch", "queries", *HEADS,
                 end=".causal"),
        *telling("1x65x1x3x40", "batch", "queries", *HEADS, given={"causal": False}, end=".full"),
        *(telling("1x65x1x3x40", "batch", "queries", *HEADS, given={"causal": causal, **WIDE},
                  change=values.of_one_sign, end=end)[0]
          for causal, end in ((False, ".to-float32"), (True, ".causal.to-float32"))),
        # Large scores: what rounds them is seen through the rounding of weights that 16 bits have.
        *telling("1x33x1x2x16", "batch", "queries", *HEADS, given={"scale": 1.0}, end=".sharp"),
        changed("far", {"queries": 9}, values.far_scores),
        Point("16of4096", {"cross": True, "queries": 16, "keys": 4096}, full=True),
        Point("4096of16", {"cross": True, "queries": 4096, "keys": 16, "causal": False}, full=True),
        large("many-batches", {"batch": 66_000, "queries": 1, "head_dim": 2}),
        large("many-keys", {"cross": True, "queries": 2, "keys": BEYOND_16_BITS, "head_dim": 4,
                            "causal": False}),
        Point("1of1100", {"cross": True, "queries": 1, "keys": 1100, "causal": False,
                          "scale": 1.0}),
        changed("far-below", {"queries": 160, "head_dim": 16}, values.far_below),
        Point("wide-head", {"queries": 5, "head_dim": 320}),
        # Padded to 96 or 128, of which a scale may be made.
        Point("head-of-72", {"queries": 9, "head_dim": 72}),
        # A later part of a prompt: what a query sees ends within a tile.
        Point("chunk", {"cross": True, "queries": 130, "keys": 163}),
    ),
    "attention_dropout": (
        *telling("1x17x2x2x16 1x65x1x3x40", "batch", "queries", *HEADS, given={"p": 0.1}),
        *telling("1x33x1x2x16", "batch", "queries", *HEADS, given={"p": 0.3, "scale": 1.0},
                 end=".sharp"),
    ),
    "attention_varlen": (
        Point("15+17+33", {**_PACKED, "lengths": (15, 17, 33)}, telling=True),
        Point("63+65", {**_PACKED, "lengths": (63, 65), "causal": False}, telling=True),
        Point("33+4of65+7", {**_PACKED, "lengths": (33, 4), "cross": True, **WIDE,
                             "lengths of keys": (65, 7), "causal": False}, values.of_one_sign,
              telling=True),
        Point("31+34.to-float32", {**_PACKED, "lengths": (31, 34), **WIDE}, values.of_one_sign,
              telling=True),
        changed("far", {"lengths": (9, 3)}, values.far_scores),
        Point("1100-sequences", {"lengths": (1, 0, 2) * 366}),
        Point("16-heads-of-250-keys", {"lengths": (250, 5), "heads of a key head": 16}),
        Point("wide-head", {"head_dim": 320, "lengths": (5, 3)}),
        Point("head-of-72", {"head_dim": 72, "lengths": (9, 4)}),
        Point("queries-of-some", {"lengths": (0, 1, 0, 1), "cross": True, "key heads": 2,
                                  "heads of a key head": 3, "lengths of keys": (4, 4, 4, 8)}),
        Point("130-heads", {"key heads": 130, "head_dim": 2, "lengths": (5, 3)}),
    ),
    "linear": (
        _SEQUENCE_FIRST,
        *telling("5x64x64 3x1000x6 4x4096x5 600x24x10 64x512x128", *PRODUCT),
        *telling("5x64x64 3x1000x6 600x24x10", *PRODUCT, **_TO_FLOAT32),
        *sized("130x136x132 5x257x1 3x259x5", *PRODUCT),
        *(changed(f"some-rows-of-nan.{inputs}", {"rows": (40,), "inputs": inputs, "outputs": 24},
                  values.some_rows_of_nan)
          for inputs in (15, 100)),
        Point("vocabulary", {"inputs": 6, "outputs": VOCABULARY}, full=True),
        large("many-rows", {"rows": (BEYOND_16_BITS,), "inputs": 2, "outputs": 2}, full=True),
        large("many-batches", {"rows": (66_000, 1), "inputs": 2, "outputs": 3, "bias": "normal"}),
        # One size alone is large, the others are what kernels have a case for.
        large("many-outputs", {"rows": (2,), "inputs": 1, "outputs": BEYOND_16_BITS}),
        large("many-inputs", {"rows": (1,), "inputs": BEYOND_16_BITS, "outputs": 2}),
    ),
    "grouped_linear": (
        *(Point(f"{label}{end}", {"lengths": lengths, "inputs": inputs, "outputs": outputs, **wide},
                telling=True)
          for label, lengths, inputs, outputs in (
              ("15+17+1.64x65", (15, 17, 1), 64, 65), ("2+3.1000x6", (2, 3), 1000, 6),
              ("600+1.24x10", (600, 1), 24, 10), ("32+32.512x64", (32, 32), 512, 64))
          for end, wide in (("", {}), (".to-float32", WIDE)) if inputs in (24, 1000) or not wide),
        Point("tiles", {"lengths": (70, 66), "rows of no group": 1, "inputs": 96, "outputs": 130}),
        Point("empty-behind-large", {"lengths": (130, 0, 70, 0, 0), "inputs": 9, "outputs": 5},
              telling=True),
        # More than a table of sizes in a kernel's constant memory has entries.
        Point("150-groups", {"lengths": (1, 0, 2) * 50}),
        Point("1100-groups", {"lengths": (1,) * 1100 + (0, 0), "inputs": 4, "outputs": 4}),
    ),
    "conv1d": (
        *telling("1x65x130x4 1x3x40x127 2x3x1025x4", "batch", "channels", "length", "kernel"),
        large("many-channels", {"batch": 1, "channels": BEYOND_16_BITS, "length": 2, "kernel": 2}),
        large("many-rows", {"batch": BEYOND_16_BITS, "channels": 1, "length": 2, "kernel": 2}),
        Point("160-taps", {"batch": 1, "channels": 3, "length": 300, "kernel": 160}),
    ),
    "conv2d": (
        *(Point(label, {**dict.fromkeys(("kernel height", "kernel width"), kernel),
                        "inputs of a group": inputs, "outputs of a group": outputs, "batch": batch,
                        "more height": more, "more width": more, "padding height": padding,
                        "padding width": padding}, telling=label != "tiles")
          for label, batch, inputs, outputs, kernel, more, padding in (
              ("3.3x65", 2, 3, 65, 3, 4, 1), ("1.17x9", 2, 17, 9, 1, 14, 0),
              ("3.128x4", 1, 128, 4, 3, 3, 1), ("aligned", 2, 64, 32, 3, 14, 1),
              ("tiles", 2, 40, 72, 3, 16, 1))),
        Point("1x1-of-every-second", {"inputs of a group": 4, "outputs of a group": 5,
                                      **dict.fromkeys(("stride height", "stride width"), 2),
                                      **dict.fromkeys(("more height", "more width"), 8)}),
        # What a library makes products of otherwise: narrow results, rows of 64, small images.
        *(Point(label, {"inputs of a group": inputs, "outputs of a group": 3, "kernel height": 2,
                        "kernel width": kernel, "more height": 5, "more width": more,
                        "stride width": stride, "padding width": padding}, telling=True)
          for label, inputs, kernel, more, stride, padding in (
              ("one-column", 16, 2, 2, 3, 0), ("row-of-64", 8, 8, 9, 1, 1),
              ("row-of-128", 4, 32, 3, 1, 0), ("all-but-padding", 16, 4, -2, 2, 2))),
        Point("channels-last", {"batch": 40, "inputs of a group": 5, "outputs of a group": 3,
                                "more height": 6, "more width": 7}, telling=True,
              layout="channels last"),
        # Where numbers are multiplied by twos, the last of an odd number of channels has a pair.
        changed("nan-beside", {"inputs of a group": 3, "outputs of a group": 4, "kernel height": 2,
                               "kernel width": 3, "more height": 3, "more width": 8},
                values.one_nan)._replace(telling=True),
        large("many-rows", {"batch": BEYOND_16_BITS, "inputs of a group": 1}),
    ),
    "permute": (
        Point("40x24.8of64", {"tokens": 40, "width": 24, "choices": 8, "experts": 64},
              telling=True),
        *(Point(f"none-of-{n}", {"tokens": 40, "experts": n, "experts chosen": "some of none"})
          for n in (4, 16, 256)),
        *(large(label, {"tokens": BEYOND_16_BITS, "width": 1, "choices": 1, "experts": experts})
          for label, experts in (("many-tokens", 3), ("one-expert", 1), ("1100-experts", 1100))),
    ),
    "unpermute": (
        *telling("9x33x4 9x65x8 3x700x5", "tokens", "width", "choices"),
        large("many-tokens", {"tokens": BEYOND_16_BITS, "width": 1, "choices": 1}),
    ),
    "embedding": (
        Point("repeated", {"rows": (130,), "count": 4, "width": 21, "indices": "equal"},
              telling=True),
        *telling("500x3x5", "rows", "count", "width"),
        large("row-beyond-16-bits", {"rows": (7,), "count": BEYOND_16_BITS, "width": 1},
              change=values.far_rows),
        large("many-indices", {"rows": (BEYOND_16_BITS,), "count": 9, "width": 1}),
        Point("of-a-vocabulary", {"rows": (7,), "count": VOCABULARY, "width": 8}, values.far_rows,
              full=True),
    ),
    "cross_entropy": (
        _OPTIONS, _SEQUENCE_FIRST,
        *telling("6x11 5x13x130", "rows", "classes", **_NONE),
        *telling("90x33", "rows", "classes"),
        # The sum over the whole vocabulary counts in smoothing alone.
        Point("3x32000", {"rows": (3,), "classes": 32_000, "label_smoothing": 0.2, "z_loss": 1e-3}),
        large("class-beyond-16-bits", {"rows": (5,), "classes": BEYOND_16_BITS,
                                       "reduction": "none"}, change=values.far_targets),
        large("tiles", {"rows": (70,), "classes": 1030}),
        changed("impossible", {"reduction": "none"}, values.impossible),
        # What is ignored is one of the classes, but for the upper half of 64 bits.
        Point("ignored:2p32", {"rows": (200,), "classes": 20, "ignore_index": 2**32 + 3,
                               "target": "some ignored"}),
        large("many-rows", {"rows": (BEYOND_16_BITS,), "classes": 2, "reduction": "none"},
              statistical=False),
        Point("5x152064", {"rows": (5,), "classes": VOCABULARY}, full=True),
    ),
    "linear_cross_entropy": (
        Point("chunk-ignored", {"rows": (600,), "inputs": 16, "classes": 40}, values.first_ignored,
              statistical=False),
        _OPTIONS, _SEQUENCE_FIRST,
        *telling("5x13x24x130 64x256x128", *CLASSES, **_NONE),
        *telling("90x12x65 65x257x33", *CLASSES),
        large("class-beyond-16-bits", {"rows": (5,), "inputs": 5, "classes": BEYOND_16_BITS},
              change=values.far_targets),
        _HEAD_LARGE, _CHUNKS,
        Point("50x32x32000", {"rows": (50,), "inputs": 32, "classes": 32_000}, full=True),
    ),
    "linear_cross_entropy_partials": (
        *telling("90x12x65 65x257x33", *CLASSES),
        _CHUNKS,
        # Classes whose numbers need more than 32 bits.
        Point("classes-from-2p32", {"rows": (6,), "classes": 11, "first": 2**32}),
    ),
    "l2_norm": (
        *(Point(str(n), {"tensors": 1, "shapes": ((n,),)}, telling=True) for n in (2, 17, 100)),
        *_MANY,
    ),
    "sums_of_squares": (
        Point("list", {"tensors": 4, "shapes": ((1030,), (7,), (2048,), (0,))}, telling=True),
        Point("4096", {"tensors": 1, "shapes": ((4096,),)}, telling=True),
        changed("signalling-nan", {"tensors": 1, "shapes": ((17,),)}, values.signalling_nan),
        changed("infinite.2p20-elements", {"tensors": 1, "shapes": (((1 << 20) + 4099,),)},
                values.infinite_at_first),
        changed("infinite-at-the-end", {"tensors": 2, "shapes": ((BEYOND_16_BITS,), (3,))},
                values.infinite_at_last),
        *_MANY,
    ),
    "clip": (Point("norm:3", _of_list(norm=3.0), telling=True), *_MANY),
    "unscale_and_check": (
        Point("scale:3", _of_list(scale=3.0), telling=True), *_MANY,
        changed("nan", {"tensors": 2, "shapes": ((5,), (7,))}, values.one_nan),
        changed("infinite-before-empty", {"tensors": 3, "shapes": ((5,), (0, 3), (3,))},
                values.infinite_at_first),
        changed("infinite-at-the-end", {"tensors": 2, "shapes": ((BEYOND_16_BITS,), (3,))},
                values.infinite_at_last),
        changed("infinite-behind-many", {"tensors": 130, "shapes": ((3,),) * 130},
                values.infinite_behind),
        changed("overflow-by-scale", {"tensors": 2, "shapes": ((3,), (5,)), "scale": 2.0**-4},
                values.infinite_once_scaled),
    ),
    "adamw": (*_STEPS, *_LATE, Point("eps:0", _of_list(eps=0.0, beta1=0.5, beta2=0.0))),
    "adamw_8bit": (
        *(point._replace(full=point.full or point.full_in_16_bits) for point in _STEPS), *_LATE,
        changed("far-apart", {"tensors": 1, "shapes": ((4, 256),), "step": 0.0, "moments": 0.0},
              values.far_octaves),
        large("275-blocks", {"tensors": 1, "shapes": ((BEYOND_16_BITS,),)}, statistical=False),
    ),
    "sgd": (
        *_STEPS, _ALIKE._replace(label="73-tensors.momentum",
                                 given={**_ALIKE.given, "momentum": (0.9, False)}),
        Point("nesterov", _of_list(momentum=(0.9, True)), telling=True),
    ),
    "lion": _STEPS,
    "lamb": (
        *(point._replace(full=point.full or point.full_in_16_bits) for point in _STEPS), *_LATE,
        changed("zero-norms", _of_list(weight_decay=0.0), values.zero_norms),
    ),
    "lamb_sums_of_squares": (
        Point("plain", _of_list(), telling=True),
        Point("betas", _of_list(beta1=0.0, beta2=0.5), telling=True),
    ),
    "quantize": (
        Point("4099.int8", {"rows": (), "width": 4099}, telling=True),
        Point("4099.int4.random", {"rows": (), "width": 4099, "format": "int4", "random": True},
              telling=True),
        changed("ties", {"rows": (4,), "width": 32}, values.ties), *_LARGE_BLOCKS,
        *(changed(f"nan.{format}", {"rows": (3,), "width": 65, "format": format}, values.one_nan)
          for format in quantization.FORMATS),
        *(Point(f"300001.{format}", {"rows": (), "width": 300_001, "format": format,
                                     "random": True, "block": 256}, full=True)
          for format in ("int8", "int4")),
        large("beyond-16-bits", {"rows": (), "width": BEYOND_16_BITS}),
    ),
    "dequantize": (
        Point("4099.int8", {"rows": (), "width": 4099}, telling=True),
        Point("33x40.int4", {"rows": (33,), "width": 40, "format": "int4", "block": 3},
              telling=True),
        large("beyond-16-bits", {"rows": (), "width": BEYOND_16_BITS}), *_LARGE_BLOCKS,
        *(changed(f"far.{format}", {"rows": (4,), "width": 96, "format": format},
                  values.tiny_scales)
          for format in _FORMATS),
    ),
    "hadamard": (
        changed("far", {"rows": (9,), "block": 6}, values.far_terms),
        Point("5x16", {"rows": (5,), "block": 4}, telling=True),
        Point("7x256", {"rows": (7,), "block": 8}, telling=True),
        Point("5x192", {"rows": (5,), "block": 6, "whole": False, "blocks": 3}, telling=True),
        *(Point(f"3x{2**n}", {"block": n}) for n in (12, 15, 16)),
        large("beyond-16-bits", {"rows": (BEYOND_16_BITS,), "block": 1}),
    ),
    "top_k": (
        *telling("6x31", *SHAPED, given={"k": "few"}),
        changed("index-beyond-16-bits", {"rows": (2,), "width": BEYOND_16_BITS, "k": "few"},
                values.largest_at_last),
        changed("many-ties", {"rows": (2,), "width": 5000, "k": "half"}, values.mostly_zero),
        changed("rows-of-nan", {"rows": (600,), "width": 33, "k": "few"}, values.rows_of_nan),
        many_rows(2),
        Point("vocabulary", {"width": VOCABULARY, "k": "few"}, full=True),
    ),
}  # fmt: skip
"""Of every operator of ours."""


def _plain(*given: Mapping[str, object]) -> Points:
    return tuple(Point(f"plain{number}", one) for number, one in enumerate(given))


_PLAIN_SHAPED = sized("4x8 3x17 2x3x33 5x64", *SHAPED)
_PLAIN_PARTS = (*_PLAIN_SHAPED, *sized("4x12", *SHAPED, given={"rows of a whole": "some"}))
_PLAIN_ELEMENTS = sized("7 8 3x5 3x17 2x3x16", *SHAPED)
_PLAIN_HEADS = sized("2x5x2x2x8 2x9x1x2x12 1x17x2x2x16", "batch", "queries", *HEADS)
_PLAIN_LISTS = _plain(_of_list(), {}, {"tensors": 2, "shapes": ((33,), (4, 3))})
_PLAIN_STEPS = _plain(
    _of_list(scale=8.0, clip=0.25, found_inf=0.0, copies=(torch.bfloat16,)),
    _of_list(), {"tensors": 2, "shapes": ((33,), (4, 3))},
)  # fmt: skip
_PLAIN_CLASSES = sized("6x5x11 2x3x4x17", *CLASSES)

PLAIN: Mapping[str, Points] = {
    **dict.fromkeys(("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"), _PLAIN_SHAPED),
    **dict.fromkeys(("dropout", "bias_dropout_add", "dropout_add_rms_norm",
                     "dropout_add_layer_norm"), _PLAIN_PARTS),
    "group_norm": (*sized("2x4x17 3x2x5 1x3x33", "batch", "channels of a group", "width",
                          given={"num_groups": 2}),
                   Point("images", {"num_groups": 2, "channels of a group": 3, "dims": "two"})),
    **dict.fromkeys(("gelu", "silu", "relu", "relu2", "sigmoid", "tanh", "softplus", "swiglu",
                     "geglu", "bias_gelu", "quantize"), _PLAIN_ELEMENTS),
    "dequantize": sized("31 3x5 2x3x16", *SHAPED),
    "softmax": (
        *sized("2x4x9 3x5x17", *SCORES, given={"mask": "whole", "bias": "whole"}),
        *sized("2x3x4x8", *SCORES, given={"causal": True}),
    ),
    "rope": sized("5x2x2x8 9x1x2x12", "length", *HEADS),
    "attention": (
        *_PLAIN_HEADS,
        Point("3of20", {"cross": True, "queries": 3, "keys": 20, "causal": False}),
    ),
    "attention_dropout": (
        *(p._replace(given={**p.given, "p": 0.3}) for p in _PLAIN_HEADS),
        Point("part", {"queries": 7, "batch": 2,
                       **{f"{dim} of a whole": True
                          for dim in ("batch", "heads", "queries", "keys")}}),
    ),
    "attention_varlen": _plain(
        {"lengths": (3, 5, 4), "head_dim": 16}, {"lengths": (0, 4, 0, 0, 3, 0)},
        {"lengths": (5, 2), "padding": 3, "causal": False},
    ),
    "linear": sized("3x8x5 2x4x33x17 5x64x64", *PRODUCT),
    "grouped_linear": _plain(
        {"lengths": (3, 5), "inputs": 8, "outputs": 5},
        {"lengths": (4, 0, 3), "rows of no group": 2, "inputs": 33, "outputs": 17},
    ),
    "conv1d": sized("2x5x7x4 1x17x33x2", "batch", "channels", "length", "kernel"),
    "conv2d": _plain(
        {"batch": 2, "inputs of a group": 3, "outputs of a group": 2, "kernel height": 3,
         "kernel width": 2, "more height": 4, "more width": 5},
        {"batch": 1, "groups": 2, "inputs of a group": 2, "outputs of a group": 3,
         "kernel height": 2, "kernel width": 3, "more height": 5, "more width": 4,
         "stride height": 2, "padding width": 1},
        {"batch": 2, "inputs of a group": 3, "outputs of a group": 6, "more height": 4},
    ),
    "permute": _plain(
        {"tokens": 7, "width": 5, "experts": 3},
        {"tokens": 9, "width": 8, "choices": 4, "experts": 9, "key": "any", "count": "half"},
    ),
    "unpermute": sized("7x5x1 6x16x3 9x33x4", "tokens", "width", "choices"),
    "embedding": sized("4x10x8 2x3x5x17 33x7x64", "rows", "count", "width"),
    "cross_entropy": sized("6x11 3x17 2x3x130", "rows", "classes"),
    "linear_cross_entropy": _PLAIN_CLASSES,
    "linear_cross_entropy_partials": _PLAIN_CLASSES,
    **dict.fromkeys(("l2_norm", "sums_of_squares", "clip", "unscale_and_check"), _PLAIN_LISTS),
    **dict.fromkeys(("adamw", "adamw_8bit", "lion", "lamb", "lamb_sums_of_squares"), _PLAIN_STEPS),
    "sgd": tuple(p._replace(given={**p.given, "momentum": (0.9, False)}) for p in _PLAIN_STEPS),
    "hadamard": _plain({"rows": (3,), "block": 3}, {"rows": (5,), "block": 4},
                       {"rows": (2, 3), "block": 2, "whole": False}),
    "top_k": sized("2x17 6x31 2x3x40", *SHAPED, given={"k": "few"}),
}  # fmt: skip
"""Small calls of ordinary numbers, by operator, which rules are asked with."""
