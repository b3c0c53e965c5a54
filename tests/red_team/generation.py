"""Draws mistakes from a seed, and leaves out those that no call reaches or that change nothing.

A probe is a raw call at random (:mod:`tests.red_team.probes`). A mistake counts when some probe
meets its conditions and comes to another result than without it: other bits of an integer, more
than 2^-10 of a number or of the mean size beside it, another layout, another exception.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip.dispatch import selection
from anychip.dispatch.operator import registered
from tests.mutants.subjects import Backend as Name
from tests.red_team.conditions import SAME_ADDRESS, STATES, Call, Condition, draw_condition
from tests.red_team.effects import draw_effect
from tests.red_team.methods import method_mistakes
from tests.red_team.mistake import Mistake
from tests.red_team.probes import Probe, probe
from tests.red_team.ranks import rank_mistakes
from tests.red_team.seam import SIGNATURES, SPECS, Seam, Target, flat

PROBES = 80
"""Per operator: what fewer than one of them in so many meets is taken for unreachable."""
TRIED_PROBES = 3
"""Of those that meet the conditions, so many have to show no difference."""
RARER = 4
"""So often a condition is drawn anew that most probes meet."""
CALLS = 10
"""In a row, where a mistake counts calls."""
METHOD_SHARE = 5
"""One mistake in so many is of a method of the device."""
RANK_SHARE = 20
"""One in so many is of a call of ranks, which need processes of their own; the rest are of rows."""
ABSOLUTE, RELATIVE = 1e-30, 2.0**-10
ASSUMED = ("not the main thread", "on a side stream", SAME_ADDRESS)
"""States that every call may have; a probe is not put into them."""
DTYPES = (torch.float32,) * 6 + (torch.bfloat16,) * 3 + (torch.float16,) * 2
BACKENDS: tuple[Name, ...] = ("cpu", "asynchronous")


def mistakes(count: int, seed: int) -> tuple[list[Mistake], Counter[str]]:
    """So many mistakes, and how many were left out for which reason."""
    draw, discarded = random.Random(seed), Counter[str]()
    found = method_mistakes(count // METHOD_SHARE, draw)
    found += rank_mistakes(count // RANK_SHARE, draw)
    before = selection.current
    try:
        for number, backend in enumerate(BACKENDS):
            left = count - len(found)
            share = left // (len(BACKENDS) - number)
            found += list(_of_rows(backend, share, draw, discarded))
    finally:
        selection.current = before
    return found, discarded


def _of_rows(
    backend: Name, count: int, draw: random.Random, discarded: Counter[str]
) -> Iterator[Mistake]:
    """In turn of all operators, of forward rows more than of backward ones."""
    seam = Seam(backend)
    selection.activate(seam.backend)
    names = sorted({row.operator for row in seam.backend.operators} & SPECS.keys())
    draw.shuffle(names)
    for number, name in enumerate(names):
        share = count * (number + 1) // len(names) - count * number // len(names)
        if share:
            seed = draw.getrandbits(32)
            bench = Bench(seam, backend, name, seed)
            yield from (bench.mistake(f"{seed}/{place}", discarded) for place in range(share))


class Bench:
    """One operator of one backend, and its probes."""

    def __init__(self, seam: Seam, backend: Name, operator: str, seed: int) -> None:
        self.seam, self.backend, self.operator = seam, backend, operator
        draw = random.Random(seed)
        self.calls: dict[Target, list[tuple[int, Call]]] = {}
        self.probes: list[Probe] = []
        for number in range(PROBES):
            dtype = draw.choice(DTYPES) if backend == "cpu" else torch.float32
            self.probes.append(probe(SPECS[operator], dtype, draw.getrandbits(32)))
            seam.on_call = partial(self._record, number)
            outcome(operator, self.probes[number])
        seam.on_call = lambda target, call: None

    def _record(self, number: int, target: Target, call: Call) -> None:
        if target[0] == self.operator:
            self.calls.setdefault(target, []).append((number, _held(call)))

    def mistake(self, seed: str, discarded: Counter[str]) -> Mistake:
        """The first one that counts.

        Each is drawn from its own seed: whether one counts may depend on where memory lies, and
        none that follows may depend on that.
        """
        for number in itertools.count():
            draw = random.Random(f"{seed}/{number}")
            targets = sorted(self.calls)
            target = targets[-1] if len(targets) == 1 or draw.random() < 0.6 else targets[0]
            made = self._drawn(draw, target)
            reason = self._refusal(made, draw)
            if reason is None:
                return made
            discarded[reason] += 1
        raise AssertionError("there is no last one")

    def _drawn(self, draw: random.Random, target: Target) -> Mistake:
        _, call = draw.choice(self.calls[target])
        count = draw.choice((1, 1, 2, 2, 3))
        conditions = [self._condition(draw, target, call) for _ in range(count)]
        signature = SIGNATURES[self.operator]
        written = signature.written if target[1] == "forward" else ()
        results = len(flat([call.values[signature.positional[i]] for i in written])) if written \
            else signature.num_outputs if target[1] == "forward" \
            else len(SPECS[self.operator].differentiable)  # fmt: skip
        effect = draw_effect(draw, call, results, written=bool(written))
        return Mistake(
            backend=self.backend, target=target, effect=effect,
            conditions=tuple({_subject(each): each for each in conditions}.values()),
        )  # fmt: skip

    def _condition(self, draw: random.Random, target: Target, call: Call) -> Condition:
        """One that holds for few calls rather than for most, as far as that can be had."""
        calls = [each for _, each in self.calls[target]]
        for _ in range(RARER):
            found = draw_condition(draw, call, has_streams=self.seam.has_streams)
            if found.measure in STATES or 2 * sum(map(found.holds, calls)) <= len(calls):
                break
        return found

    def _refusal(self, mistake: Mistake, draw: random.Random) -> str | None:
        """Why a mistake does not count."""
        fixed = [c for c in mistake.conditions if c.measure not in STATES]
        reaching = [
            n for n, call in self.calls[mistake.target] if all(c.holds(call) for c in fixed)
        ]
        if not reaching:
            return "no probe meets the conditions"
        for number in draw.sample(reaching, min(len(reaching), TRIED_PROBES)):
            if self._differs(mistake, self.probes[number]):
                return None
        return "the effect changes nothing"

    def _differs(self, mistake: Mistake, given: Probe) -> bool:
        conditions = tuple(c for c in mistake.conditions if c.measure not in ASSUMED)
        counts = any(c.counts for c in conditions)
        calls = [given, _varied(given)] * (CALLS // 2 if counts else 1) + [given]
        right = [outcome(self.operator, each) for each in calls[:2]]
        self.seam.mistake = replace(mistake, conditions=conditions, history=type(mistake.history)())
        try:
            got = [outcome(self.operator, each) for each in calls]
        finally:
            self.seam.mistake = None
        return any(differ(right[n % 2], each) for n, each in enumerate(got))


def _subject(condition: Condition) -> str:
    """What two conditions of a mistake may not both speak of: a state and its contrary."""
    return condition.measure if condition.measure in STATES else str(condition)


def _held(call: Call) -> Call:
    """With copies of lists, which a mistake may not keep from being emptied."""
    return Call({n: list(v) if isinstance(v, list) else v for n, v in call.values.items()})


def outcome(operator: str, given: Probe) -> list[Any]:
    """All that can be seen of a call: results, gradients, arguments after it; or the exception."""
    copied = _copies(given.args)
    names = SIGNATURES[operator].positional
    inputs = []
    for place, name in enumerate(names):
        if name in given.needs:
            copied[place] = copied[place].detach().requires_grad_()
            inputs.append(copied[place])
    try:
        returned = registered()[operator](*copied, **given.attrs)
        outputs = list(SIGNATURES[operator].results(returned))
        grads: list[Any] = []
        asked = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
        if asked and inputs:
            generator = torch.Generator().manual_seed(given.seed)
            given_grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in asked]
            found = torch.autograd.grad(asked, inputs, given_grads, allow_unused=True)
            # Gradients may lie in any order, as torch's own.
            grads = [None if grad is None else grad.contiguous() for grad in found]
    except Exception as error:
        return [type(error).__name__]
    return [*outputs, *grads, *flat(copied)]


def _copies(args: tuple[Any, ...]) -> list[Any]:
    """Of all tensors, in their layouts, and sharing storages as they do."""
    storages: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [copy(each) for each in value]
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        made = storages.setdefault(storage.data_ptr() or id(value), storage.clone())
        empty = torch.empty(0, dtype=value.dtype)
        return empty.set_(made, value.storage_offset(), value.shape, value.stride())

    return [copy(arg) for arg in args]


def _varied(given: Probe) -> Probe:
    """The same call with half the numbers, so that what is stale shows."""
    args = _copies(given.args)
    seen = set()
    for tensor in flat(args):
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            whole.mul_(0.5)
    return given._replace(args=tuple(args))


def differ(right: list[Any], got: list[Any]) -> bool:
    """Whether somebody who may not rely on the last bits could tell."""
    return len(right) != len(got) or any(map(_differ, right, got))


def _differ(right: Any, got: Any) -> bool:
    if not isinstance(right, Tensor) or not isinstance(got, Tensor):
        return type(right) is not type(got) or (isinstance(right, str) and right != got)
    if (right.shape, right.dtype, right.is_contiguous()) != (
        got.shape, got.dtype, got.is_contiguous(),
    ):  # fmt: skip
        return True
    if not right.is_floating_point():
        return not torch.equal(right, got)
    left, other = right.detach().double(), got.detach().double()
    if not left.numel():
        return False
    if not torch.equal(left.isfinite(), other.isfinite()):
        return True
    near = torch.nan_to_num(left), torch.nan_to_num(other)
    size = near[0].abs()
    mean = float(size.mean()) if math.isfinite(float(size.mean())) else 0.0
    return bool(((near[0] - near[1]).abs() > RELATIVE * size.clamp_min(mean) + ABSOLUTE).any())
