"""What an oracle consists of, and how a call's tensors become its numbers."""

from collections.abc import Callable, Sequence
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
        calls: those that are made whatever the design.
        plain: small ones of ordinary numbers, for rules that do not depend on the values.
        backward: ``f(grads, *args, **attrs)`` gives the gradient of every differentiable argument.
        independent: written from the equation. False: the operator's own reference in float64, and
            the bound is that of its author.
    """

    forward: Callable[..., Sequence[Rounded]]
    backward: Callable[..., Sequence[Rounded | None]] | None = None
    calls: tuple[Call, ...] = ()
    plain: tuple[Call, ...] = ()
    independent: bool = True

    def is_full(self, call: Call, dtype: torch.dtype) -> bool:
        """Whether a call is made only at level full.

        So are, in 16 bits, all with ordinary numbers, which the designs ask, but for what tells
        precisions apart.
        """
        is_plain = call.full_in_16_bits or (self.independent and call.statistical)
        return call.full or (dtype.itemsize == 2 and is_plain and not call.telling)


Gradients = tuple[Rounded | None, ...]
Answer = tuple[tuple[Rounded, ...], Callable[..., Gradients]]
"""Outputs and residuals; and from the outputs' gradients those of the differentiable arguments."""


def differentiable(answer: Callable[..., Answer]) -> Oracle:
    """Of ``answer(*args, **attrs)``, which states both directions from the same parts."""
    return Oracle(
        forward=lambda *args, **attrs: answer(*args, **attrs)[0],
        backward=lambda grads, *args, **attrs: answer(*args, **attrs)[1](*grads),
    )


def numbers(arg: Any, call: Call | None = None) -> Any:
    """An argument as an oracle takes it: float tensors as Rounded, other tensors as arrays.

    Of a call whose infinite numbers leave something open they are NaN.
    """
    if isinstance(arg, Tensor):
        host = arg.detach().cpu()
        if not host.is_floating_point():
            return host.numpy()
        if call is not None and call.leaves_open:
            host = host.masked_fill(host.isinf(), torch.nan)
        return Rounded.exact(host.double().numpy(), STORED[host.dtype])
    if isinstance(arg, (list, tuple)):
        return [numbers(entry, call) for entry in arg]
    return arg
