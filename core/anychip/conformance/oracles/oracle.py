"""What an oracle consists of, and how a call's tensors become its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import Call
from anychip.conformance.formats import STORED


@dataclass(frozen=True, kw_only=True, slots=True)
class Oracle:
    """The independent answer for one operator.

    Attributes:
        forward: ``f(*args, **attrs)`` gives outputs, then residuals; for an in-place operator every
            written tensor as it should be afterwards, in the schema's order.
        calls: what the operator is called with, fixed cases first.
        backward: ``f(grads, *args, **attrs)`` gives the gradient of every differentiable argument.
        lower_precision: labels of calls at which a computation one precision class lower must fail.
        independent: written from the equation. False: the operator's own reference in float64, and
            the bound is that of its author.
    """

    forward: Callable[..., Sequence[Rounded]]
    calls: Callable[[], Iterable[Call]]
    backward: Callable[..., Sequence[Rounded | None]] | None = None
    lower_precision: tuple[str, ...] = ()
    independent: bool = True

    def is_full(self, call: Call, dtype: torch.dtype) -> bool:
        """Whether a call is made only at level full.

        So are those that differ in sizes alone and, in 16 bits, all with ordinary numbers: the
        designs vary both. What tells precisions apart is asked all the same.
        """
        in_16_bits = dtype.itemsize == 2
        if call.full or (call.full_in_16_bits and in_16_bits):
            return True
        is_plain = call.sized or (in_16_bits and self.independent and call.statistical)
        return is_plain and call.label not in self.lower_precision


Gradients = tuple[Rounded | None, ...]
Answer = tuple[tuple[Rounded, ...], Callable[..., Gradients]]
"""Outputs and residuals; and from the outputs' gradients those of the differentiable arguments."""


def differentiable(
    answer: Callable[..., Answer], calls: Callable[[], Iterable[Call]], *lower_precision: str
) -> Oracle:
    """Of ``answer(*args, **attrs)``, which states both directions from the same parts."""
    return Oracle(
        forward=lambda *args, **attrs: answer(*args, **attrs)[0],
        backward=lambda grads, *args, **attrs: answer(*args, **attrs)[1](*grads),
        calls=calls,
        lower_precision=lower_precision,
    )


def numbers(arg: Any) -> Any:
    """An argument as an oracle takes it: float tensors as Rounded, other tensors as arrays."""
    if isinstance(arg, Tensor):
        host = arg.detach().cpu()
        if not host.is_floating_point():
            return host.numpy()
        return Rounded.exact(host.double().numpy(), STORED[host.dtype])
    if isinstance(arg, (list, tuple)):
        return [numbers(entry) for entry in arg]
    return arg
