"""The same arguments give the same bits: ten runs of every operator, forward and backward."""

from __future__ import annotations

from benchmarks.cuda.calls import Call, different, every_call
from benchmarks.cuda.stage import Stage, main, stage

RUNS = 10


@stage(seconds=60.0)
def command(stage: Stage) -> None:
    """Run every operator ten times and compare bits."""
    for call in every_call(stage.chip, tiny=stage.tiny):
        if call.spec.determinism != "bitwise":
            continue
        if not stage.has_time(call.name):
            return
        stage.attempt(call.name, repeated, call)


def repeated(call: Call) -> str:
    """The first difference to the first run."""
    first = call()
    return next((wrong for _ in range(RUNS - 1) if (wrong := different(call(), first))), "")


if __name__ == "__main__":
    main(command)
