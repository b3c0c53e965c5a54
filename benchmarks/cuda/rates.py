"""What the device reaches: bytes/s of a copy, flop/s of products; see anychip.bench.

All other figures are read against these, not against a data sheet.
"""

from __future__ import annotations

from anychip.bench import device
from benchmarks.cuda.stage import Stage, main, stage

COPY_NBYTES, WIDTH = 1 << 31, 8192


@stage(seconds=20.0)
def command(stage: Stage) -> None:
    """Measure a copy and matrix products."""
    stage.reports.append(
        device.run(
            stage.chip,
            rounds=3 if stage.tiny else 9,
            progress=lambda _: None,
            window=0.001 if stage.tiny else 0.1,
            copy_nbytes=1 << 14 if stage.tiny else COPY_NBYTES,
            width=64 if stage.tiny else WIDTH,
        )
    )


if __name__ == "__main__":
    main(command)
