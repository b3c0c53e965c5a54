"""What do the stages of a model hold together? Its state dict, and its optimizer's, as if whole.

A checkpoint of a pipeline is that of the whole model on one rank: it loads at another number of
stages, and without a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from anychip.comm import gather_objects
from anychip.contract import Communicator
from anychip.train.parallel.stage import Stage, merge
from anychip.train.zero import Optimizer, ShardedModel
from anychip.train.zero.state import in_form


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
        comm: the ranks of the pipeline.
        replicas: the ranks that hold the same stage.
        optimizer: which may have taken the stage's weights apart.
    """

    def __init__(
        self, stage: Stage, comm: Communicator, replicas: Communicator, optimizer: Optimizer
    ) -> None:
        self.stage, self.comm, self.replicas = stage, comm, replicas
        self._holder = optimizer.stands_for(stage)

    def parameters(self) -> Any:
        """Those of this rank's stage: where they are says which device the model is on."""
        return self.stage.parameters()

    def state_dict(self, *, to_rank: int | None = None) -> dict[str, Any]:
        """Whole, on the host; a collective call.

        Args:
            to_rank: of the pipeline and of the replicas, the only one that gets it; the others get
                nothing.
        """
        if isinstance(self._holder, ShardedModel):
            mine = self._holder.state_dict(to_rank=to_rank)
        else:
            mine = dict(self._holder.state_dict())
        if to_rank not in (None, self.replicas.rank):
            return {}
        return merge(gather_objects(self.comm, mine, to_rank=to_rank))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this stage's part; nothing is sent."""
        names = [*dict(self.stage.state_dict(keep_vars=True))]
        self._holder.load_state_dict({name: state_dict[name] for name in names})


class WholeOptimizer:
    """The state of all stages' optimizers, in the form of one optimizer of the whole model.

    Args:
        comm: the ranks of the pipeline.
    """

    def __init__(
        self, optimizer: Optimizer, stage: Stage, names: Names, comm: Communicator
    ) -> None:
        self.optimizer, self.names, self.comm = optimizer, names, comm
        own = {param: names.of[name] for name, param in stage.named_parameters()}
        self.groups = [[own[p] for p in group["params"]] for group in optimizer.param_groups]

    def state_dict(self, *, to_rank: int | None = None) -> dict[str, Any]:
        """Whole, on the host; a collective call.

        Args:
            to_rank: as :meth:`WholeModel.state_dict` has it.
        """
        mine = self.optimizer.state_dict(to_rank=to_rank)
        if to_rank not in (None, self.optimizer.comm.rank):
            return {}
        numbers = [name for group in self.groups for name in group]
        parts = gather_objects(
            self.comm,
            {
                "state": {numbers[index]: entry for index, entry in mine["state"].items()},
                "options": [_options(group) for group in mine["param_groups"]],
                "groups": self.groups,
                "rest": _rest(mine),
            },
            to_rank=to_rank,
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

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Whether :meth:`load_state_dict` takes it.

        Raises:
            ValueError: the groups or shapes are not those of the whole model.
        """
        self.optimizer.check_state_dict(self._mine(state_dict))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this stage's part; nothing is sent.

        Raises:
            ValueError: as :meth:`check_state_dict`.
        """
        self.optimizer.load_state_dict(self._mine(state_dict))

    def _mine(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = in_form(state_dict, self.optimizer.rule, ())
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
                state[place] = state_dict["state"].get(saved[name][0], {})
            groups.append({**_options(saved[mine[0]][1]), "params": indices})
            count += len(mine)
        return {"state": state, "param_groups": groups, **_rest(state_dict)}


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
