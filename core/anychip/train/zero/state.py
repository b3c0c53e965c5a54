"""States in whole tensors: gathered from the ranks to be saved, and taken apart when loaded."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.contract import HOST
from anychip.train import schema
from anychip.train.optim import Rule
from anychip.train.zero import checks
from anychip.train.zero.layout import ShardMetadata
from anychip.train.zero.sharded import Place
from anychip.train.zero.update import MASTER
from anychip.train.zero.weights import state_shape

Entry = Mapping[str, Tensor]
"""State of one parameter by name; ``step`` is its step count."""

STEP = "step"


def _is_step_tensor(value: Any) -> bool:
    is_one = schema.TENSOR.fits(value) and value.numel() == 1 and not value.is_complex()
    return is_one and 0 <= float(value) < 1 << 62


def _is_step(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and 0 <= value < 1 << 62
    return is_number or _is_step_tensor(value)


_STEP = schema.Check("a number of steps", _is_step)
STEP_TENSOR = schema.Check(_STEP.words, _is_step_tensor)
"""What can be the step count of a parameter."""

_GROUPS = [{"params": [int], str: schema.OPTION}]
_REST: dict[str, schema.Form] = {
    "num_steps": schema.COUNT,
    "loss_scale?": {
        "scale": schema.Check("a number above 0", lambda v: type(v) is float and 0 < v < math.inf),
        "num_clean": schema.COUNT,
        "num_skipped": schema.COUNT,
    },
}
_FORM: schema.Form = {
    "state": {int: {STEP: STEP_TENSOR, str: schema.TENSOR}},
    "param_groups": _GROUPS,
    **_REST,
}
SETTINGS: schema.Form = {"param_groups": [{"params": [str], str: schema.OPTION}], **_REST}
"""Of a state without tensors, with the names of parameters in place of their numbers."""

_FORM_OF_TORCH = {"state": {int: {"step?": _STEP, str: schema.OPTION}}, "param_groups": _GROUPS}
_FORM_WITH_NAMES = {
    "state": {str: {str: schema.OPTION}},
    "param_groups": [{"params": [str], str: schema.OPTION}],
}

IS_SCHEDULED = "is_scheduled"
"""In a saved group whose rule has a schedule: whether that decides ``lr``."""

_ELSEWHERE = {"foreach", "fused", "capturable", "differentiable"}
"""Options of torch's optimizers that say how, and not what."""

_NEUTRAL = {"amsgrad": False, "maximize": False, "dampening": 0, "decoupled_weight_decay": True}
"""Options of torch's that our rules have with this value only."""


def numbered(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups with the parameters' numbers in their place."""
    count, found = 0, []
    for group in groups:
        numbers = list(range(count, count + len(group["params"])))
        found.append({**group, "params": numbers})
        count += len(numbers)
    return found


def options(group: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
    """What a parameter group takes over from a saved one."""
    scheduled = rule.schedule is not None and "initial_lr" not in group
    left_out = {"params", IS_SCHEDULED} | ({"lr"} if group.get(IS_SCHEDULED, scheduled) else set())
    return {name: copy.deepcopy(value) for name, value in group.items() if name not in left_out}


def in_form(state_dict: Mapping[str, Any], rule: Rule, params: Sequence[Tensor]) -> dict[str, Any]:
    """A state of ours or of torch's, in the form of ours.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(state_dict, dict) and "num_steps" not in state_dict:
        state_dict = _with_numbers(state_dict)
        schema.check(state_dict, _FORM_OF_TORCH, "optimizer state")
        state_dict = _of_torch(state_dict, rule, params)
    schema.check(state_dict, _FORM, "optimizer state")
    return dict(state_dict)


def _with_numbers(state_dict: dict[str, Any]) -> dict[str, Any]:
    """In place of names, as torch.distributed.checkpoint's get_state_dict gives them."""
    found = state_dict.get("state")
    if not isinstance(found, dict) or not any(isinstance(key, str) for key in found):
        return state_dict
    schema.check(state_dict, _FORM_WITH_NAMES, "optimizer state")
    groups, states = numbered(state_dict["param_groups"]), state_dict["state"]
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    entries = {number: states[name] for number, name in enumerate(names) if name in states}
    return {"state": entries, "param_groups": groups}


def _of_torch(
    state_dict: Mapping[str, Any], rule: Rule, params: Sequence[Tensor]
) -> dict[str, Any]:
    """The state of one of torch's optimizers, as the rule's would have been saved.

    Raises:
        ValueError: it was updated otherwise than the rule does.
    """
    groups = [_options_of_torch(group, rule) for group in state_dict["param_groups"]]
    if "momentum" in rule.options and rule.schedule is not None:
        raise ValueError(
            "optimizer state: torch's SGD saves no number of steps, which the rule's schedule "
            "needs; make the rule with a number as lr"
        )
    keys = [key for group in groups for key in group["params"]]
    entries: dict[Any, dict[str, Tensor]] = {}
    for key, param in zip(keys, params, strict=False):
        given = {k: v for k, v in state_dict["state"].get(key, {}).items() if v is not None}
        given = {"step": 0.0, **rule.init(param), **given}  # torch makes states at the first step
        entries[key] = {name: torch.as_tensor(value) for name, value in given.items()}
    count = max(float(entry["step"]) for entry in entries.values())
    return {"state": entries, "param_groups": groups, "num_steps": int(count)}


def _options_of_torch(group: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
    kept = {name: value for name, value in group.items() if name not in _ELSEWHERE}
    for name, value in _NEUTRAL.items():
        got = kept.pop(name, value)
        if got != value and (name != "decoupled_weight_decay" or group["weight_decay"]):
            raise ValueError(
                f"optimizer state: saved with {name}={got!r}, and the rule knows {value!r} only; "
                "go on with torch's optimizer, or begin with a fresh state"
            )
    foreign = kept.keys() - {*rule.options, *checks.KEPT}
    if foreign:
        raise ValueError(
            f"optimizer state: saved by another rule, with {', '.join(sorted(foreign))}; this one "
            f"has {', '.join(rule.options)}"
        )
    return {**kept, "decoupled": False} if "decoupled" in rule.options else kept


def gather(
    entry: Entry, place: Place, blocks: Mapping[str, int], *, keeps: bool
) -> dict[str, Tensor]:
    """A parameter's state in whole tensors, on the host. A collective call.

    Args:
        blocks: as :class:`~anychip.train.optim.Rule` has them.
        keeps: False: this rank takes part, and gets nothing.
    """
    found = {}
    for name, tensor in entry.items():
        whole = tensor
        if name != STEP:
            whole = place.weights.whole(place.index, tensor, blocks.get(name))
        if keeps:
            found[name] = whole.to(HOST, copy=name == STEP)
    return found


def matched(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[Tensor, Entry],
    blocks: Mapping[str, int],
    *,
    partitioned: bool,
) -> dict[Tensor, Entry]:
    """The saved entry of each parameter.

    Raises:
        ValueError: groups or shapes are not those of this optimizer.
    """
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    mine = [len(group["params"]) for group in groups]
    if sizes != mine:
        raise ValueError(f"optimizer state: groups of {mine} parameters expected, got {sizes}")
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in groups for param in group["params"]]
    found = {}
    for number, (key, param) in enumerate(zip(keys, params, strict=True)):
        found[param] = state_dict["state"].get(key, {})
        wanted = {name: tuple(tensor.shape) for name, tensor in entries[param].items()}
        if partitioned:
            shape = tuple(param.shape)
            whole = {name: state_shape(shape, blocks.get(name)) for name in wanted}
            wanted = {**whole, STEP: wanted[STEP]}
        if MASTER in wanted and MASTER not in found[param]:
            del wanted[MASTER]  # saved with float32 weights: the weights that are here count
        _check_entry(number, found[param], wanted, entries[param])
    return found


def _check_entry(
    number: int, saved: Entry, wanted: Mapping[str, tuple[int, ...]], mine: Entry
) -> None:
    got = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if wanted != got:
        raise ValueError(
            f"optimizer state of parameter {number}: shapes {wanted} expected, got {got}"
        )
    for name, tensor in saved.items():
        if tensor.is_complex() or tensor.is_floating_point() != mine[name].is_floating_point():
            raise ValueError(
                f"optimizer state of parameter {number}: {name} of {mine[name].dtype} expected, "
                f"got {tensor.dtype}"
            )


@torch.no_grad()
def load(
    saved: Entry,
    mine: dict[str, Tensor],
    span: ShardMetadata | None,
    steps: dict[float, Tensor],
    blocks: Mapping[str, int],
) -> None:
    """Copies an entry, or this rank's part of it.

    Args:
        span: of this rank's part in the whole; None: it is the whole.
        blocks: as :class:`~anychip.train.optim.Rule` has them.
        steps: step counts of the group so far. Parameters that had counted together go on so.
    """
    for name, tensor in saved.items():
        if name == STEP:
            continue
        if span is not None:
            start = span.offset // blocks.get(name, 1)
            tensor = tensor.reshape(-1)[start : start + mine[name].numel()]
        mine[name].copy_(tensor)
    count = float(saved[STEP])
    if count not in steps:
        steps[count] = torch.full_like(mine[STEP], count)
    mine[STEP] = steps[count]
