"""Do the device's kernels and the same sources on the host's emulator find the same?

What differs between them is the compiler: contraction, the device's exp and rsqrt, the order of
sums. Masks of dropout and indices must agree bit for bit. Not asked are rows that call torch's
kernels, and what has digits for a result. float64 is the business of the conformance suite.
"""

from __future__ import annotations

import click
from torch import Tensor

import anychip
from benchmarks.cuda.calls import Call, apart, every_call
from benchmarks.cuda.stage import Stage, main, stage

DIGITS = "lamb_sums_of_squares"
"""Whose sums, of steps that compilers round differently, are whole numbers."""


@stage(seconds=90.0)
@click.option("--against", default="cuda-emulated", show_default=True, metavar="NAME")
def command(stage: Stage, against: str) -> None:
    """Compare every operator with another backend, which runs on the host."""
    found: dict[str, list[Tensor]] = {}
    for call in every_call(stage.chip, tiny=stage.tiny):
        rows = stage.chip.operators.rows(call.spec.name, "forward")
        if not rows or rows[0].kind != "native" or call.spec.name == DIGITS:
            continue
        if not stage.has_time(call.name):
            break
        stage.attempt(f"{call.name} runs", keep, found, call)
    # From here on the host's tensors are the other backend's, which may be this one's type too.
    for call in every_call(anychip.use(against), tiny=stage.tiny):
        if call.name in found:
            stage.attempt(call.name, compare, found[call.name], call)


def keep(found: dict[str, list[Tensor]], call: Call) -> None:
    """Runs a call, and keeps its results on the host."""
    found[call.name] = [t.cpu() for t in call()]


def compare(got: list[Tensor], call: Call) -> str:
    """How a call's own results differ from kept ones."""
    return apart(got, [t.cpu() for t in call()])


if __name__ == "__main__":
    main(command)
