"""How is a state in whole tensors loaded? That of the version before, and of any optimizer.

Every rank has all of it on the host, and takes its part.
"""

from typing import Any

from torch import nn

from anychip.train.checkpoint.names import Names
from anychip.train.zero import Optimizer, ShardedModel
from anychip.train.zero.state import in_form


def holder(model: nn.Module, optimizer: Any) -> nn.Module | ShardedModel:
    """What takes the values of a model: an optimizer may have taken its weights apart."""
    return optimizer.stands_for(model) if isinstance(optimizer, Optimizer) else model


def of_stage(
    state_dict: dict[str, Any], optimizer: Optimizer, stage: nn.Module, names: Names
) -> dict[str, Any]:
    """What a stage's optimizer takes of the state of an optimizer of the whole model.

    Raises:
        ValueError: the groups are not those of the whole model.
    """
    own = {param: names.of[name] for name, param in stage.named_parameters()}
    groups = [[own[p] for p in group["params"]] for group in optimizer.param_groups]
    state_dict = in_form(state_dict, optimizer.rule, ())
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != [len(group) for group in names.groups]:
        raise ValueError(
            f"optimizer state: groups of {[len(g) for g in names.groups]} parameters expected, "
            f"got {sizes}"
        )
    saved = {
        name: (index, group)
        for of_group, group in zip(names.groups, state_dict["param_groups"], strict=True)
        for name, index in zip(of_group, group["params"], strict=True)
    }
    state, mine, count = {}, [], 0
    for group in groups:
        indices = list(range(count, count + len(group)))
        for place, name in zip(indices, group, strict=True):
            state[place] = state_dict["state"].get(saved[name][0], {})
        mine.append({**saved[group[0]][1], "params": indices})
        count += len(group)
    return {**state_dict, "state": state, "param_groups": mine}
