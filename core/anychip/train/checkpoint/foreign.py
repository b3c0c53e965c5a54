"""How are weights and states taken over that somebody else has saved?

``dcp`` and ``pretrained`` know two such forms, each as a :class:`Source`. All names and shapes are
looked at first, on every rank; then each rank reads its own boxes.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from anychip.contract import Communicator
from anychip.runtime import on_host
from anychip.train.checkpoint.agreement import attempt, gather
from anychip.train.checkpoint.folder import CheckpointError
from anychip.train.checkpoint.holders import Held, HeldWithStates, Stateful, holder
from anychip.train.checkpoint.manifest import describe
from anychip.train.checkpoint.names import Names, of_model
from anychip.train.checkpoint.parts import Part
from anychip.train.zero.state import STEP_TENSOR


class Source(Protocol):
    """What has tensors, under a checkpoint's names: ``model.NAME``, ``optimizer.NAME.STATE``."""

    def find(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Of a tensor."""
        ...

    def read(self, name: str, part: Part) -> Tensor:
        """The elements of a part, (numel,), on the host.

        Raises:
            OSError, CheckpointError: they are not there.
        """
        ...

    def others(self, known: Collection[str]) -> list[str]:
        """Tensors of a model beside those that are known, in the source's words."""
        ...


def load(
    path: Path, open_source: Callable[[Held], Source], *, model: nn.Module, optimizer: Stateful,
    names: Names | None, comm: Communicator | None, weights_only: bool,
) -> int:  # fmt: skip
    """Loads what a source has into what is given. With several ranks a collective call.

    Returns:
        The steps that the optimizer has done.

    Raises:
        CheckpointError: the source has not what is needed, or something else; nothing was changed.
    """
    held = holder(model, optimizer, names, 0 if comm is None else comm.rank)
    if not weights_only and not isinstance(held, HeldWithStates):
        mine = type(optimizer).__name__
        raise _refusal(path, f"states are loaded into zero.Optimizer, and this is {mine}")
    found = attempt(comm, lambda: _look(path, open_source(held), held, weights_only))
    others = gather(comm, sorted(found.source.others(held.described().keys())))
    absent = set.intersection(*map(set, others))
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise _refusal(path, f"the model has no {sorted(absent)[0]}{more}")
    attempt(comm, found.load)
    if not isinstance(held, HeldWithStates):
        return 0
    settings = held.settings()
    steps = found.steps or {name: float(on_host(part.values)) for name, part in held.steps.items()}
    settings["num_steps"] = int(max(steps.values(), default=0.0))
    held.finish(settings, steps, [part.name for _, part in found.parts])
    return int(settings["num_steps"])


class _Found:
    """What is loaded.

    Attributes:
        parts: with the names that the source knows them by.
        steps: by the parameters' names; none when only weights are loaded.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.parts: list[tuple[str, Part]] = []
        self.steps: dict[str, float] = {}

    @torch.no_grad()
    def load(self) -> None:
        for name, part in self.parts:
            if part.values.numel():
                part.values.copy_(self.source.read(name, part).view(part.values.shape))


def _look(path: Path, source: Source, held: Held, weights_only: bool) -> _Found:
    found = _Found(source)
    for part in held.parts:
        names = _names(held, part)
        if names[0].startswith(of_model("")) or not weights_only:
            found.parts.append((_fitting(path, source, part, names), part))
    if isinstance(held, HeldWithStates) and not weights_only:
        for name, part in held.steps.items():
            value = source.read(_fitting(path, source, part, [part.name]), part)
            if not STEP_TENSOR.fits(value):
                words = f"{STEP_TENSOR.words} expected, got {on_host(value).tolist()}"
                raise _refusal(path, f"{part.name}: {words}")
            found.steps[name] = float(value)
    return found


def _fitting(path: Path, source: Source, part: Part, names: Sequence[str]) -> str:
    """The first of a part's names that the source has."""
    for name in names:
        if (got := source.find(name)) is not None:
            dtype, shape = got
            if shape == part.shape and dtype.is_floating_point == part.dtype.is_floating_point:
                return name
            mine = describe(part.dtype, part.shape)
            raise _refusal(path, f"{name}: {mine} expected, got {describe(dtype, shape)}")
    is_state = not names[0].startswith(of_model(""))
    hint = "; weights_only=True loads weights alone" if is_state else ""
    raise _refusal(path, f"it has no {names[0]}{hint}")


def _names(held: Held, part: Part) -> list[str]:
    """What else a tensor may be called: as what it is tied to; a master as its weight."""
    name = (
        part.otherwise if part.otherwise and not part.name.startswith(of_model("")) else part.name
    )
    elsewhere = [held.aliases[name]] if name in held.aliases else []  # on another stage
    return [name, *elsewhere, *(alias for alias, of in held.aliases.items() if of == name)]


def _refusal(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be loaded: {problem}; nothing was changed")
