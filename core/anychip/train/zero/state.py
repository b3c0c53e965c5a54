"""States in whole tensors: gathered from the ranks to be saved, and taken apart when loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.train.zero.shards import Shard, Shards, state_shape

Entry = Mapping[str, Tensor]
"""State of one parameter by name; ``step`` is its step count."""


def gather(
    entry: Entry, param: Tensor, shards: Shards, blocks: Mapping[str, int], *, keeps: bool
) -> dict[str, Tensor]:
    """A parameter's state in whole tensors, on the host. A collective call.

    Args:
        blocks: as :class:`~anychip.train.optim.Rule` has them.
        keeps: False: this rank takes part, and gets nothing.
    """
    found = {}
    for name, tensor in entry.items():
        whole = tensor if name == "step" else shards.whole(param, tensor, blocks.get(name))
        if keeps:
            found[name] = whole.to("cpu", copy=name == "step")
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
            wanted = {**whole, "step": wanted["step"]}
        _check_entry(number, found[param], wanted)
    return found


def _check_entry(number: int, saved: Entry, wanted: Mapping[str, tuple[int, ...]]) -> None:
    got = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if wanted != got:
        raise ValueError(
            f"optimizer state of parameter {number}: shapes {wanted} expected, got {got}"
        )


@torch.no_grad()
def load(
    saved: Entry,
    mine: dict[str, Tensor],
    shard: Shard | None,
    steps: dict[float, Tensor],
    blocks: Mapping[str, int],
) -> None:
    """Copies an entry, or this rank's part of it.

    Args:
        blocks: as :class:`~anychip.train.optim.Rule` has them.
        steps: step counts of the group so far. Parameters that had counted together go on so.
    """
    for name, tensor in saved.items():
        if name == "step":
            continue
        if shard is not None:
            start = shard.span.offset // blocks.get(name, 1)
            tensor = tensor.reshape(-1)[start : start + mine[name].numel()]
        mine[name].copy_(tensor)
    count = float(saved["step"])
    if count not in steps:
        steps[count] = torch.full_like(mine["step"], count)
    mine["step"] = steps[count]
