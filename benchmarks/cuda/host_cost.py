"""What a call of a small kernel costs the host: through ``anychip.ops``, its row alone, torch's.

The device is not waited for between calls, and has little to do: the host is what is measured. The
row alone makes its outputs and calls the binding; what ``ops`` costs more is dispatch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from anychip import ops
from anychip.bench import dispatch
from anychip.bench.report import Report, Timing
from anychip.bench.timing import Samples, interleave
from benchmarks.cuda.stage import Stage, main, stage

GOAL_US = 4.0


@stage(seconds=30.0)
def command(stage: Stage) -> None:
    """Measure the host's time per call."""
    rounds, window = (3, 0.001) if stage.tiny else (21, 0.01)
    taken = interleave(
        calls(stage), rounds=rounds, window=window, synchronize=stage.chip.synchronize
    )
    over = taken["ops.layer_norm"].over(taken["its row"]) * 1e6 if "its row" in taken else None
    stage.reports.append(
        Report(
            subject="dispatch of a small layer_norm",
            backend=stage.chip.name,
            device=stage.chip.identity(),
            threads=torch.get_num_threads(),
            rows=[row(samples, over) for samples in taken.values()],
            notes=(f"over us: ops less its row; the goal is {GOAL_US}",),
        )
    )
    if not stage.tiny:
        stage.reports.append(dispatch.run(stage.chip, rounds=rounds, progress=lambda _: None))


def calls(stage: Stage) -> dict[str, Callable[[], object]]:
    """The ways to one small layer norm."""
    x = torch.randn(8, 64, device=stage.chip.device())
    weight, bias = torch.ones(64, device=x.device), torch.zeros(64, device=x.device)
    found: dict[str, Callable[[], object]] = {
        "ops.layer_norm": lambda: ops.layer_norm(x, weight, bias, eps=1e-5),
        "torch layer_norm": lambda: functional.layer_norm(x, (64,), weight, bias, 1e-5),
    }
    rows = stage.chip.operators.rows("layer_norm", "forward")
    if rows:
        function = rows[0].function
        found["its row"] = lambda: function(x, weight, bias, eps=1e-5)
    else:
        stage.notes.append("the backend has no row for layer_norm: the reference was measured")
    return found


def row(samples: Samples, over: float | None) -> Timing:
    """One way, as a line."""
    mine = samples.name == "ops.layer_norm" and over is not None
    return Timing(
        name=samples.name,
        microseconds=samples.median * 1e6,
        best_microseconds=samples.best * 1e6,
        facts={"over us": over} if mine else {},
    )


if __name__ == "__main__":
    main(command)
