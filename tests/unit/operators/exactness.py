"""How far a result may be from the float64 one: half an ULP of its dtype, and float32 roundings."""

from typing import Any

import torch
from torch import Tensor

from tests.unit.dispatch.calls import Call, call, floats
from tests.unit.dispatch.plain import PLAIN

U = 2.0**-24
"""Unit roundoff of float32, in which every operator accumulates."""


def doubled(value: Any) -> Any:
    """Floating-point tensors in float64, lists looked into; the rest as it is."""
    if isinstance(value, (list, tuple)):
        return [doubled(v) for v in value]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double()
    return value


def roundings(made: Call, constant: float) -> float:
    """Roundings on the longest path: the operator's own constant, and those of its sums."""
    return constant + float(made.spec.bound.length(*made.args, **made.attrs))


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


def check_against_float64(
    name: str,
    index: int,
    dtype: torch.dtype,
    *,
    ulps: float = 0.5,
    inner: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Outputs and gradients of a sample against plain torch in float64.

    Args:
        ulps: of the outputs' and gradients' own dtype.
        inner: ULP of the largest element, forward and backward, for what was rounded to the dtype
            on the way.
    """
    made = call(name, index, dtype, grad=True)
    places = [i for i, a in enumerate(made.args) if isinstance(a, Tensor) and a.requires_grad]
    exact = doubled(list(made.args))
    for place in places:
        exact[place].requires_grad_()
    got, want = floats(made()), floats(PLAIN[name](*exact, **made.attrs))
    weights = [torch.cos(torch.arange(y.numel())).view(y.shape).to(y.dtype) for y in got]
    coarse = torch.finfo(dtype).eps / U
    forward = roundings(made, made.spec.bound.forward)
    for one, other in zip(got, want, strict=True):
        assert_close(one.detach(), other.detach(), forward + inner[0] * coarse, ulps=ulps)
    grads = torch.autograd.grad(got, made.leaves(), weights)
    exact_leaves = [exact[i] for i in places]
    exact_grads = torch.autograd.grad(want, exact_leaves, [w.double() for w in weights])
    backward = roundings(made, made.spec.bound.backward)
    for one, other in zip(grads, exact_grads, strict=True):
        # A gradient that sums over rows has as many more terms as there are rows.
        rows = max(t.numel() for t in made.leaves()) / max(one.numel(), 1)
        assert_close(one, other, backward + rows + inner[1] * coarse, ulps=ulps)
