"""How far a result may be from the float64 one: half an ULP of its dtype, and float32 roundings."""

import torch
from torch import Tensor

U = 2.0**-24
"""Unit roundoff of float32, in which every operator accumulates."""


def assert_close(got: Tensor, want: Tensor, count: float, *, ulps: float = 0.5) -> None:
    """``count`` float32 roundings of the largest element, then ``ulps`` ULP of got's dtype."""
    info = torch.finfo(got.dtype)
    assert got.shape == want.shape
    error = (got.double() - want).abs()
    size = want.abs()
    scale = max(float(size.max()), 1.0) if size.numel() else 0.0
    # eps is the ULP at 1; below the smallest normal number an ULP grows no smaller.
    allowed = 2 * ulps * info.eps * size.clamp(min=info.smallest_normal) + count * U * scale
    wrong = ~(error <= allowed)  # NaN is wrong too
    if wrong.any():
        place = int((error - allowed).argmax())
        raise AssertionError(
            f"{int(wrong.sum())} of {got.numel()} too far; worst at {place}: got "
            f"{got.flatten()[place].item()}, want {want.flatten()[place].item()}"
        )
