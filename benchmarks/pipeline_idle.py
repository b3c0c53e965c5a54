"""Does a pipeline wait as long as the simulator says? Measured with stages that sleep.

A sleep needs no core, so that any number of ranks runs on any machine. Noise only adds to what
ranks wait: the best of a few runs counts. A backward that is split sleeps in its I. Prints a
Markdown table, in eight minutes; exits with 1 when a rank's idle time is further from the simulated
one than 5 % of the step.

    python benchmarks/pipeline_idle.py [--runs 2] [--grid]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train.parallel import (
    NAMES,
    Costs,
    Pipeline,
    Schedule,
    Timeline,
    make_schedule,
    simulate,
)
from anychip.train.parallel.schedule import stages_per_rank

FORWARD_S, BACKWARD_S = 0.2, 0.4
LIMIT = 0.05
RANKS = {
    "2 ranks": (1.0, 1.0),
    "4 ranks": (1.0,) * 4,
    "3 ranks, the second one slow": (1.0, 2.0, 1.0),
}
"""How long all stages of each rank sleep, in multiples."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        time.sleep(FORWARD_S * factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD_S * ctx.factor)
        return grads[0], None


class Sleeping(nn.Module):
    """A stage without work."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight, self.factor)  # type: ignore[no-any-return,no-untyped-call]


def measure(schedule: Schedule, factors: list[float]) -> Timeline:
    """One step, ranks as threads.

    Args:
        factors: of each stage.
    """
    x, owners = torch.ones(schedule.num_microbatches, 1), schedule.owners()

    def work(comm: Communicator) -> Timeline:
        pipeline = Pipeline(
            [Sleeping(f) for s, f in enumerate(factors) if owners[s] == comm.rank],
            comm,
            schedule,
            loss_fn=lambda output, targets: output.mean(),
            measure=lambda: None,
        )
        for _ in range(2):  # in the first one stages tell each other shapes
            pipeline.run(x, x)
        return pipeline.timeline()

    return run_ranks(len(schedule.rows), work)[0]


def difference(found: Timeline, wanted: Timeline) -> float:
    """Seconds of the rank that is furthest from what it should wait."""
    pairs = zip(found.idle, wanted.idle, strict=True)
    return float(max(abs(f - w) for f, w in pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measured against simulated idle time.")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--grid", action="store_true", help="draw the best run, too")
    options = parser.parse_args()
    worst = 0.0
    print("| schedule | stages | idle, simulated (ms) | measured (ms) | differs by | of the step |")
    print("|---|---|---|---|---|---|")
    for name in NAMES:
        for label, multiples in RANKS.items():
            virtual = stages_per_rank(name)
            schedule = make_schedule(name, len(multiples), 2 * len(multiples), virtual=virtual)
            owners = schedule.owners()
            factors = [multiples[owners[s]] / virtual for s in range(schedule.num_stages)]
            forward, backward = ([s * f for f in factors] for s in (FORWARD_S, BACKWARD_S))
            wanted = simulate(schedule, Costs(forward=forward, backward=backward, weights=0.0))
            runs = [measure(schedule, factors) for _ in range(options.runs)]
            best = min(runs, key=lambda run: difference(run, wanted))
            furthest = difference(best, wanted)
            parts = [furthest / float(whole) for whole in (min(wanted.idle), wanted.makespan)]
            worst = max(worst, parts[1])
            columns = [
                ", ".join(f"{1e3 * float(idle):.0f}" for idle in line.idle)
                for line in (wanted, best)
            ]
            row = [name, label, *columns, *(f"{part:.1%}" for part in parts)]
            print("| " + " | ".join(row) + " |", flush=True)
            if options.grid:
                print(f"\n```\n{best.grid(60)}\n```\n")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
