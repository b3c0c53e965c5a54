"""What does a device reach? Measured rates, for estimates of what a layer costs.

Properties give a vendor's peaks, or nothing. ``anychip bench device --json FILE`` measures, and its
report is read here: with its date and device, so that nobody takes another one's rates for these.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from anychip.contract import Backend

COPY, COPY_UNIT, PRODUCT_UNIT = "copy", "GB/s", "TFLOP/s"
"""Name of a row of the report, and the headings under which rates stand."""


def product_name(dtype: torch.dtype) -> str:
    """The name of the row of products in a dtype."""
    return f"product, {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one device reached.

    Attributes:
        backend: its name.
        device: as its ``identity()`` said.
        date: of the measurement, ISO 8601.
        bandwidth: bytes/s of a copy, those read and those written.
        flops: flop/s of matrix products by dtype.
    """

    backend: str
    device: str
    date: str
    bandwidth: float
    flops: Mapping[torch.dtype, float]


def read_rates(path: Path, chip: Backend) -> Rates:
    """The rates of a report that was measured on this device.

    Raises:
        ValueError: it is no report of ``anychip bench device``, or one of another device.
        OSError: it cannot be read.
    """
    again = f"measure with anychip bench device --backend {chip.name} --json {path}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["name"]: row["facts"] for row in found["rows"]}
        dtypes = {product_name(dtype): dtype for dtype in chip.properties().dtypes}
        rates = Rates(
            backend=found["backend"], device=found["device"], date=found["date"],
            bandwidth=_rate(rows[COPY][COPY_UNIT]) * 1e9,
            flops={
                dtype: _rate(rows[name][PRODUCT_UNIT]) * 1e12
                for name, dtype in dtypes.items()
                if name in rows
            },
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a report of anychip bench device "
            f"({type(error).__name__}: {error}); {again}"
        ) from None
    expected, got = (chip.name, chip.identity()), (rates.backend, rates.device)
    if expected != got:
        raise ValueError(
            f"{path} has the rates of {got[1]} (backend {got[0]!r}), and this is {expected[1]} "
            f"(backend {expected[0]!r}); {again}"
        )
    return rates


def _rate(value: Any) -> float:
    if not isinstance(value, float) or not value > 0:
        raise ValueError(f"a rate is a number above 0, got {value!r}")
    return value


class Speed(NamedTuple):
    """Of a device in float32.

    Attributes:
        flops_per_byte: what it computes in the time of one byte; 10 where it does not say.
        flops: per second; 0.0: it does not say.
    """

    flops_per_byte: float
    flops: float


def speed(chip: Backend, rates: Rates | None = None) -> Speed:
    """From measured rates, or else from its properties."""
    properties = chip.properties()
    flops, bandwidth = properties.flops, properties.bandwidth
    if rates is not None:
        flops, bandwidth = rates.flops, rates.bandwidth
    rate = flops.get(torch.float32)
    return Speed(rate / bandwidth if rate and bandwidth else 10.0, rate or 0.0)
