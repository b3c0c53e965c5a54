"""How may an operator be called? Where its tensors may lie, and rules that a design does not ask.

Nothing of where tensors lie changes the answer, nor who calls meanwhile, and nothing besides the
results is written. From where calls come, and what they share, are factors of the designs.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anychip.conformance.calls import (
    INNER_LAYOUTS,
    LAYOUTS,
    LIST_LAYOUTS,
    READ_ONLY_LAYOUTS,
    Arguments,
    Call,
    Draw,
    Layout,
    PlacedCall,
    is_another_order,
)
from anychip.conformance.case import Context, check, check_equal_bits, check_same_bits
from anychip.conformance.oracles import Oracle
from anychip.conformance.oracles.oracle import numbers
from anychip.conformance.trial import Rule, Subject, Trial, each_trial

T = TypeVar("T")
AnyTrial = TypeVar("AnyTrial", bound=Trial)

# Where tensors lie


def can_lie(arg: Any, layout: Layout, *, written: bool) -> bool:
    """Whether an argument can lie in memory like that, and otherwise than contiguously."""
    if isinstance(arg, (list, tuple)):
        # Tensors that may be one are one, wherever they are placed.
        apart = len({id(tensor) for tensor in arg}) == len(arg)
        if layout in LIST_LAYOUTS:
            return apart and len(arg) > 1 and len({tensor.dtype for tensor in arg}) == 1
        if layout in READ_ONLY_LAYOUTS:
            return not written and any(t.dim() and t.shape[0] > 1 for t in arg)
        return bool(arg) and layout in LAYOUTS
    if layout in INNER_LAYOUTS:
        is_tensor = isinstance(arg, Tensor) and arg.dim() > 2
        return is_tensor and is_another_order(arg.shape, layout)
    if not isinstance(arg, Tensor) or not arg.dim() or (arg.dim() == 1 and layout == "transposed"):
        return False
    equal = layout in READ_ONLY_LAYOUTS
    can_be = not equal or (not written and arg.is_floating_point() and arg.numel() > 0)
    return can_be and (
        layout in ("contiguous", "first", "offset") or is_another_order(arg.shape, layout)
    )


def compare(context: Context, trial: Trial, oracle: Oracle, note: str) -> None:
    """The values of one call, and that nothing else was written."""
    placed = trial.place(context)
    trial.compare(context, trial.run(placed), trial.expected(oracle), note)
    trial.check_untouched(placed, note)


def with_argument(trial: Trial, place: int, new: Any) -> Call:
    """A trial's call with another argument; a function is given all of them."""

    def make(draw: Draw) -> Arguments:
        args, attrs = trial.signature.bind(*trial.call.make(draw))
        value = new(args) if callable(new) else new
        return (*args[:place], value, *args[place + 1 :]), dict(attrs)

    return replace(trial.call, make=make, statistical=False)


def alike(args: Sequence[Any], written: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of float arguments that are not written, with one shape and dtype."""
    floats = [
        index
        for index, arg in enumerate(args)
        if isinstance(arg, Tensor) and arg.is_floating_point() and arg.dim()
        if index not in written
    ]
    return [
        (a, b)
        for a, b in itertools.combinations(floats, 2)
        if args[a].shape == args[b].shape and args[a].dtype == args[b].dtype and args[a].numel() > 1
    ]


# What lies where a result will be, and behind it


def fill_free_blocks(context: Context, sizes: Sequence[int], pattern: int) -> None:
    """Writes a pattern into blocks of these sizes and frees them."""
    blocks = [
        torch.empty(size, dtype=torch.uint8, device=context.device).fill_(pattern)
        for size in sizes
        for _ in range(4)
    ]
    context.backend.synchronize()
    del blocks


class GuardedEmpty(TorchDispatchMode):
    """``torch.empty`` gives memory that is full of NaN, and is followed by a guard zone."""

    NAMES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
    GUARD, PATTERN = 256, 0xA5

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: for that torch imports its compiler, which takes seconds, and nothing is compiled."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: list[tuple[Tensor, Tensor, torch.Size]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or func._opname not in self.NAMES or not made.numel():
            return made
        extent = 1 + sum((n - 1) * s for n, s in zip(made.shape, made.stride(), strict=True))
        nbytes = extent * made.element_size()
        buffer = torch.empty(nbytes + self.GUARD, dtype=torch.uint8, device=made.device)
        buffer[:nbytes], buffer[nbytes:] = 0xFF, self.PATTERN
        given = buffer[:nbytes].view(made.dtype).as_strided(made.shape, made.stride())
        self.given.append((given, buffer[nbytes:], made.shape))
        return given

    def overwritten(self) -> str | None:
        """What was written behind a tensor; None when nothing was."""
        for tensor, guard, shape in self.given:
            # One that was resized has another end.
            changed = int((guard != self.PATTERN).sum()) if tensor.shape == shape else 0
            if changed:
                return f"{changed} bytes behind a result of shape {tuple(shape)} were overwritten"
        return None


def rule_guarded_results(context: Context, of: Subject) -> None:
    """A row that makes its results with torch's ``empty`` fills them, and stops at their end."""
    for trial in each_trial(context, of):
        placed = trial.place(context)
        kernel = of.operator.kernel
        known = kernel.key(placed.args)
        choice = known and kernel.peek(known[1], placed.args, placed.attrs)
        if choice is None:
            continue
        with GuardedEmpty() as guards, torch.no_grad():
            returned = choice.function(*placed.args, **placed.attrs)
        context.backend.synchronize()
        results = trial.results(returned, placed)[: of.operator.signature.num_outputs]
        trial.compare(context, results, trial.expected(of.oracle), ", in guarded memory")
        problem = guards.overwritten()
        check(problem is None, str(problem))


# Answers of other calls


def same_answer(
    context: Context,
    of: Subject,
    trial: Trial,
    found: Sequence[Tensor],
    plain: Sequence[Tensor],
    where: str,
) -> None:
    """The bits of a plain call; of an operator without an order, the oracle's numbers."""
    if of.is_bitwise:
        check_same_bits(trial.names(), found, plain, f" {where}")
    else:
        trial.compare(context, found, trial.expected(of.oracle), f" {where}", statistical=True)


CALLS_OF_A_THREAD = 5


def at_once(
    context: Context, trials: Sequence[AnyTrial], run: Callable[[AnyTrial, PlacedCall], T]
) -> Iterator[tuple[AnyTrial, T, T]]:
    """Asks for each trial alone, then several times for all at once, each in a thread.

    Yields:
        a trial, and what was found beside the others, and alone.
    """
    alone = [run(trial, trial.place(context)) for trial in trials]
    start = threading.Barrier(len(trials))

    def wait_and_run(trial: AnyTrial, placed: PlacedCall) -> T:
        start.wait()
        return run(trial, placed)

    rounds = []
    with ThreadPoolExecutor(len(trials)) as pool:
        for _ in range(CALLS_OF_A_THREAD):
            placed = [trial.place(context) for trial in trials]
            rounds.append(list(pool.map(wait_and_run, trials, placed)))
    context.backend.synchronize()
    for found in rounds:
        yield from zip(trials, found, alone, strict=True)


def rule_two_threads(context: Context, of: Subject) -> None:
    """Two threads call at once, each with its own numbers: no room that both write to."""
    call = of.oracle.plain[0]
    labels = (call.label, f"{call.label}.other")
    trials = [of.trial(replace(call, label=label), context) for label in labels]
    for trial, found, alone in at_once(context, trials, Trial.run):
        same_answer(context, of, trial, found, alone, "while another thread calls it too")


MANY_CALLS = 60
LEAK = MANY_CALLS * 160
"""Bytes: blocks of a device are larger, and of the host's own work so much comes and goes."""


def check_no_leak(context: Context, call: Callable[[], object]) -> None:
    """Many calls of one kind leave no more memory allocated than was before, in one of three tries.

    On the host other work of the process is counted too.
    """
    grown = list[int]()
    while len(grown) < 3 and (not grown or grown[-1] > LEAK):
        call()  # what is kept for all calls is there
        context.backend.synchronize()
        before = context.backend.memory.stats().allocated
        for _ in range(MANY_CALLS):
            call()
        context.backend.synchronize()
        grown.append(context.backend.memory.stats().allocated - before)
    text = f"`allocated` grew by {grown} bytes, each time in {MANY_CALLS} calls of one kind"
    check(grown[-1] <= LEAK, text)


def counts_memory(of: Subject, context: Context) -> bool:
    """Whether the backend says how much is allocated."""
    return "memory_stats" in context.backend.capabilities


def rule_leaks(context: Context, of: Subject) -> None:
    """A call lets go of what it needs."""
    trial = next(each_trial(context, of))
    placed = trial.place(context)
    check_no_leak(context, lambda: trial.run(placed))


# Numbers that are copied


_COPIES = ("embedding", "permute")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def rule_copied_bits(context: Context, of: Subject) -> None:
    """A copy keeps all bits: payloads of NaN, numbers below the normal ones, the sign of 0.

    Where each number comes from says the oracle, asked with the places of the numbers.
    """
    name = of.operator.spec.differentiable[0]
    for trial in itertools.islice(each_trial(context, of), 2):
        index = trial.signature.positional.index(name)
        args, attrs = trial.arguments
        shape, integers = args[index].shape, _INTEGERS[of.dtype.itemsize]
        count = math.prod(shape)
        generator = torch.Generator().manual_seed(count)
        ends = torch.iinfo(integers)
        bits = torch.randint(ends.min, ends.max + 1, (count,), generator=generator)
        bits[::3] |= torch.tensor(math.inf, dtype=of.dtype).view(integers).long()
        some = bits.to(integers).view(of.dtype)
        kept = torch.cat((torch.zeros(1, dtype=of.dtype), some))
        asked = of.trial(with_argument(trial, index, some.view(shape)), context)
        got = asked.run(asked.place(context))[0]
        places = [*args[:index], torch.arange(1.0, count + 1).view(shape), *args[index + 1 :]]
        with np.errstate(all="ignore"):
            found = of.oracle.forward(*map(numbers, places), **attrs)[0].value
        want = kept[torch.from_numpy(found).long()]
        check_equal_bits(f"{trial.names()[0]}, a copy of any bits", got.cpu(), want)


def rule_signed_zeros(context: Context, of: Subject) -> None:
    """What is taken out of a tensor keeps the sign of 0."""
    trial = next(each_trial(context, of))
    zeros = torch.zeros_like(trial.arguments[0][0])
    zeros[..., 1::2] = -0.0
    asked = of.trial(with_argument(trial, 0, zeros), context)
    got, want = asked.run(asked.place(context))[0], asked.expected(of.oracle)[0].value
    check_equal_bits(asked.names()[0], got.cpu(), torch.tensor(want).to(of.dtype))


RULES = (
    Rule("guarded-results", rule_guarded_results, lambda of, _: of.returns),
    Rule("two-threads", rule_two_threads, of_no_type=True),
    Rule("leaks", rule_leaks, counts_memory, of_no_type=True),
    Rule("signed-zeros", rule_signed_zeros, lambda of, _: of.operator.spec.name == "top_k"),
    Rule("copied-bits", rule_copied_bits, lambda of, _: of.operator.spec.name in _COPIES),
)
