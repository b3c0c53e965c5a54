"""How are tensors of a model called in a checkpoint, whatever part of the model a rank holds?"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

_EXCHANGE = "exchange."


class Names(NamedTuple):
    """How a whole model names its parameters: what a stage of it does not know by itself.

    Attributes:
        of: each name to the first name of the same parameter: tied ones have several.
        groups: the first names, in the parameter groups and in the order of an optimizer of the
            whole model.
    """

    of: Mapping[str, str]
    groups: Sequence[Sequence[str]]


def names_of(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> Names:
    """The names of a model's parameters, and of those in an optimizer's groups."""
    first = {param: name for name, param in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return Names(
        {name: first[param] for name, param in every},
        [[first[param] for param in group["params"]] for group in groups],
    )


def of_model(name: str) -> str:
    """Of a parameter or buffer."""
    return f"model.{name}"


def of_state(name: str, state: str) -> str:
    """Of a state of the optimizer, by its parameter's first name in the whole model."""
    return f"optimizer.{name}.{state}"


def of_exchange(name: str, carried: str) -> str:
    """Of what a :class:`~anychip.train.zero.exchange.Exchange` carries of a parameter's gradient:
    (ranks, *shape), since each rank carries its own.
    """
    return f"{_EXCHANGE}{name}.{carried}"


def carried_in(names: Iterable[str]) -> set[str]:
    """What exchanges carry, from a checkpoint's names of tensors."""
    return {name.rpartition(".")[2] for name in names if name.startswith(_EXCHANGE)}


def states_of(names: Sequence[str] | Mapping[str, Any]) -> dict[str, set[str]]:
    """The states that a checkpoint has of each parameter, from its names of tensors."""
    found: dict[str, set[str]] = {}
    for name in names:
        if name.startswith("optimizer."):
            param, _, state = name.removeprefix("optimizer.").rpartition(".")
            found.setdefault(param, set()).add(state)
    return found
