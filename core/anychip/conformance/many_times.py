"""Is a call of more than 2^20 elements the small call that it repeats, time after time?

Along which dims an operator can be cut, its spec says (:class:`anychip.contract.Sharding`): each
shard has its own part of the results. So a call whose arguments are repeated along such a dim has
the small call's results, repeated. Grids that end, indices that overflow and other implementations
of large calls are met without an oracle of large calls, which would take much longer.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import Arguments, Call, Draw
from anychip.conformance.case import Context
from anychip.conformance.trial import Subject, Trial

ELEMENTS = (1 << 20) + 1
"""So many the largest argument of a large call has, or more."""
Along = int | None
"""The dim along which a tensor is repeated; None: it stays as it is."""


class Large(NamedTuple):
    """A call that repeats a small one.

    Attributes:
        times: so often.
        outputs: along which dim each is repeated.
        arguments: the same by name, of those that are.
    """

    call: Call
    times: int
    outputs: Sequence[Along]
    arguments: Mapping[str, int]

    def of(self, tensor: Tensor, along: Along) -> Tensor:
        """A tensor of the small call as the large one has it."""
        return tensor if along is None else torch.cat([tensor] * self.times, along)

    def compare(
        self, context: Context, name: str, got: Tensor, small: Tensor, want: Rounded, along: Along
    ) -> None:
        """A result has the bits of the small call's, repeated, or numbers within its bounds.

        Args:
            small, want: the small call's result on the device, and the oracle's.
        """
        if got.shape == (wanted := self.of(small, along)).shape and torch.equal(got, wanted):
            return
        if along is not None:
            want = want.shaped(lambda array: np.concatenate([array] * self.times, along))
        context.compare(f"{name}, many times over", got, want, statistical=False)


def large_calls(trial: Trial, context: Context) -> Iterator[Large]:
    """Large calls of a small one, by each way to cut its operator; at level quick by one."""
    (args, attrs), signature = trial.arguments, trial.signature
    sharding = trial.operator.spec.sharding
    assert sharding is not None
    ways = sharding.forward(*args, *(attrs[name] for name in signature.attr_names))
    known = [(name, arg) for name, arg in zip(signature.positional, args, strict=True)]
    for outputs, inputs in itertools.islice(ways, None if context.level == "full" else 1):
        places = iter(inputs)
        along = {name: next(places) for name, arg in known if isinstance(arg, Tensor)}
        cut = {name: dim for name, dim in along.items() if isinstance(dim, int)}
        if "partial" in (*outputs, *along.values()) or not cut:
            continue
        times = ELEMENTS // max(arg.numel() for name, arg in known if name in cut) + 1
        large = Large(trial.call, times, outputs, cut)  # type: ignore[arg-type]
        made = tuple(large.of(arg, cut[name]) if name in cut else arg for name, arg in known)
        yield large._replace(call=replace(trial.call, make=partial(_given, (made, attrs))))


def _given(arguments: Arguments, _: Draw) -> Arguments:
    return arguments


def can_repeat(of: Subject, _: Context) -> bool:
    """Whether an operator can be cut, and what it gives does not depend on where."""
    return of.operator.spec.sharding is not None and not of.operator.spec.random
