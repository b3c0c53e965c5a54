"""Calls that differ in a size: beside powers of two, widths of models, ends of index types.

Sizes beside powers of two are where a vector, warp, block or tile ends; multiples of 96 are widths
of models, which kernels are written for; 65,536 and 32,768 are where an index of 16 bits ends, and
a grid's second and third dimension; 110 and 256 where multi-tensor kernels start another launch.
Kernels that use tiles begin where all dims are large, and others where one dim is 1 or 0. The
largest sizes are asked for at level full. What is asked of which operator is in :mod:`.edges`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from anychip.conformance.calls import Arguments, Call

Edges = Callable[[], Iterator[Call]]


def N(size: int) -> int:
    """In a sweep's options, the size."""
    return size


QUICK = (15, 65, 129)
"""Others are levels of the designs."""
WIDTHS = (96, 192, 768)
"""Widths of models and of heads: a kernel of its own for each."""
FULL = (
    *range(2, 15), 16, 17, 31, 32, 33, 63, 64, 80, 127, 128, 160, 255, 256, 257, 320, 384, 511, 512,
    513, 640, 1023, 1024, 1025, 1280, 1536, 2047, 2048, 2049, 2560, 3072, 4095, 4096, 4097,
)  # fmt: skip
HIDDEN = (8191, 8192, 8193, 16383, 16384, 16385)
"""The largest hidden sizes."""
VOCABULARIES = (32_000, 152_064)
BEYOND_16_BITS = 70_001
MANY = 300
"""Tensors of a list."""


_FLAGS = ("full", "full_in_16_bits", "statistical", "gradient")


def sweep(
    make: Callable[..., Arguments],
    name: str,
    *,
    top: int = 4097,
    more: tuple[int, ...] = (),
    quick: tuple[int, ...] = QUICK,
    **options: Any,
) -> Edges:
    """A call per size: ``make(draw, **options)``, where what is a function is one of the size."""

    def calls() -> Iterator[Call]:
        for size in (*quick, *(s for s in FULL if s <= top and s not in quick), *more):
            yield Call(
                f"{name}:{size}",
                partial(make, **{key: _at(value, size) for key, value in options.items()}),
                full=size not in quick,
                full_in_16_bits=size not in QUICK,
                sized=size in QUICK,
            )

    return calls


def _at(value: Any, size: int) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_at(entry, size) for entry in value)
    return value(size) if callable(value) else value


def one(label: str, make: Callable[..., Arguments], **options: Any) -> Edges:
    """A call with options of ``make``, and flags of the call."""
    flags = {name: options.pop(name) for name in _FLAGS if name in options}
    return lambda: iter([Call(label, partial(make, **options), **flags)])


def large(label: str, make: Callable[..., Arguments], **options: Any) -> Edges:
    """One whose size is what matters: an index counts elements, whatever their type."""
    return one(label, make, full_in_16_bits=True, **options)


def both(*edges: Edges) -> Edges:
    return lambda: (call for part in edges for call in part())


def named(edges: Edges, name: str) -> Edges:
    """The same calls with a name behind their labels."""
    return lambda: (replace(call, label=f"{call.label}.{name}") for call in edges())
