"""Rules about what an operator must refuse on a host, where numbers can be looked at for free.

A device cannot look at an index without making the host wait for it, so nothing is asked of one.
"""

from __future__ import annotations

from collections.abc import Callable

from anychip.conformance.case import Context, expect_error
from anychip.conformance.trial import AnyOperator, Subject, Trial, each_trial

_INDICES = {
    "cross_entropy": ("target", "logits", -1),
    "linear_cross_entropy": ("target", "weight", 0),
    "embedding": ("indices", "weight", 0),
}
"""Operators that take indices: the argument, and the dim of another one that it is an index of."""
_ENDS = {
    "attention_varlen": (("cu_seqlens_q", "q"), ("cu_seqlens_k", "k")),
    "grouped_linear": (("offsets", "x"),),
}
"""Operators that take ends of groups of rows: the argument, and the one whose rows they are."""


def rule_range(context: Context, of: Subject) -> None:
    """An index outside of its range is an error, also where it is the only one."""
    name, positional = of.operator.spec.name, of.operator.signature.positional
    argument, classes = positional.index(_INDICES[name][0]), positional.index(_INDICES[name][1])
    trial = _with_several(context, of, argument)
    limit = trial.arguments[0][classes].shape[_INDICES[name][2]]
    for wrong in (limit, limit + 1000, -1):
        placed = trial.place(context)
        placed.args[argument].view(-1)[-1] = wrong
        expect_error(
            (IndexError, ValueError),
            f"{positional[argument]} = {wrong}",
            of.operator,
            *placed.args,
            **placed.attrs,
        )


def rule_ends(context: Context, of: Subject) -> None:
    """Ends that are not sorted, or not from 0 to the rows, are an error that names them."""
    name, positional = of.operator.spec.name, of.operator.signature.positional
    for argument, whole in (map(positional.index, pair) for pair in _ENDS[name]):
        trial = _with_several(context, of, argument)
        rows = trial.arguments[0][whole].shape[0]
        for wrong in ({-1: rows + 1}, {0: -1}, {-2: rows, -1: rows - 1}):
            placed = trial.place(context)
            for place, value in wrong.items():
                placed.args[argument][place] = value
            expect_error(
                ValueError,
                f"{positional[argument]} = {placed.args[argument].tolist()} of {rows} rows",
                of.operator,
                *placed.args,
                mentions=(name, positional[argument]),
                **placed.attrs,
            )


def _with_several(context: Context, of: Subject, argument: int) -> Trial:
    """A plain call with several numbers in an argument: one wrong one is among right ones."""
    return next(
        trial
        for trial in each_trial(context, of)
        if trial.call.layout == "contiguous" and trial.arguments[0][argument].numel() > 2
    )


def _takes_indices_on_host(operator: AnyOperator, context: Context) -> bool:
    return operator.spec.name in _INDICES and context.backend.is_host


def _takes_ends_on_host(operator: AnyOperator, context: Context) -> bool:
    return operator.spec.name in _ENDS and context.backend.is_host


RULES: tuple[tuple[str, Callable[[AnyOperator, Context], bool], Callable[..., None]], ...] = (
    ("range", _takes_indices_on_host, rule_range),
    ("ends", _takes_ends_on_host, rule_ends),
)
