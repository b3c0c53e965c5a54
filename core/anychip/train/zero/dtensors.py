"""Parameters that somebody else has cut, as FSDP2 does: what of them is here, and who has the rest?

A rule updates the shard of this rank. States are cut like their parameter, so that torch's
checkpoints find them; exact sums of squares are added up over the ranks that hold the other shards.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed
from torch import Tensor

from anychip.contract import Communicator, UnsupportedError
from anychip.train.optim.rule import Reduce, identity


def is_cut(tensor: Tensor) -> bool:
    """A DTensor, whose class takes a second to import."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Tensor:
    """What this rank has of it, in the same memory; a tensor that nobody has cut is itself."""
    found: Tensor = tensor.to_local() if is_cut(tensor) else tensor
    return found


def cut_like(param: Any, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """States of this rank's shard as those of the whole parameter."""
    if not is_cut(param):
        return dict(states)
    from torch.distributed.tensor import DTensor

    how = {"shape": param.shape, "stride": param.stride(), "run_check": False}
    given = param.device_mesh, param.placements
    return {name: DTensor.from_local(each, *given, **how) for name, each in states.items()}


def sum_over_parts(params: Iterable[Any]) -> Reduce:
    """int64 sums of this rank in, their sum over the ranks that hold the other shards out."""
    param = next(iter(params))
    if not is_cut(param):
        return identity
    groups = [param.device_mesh.get_group(dim) for dim in _cut_dims(param)]

    def add(sums: Tensor) -> Tensor:
        for group in groups:
            torch.distributed.all_reduce(sums, group=group)
        return sums

    return add


def _cut_dims(param: Any) -> list[int]:
    return [dim for dim, placement in enumerate(param.placements) if placement.is_shard()]


def check(params: Iterable[Any], comm: Communicator, *, is_scaled: bool, blocks: Any) -> None:
    """What can be done with parameters that somebody else has cut.

    Args:
        params: of all groups.
        blocks: as :class:`~anychip.train.optim.Rule` has them.

    Raises:
        UnsupportedError: the ranks of ``comm`` would reduce gradients once more, or not all shards
            are cut alike.
    """
    params = list(params)
    if not any(map(is_cut, params)):
        return
    kinds = {(p.device_mesh, *_cut_dims(p)) if is_cut(p) else None for p in params}
    reasons = {
        "their gradients are reduced where they are cut, and this communicator has several ranks; "
        "give anychip.comm.alone(device=...)": comm.world_size > 1,
        "they are cut in different ways, or some are whole; with a norm of all they have to be cut "
        "alike: fully_shard(model) after its blocks": len(kinds) > 1,
        "the loss scale needs to know of overflows on all ranks; compute in bfloat16": is_scaled,
        f"{', '.join(blocks)} has an entry per block, and they are not cut at blocks; take states "
        "in float32, or zero.Optimizer(stage=3) in place of fully_shard": bool(blocks),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise UnsupportedError(f"parameters that are DTensors: {reason}")
