"""How long does a training step wait for a checkpoint, and what does the host hold meanwhile?

Saves a GPT with AdamW (12 bytes per parameter) three times as training does, once waiting and once
with a `checkpoint.Saver`, and prints medians: seconds that the step waits, seconds until the
checkpoint is there, seconds of a copy of the same bytes, and by how much the process grew.

    python benchmarks/saving.py [--width 768] [--layers 8] [--times 5]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import anychip
from anychip.comm import alone
from anychip.train import checkpoint, models, optim, zero


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    chip = anychip.use("cpu")
    model = models.GPT(models.GPTConfig(width=options.width, layers=options.layers, heads=8))
    opt = zero.Optimizer(model.to(chip.device()), optim.adamw(1e-3), alone())
    nbytes = sum(3 * param.nbytes for param in model.parameters())
    print(f"{nbytes / 2**20:.0f} MiB of weights and states")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as out:
        for saver in (None, checkpoint.Saver()):
            waits, ends = [], []
            for step in range(options.times):
                given = {"step": step, "model": model, "optimizer": opt, "saver": saver}
                waits.append(seconds(lambda given=given: checkpoint.save(out, **given)))
                ends.append(waits[-1] + (seconds(saver.close) if saver is not None else 0.0))
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
            print(
                f"{'waiting' if saver is None else 'with a saver'}: the step waits "
                f"{statistics.median(waits):.3f} s (first {waits[0]:.3f}), written after "
                f"{statistics.median(ends):.3f} s, peak of memory {grown:+.0f} MiB"
            )
    source, target = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
    copies = [seconds(lambda: target.copy_(source)) for _ in range(options.times)]
    print(f"a copy of as many bytes: {statistics.median(copies):.3f} s")


if __name__ == "__main__":
    main()
