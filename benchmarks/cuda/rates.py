"""What the device reaches: bytes/s of a copy, flop/s of products; next to what its properties say.

All other figures are read against these, not against a data sheet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from anychip import ops
from anychip.bench.report import Report, Row
from anychip.bench.timing import interleave
from benchmarks.cuda.stage import Stage, main, stage

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@stage(seconds=20.0)
def command(stage: Stage) -> None:
    """Measure a copy and matrix products."""
    device, width = stage.chip.device(), 64 if stage.tiny else 8192
    source = torch.randn(1 << 12 if stage.tiny else 1 << 29, device=device)
    known = stage.chip.properties()
    calls: dict[str, Callable[[], object]] = {
        "copy": partial(torch.empty_like(source).copy_, source)
    }
    work = {"copy": 2.0 * source.nbytes}
    said: dict[str, float | None] = {"copy": known.bandwidth}
    for dtype in DTYPES:
        name = f"product, {str(dtype).removeprefix('torch.')}"
        # Random values: products of zeros draw less power, and run faster.
        x, weight = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        calls[name] = partial(ops.linear, x, weight)
        work[name], said[name] = 2.0 * width**3, known.flops.get(dtype)
    taken = interleave(
        calls,
        rounds=3 if stage.tiny else 9,
        window=0.001 if stage.tiny else 0.1,
        synchronize=stage.chip.synchronize,
    )
    rows = []
    for name, samples in taken.items():
        rate = work[name] / samples.median
        facts = {"GB/s" if name == "copy" else "TFLOP/s": rate / (1e9 if name == "copy" else 1e12)}
        expected = said[name]
        if expected:
            facts["of properties"] = rate / expected
        best = samples.best * 1e6
        micros = samples.median * 1e6
        rows.append(Row(name=name, microseconds=micros, best_microseconds=best, facts=facts))
    stage.reports.append(
        Report(
            subject="rates of the device",
            backend=stage.chip.name,
            device=stage.chip.identity(),
            threads=torch.get_num_threads(),
            rows=rows,
            notes=(f"products of {width} x {width} matrices, through anychip.ops",),
        )
    )


if __name__ == "__main__":
    main(command)
