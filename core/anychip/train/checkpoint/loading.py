"""How does a run go on from a checkpoint? All of it is looked at first, on every rank; then loaded.

Each rank reads the boxes that meet what it holds, whatever arrangement they were saved at.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from anychip.contract import Communicator
from anychip.runtime import on_host
from anychip.train import schema
from anychip.train.checkpoint import folder, manifest, randomness, whole_tensors
from anychip.train.checkpoint.agreement import attempt, gather
from anychip.train.checkpoint.folder import refusal
from anychip.train.checkpoint.holders import Held, HeldWithStates, Stateful, holder, in_words
from anychip.train.checkpoint.manifest import Manifest, describe
from anychip.train.checkpoint.names import Names, of_model
from anychip.train.checkpoint.parts import Part
from anychip.train.checkpoint.reading import Reader, open_files
from anychip.train.checkpoint.saving import device_of
from anychip.train.zero import Optimizer
from anychip.train.zero.state import STEP_TENSOR

_ANY_DICT = schema.Check("a dict", lambda value: isinstance(value, dict))
_PROGRESS: Mapping[str, schema.Form] = {
    "step": schema.COUNT,
    "data": schema.optional(_ANY_DICT),
    "random": [randomness.FORM],
    "extra": {str: schema.ANY},
}
_OWN_PROGRESS: Mapping[str, schema.Form] = {
    **_PROGRESS,
    "optimizer": {"named?": schema.ANY, "whole?": schema.ANY},
    "others": {str: schema.ANY},
}
_FORMS: Mapping[int, Mapping[str, schema.Form]] = {
    manifest.VERSION: {"progress": _OWN_PROGRESS},
    manifest.WHOLE_TENSORS: {"model": {str: schema.ANY}, "optimizer": {}, "progress": _PROGRESS},
}


class State(NamedTuple):
    """Where a run goes on.

    Attributes:
        step: updates done; 0 when there was no checkpoint.
        extra: what was given to :func:`save`.
    """

    step: int
    extra: Mapping[str, Any]


class _Looked(NamedTuple):
    """A checkpoint that fits.

    Attributes:
        load: changes what is given, and cannot fail.
        absent: names of the model's tensors that this rank does not have.
    """

    digest: str
    state: State
    load: Callable[[], None]
    absent: frozenset[str]


def saved_step(directory: str | Path) -> int | None:
    """The step of the checkpoint in a directory by its manifest; None: there is none.

    Raises:
        CheckpointError: the manifest is damaged, or of a newer version.
    """
    path = Path(directory) / "checkpoint"
    return manifest.read(path).step if folder.has_manifest(path) else None


def _nothing() -> None:
    pass


class _Loads(NamedTuple):
    """What changes the model and the optimizer, when all has been looked at.

    Attributes:
        before: what may still say that it does not fit.
        model: its tensors, and states that are read by parts.
        after: what needs the model's.
    """

    before: Callable[[], Any] = _nothing
    model: Callable[[], Any] = _nothing
    after: Callable[[], Any] = _nothing


class _Targets(NamedTuple):
    """What a checkpoint is loaded into."""

    model: nn.Module
    optimizer: Stateful
    data: Stateful | None
    names: Names | None
    rank: int
    weights_only: bool
    averaged: bool


def resume(
    directory: str | Path, *, model: nn.Module, optimizer: Stateful, data: Stateful | None = None,
    names: Names | None = None, comm: Communicator | None = None, weights_only: bool = False,
    averaged: bool = False,
) -> State:  # fmt: skip
    """Loads the checkpoint in a directory, if there is one, into what is given.

    With several ranks a collective call: each reads what it needs of the same files, and all load
    when it fits on all of them. At the number of ranks that saved it, each goes on with its
    generators' states; at another one only those do that were there, and the others keep the states
    that they have.

    Args:
        model, optimizer, data, names, comm: as :func:`save` has them, in any arrangement.
        weights_only: read no states, which the optimizer need not have: to be asked, not to go on
            with. A 16-bit weight has its own value then, and its master that.
        averaged: give the model the averages of its weights, which the optimizer's rule has kept
            (:func:`anychip.train.optim.averaged`): to be asked, not to go on with.

    Raises:
        CheckpointError: the checkpoint is damaged, or is of another model, optimizer or data, or
            of a newer version; it has no averages; the ranks see different ones. The model is as it
            was, and no file is changed.
    """
    path, rank = Path(directory) / "checkpoint", 0 if comm is None else comm.rank
    targets = _Targets(model, optimizer, data, names, rank, weights_only, averaged)
    with ExitStack() as stack:
        looked = attempt(comm, lambda: _look(path, targets, stack))
        told = gather(comm, (looked.digest, sorted(looked.absent)))
        if any(digest != looked.digest for digest, _ in told):
            raise refusal(path, "the ranks see different ones; give a directory that all share")
        absent = frozenset.intersection(*(frozenset(names) for _, names in told))
        if absent:
            raise _other_model(path, sorted(absent), {}, dict.fromkeys(absent, "there"))
        looked.load()
    return looked.state


def _look(path: Path, targets: _Targets, stack: ExitStack) -> _Looked:
    """Raises CheckpointError when it does not fit."""
    if not folder.has_manifest(path):
        folder.require_ours(path)
        return _Looked("", State(0, {}), _nothing, frozenset())
    held = holder(targets.model, targets.optimizer, targets.names, targets.rank)
    if targets.weights_only and isinstance(held, HeldWithStates):
        held.leave_out_states()
    reader = open_files(path, held.all_parts(), stack, averaged=targets.averaged)
    values = _values(path, reader)
    progress = values["progress"]
    _check_beside(path, progress, targets)
    absent = _check_model(path, held, _saved_model(reader.manifest, values, held), targets.names)
    if reader.manifest.version == manifest.VERSION:
        load = _look_at_parts(path, reader, held, progress, targets)
    else:
        load = _look_at_whole(path, values["model"], values["optimizer"], targets)
    state = State(progress["step"], progress["extra"])
    rest = partial(_load, path, progress, targets, load)
    return _Looked(reader.manifest.digest, state, rest, frozenset(absent))


def _values(path: Path, reader: Reader) -> dict[str, Any]:
    """What the files hold that are no tensors' alone, verified and of their form."""
    forms = _FORMS[reader.manifest.version]
    values = {part: reader.values(part) for part in forms}
    for part, form in forms.items():
        try:
            schema.check(values[part], form, part)
        except ValueError as error:
            raise refusal(path, f"it holds something else: {error}") from error
    if values["progress"]["step"] != reader.manifest.step:
        step = reader.manifest.step
        raise refusal(path, f"manifest.json has step {step}, and progress another one")
    return values


def _check_beside(path: Path, progress: Mapping[str, Any], targets: _Targets) -> None:
    """The states of generators, and the position in the data."""
    randoms = _randoms(progress, targets)
    if randoms is not None:
        check = partial(randomness.check, device=device_of(targets.model))
        _hand_over(path, "generators", check, randoms)
    if targets.data is not None:
        if progress["data"] is None:
            raise refusal(path, "it was saved without a position in the data")
        if take := getattr(targets.data, "check_state_dict", None):
            _hand_over(path, "data", take, progress["data"])


def _randoms(progress: Mapping[str, Any], targets: _Targets) -> Any:
    saved = progress["random"]
    return saved[targets.rank] if targets.rank < len(saved) else None


def _hand_over(path: Path, name: str, take: Callable[..., Any], *state: Any) -> None:
    try:
        take(*state)
    except (ValueError, KeyError, TypeError) as error:
        raise refusal(path, f"it does not fit the {name}: {error}") from error


def _saved_model(found: Manifest, values: Mapping[str, Any], held: Held) -> dict[str, str]:
    """What a checkpoint has of a model, in words: in the dtypes that it is loaded in."""
    others = values["progress"]["others"] if found.version == manifest.VERSION else values["model"]
    saved = {name: str(tensor) for name, tensor in found.tensors.items()}
    saved = {name: text for name, text in saved.items() if name.startswith(of_model(""))}
    mine, adapted = {part.name for part in held.parts}, {}
    for part in held.parts:
        tensor = found.of(part) if part.name in saved else None
        # A weight comes from its master, or is made of this rank's one.
        if tensor is not None and (tensor.dtype == part.dtype or part.otherwise in mine):
            adapted[part.name] = describe(part.dtype, tensor.shape)
    first = {alias: of for alias, of in held.aliases.items() if alias in saved and of in adapted}
    saved |= {**{alias: adapted[of] for alias, of in first.items()}, **adapted}
    return saved | {of_model(name): in_words(value) for name, value in others.items()}


def _check_model(path: Path, held: Held, saved: Mapping[str, str], names: Names | None) -> set[str]:
    """The names that are not this rank's; those of a whole model all are."""
    mine = held.described()
    expected = {**mine, **saved} if names is None else mine
    wrong = [name for name in expected if mine.get(name) != saved.get(name)]
    if wrong:
        raise _other_model(path, wrong, mine, saved)
    return saved.keys() - mine.keys()


def _other_model(
    path: Path, wrong: Sequence[str], mine: Mapping[str, str], saved: Mapping[str, str]
) -> folder.CheckpointError:
    name, more = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return refusal(
        path,
        f"it is of another model: {name.removeprefix(of_model(''))} is "
        f"{mine.get(name, 'absent')} in this model and {saved.get(name, 'absent')} in the "
        f"checkpoint{more}",
    )


def _look_at_parts(
    path: Path, reader: Reader, held: Held, progress: Mapping[str, Any], targets: _Targets
) -> _Loads:
    """Raises CheckpointError unless all that this rank reads is there and fits."""
    state, tensors = progress["optimizer"], reader.manifest.tensors
    if targets.weights_only:
        loads = _Loads(after=held.finish_weights)
    elif "whole" in state:
        loads = _look_at_state(path, state["whole"], targets)
    elif isinstance(held, HeldWithStates) and "named" in state:
        _hand_over(path, "optimizer", held.check, state["named"], tensors)
        steps = {name: _step(path, reader, part) for name, part in held.steps.items()}
        given = [part.name for part in held.parts if reader.manifest.of(part) is not None]
        loads = _Loads(after=partial(held.finish, state["named"], steps, given))
    else:
        mine = type(targets.optimizer).__name__
        raise refusal(
            path,
            f"it does not fit the optimizer: it was saved with zero.Optimizer, and this is {mine}",
        )
    for part in held.parts:
        reader.verify(part)
    return loads._replace(model=partial(_load_parts, reader, held, progress["others"]))


def _step(path: Path, reader: Reader, part: Part) -> float:
    reader.verify(part)
    value = reader.read(part)
    if not STEP_TENSOR.fits(value):
        raise refusal(
            path, f"{part.name}: {STEP_TENSOR.words} expected, got {on_host(value).tolist()}"
        )
    return float(value)


def _load_parts(reader: Reader, held: Held, others: Mapping[str, Any]) -> None:
    for part in held.parts:
        # States are not there when they are whole.
        if part.values.numel() and reader.manifest.of(part) is not None:
            part.values.copy_(reader.read(part).view(part.values.shape))
        elif part.is_per_rank:
            part.values.zero_()  # nothing was owed
    mine = {name: value for name, value in others.items() if name in held.others}
    if mine:
        held.model.load_state_dict(mine, strict=False)


def _look_at_state(path: Path, state: dict[str, Any], targets: _Targets) -> _Loads:
    """Of an optimizer's state in whole tensors."""
    optimizer = targets.optimizer
    if targets.names is not None and isinstance(optimizer, Optimizer):
        try:
            state = whole_tensors.of_stage(state, optimizer, targets.model, targets.names)
        except ValueError as error:
            raise refusal(path, f"it does not fit the optimizer: {error}") from error
    if check := getattr(optimizer, "check_state_dict", None):
        _hand_over(path, "optimizer", check, state)
        return _Loads(after=partial(optimizer.load_state_dict, state))
    # What it does not take it says when it is loaded only: before the model is changed.
    return _Loads(before=partial(_hand_over, path, "optimizer", optimizer.load_state_dict, state))


def _look_at_whole(
    path: Path, model: Mapping[str, Any], state: dict[str, Any], targets: _Targets
) -> _Loads:
    """Of a checkpoint in whole tensors."""
    loads = _Loads() if targets.weights_only else _look_at_state(path, state, targets)
    into = whole_tensors.holder(targets.model, targets.optimizer)
    mine = {name: model[name] for name in targets.model.state_dict(keep_vars=True)}
    return loads._replace(model=partial(into.load_state_dict, mine))


@torch.no_grad()
def _load(path: Path, progress: Mapping[str, Any], targets: _Targets, loads: _Loads) -> None:
    if targets.data is not None:
        _hand_over(path, "data", targets.data.load_state_dict, progress["data"])
    loads.before()
    loads.model()
    loads.after()
    randoms = _randoms(progress, targets)
    if randoms is not None:
        randomness.restore(randoms, device_of(targets.model))
