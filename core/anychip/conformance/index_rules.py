"""Rules about numbers that count something of another argument, as the spec says by ``indexes``.

Drawn anew over their whole range they give the oracle's results. Out of it they are an error on a
host, where numbers can be looked at for free; a device cannot look without making the host wait for
it, so nothing is asked of one.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from anychip.conformance.calling_rules import compare, with_argument
from anychip.conformance.calls import stream
from anychip.conformance.case import Context, check, expect_error
from anychip.conformance.trial import Rule, Subject, Trial
from anychip.dispatch.indexes import Index


def drawn(kind: str, count: int, size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """So many numbers for a dim of a size of at least 1: low ones, high ones, any."""
    if kind == "each":
        first = torch.arange(count)
        return {
            "in order": first, "backwards": first.flip(0),
            "in any order": torch.randperm(count, generator=generator),
        }  # fmt: skip
    top = size - 1 if kind == "" else size
    some = torch.randint(top + 1, (count,), generator=generator)
    ends = torch.full_like(some, top)
    ends[::2] = 0
    found = {
        "all 0": torch.zeros_like(some), f"all {top}": torch.full_like(some, top),
        "any": some if kind == "" else some.sort().values,
        f"0 and {top}": ends if kind == "" else ends.sort().values,
        f"{top} last": torch.zeros_like(some).index_fill(0, torch.tensor(count - 1), top),
    }  # fmt: skip
    for numbers in found.values():
        numbers[: kind == "bounds"] = 0
    return found


def refused(kind: str, numbers: Tensor, size: int) -> Iterator[dict[int, int]]:
    """What makes numbers that are none: places among several of them, and what stands there."""
    if kind == "":
        for place in (-1, 0, len(numbers) // 2):
            yield from ({place: wrong} for wrong in (size, size + 1000, -1, -size))
        yield from ({-1: sign * 2**31} for sign in (1, -1) if numbers.dtype == torch.int64)
        yield from ({-1: 2**width} for width in (32, 62) if numbers.dtype == torch.int64)
        return
    yield {-1: size + (kind != "each")}
    yield {0: -1}
    if kind == "each":
        yield {0: int(numbers[1])}
        least, more, less, most = numbers.argsort()[[0, 1, -2, -1]].tolist()
        yield {least: int(numbers[more]), most: int(numbers[less])}  # of the same sum
    else:
        yield {-2: size, -1: size - 1}
    if kind == "bounds":
        yield from ({0: 1, **dict.fromkeys(range(1, end), size)} for end in (1, len(numbers)))


def _trials(context: Context, of: Subject) -> Iterator[tuple[str, Index, Trial]]:
    """Of each such argument a plain call in which it has several numbers, and what they count."""
    for name, index in of.operator.signature.indexes.items():
        place, other = map(of.operator.signature.positional.index, (name, index.argument))
        for trial in (of.trial(call, context) for call in of.oracle.plain):
            given = trial.arguments[0][place]
            if given is not None and given.numel() > 2 and trial.arguments[0][other].numel():
                yield name, index, trial
                break
        else:
            check(False, f"no call has three numbers of {name}, and something that they count")


def rule_drawn(context: Context, of: Subject) -> None:
    """Numbers from one end of their range to the other give the oracle's results."""
    for name, index, trial in _trials(context, of):
        positional = trial.signature.positional
        place, other = map(positional.index, (name, index.argument))
        old, size = trial.arguments[0][place], trial.arguments[0][other].shape[index.dim]
        generator = torch.Generator().manual_seed(stream(name, context.seed))
        for text, numbers in drawn(index.kind, old.numel(), size, generator).items():
            new = numbers.view(old.shape).to(old.dtype)
            changed = of.trial(with_argument(trial, place, new), context)
            compare(context, changed, of.oracle, f" where {name} is {text}")


def rule_range(context: Context, of: Subject) -> None:
    """Numbers out of their range are an error, also where one alone is; ends are named."""
    for name, index, trial in _trials(context, of):
        place, other = map(trial.signature.positional.index, (name, index.argument))
        args, size = trial.arguments[0], trial.arguments[0][other].shape[index.dim]
        given = [args[place].to(getattr(torch, t)) for t in of.operator.spec.dtypes_of(name)]
        for old, wrong in ((n, w) for n in given for w in refused(index.kind, n.view(-1), size)):
            numbers = old.clone()
            for where, value in wrong.items():
                numbers.view(-1)[where] = value
            asked = of.trial(with_argument(trial, place, numbers), context)
            placed = asked.place(context)
            expect_error(
                ValueError if index.kind else (IndexError, ValueError),
                f"{name} = {_text(wrong)} of {index.argument}'s {size}",
                of.operator,
                *placed.args,
                mentions=(of.operator.spec.name, name) if index.kind else (),
                **placed.attrs,
            )


def _text(wrong: Mapping[int, int]) -> str:
    return ", ".join(f"{value} at {where}" for where, value in wrong.items())


RULES = (
    Rule("indices", rule_drawn, lambda of, _: of.operator.spec.indexes),
    Rule("range", rule_range, lambda of, c: of.operator.spec.indexes and c.backend.is_host),
)
