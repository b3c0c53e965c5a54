"""Which numbers has a floating-point type? Digits, exponents, and neighbours' distance."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Format(NamedTuple):
    """A binary floating-point type.

    Attributes:
        name: as in case ids.
        digits: bits of the significand, the leading one included.
        min_exponent: of the smallest normal number.
        largest: the largest finite number.
    """

    name: str
    digits: int
    min_exponent: int
    largest: float

    @property
    def unit(self) -> float:
        """Unit roundoff: half the distance from 1 to the next number."""
        return 2.0**-self.digits

    @property
    def smallest(self) -> float:
        """The smallest subnormal number."""
        return 2.0 ** (self.min_exponent - self.digits + 1)


FP32 = Format("fp32", 24, -126, torch.finfo(torch.float32).max)
FORMATS = {
    torch.float32: FP32,
    torch.bfloat16: Format("bf16", 8, -126, torch.finfo(torch.bfloat16).max),
    torch.float16: Format("fp16", 11, -14, torch.finfo(torch.float16).max),
}
"""The types of float tensors that a chip is asked in."""
STORED = {
    **FORMATS,
    torch.float8_e4m3fn: Format("e4m3", 4, -6, torch.finfo(torch.float8_e4m3fn).max),
    torch.float8_e5m2: Format("e5m2", 3, -14, torch.finfo(torch.float8_e5m2).max),
}
"""With those that an argument or a result of an operator may have besides."""


_EXPONENT = 0x7FF << 52
"""Where a float64 has it."""


def ulp(values: Array, format: Format) -> Array:
    """Distance between neighbours of ``format`` at the size of ``values``.

    Never below the smallest subnormal number.
    """
    power = (np.abs(values).view(np.int64) & _EXPONENT).view(np.float64)  # its binade's lowest
    return np.asarray(np.maximum(power, 2.0**format.min_exponent) * 2.0 ** (1 - format.digits))
