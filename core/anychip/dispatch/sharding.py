"""DTensor: the specs' sharding rules in the form that ``torch.distributed.tensor`` takes.

Registered when the first DTensor comes, since importing that package costs a second. An operator
without a rule is refused by DTensor itself, by name.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from anychip.contract import OperatorSpec, Placement

_covered: set[str] = set()


def cover(spec: OperatorSpec, num_outputs: int, forward: Any, backward: Any) -> None:
    """Registers the rules of both directions of an operator, once.

    Args:
        forward, backward: its two operators of ``torch.library``.
    """
    if spec.sharding is None or spec.name in _covered:
        return
    _covered.add(spec.name)
    _register(forward, spec.sharding.forward, num_outputs + len(spec.residuals))
    _register(backward, spec.sharding.backward, len(spec.differentiable))


def _register(overload: Any, rule: Any, results: int) -> None:
    def strategy(*args: Any, **_: Any) -> list[tuple[list[Any], list[Any]]]:
        # Tensors come as DTensorSpec; everything else as itself.
        tensors = [hasattr(a, "tensor_meta") for a in args]
        replicated = ([Replicate()] * results, [Replicate() if t else None for t in tensors])
        allowed = [replicated]
        shapes = [_Shape(a) if t else a for a, t in zip(args, tensors, strict=True)]
        num_ranks = next(a.mesh.size() for a, t in zip(args, tensors, strict=True) if t)
        for outputs, inputs in rule(*shapes):
            if _cut_alike(shapes, tensors, inputs, num_ranks):
                allowed.append(([_placement(p) for p in outputs], _spread(inputs, tensors)))
        return allowed

    register_sharding(overload)(strategy)
    # DTensor remembers an answer by the tensors and the attributes from the first int on. A rule
    # may look at any attribute, so that all of them belong to the question.
    first = next(
        (i for i, a in enumerate(overload._schema.arguments) if not _is_tensor(a.type)), 100
    )
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[overload] = RuntimeSchemaInfo(first, needs_pytree=True)


def _is_tensor(kind: Any) -> bool:
    while isinstance(kind, (torch.OptionalType, torch.ListType)):
        kind = kind.getElementType()
    return isinstance(kind, torch.TensorType)


def _cut_alike(
    shapes: Sequence[Any], tensors: Sequence[bool], inputs: Sequence[Placement], num_ranks: int
) -> bool:
    """Whether the shards of all arguments belong together.

    Dims of one size are cut at the same places. Dims of different sizes, like the heads of queries
    and of keys, only when both divide evenly.
    """
    split = (a for a, is_tensor in zip(shapes, tensors, strict=True) if is_tensor)
    sizes = {
        a.shape[place] for a, place in zip(split, inputs, strict=True) if isinstance(place, int)
    }
    return len(sizes) <= 1 or all(size % num_ranks == 0 for size in sizes)


def _spread(placements: Sequence[Placement], tensors: Sequence[bool]) -> list[Any]:
    """One placement per tensor argument, None for every other argument."""
    rest = iter(placements)
    return [_placement(next(rest)) if is_tensor else None for is_tensor in tensors]


def _placement(place: Placement) -> Any:
    if place is None:
        return Replicate()
    return Partial() if place == "partial" else Shard(place)


class _Shape:
    """What a sharding rule may read of a tensor."""

    def __init__(self, spec: Any) -> None:
        self.shape = tuple(spec.shape)

    def dim(self) -> int:
        return len(self.shape)
