"""What a device reaches: bytes/s of a copy, flop/s of matrix products; next to its properties.

A vendor's figures are peaks, and many a device has none. Estimates of cost can take these instead:
:mod:`anychip.train.parallel.rates` reads the report.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anychip import ops
from anychip.bench.report import Report, Timing
from anychip.bench.timing import Samples, interleave
from anychip.contract import Backend
from anychip.train.parallel.rates import COPY, COPY_UNIT, PRODUCT_UNIT, product_name

_WIDTHS = (512, 1024, 2048, 4096, 8192)
_LONG_S = 0.01
"""A product of so long keeps a device busy; wider ones say the same."""
_LARGEST_COPY = 1 << 30
"""Bytes: more than any cache holds."""


def run(
    backend: Backend,
    *,
    rounds: int,
    progress: Callable[[int], None],
    window: float = 0.1,
    copy_nbytes: int | None = None,
    width: int | None = None,
) -> Report:
    """Times a copy, and a product per float dtype that the device computes in.

    Args:
        window: seconds that one of them runs per round, about.
        copy_nbytes: that are read, and written again; None: 1 GiB, or a 32nd of the memory.
        width: of the square matrices; None: from 512 on, until float32 takes 10 ms, up to 8192.
    """
    known = backend.properties()
    copy_nbytes = copy_nbytes or min(_LARGEST_COPY, known.total_memory // 32)
    width = width or _busy_width(backend)
    source = torch.ones(copy_nbytes // 4, device=backend.device())
    calls: dict[str, Callable[[], object]] = {COPY: partial(torch.empty_like(source).copy_, source)}
    said: dict[str, float | None] = {COPY: known.bandwidth}
    for dtype in sorted(known.dtypes, key=str):
        calls[product_name(dtype)] = _product(backend, width, dtype)
        said[product_name(dtype)] = known.flops.get(dtype)
    taken = interleave(
        calls, rounds=rounds, window=window, synchronize=backend.synchronize, progress=progress
    )
    work = {name: 2.0 * (source.nbytes if name == COPY else width**3) for name in calls}
    return Report(
        subject="device", backend=backend.name, device=backend.identity(),
        threads=torch.get_num_threads(),
        rows=[_row(name, samples, work[name], said[name]) for name, samples in taken.items()],
        notes=(
            f"copy: {source.nbytes} bytes read and as many written; product: {width} x {width} "
            "matrices, through anychip.ops",
            "of properties: the part of what the backend's properties say",
        ),
    )  # fmt: skip


def _product(backend: Backend, width: int, dtype: torch.dtype) -> Callable[[], object]:
    # Random values: products of zeros draw less power, and run faster.
    x, weight = (torch.randn(width, width, device=backend.device()).to(dtype) for _ in range(2))
    return partial(ops.linear, x, weight)


def _busy_width(backend: Backend) -> int:
    """The first width whose product takes long enough, or the last."""
    for width in _WIDTHS:
        call = _product(backend, width, torch.float32)
        call()
        backend.synchronize()
        start = time.perf_counter()
        call()
        backend.synchronize()
        if time.perf_counter() - start >= _LONG_S:
            break
    return width


def _row(name: str, samples: Samples, work: float, said: float | None) -> Timing:
    rate = work / samples.median
    unit, scale = (COPY_UNIT, 1e9) if name == COPY else (PRODUCT_UNIT, 1e12)
    facts: dict[str, Any] = {unit: rate / scale}
    if said:
        facts["of properties"] = rate / said
    return Timing(
        name=name,
        microseconds=samples.median * 1e6,
        best_microseconds=samples.best * 1e6,
        facts=facts,
    )
