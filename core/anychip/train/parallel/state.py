"""What do the stages of a model hold together? Its state dict, and its optimizer's, as if whole.

A checkpoint of a pipeline is that of the whole model on one rank: it loads at another number of
stages, and without a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from anychip.contract import Communicator
from anychip.contract.collectives import gather_objects
from anychip.train.parallel.stage import Stage, merge
from anychip.train.zero import Optimizer


class Names(NamedTuple):
    """How a whole model names its parameters.

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


class WholeModel:
    """The state dict of all stages together.

    Args:
        to_rank: the only rank of the pipeline that keeps what is gathered; None: all do.
    """

    def __init__(self, stage: Stage, comm: Communicator, *, to_rank: int | None = None) -> None:
        self.stage, self.comm, self.to_rank = stage, comm, to_rank

    def parameters(self) -> Any:
        """Those of this rank's stage: where they are says which device the model is on."""
        return self.stage.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Whole, on the host; nothing on ranks that do not keep it. A collective call."""
        return merge(gather_objects(self.comm, dict(self.stage.state_dict()), to_rank=self.to_rank))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this stage's part; nothing is sent."""
        self.stage.load_state_dict({key: state_dict[key] for key in self.stage.state_dict()})


class WholeOptimizer:
    """The state of all stages' optimizers, in the form of one optimizer of the whole model.

    Args:
        to_rank: the only rank of the pipeline that keeps what is gathered; None: all do.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        stage: Stage,
        names: Names,
        comm: Communicator,
        *,
        to_rank: int | None = None,
    ) -> None:
        self.optimizer, self.names, self.comm, self.to_rank = optimizer, names, comm, to_rank
        own = {param: names.of[name] for name, param in stage.named_parameters()}
        self.groups = [[own[p] for p in group["params"]] for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Whole, on the host; nothing on ranks that do not keep it. A collective call."""
        mine = self.optimizer.state_dict()
        numbers = [name for group in self.groups for name in group]
        parts = gather_objects(
            self.comm,
            {
                "state": {numbers[index]: entry for index, entry in mine["state"].items()},
                "options": [_options(group) for group in mine["param_groups"]],
                "groups": self.groups,
                "rest": _rest(mine),
            },
            to_rank=self.to_rank,
        )
        if not parts:
            return {}
        entries = merge([{n: e for n, e in part["state"].items()} for part in _first(parts)])
        whole = [name for group in self.names.groups for name in group]
        groups, start = [], 0
        for group in self.names.groups:
            indices = list(range(start, start + len(group)))
            groups.append({**_options_of(group, parts), "params": indices})
            start += len(group)
        state = {index: entries[name] for index, name in enumerate(whole)}
        return {"state": state, "param_groups": groups, **parts[0]["rest"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this stage's part; nothing is sent.

        Raises:
            ValueError: the groups or shapes are not those of the whole model.
        """
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != [len(group) for group in self.names.groups]:
            raise ValueError(
                f"optimizer state: groups of {[len(g) for g in self.names.groups]} parameters "
                f"expected, got {sizes}"
            )
        saved = {
            name: (index, group)
            for names, group in zip(self.names.groups, state_dict["param_groups"], strict=True)
            for name, index in zip(names, group["params"], strict=True)
        }
        state, groups, count = {}, [], 0
        for mine in self.groups:
            indices = list(range(count, count + len(mine)))
            for place, name in zip(indices, mine, strict=True):
                state[place] = state_dict["state"][saved[name][0]]
            groups.append({**_options(saved[mine[0]][1]), "params": indices})
            count += len(mine)
        self.optimizer.load_state_dict(
            {"state": state, "param_groups": groups, **_rest(state_dict)}
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _rest(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in ("state", "param_groups")}


def _first(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts, each entry only where it stands first: a tied parameter is on two stages."""
    seen: set[str] = set()
    found = []
    for part in parts:
        found.append({"state": {n: e for n, e in part["state"].items() if n not in seen}})
        seen |= part["state"].keys()
    return found


def _options_of(group: Sequence[str], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    for part in parts:
        for names, options in zip(part["groups"], part["options"], strict=True):
            if names and names[0] in group:
                return dict(options)
    raise AssertionError(f"no stage has a parameter of {list(group)}")
