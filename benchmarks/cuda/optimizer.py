"""A step of AdamW over 10^9 parameters, next to torch's and the bytes bound.

With states in float32, and in 8 bits, for which torch has no peer.
"""

from __future__ import annotations

from benchmarks import optimizers
from benchmarks.cuda.stage import Stage, main, stage

NUM_PARAMS = 10**9


@stage(seconds=60.0)
def command(stage: Stage) -> None:
    """Measure the optimizer's step."""
    stage.reports.append(
        optimizers.run(
            stage.chip,
            rounds=3 if stage.tiny else 9,
            progress=lambda _: None,
            names=("adamw", "adamw-8bit"),
            num_params=20_000 if stage.tiny else NUM_PARAMS,
            window=0.001 if stage.tiny else 0.1,
        )
    )


if __name__ == "__main__":
    main(command)
