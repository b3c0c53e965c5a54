"""What must a plugin change that was written for an earlier contract? One sentence for each thing.

Seen from its methods and its operator table; nothing is called. What a row computes, and kernel
packs, which state no version, are for the conformance suite and ``anychip doctor``.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from anychip.contract import API_VERSION, Backend, OperatorTable, Row

REPLACED = {"native_communicator": "transport(job)"}
"""Methods of earlier contracts that nobody calls any more, and what has taken their place."""


class Added(NamedTuple):
    """What rows for an operator take since contract 2.0.

    Attributes:
        forward, backward: how many tensors a row is given.
        names: attributes that are new.
        text: what is new, for people.
    """

    forward: int
    backward: int
    names: tuple[str, ...]
    text: str


_ROWS = "rows=None after the tensors that were there (in a backward after rng)"
_SCALE = ("width", "column")
_DTYPE = "out_dtype=None, the dtype of the result"
ADDED = {
    "linear": Added(3, 3, ("out_dtype",), _DTYPE),
    "grouped_linear": Added(3, 4, ("out_dtype",), _DTYPE),
    "attention": Added(3, 6, ("out_dtype",), _DTYPE),
    "attention_varlen": Added(
        5, 8, ("out_dtype",), f"cu_seqlens_q and cu_seqlens_k in place of cu_seqlens, and {_DTYPE}"
    ),
    "permute": Added(4, 4, (), "key=None and num_tokens=None after indices, going forward"),
    "dropout": Added(3, 3, _SCALE, f"{_ROWS}, and width=0 and column=0 by name"),
    "bias_dropout_add": Added(5, 3, _SCALE, f"{_ROWS}, and width=0 and column=0 by name"),
    "dropout_add_rms_norm": Added(5, 7, (), _ROWS),
    "dropout_add_layer_norm": Added(6, 8, (), _ROWS),
    "attention_dropout": Added(
        8,
        11,
        ("heads", "queries", "keys"),
        "batch_index, head_index, query_index and key_index, all None, after rng, and heads=0, "
        "queries=0 and keys=0 by name",
    ),
}  # fmt: skip
"""By operator; each row takes it, or leaves calls that have it to others by ``accepts``."""


def sentences(backend: Backend) -> list[str]:
    """What a plugin of contract 1 must change, in the order in which it is to be read."""
    found = [
        f"Write {new} in place of {old}()."
        for old, new in REPLACED.items()
        if hasattr(backend, old)
    ]
    table = getattr(backend, "operators", None)
    if isinstance(table, OperatorTable):
        found += [
            f"Rows for {name} take {added.text}."
            for name, added in ADDED.items()
            if any(_lacks(row, added) for row in table if row.operator == name)
        ]
    return [*found, f"State api = {API_VERSION}."]


def _lacks(row: Row, added: Added) -> bool:
    return not all(_takes(f, count, added.names) for f, count in _functions(row, added))


def _functions(row: Row, added: Added) -> Iterator[tuple[Callable[..., Any], int]]:
    """What is called with the arguments of a call, and with how many tensors at least."""
    count = added.forward if row.direction == "forward" else added.backward
    yield row.function, count
    if row.accepts is not None:
        yield row.accepts, count
    if row.paired is not None:
        yield row.paired.fake_residuals, count
        yield row.paired.backward, 0  # it has residuals of its own


def _takes(function: Callable[..., Any], count: int, names: tuple[str, ...]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # compiled code need not say how it is called
        return False
    kinds = [p.kind for p in parameters]
    room = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return (room >= count or inspect.Parameter.VAR_POSITIONAL in kinds) and (
        {*names} <= {p.name for p in parameters} or inspect.Parameter.VAR_KEYWORD in kinds
    )
