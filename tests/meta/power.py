"""How small a defect do the limits on errors still find? Measured, not argued.

``python -m tests.meta.power``: of every operator and float type, the smallest defects that level
quick finds with 99 %; three minutes of one core. Its lines are those of docs/conformance.md.

Note: What is measured
    A defect of a size is *found* when each of ``RUNS`` = 299 runs finds it, of other inputs and
    another draw of the defect: one that is found with less than 99 % passes that test with
    0.99^299 < 5 %. Statistical limits and the bound of single elements are asked apart.

    - ``noise``: each number is off by a normal number of standard deviation s times itself.
    - ``bias``: all numbers are larger by the same part s.
    - ``rare``: one number in n is wrong by its own size, nobody knows which.
    - ``factors``: of every product have b bits, the leading one among them: 11 are TF32's.
    - ``sums``: are rounded to b bits after every 16 terms, as by an accumulator of so many: 8 are
      bfloat16's, 11 float16's. Rounded more often they would be found sooner.

    Noise and bias spoil one result, or one gradient, of one call, and nothing else is rounded but
    that to the result's type: other roundings make an error larger, not smaller. The call is one of
    those at which an oracle lists that lower precision has to fail: of those of ``SMALL`` elements
    one that sees nearly as much as any. Of several operators the result counts that is seen least;
    which one it is, ``PILOTS`` runs tell. Factors and sums spoil all of a call, of any size. What
    moves a training's losses is known without runs (:func:`training_bias`).

Left out: designs, which ask more calls, of all kinds of values; results of fewer than 64 numbers,
which have no statistical limit (tests/unit/conformance/test_power.py lists them); float32 results
of 16-bit arguments, which are those of float32; random, all of whose rules compare bits; states in
8 bits of the training chapter, asked at level full alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from anychip.conformance.bounds import STATISTICAL_COUNT
from anychip.conformance.formats import FORMATS, Array
from anychip.conformance.oracles import training as curves
from tests.meta.spoilt import Asked, Fewer, Result, Rules, dtypes_of, quick_calls, telling
from tests.meta.training_data import curve, enlarge, orders

RUNS = 299
PILOTS = 8
"""Runs that tell which call sees most, or least."""
SMALL = 10_000
"""Elements of the arguments of a call."""
NEAR = 1.0
"""Bits by which a call may see less than another, larger one."""
ELEMENTS = 1 << 19
"""Of an array of several runs."""
LARGEST, SMALLEST, STEPS = 2.0, -30.0, 9
"""Sizes of a defect, as powers of 2, and how often what lies between is halved."""

PERCENT_99 = 2.326
"""99 % of a normal distribution are below so many standard deviations."""
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "relu, relu2, dropout, rope, top_k, dequantize": (
        "relu", "relu2", "dropout", "rope", "top_k", "dequantize",
    ),
    "bias_dropout_add, clip, unscale_and_check": ("bias_dropout_add", "clip", "unscale_and_check"),
    "gelu, silu, sigmoid, tanh, softplus, swiglu, geglu, bias_gelu, quantize": (
        "gelu", "silu", "sigmoid", "tanh", "softplus", "swiglu", "geglu", "bias_gelu", "quantize",
    ),
    "softmax, cross_entropy": ("softmax", "cross_entropy"),
    "rms_norm, layer_norm, after additions and dropout too": (
        "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "dropout_add_rms_norm",
        "dropout_add_layer_norm",
    ),
    "group_norm": ("group_norm",),
    "hadamard, permute, unpermute": ("hadamard", "permute", "unpermute"),
    "embedding": ("embedding",),
    "linear, grouped_linear": ("linear", "grouped_linear"),
    "conv1d, conv2d": ("conv1d", "conv2d"),
    "linear_cross_entropy, its partials": (
        "linear_cross_entropy", "linear_cross_entropy_partials",
    ),
    "attention, attention_dropout, attention_varlen": (
        "attention", "attention_dropout", "attention_varlen",
    ),
    "adamw, adamw_8bit, lamb, lion, sgd": ("adamw", "adamw_8bit", "lamb", "lion", "sgd"),
}  # fmt: skip
"""Operators that share a line, of which it has the result that is seen least."""
SCALARS = ("sums_of_squares", "lamb_sums_of_squares", "l2_norm")
"""Operators without a result of 64 numbers."""
PRODUCTS = (
    "linear", "grouped_linear", "linear_cross_entropy", "linear_cross_entropy_partials", "conv1d",
    "conv2d", "attention", "attention_dropout", "attention_varlen",
)  # fmt: skip


# One result: noise and bias


def noise(result: Result) -> Array:
    """By how much of itself each number is off, for a defect of size 1."""
    return np.random.default_rng(1).standard_normal(result.value.shape)


def bias(result: Result) -> Array:
    return np.ones(result.value.shape)


Defect = Callable[[Result], Array]
DEFECTS: Mapping[str, Defect] = {"noise": noise, "bias": bias}


def smallest_of_all(result: Result, defect: Defect) -> Rules:
    """By each of the rules."""
    return Rules(*(smallest(result, defect, rule) for rule in Rules._fields))


def smallest(result: Result, defect: Defect, rule: str) -> float:
    """The smallest size that every run finds, as a power of 2; infinite where there is none.

    It is the largest of the runs' smallest, of which few are larger than all before.
    """
    shape = defect(result)
    largest, at, count = SMALLEST, 0, 8
    while at < len(result.value):
        runs = np.arange(at, min(at + count, len(result.value)))
        runs = runs[~_seen(result, shape, rule, runs, np.full(len(runs), largest))]
        low, high = np.full(len(runs), largest), np.full(len(runs), LARGEST)
        if not _seen(result, shape, rule, runs, high).all():
            return math.inf
        for _ in range(STEPS if len(runs) else 0):
            middle = (low + high) / 2
            seen = _seen(result, shape, rule, runs, middle)
            low, high = np.where(seen, low, middle), np.where(seen, middle, high)
        largest = max([largest, *high.tolist()])
        at, count = at + count, max(1, min(4 * count, ELEMENTS // result.value.shape[1]))
    return largest


def _seen(result: Result, shape: Array, rule: str, runs: Any, sizes: Array) -> Any:
    part = result.part(runs)
    spoilt = part.value * (1.0 + np.exp2(sizes)[:, None] * shape[runs])
    return getattr(part.found(spoilt), rule)


class Seen(NamedTuple):
    """What few runs say about the limits on one result, at the call that sees most.

    Attributes:
        name: of the result at that call.
        noise, bias: the smallest that are found, as powers of 2.
        rare: n, of one wrong number in n.
    """

    asked: Asked
    name: str
    noise: Rules
    bias: Rules
    rare: float


class Power(NamedTuple):
    """Of the limits on all results of some operators: what is found in each of them."""

    noise: Rules
    bias: Rules
    rare: float


def power(operators: Sequence[str], dtype: torch.dtype, runs: int = RUNS) -> Power | None:
    """Of those that take a type; None if no result is of it.

    Which result is seen least, few runs tell; how little, many.
    """
    seen = [one for name in operators if dtype in dtypes_of(name) for one in best(name, dtype)]
    if not seen:
        return None
    least = {
        (kind, rule): max(seen, key=lambda one: getattr(getattr(one, kind), rule))
        for kind in DEFECTS
        for rule in Rules._fields
    }
    results: dict[tuple[str, str], dict[str, Result]] = {}
    for one in least.values():
        call = one.asked.operator, one.asked.call.label
        if call not in results:
            names = {
                o.name for o in least.values() if call == (o.asked.operator, o.asked.call.label)
            }
            results[call] = one.asked.results(runs, *names)

    def size(kind: str, rule: str) -> float:
        one = least[kind, rule]
        result = results[one.asked.operator, one.asked.call.label][one.name]
        return smallest(result, DEFECTS[kind], rule)

    of_noise, of_bias = (Rules(*(size(kind, rule) for rule in Rules._fields)) for kind in DEFECTS)
    return Power(of_noise, of_bias, min(one.rare for one in seen))


def best(operator: str, dtype: torch.dtype) -> list[Seen]:
    """Of each result that some call asks for 64 numbers of, one call that sees nearly most.

    The same for many results, if there is one.
    """
    near = {
        title: [one for one in calls if one.noise.statistical <= _least(calls) + NEAR]
        for title, calls in tried(operator, dtype).items()
    }
    uses = Counter(one.asked.call.label for calls in near.values() for one in calls)
    return [max(calls, key=lambda one: uses[one.asked.call.label]) for calls in near.values()]


def _least(calls: Sequence[Seen]) -> float:
    return min(float(one.noise.statistical) for one in calls)


def tried(operator: str, dtype: torch.dtype) -> dict[str, list[Seen]]:
    """What calls see in few runs, by result; of large calls only what no other one shows."""
    found: dict[str, list[Seen]] = {}
    counts = outputs(operator, dtype)
    for asked in telling(operator, dtype):
        forms, named = asked.forms(), titles(asked)
        enough = [name for name in named if forms[name].numel() >= STATISTICAL_COUNT]
        if not enough or (asked.size > SMALL and all(named[name] in found for name in enough)):
            continue
        for name, result in asked.results(PILOTS, *enough).items():
            if result.is_enough:
                of_noise, of_bias = (smallest_of_all(result, defect) for defect in DEFECTS.values())
                visible = float(np.mean(np.abs(result.value) > result.half + result.worst))
                rare = rarest(counts[named[name]] * visible)
                one = Seen(asked, name, of_noise, of_bias, rare)
                found.setdefault(named[name], []).append(one)
    return found


def titles(asked: Asked) -> dict[str, str]:
    """Results in the call's type, and under which name they stand here: lists have one for all."""
    return {
        name: name.split("[")[0]
        for name, form in asked.forms().items()
        if form.dtype == asked.dtype
    }


def outputs(operator: str, dtype: torch.dtype) -> dict[str, int]:
    """Numbers of each result that the fixed calls of level quick ask for."""
    found: dict[str, int] = {}
    for asked in quick_calls(operator, dtype):
        forms = asked.forms()
        for name, title in titles(asked).items():
            found[title] = found.get(title, 0) + forms[name].numel()
    return found


def rarest(count: float) -> float:
    """n, if with 99 % some of so many numbers is one of the wrong: (1 - 1/n)^count = 1/100."""
    return count / math.log(100.0)


# All of a call: factors and sums

BOTH = Rules._fields


class Bits(NamedTuple):
    """From how many bits on products or sums are found.

    Attributes:
        most: by the statistical limits, at the call that sees most.
        least: by any limit, at the call that sees least.
    """

    most: int
    least: int


def bits(operator: str, dtype: torch.dtype, kind: str, runs: int = RUNS) -> Bits:
    """Of an operator's calls at which lower precision has to fail."""
    found = []
    calls = [Fewer(asked, kind) for asked in telling(operator, dtype)]
    for choose, by in ((max, BOTH[:1]), (min, BOTH)):
        seen = [call.bits(PILOTS // 2, by=by) for call in calls]
        at = seen.index(choose(seen))
        found.append(calls[at].bits(runs, by=by, most=seen[at]))
    return Bits(*found)


# A training: bias of all gradients


def training_bias(name: str) -> float:
    """The smallest that moves the losses of 99 % of float32 runs beyond the limit, as a power of 2.

    Of the float64 curve with a bias of 2^-12 and without, for what is small moves it in proportion.
    By the triangle inequality a run of that bias deviates at least by the curve less its own.
    """
    known, recipe = curves.load(name), curves.RECIPES[name]
    change = partial(enlarge, factor=1.0 + 2.0**-12)
    moved = curve(recipe, torch.float64, orders(1)[0], change=change)
    logs = np.log(known.deviations)
    own = math.exp(float(logs.mean()) + PERCENT_99 * float(logs.std(ddof=1)))
    return math.log2((known.limit + own) / known.deviation(moved)) - 12


# The tables


def line(family: str) -> str:
    """Of the table of noise and bias."""
    found = [power(FAMILIES[family], dtype) for dtype in FORMATS]
    cells = [_cell(getattr(p, kind)) if p else "" for p in found for kind in DEFECTS]
    rare = [f"{p.rare:,.0f}" if p else "" for p in found]
    return _row(family, *cells, *rare)


def line_of_products(operator: str) -> str:
    """Of the table of factors and sums."""
    kinds = [(torch.float32, "factors"), *((dtype, "sums") for dtype in FORMATS)]
    return _row(operator, *("{} / {}".format(*bits(operator, *of)) for of in kinds))


def line_of_training(name: str) -> str:
    """Of the table of trainings."""
    return _row(name, f"{-training_bias(name):.1f}")


def _cell(found: Rules) -> str:
    return " / ".join(f"{-size:.1f}" if math.isfinite(size) else "-" for size in found)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the lines of all tables."""
    torch.set_num_threads(1)
    for lines, of in ((line, FAMILIES), (line_of_products, PRODUCTS),
                      (line_of_training, curves.RECIPES)):  # fmt: skip
        for name in of:
            print(lines(name), flush=True)
        print()


if __name__ == "__main__":
    main()
