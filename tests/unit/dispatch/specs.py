"""Operators of the tests' own: x^2 + x^3, whose second derivative at 3 is 20."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

import anychip
from anychip.contract import Bound, Cost, OperatorSpec, Residual, Sample
from anychip.dispatch.operator import Operator, registered


def _forward(x: Tensor) -> Tensor:
    return x**2 + x**3


def _backward(grad: Tensor, x: Tensor, *, needs: tuple[bool]) -> tuple[Tensor]:
    return (grad * (2 * x + 3 * x**2),)


def _forward_square(x: Tensor) -> tuple[Tensor, Tensor]:
    return x**2 + x**3, x**2


def _backward_square(
    grad: Tensor, x: Tensor, square: Tensor, *, needs: tuple[bool]
) -> tuple[Tensor]:
    return (grad * (2 * x + 3 * square),)


def _backward_output(grad: Tensor, x: Tensor, y: Tensor, *, needs: tuple[bool]) -> tuple[Tensor]:
    # y / x = x + x^2, so that the gradient is 3 y / x - x.
    return (grad * (3 * y / x - x),)


def polynomial(
    name: str, kind: Literal["plain", "residual", "output"] = "plain", **changes: Any
) -> Operator[..., Any]:
    """The operator, registered on first use; ``kind`` is what its backward is given."""
    known = registered().get(name)
    if known is not None:
        return known
    functions: Mapping[str, tuple[Any, Any, tuple[str, ...]]] = {
        "plain": (_forward, _backward, ("x",)),
        "residual": (_forward_square, _backward_square, ("x", "square")),
        "output": (_forward, _backward_output, ("x", "y")),
    }
    forward, backward, saved = functions[kind]
    residuals = (Residual("square", "x.shape", "float32"),) if kind == "residual" else ()
    options: dict[str, Any] = {
        "name": name, "namespace": "polynomials", "signature": "(Tensor x) -> Tensor",
        "equation": "x^2 + x^3", "source": "school", "forward": forward, "backward": backward,
        "fake": lambda x: (
            tuple(torch.empty_like(x) for _ in range(1 + len(residuals)))
            if residuals
            else torch.empty_like(x)
        ),
        "saved": saved, "residuals": residuals, "differentiable": ("x",),
        "sizes": lambda x, *_: {"numel": x.numel()},
        "samples": lambda maker: [Sample((maker.normal(3),), {}, "3")],
        "cost": lambda *_: Cost(0, 0), "bound": Bound(4, 4, lambda *_: 1),
    }  # fmt: skip
    return anychip.register(OperatorSpec(**(options | changes)))
