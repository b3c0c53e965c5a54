"""What does a device cost that is a C library? Next to torch's eager CPU, in one run.

``python -m benchmarks.chip_overheads [--build]``: the guide's chip with its one kernel, ``add``.
Rounds are interleaved, ratios are medians over rounds. ``--build`` builds the bridge once more.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import anychip
from anychip.bench.timing import interleave
from anychip.cabi import bridge
from anychip.train.models import GPT, GPTConfig
from benchmarks.vendor_afternoon import Vendor, blocks

LIMITS = {"add of 8 floats": 1.2, "operator on the host": 8.0, "GPT training step": 3.0}
BUILD_S, FIND_S = 150.0, 1.0
SIZES = GPTConfig(layers=2, width=128, heads=4, context=128)


def library(folder: Path) -> Path:
    """The guide's chip, compiled as the guide says but with optimization."""
    vendor = Vendor(folder)
    for _, language, text in blocks():
        if language == "c":
            vendor.write(text)
    command = next(text for _, language, text in blocks() if language == "bash").splitlines()[0]
    vendor.run("", command.replace("cc ", "cc -O2 "))
    return folder / "libacme.so"


def training(model: GPT, device: torch.device) -> Callable[[], object]:
    """A step with torch's own optimizer."""
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(SIZES.vocab_size, (4, SIZES.context)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--rounds", type=int, default=21)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chip = anychip.use(str(library(Path(folder))))
        chip.device()
        start = time.monotonic()
        bridge.extension().find()
        found_s = time.monotonic() - start
        if given.build:
            start = time.monotonic()
            bridge.extension().build(Path(folder, "bridge.so"))
            say("build of the bridge", time.monotonic() - start, BUILD_S, "s")
        say("bridge found prebuilt", found_s, FIND_S, "s")
        model = GPT(SIZES)
        for name, limit in LIMITS.items():
            calls = {
                kind: made(name, model, device)
                for kind, device in (("cpu", torch.device("cpu")), ("chip", chip.device()))
            }
            taken = interleave(
                calls, rounds=given.rounds, window=0.05, synchronize=chip.synchronize
            )
            say(name, taken["chip"].ratio(taken["cpu"]), limit, "x CPU eager")


def made(name: str, model: GPT, device: torch.device) -> Callable[[], object]:
    x = torch.ones(8, device=device)
    if name == "add of 8 floats":
        return partial(torch.add, x, x)
    if name == "operator on the host":
        return partial(torch.sin, x)
    return training(model, device)


def say(name: str, value: float, limit: float, unit: str) -> None:
    print(f"{name:24s} {value:8.2f} {unit}, at most {limit:g}{'' if value <= limit else ' MISSED'}")


if __name__ == "__main__":
    main()
