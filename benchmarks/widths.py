"""Rows that no vector divides: norms, softmax, losses and embedding of odd widths, next to torch.

python -m benchmarks.widths [WIDTH ...] [--dtype bfloat16] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

import anychip
from anychip.bench import operators
from anychip.bench.case import Case, Make
from anychip.contract import SampleMaker

ELEMENTS = 1 << 19
"""Of each tensor: what a core's own cache holds nearly, so that the arithmetic shows."""
WIDTHS = (3, 10, 33, 64, 100, 197, 1024)


def norm(m: SampleMaker, *, width: int, bias: bool) -> Case:
    """rms_norm, or layer_norm with a bias."""

    def eager(x: Tensor, weight: Tensor, *rest: Tensor, eps: float) -> Tensor:
        if bias:
            return functional.layer_norm(x, (width,), weight, rest[0], eps)
        return functional.rms_norm(x, (width,), weight, eps)

    vectors = [m.normal(width) for _ in range(1 + bias)]
    args = (m.normal(ELEMENTS // width, width), *vectors)
    return Case(args=args, attrs={"eps": 1e-5}, eager=eager)


def softmax(m: SampleMaker, *, width: int) -> Case:
    """Without a mask."""
    args = (m.normal(ELEMENTS // width, width), None, None)
    attrs = {"scale": 1.0, "causal": False}
    return Case(args=args, attrs=attrs, eager=lambda x, *_, **__: functional.softmax(x, -1))


def cross_entropy(m: SampleMaker, *, width: int) -> Case:
    """Of so many classes."""
    rows = ELEMENTS // width
    args = (m.normal(rows, width), m.integers(width, rows))
    return Case(args=args, attrs={}, eager=functional.cross_entropy)


def embedding(m: SampleMaker, *, width: int) -> Case:
    """Of 1,000 rows."""
    args = (m.integers(1000, ELEMENTS // width), m.normal(1000, width))
    return Case(args=args, attrs={}, eager=functional.embedding)


def cases(width: int) -> dict[str, Make]:
    """By operator and width."""
    made: dict[str, Make] = {
        "rms_norm": partial(norm, width=width, bias=False),
        "layer_norm": partial(norm, width=width, bias=True),
        "softmax": partial(softmax, width=width),
        "cross_entropy": partial(cross_entropy, width=width),
        "embedding": partial(embedding, width=width),
    }
    return {f"{name} {width}": make for name, make in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("widths", nargs="*", type=int, default=WIDTHS)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", default=7, type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    backend = anychip.use("cpu")
    given = {name: make for width in args.widths for name, make in cases(width).items()}
    report = operators.run(
        backend, rounds=args.rounds, progress=lambda _: None, dtype=getattr(torch, args.dtype),
        compiled=False, reference=False, window=0.02, cases=given,
    )  # fmt: skip
    Console(width=160).print(report.table())
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")


if __name__ == "__main__":
    main()
