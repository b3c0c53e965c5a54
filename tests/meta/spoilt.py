"""Results that are wrong by a known size, made from the oracle's, for :mod:`.power`.

No backend runs: an exact result is spoilt, rounded to its type, and compared by the limits of
:mod:`anychip.conformance.bounds`, of many runs at once. Or an oracle is asked again, with products
or sums of fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import anychip.ops  # noqa: F401 - defines our operators
from anychip.conformance import bounds, oracles
from anychip.conformance.arithmetic import UNIT, Rounded, broadcast, matmul
from anychip.conformance.calls import Call, tensors_of
from anychip.conformance.chapters.gradients import GradientTrial
from anychip.conformance.formats import FORMATS, STORED, Array, Format, ulp
from anychip.conformance.oracles import ORACLES
from anychip.dispatch.operator import registered

BLOCK = 16
"""Terms that a matrix unit adds before its accumulator rounds: fewer would be seen sooner."""
Found = NDArray[np.bool_]


class Rules(NamedTuple):
    """One answer for the statistical limits, and one for the bound of single elements."""

    statistical: Any
    single: Any


class Result(NamedTuple):
    """One result of one call with the inputs of several seeds; arrays are (runs, elements).

    Attributes:
        half: half an ULP of the result's type.
        worst, spread: the oracle's bounds.
        kept: of the call's elements those that are here: they are finite in every run.
    """

    value: Array
    half: Array
    worst: Array
    spread: Array
    kept: NDArray[np.bool_]
    format: Format

    @classmethod
    def joined(cls, numbers: Sequence[Rounded], format: Format) -> Result:
        """The oracle's numbers of several runs."""
        value, worst, spread = (
            np.stack([broadcast(getattr(n, name), n.shape).ravel() for n in numbers])
            for name in ("value", "worst", "spread")
        )
        kept = np.logical_and.reduce(np.isfinite(value) & np.isfinite(worst), 0)
        if not kept.all():
            value, worst, spread = value[:, kept], worst[:, kept], spread[:, kept]
        worst, spread = worst * UNIT, spread * UNIT
        half = ulp(np.abs(value) + worst, format) / 2
        return cls(value, half, worst, spread, kept, format)

    def part(self, runs: Any) -> Result:
        """Some runs."""
        value, half, worst, spread = (array[runs] for array in self[:4])
        return Result(value, half, worst, spread, self.kept, self.format)

    @property
    def is_enough(self) -> bool:
        """Whether there are as many elements as the statistical limits need."""
        count: int = self.value.shape[1]
        return count >= bounds.STATISTICAL_COUNT

    def found(self, spoilt: Array) -> Rules:
        """(runs,) whether each of the limits finds this in place of the value."""
        error = np.abs(stored(spoilt, self.format) - self.value)
        if not error.shape[1]:
            return Rules(*np.zeros((2, len(error)), np.bool_))
        single = (error / (self.half + self.worst)).max(axis=1) > bounds.DETERMINISTIC_LIMIT
        ratio = error / (self.half + self.spread)
        place = int(bounds.QUANTILE * (ratio.shape[1] - 1))
        together = np.sqrt(np.mean(ratio**2, axis=1)) > bounds.RMS_LIMIT
        some = np.partition(ratio, place, axis=1)[:, place] > bounds.QUANTILE_LIMIT
        return Rules((together | some) & self.is_enough, single)


def in_bits(values: Array, bits: int) -> Array:
    """Rounded to nearest even, with so many bits; exponents without an end."""
    rest, one = np.uint64(53 - bits), np.uint64(1)
    whole = np.array(values, dtype=np.float64).view(np.uint64)
    whole = whole + (one << (rest - one)) - one + ((whole >> rest) & one)
    rounded: Array = ((whole >> rest) << rest).view(np.float64)
    return rounded


def stored(values: Array, format: Format) -> Array:
    """Rounded to a type."""
    whole = {"fp32": np.float32, "fp16": np.float16}.get(format.name)
    if whole is None:
        return in_bits(values, format.digits)
    with np.errstate(over="ignore"):
        rounded: Array = values.astype(whole).astype(np.float64)
    return rounded


# What the suite asks


class Asked(NamedTuple):
    """A call of an operator in a type, as the suite makes it at level quick."""

    operator: str
    call: Call
    dtype: torch.dtype

    def trial(self, seed: int = 0) -> GradientTrial:
        return GradientTrial(registered()[self.operator], self.call, self.dtype, seed)

    @property
    def size(self) -> int:
        """Elements of the arguments."""
        return sum(t.numel() for t in tensors_of(self.trial().arguments[0]))

    def forms(self) -> dict[str, torch.Tensor]:
        """Every result, and every gradient, with its shape and type; of whole numbers none."""
        trial = self.trial()
        args = trial.arguments[0]
        outputs = trial.form[: trial.signature.num_outputs]
        if trial.written:
            outputs = [t for i in trial.written for t in tensors_of([args[i]])]
        found = dict(zip(trial.names(), outputs, strict=True))
        if self.has_gradients:
            named = dict(zip(trial.signature.positional, args, strict=True))
            found |= {f"gradient of {name}": named[name] for name in trial.leaf_names}
        return {name: form for name, form in found.items() if form.is_floating_point()}

    @property
    def has_gradients(self) -> bool:
        return self.call.gradient and ORACLES[self.operator].backward is not None

    def outputs(self, seed: int) -> dict[str, Rounded]:
        """The oracle's, by name."""
        trial = self.trial(seed)
        return dict(zip(trial.names(), trial.expected(ORACLES[self.operator]), strict=False))

    def gradients(self, seed: int) -> dict[str, Rounded]:
        """Those of every argument that has one."""
        trial = self.trial(seed)
        found = trial.gradients(ORACLES[self.operator], trial.output_gradients())
        return {f"gradient of {name}": number for name, number in found.items()}

    def results(self, runs: int, *names: str) -> dict[str, Result]:
        """These, or all, of so many seeds; what is not finite in one of them is in none."""
        forms = self.forms()
        wanted = names or tuple(forms)
        gradients = self.trial().gradient_names if self.has_gradients else []
        made: list[dict[str, Rounded]] = [{} for _ in range(runs)]
        if not {*wanted} <= {*gradients}:
            made = [self.outputs(seed) for seed in range(runs)]
        if {*wanted} & {*gradients}:
            made = [old | self.gradients(seed) for seed, old in enumerate(made)]
        return {
            name: Result.joined([numbers[name] for numbers in made], STORED[forms[name].dtype])
            for name in wanted
        }


def quick_calls(operator: str, dtype: torch.dtype) -> list[Asked]:
    """Those that level quick asks, but for the designs'."""
    oracle = ORACLES[operator]
    return [Asked(operator, c, dtype) for c in oracle.calls if not oracle.is_full(c, dtype)]


def telling(operator: str, dtype: torch.dtype) -> list[Asked]:
    """Calls with random inputs at which a lower precision has to be found, by size."""
    found = [a for a in quick_calls(operator, dtype) if a.call.telling]
    return sorted((a for a in found if a.call.statistical), key=lambda a: a.size)


def dtypes_of(operator: str) -> list[torch.dtype]:
    """Float types that it takes."""
    free = registered()[operator].spec.free_dtypes
    return [dtype for dtype in FORMATS if str(dtype).removeprefix("torch.") in free]


# Oracles of fewer bits


@contextmanager
def fewer_bits(kind: str, bits: int) -> Iterator[None]:
    """Within it oracles give numbers without bounds, and of lower precision.

    Args:
        kind: ``factors`` of products have so many bits, or ``sums`` are rounded to them.
    """
    plain = Rounded.sum
    modules = [m for m in vars(oracles).values() if getattr(m, "matmul", None) is matmul]

    def product(a: Rounded, b: Rounded) -> Rounded:
        if kind == "factors":
            return _bare(in_bits(a.value, bits) @ in_bits(b.value, bits))
        return _bare(_summed(a.value, b.value, bits))

    def total(number: Rounded, axis: int | tuple[int, ...], *, keepdims: bool = False) -> Rounded:
        if kind == "factors":
            return plain(number, axis, keepdims=keepdims)
        axes = (axis,) if isinstance(axis, int) else axis
        places = range(-len(axes), 0)
        terms = np.moveaxis(number.value, axes, places)
        kept = terms.shape[: terms.ndim - len(axes)]
        rows = terms.reshape(*kept, 1, -1)
        value = _summed(rows, np.ones((rows.shape[-1], 1)), bits).reshape(kept)
        return _bare(np.expand_dims(value, axes) if keepdims else value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounded, "sum", total)
        for module in modules:
            patch.setattr(module, "matmul", product)
        yield


def _bare(value: Array) -> Rounded:
    return Rounded(value, np.zeros(()), np.zeros(()))


def _summed(a: Array, b: Array, bits: int) -> Array:
    """``a @ b``, rounded after every BLOCK terms."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = np.zeros((*batch, a.shape[-2], b.shape[-1]))
    for at in range(0, a.shape[-1], BLOCK):
        part = slice(at, at + BLOCK)
        total = in_bits(total + a[..., part] @ b[..., part, :], bits)
    return total


class Fewer:
    """A call whose products or sums have fewer bits: which runs show it, and from how many on."""

    def __init__(self, asked: Asked, kind: str) -> None:
        self.asked, self.kind = asked, kind
        self.formats = {name: STORED[form.dtype] for name, form in asked.forms().items()}
        directions = (asked.outputs, asked.gradients)
        self.directions = directions if asked.has_gradients else directions[:1]
        self._right: dict[tuple[int, int], dict[str, Result]] = {}

    def is_found(self, bits: int, seed: int, *, by: Sequence[str]) -> bool:
        """Whether one of these rules finds it in some result of a run."""
        return any(
            getattr(found, rule).all()
            for number in range(len(self.directions))
            for found in self._found(number, bits, seed)
            for rule in by
        )

    def _found(self, number: int, bits: int, seed: int) -> Iterator[Rules]:
        direction = self.directions[number]
        with np.errstate(all="ignore"):
            if (number, seed) not in self._right:
                self._right[number, seed] = {
                    name: Result.joined([one], self.formats[name])
                    for name, one in direction(seed).items()
                    if name in self.formats
                }
            with fewer_bits(self.kind, bits):
                wrong = direction(seed)
            for name, right in self._right[number, seed].items():
                yield right.found(wrong[name].value.reshape(1, -1)[:, right.kept])

    def bits(self, runs: int, *, by: Sequence[str], most: int = 23) -> int:
        """The most bits that every run finds."""
        for bits in range(most, 0, -1):
            if all(self.is_found(bits, seed, by=by) for seed in range(runs)):
                return bits
        return 0
