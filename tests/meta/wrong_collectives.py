"""Wrong backends that the collectives chapter has to find.

Ranks are processes that import these classes by name, and mix the change into the communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from anychip.contract import Communicator, Transfer, Work
from anychip.contract.collectives.communicator import DONE
from tests.meta.honest import HonestBackend
from tests.meta.wrong import Wrong

Base: Any = Communicator
"""Of the changes, which are mixed into whatever communicator the job has."""


class RanksBackend(HonestBackend):
    """Honest; its communicator is changed by ``change``."""

    change: ClassVar[type] = type("Nothing", (Base,), {})

    def communicator(self, **settings: Any) -> Communicator:
        comm = super().communicator(**settings)
        if self.change not in type(comm).__mro__:
            comm.__class__ = type(self.change.__name__, (self.change, type(comm)), {})
        return comm


class AllReduceAverages(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
            wrong = "avg" if tensor.is_floating_point() and reduction == "sum" else reduction
            return super().all_reduce(tensor, wrong, **named)  # type: ignore[misc,no-any-return]


class AllReduceInBfloat16(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
            if tensor.dtype != torch.float32 or named.get("async_op"):
                return super().all_reduce(tensor, reduction, **named)  # type: ignore[misc,no-any-return]
            narrow = tensor.to(torch.bfloat16)
            super().all_reduce(narrow, reduction)  # type: ignore[misc]
            tensor.copy_(narrow)
            return DONE


class ReduceScatterNeighbour(RanksBackend):
    class change(Base):
        def reduce_scatter(self, output: Tensor, tensor: Tensor, *rest: Any, **named: Any) -> Work:
            half = tensor.numel() // self.world_size
            if named.get("sizes") is None and half:
                tensor = tensor.view(self.world_size, half).roll(1, 0).reshape(-1)
            return super().reduce_scatter(output, tensor, *rest, **named)  # type: ignore[misc,no-any-return]


class BroadcastFromFirst(RanksBackend):
    class change(Base):
        def broadcast(self, tensor: Tensor, source: int, **named: Any) -> Work:
            return super().broadcast(tensor, min(source, 0), **named)  # type: ignore[misc,no-any-return]


class DoneTooEarly(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, *rest: Any, async_op: bool = False) -> Work:
            work: Work = super().all_reduce(tensor, *rest, async_op=async_op)  # type: ignore[misc]
            if not async_op:
                return work
            self.__dict__.setdefault("kept", []).append(work)
            return DONE


class BarrierIsNothing(RanksBackend):
    class change(Base):
        def barrier(self) -> None:
            return None


class GroupIsWorld(RanksBackend):
    class change(Base):
        def split(self, groups: Sequence[Sequence[int]], *, name: str) -> Communicator:
            super().split(groups, name=name)  # type: ignore[misc]
            return self  # type: ignore[return-value]


class RingTagsSwapped(RanksBackend):
    class change(Base):
        def exchange(self, transfers: Sequence[Transfer], **named: Any) -> Work:
            tags = [t.tag for t in transfers if t.kind == "recv"][::-1]
            swapped = [t._replace(tag=tags.pop(0)) if t.kind == "recv" else t for t in transfers]
            return super().exchange(swapped, **named)  # type: ignore[misc,no-any-return]


class AloneGathersNothing(RanksBackend):
    class change(Base):
        def all_gather(self, output: Tensor, tensor: Tensor, **named: Any) -> Work:
            return DONE


class AloneDividesByTwo(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
            if reduction == "avg":
                tensor.div_(2)
            return DONE


class AloneAcceptsMistakes(RanksBackend):
    class change(Base):
        def _check_rank(self, call: str, what: str, rank: int) -> None:
            return None


TOGETHER = " or ".join(
    f"collectives/2/{name}"
    for name in (
        "all_reduce/fp32", "reduce_scatter/fp32", "broadcast/fp32", "send/fp32", "early",
        "barrier", "groups",
    )
)  # fmt: skip
"""One selection for all, so that one run of the twin is enough."""


def wrong(name: str, bug: str, made: type[RanksBackend], select: str = TOGETHER) -> Wrong:
    return Wrong(
        name=name, bug=bug, chapter="collectives", make=made, select=select, twin=RanksBackend
    )


CATALOGUE: tuple[Wrong, ...] = (
    wrong("all-reduce-averages", "another reduction", AllReduceAverages),
    wrong("all-reduce-in-bf16", "lower precision on the wire", AllReduceInBfloat16),
    wrong("reduce-scatter-neighbour", "the neighbour's part", ReduceScatterNeighbour),
    wrong("broadcast-from-first", "an argument without effect", BroadcastFromFirst),
    wrong("work-done-too-early", "completes too early", DoneTooEarly),
    wrong("barrier-is-nothing", "missing wait", BarrierIsNothing),
    wrong("group-is-world", "scope of a group ignored", GroupIsWorld),
    wrong("ring-tags-swapped", "messages mixed up", RingTagsSwapped),
    wrong("alone-gathers-nothing", "a special case forgotten", AloneGathersNothing,
          "collectives/1"),
    wrong("alone-divides-by-two", "wrong number of ranks", AloneDividesByTwo, "collectives/1"),
    wrong("alone-accepts-mistakes", "missing check of an argument", AloneAcceptsMistakes,
          "collectives/1"),
)  # fmt: skip
