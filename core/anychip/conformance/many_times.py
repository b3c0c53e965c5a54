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
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import Arguments, Call, Draw, Layout, tensors_of
from anychip.conformance.case import Context
from anychip.conformance.trial import Subject, Trial

ELEMENTS = (1 << 20) + 1
"""So many the largest argument of a large call has, or more."""
LISTS = ("adamw", "sgd", "lion", "clip", "unscale_and_check")
"""Rules that do the same to each element of a list's tensors."""
LAYOUTS: Sequence[Layout] = ("contiguous", "offset")
"""As it is aligned, and as no vector is."""
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

    def given(self, name: str, arg: Any) -> Any:
        """The same of an argument, which may be a list."""
        along = self.arguments.get(name)
        return [self.of(t, along) for t in arg] if isinstance(arg, list) else self.of(arg, along)

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


def large_calls(trial: Trial, context: Context, elements: int = ELEMENTS) -> Iterator[Large]:
    """Large calls of a small one, aligned and not, by each way to cut its operator; at level quick
    by one.
    """
    (args, attrs), names = trial.arguments, trial.signature.positional
    known = dict(zip(names, args, strict=True))
    for outputs, cut in itertools.islice(_ways(trial), None if context.level == "full" else 1):
        largest = max(t.numel() for name in cut for t in tensors_of([known[name]]))
        large = Large(trial.call, -(-elements // largest), outputs, cut)
        made = tuple(large.given(name, arg) for name, arg in known.items())
        for lies in LAYOUTS:
            call = replace(trial.call, make=partial(_given, (made, attrs)), layout=lies)
            yield large._replace(call=call)


def _ways(trial: Trial) -> Iterator[tuple[Sequence[Along], Mapping[str, int]]]:
    """Along which dims outputs are repeated, and arguments by name."""
    (args, attrs), signature, spec = trial.arguments, trial.signature, trial.operator.spec
    known = list(zip(signature.positional, args, strict=True))
    if spec.sharding is None:
        written = [args[index] for index in trial.written if args[index] is not None]
        outputs = [along for arg in written
                   for along in ([0] * len(arg) if isinstance(arg, list) else [None])]  # fmt: skip
        yield outputs, {name: 0 for name, arg in known if isinstance(arg, list) and arg}
        return
    for results, inputs in spec.sharding.forward(*args, *(attrs[n] for n in signature.attr_names)):
        places = iter(inputs)
        along = {name: next(places) for name, arg in known if isinstance(arg, Tensor)}
        cut = {name: dim for name, dim in along.items() if isinstance(dim, int)}
        if "partial" not in (*results, *along.values()) and cut:
            yield cast("Sequence[Along]", results), cut


def _given(arguments: Arguments, _: Draw) -> Arguments:
    return arguments


def can_repeat(of: Subject, _: Context) -> bool:
    """Whether an operator can be cut, and what it gives does not depend on where."""
    spec = of.operator.spec
    return spec.name in LISTS or (spec.sharding is not None and not spec.random)


def small_trial(of: Subject, context: Context) -> Trial:
    """The call that is repeated; of lists one whose tensors all have dims and elements."""
    return of.trial(of.oracle.plain[-1 if of.operator.spec.name in LISTS else 0], context)
