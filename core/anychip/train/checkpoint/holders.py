"""Which tensors does a rank hold, and what else has to be saved and loaded with them?

Of a model with any optimizer rank 0 holds everything, and the optimizer's state is one value. Of
one with :class:`anychip.train.zero.Optimizer` each rank holds its parts, of states too.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from anychip.train import schema
from anychip.train.checkpoint.manifest import StoredTensor, describe
from anychip.train.checkpoint.names import (
    Names,
    carried_in,
    of_exchange,
    of_model,
    of_state,
    states_of,
)
from anychip.train.checkpoint.parts import ALL, DTYPES, Part, Share
from anychip.train.zero import Optimizer
from anychip.train.zero.state import SETTINGS, STEP
from anychip.train.zero.update import MASTER
from anychip.train.zero.weights import state_shape


class Stateful(Protocol):
    """What has a state that can be saved: an optimizer, a loader.

    One with ``check_state_dict``, which raises ValueError for what ``load_state_dict`` would not
    take, is asked before anything is loaded into anything.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Held:
    """What a rank holds of a model.

    Args:
        rank: among those that hold the same model, or stage of it.
        names: of the whole model; None: this is all of it.

    Attributes:
        parts: of tensors, each under the first of its names.
        aliases: other names in the checkpoint of a tensor to the one that it is saved under.
        others: by name what no file of tensors can hold.
        stage: number of the model's stage that it is of.
    """

    stage = 0

    def __init__(self, model: nn.Module, names: Names | None, rank: int) -> None:
        self.model, self.names, self.rank = model, names, rank
        self.parts: list[Part] = []
        self.aliases: dict[str, str] = {}
        self.others: dict[str, Any] = {}
        every = [*model.named_parameters(remove_duplicate=False)]
        self._own = {name for name, _ in every}
        tensors = {id(value) for _, value in [*every, *model.named_buffers()]}
        first: dict[int, str] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            held = id(value) in tensors and schema.TENSOR.fits(value) and value.dtype in DTYPES
            if not held:  # a file of tensors does not have it
                self.others[name] = value.detach() if isinstance(value, Tensor) else value
            elif id(value) in first:
                self.aliases[of_model(name)] = of_model(first[id(value)])
            else:
                first[id(value)] = name
                self._add(name, value)

    def finish_weights(self) -> None:
        """Makes of the parts' values what the model computes with: here they are that."""

    def _add(self, name: str, value: Tensor) -> None:
        part = self.part_of(name, value)
        saved_as = self.names.of.get(name, name) if self.names is not None else name
        if saved_as not in self._own | {name}:  # another stage has it too, and writes it
            self.aliases[part.name] = of_model(saved_as)
            part = without_share(part)
        self.parts.append(part)

    def part_of(self, name: str, value: Tensor) -> Part:
        """What this rank holds of a parameter or buffer; of a buffer, rank 0's is saved."""
        share = ALL if self.rank == 0 else None
        shape, dtype = tuple(value.shape), value.dtype
        return Part(name=of_model(name), shape=shape, dtype=dtype, values=value, share=share)

    def all_parts(self) -> list[Part]:
        """Of everything that is saved in boxes."""
        return self.parts

    def described(self) -> dict[str, str]:
        """The model's tensors and other values in words, by all their names."""
        found = {part.name: describe(part.dtype, part.shape) for part in self.parts}
        found = {name: text for name, text in found.items() if name.startswith(of_model(""))}
        found |= {name: found[first] for name, first in self.aliases.items() if first in found}
        found |= {of_model(name): in_words(value) for name, value in self.others.items()}
        order = [of_model(name) for name in self.model.state_dict(keep_vars=True)]
        return {name: found[name] for name in order}


def without_share(part: Part) -> Part:
    """The part, which another rank writes."""
    return replace(part, share=None)


def in_words(value: Any) -> str:
    """A value of a model's state dict."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if not schema.TENSOR.fits(value):
        return f"a tensor of the layout {value.layout}"
    return describe(value.dtype, value.shape)


class HeldWithStates(Held):
    """What a rank holds of a model and of the states of its :class:`anychip.train.zero.Optimizer`.

    Attributes:
        steps: of each parameter its step count, by its name in the checkpoint.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, names: Names | None) -> None:
        self.optimizer = optimizer
        self.places = {} if optimizer.sharded is None else optimizer.sharded.places
        self.groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        self.trained = {param for group in self.groups for param in group}
        comm = optimizer.comm
        self._all = Share(comm.rank, comm.world_size)
        self.named = _named(model, names, self.groups)
        super().__init__(model, names, comm.rank)
        if optimizer.model_comm is not None:
            self.stage = optimizer.model_comm.rank
        self.steps: dict[str, Part] = {}
        for param, name in self.named.items():
            self._add_states(param, name)
            self._add_carried(param, name)

    def _cut(self, param: Tensor) -> Share:
        """Of a part: neighbouring ranks have the parts of a whole, and so does each such group."""
        count = self.places[param].weights.layout.world_size
        return Share(self._all.number // count, self._all.copies // count)

    def part_of(self, name: str, value: Tensor) -> Part:
        """What this rank holds of a parameter or buffer."""
        shape, dtype = tuple(value.shape), value.dtype
        place = self.places.get(value)
        if place is not None and place.weights.partition.weights:
            assert place.weights.spans is not None
            return Part(
                name=of_model(name), shape=shape, dtype=dtype, share=self._cut(value),
                values=place.weights.values[place.index],
                offset=place.weights.spans[place.index].offset, otherwise=self._master(value),
            )  # fmt: skip
        if value not in self.trained:
            return super().part_of(name, value)
        return Part(
            name=of_model(name), shape=shape, dtype=dtype, values=value, share=self._all,
            otherwise=self._master(value),
        )  # fmt: skip

    def _master(self, param: Tensor) -> str | None:
        return of_state(self.named[param], MASTER) if param in self.named else None

    def _add_states(self, param: Tensor, name: str) -> None:
        is_elsewhere = name not in self._own and self.names is not None
        # A rank with the first and the last stage has both copies of what is tied; one is written.
        is_elsewhere |= name in self.steps
        blocks, place = self.optimizer.rule.blocks, self.places.get(param)
        spans = None if place is None else place.weights.spans
        for state, values in self.optimizer.state[param].items():
            shape, offset, share = tuple(values.shape), 0, self._all
            if spans is not None and place is not None and state != STEP:
                block = blocks.get(state)
                shape, share = state_shape(tuple(param.shape), block), self._cut(param)
                offset = spans[place.index].offset // (block or 1)
            part = Part(
                name=of_state(name, state), shape=shape, dtype=values.dtype, values=values,
                offset=offset, share=None if is_elsewhere else share,
                otherwise=of_model(name) if state == MASTER else None,
            )  # fmt: skip
            if state == STEP:
                self.steps.setdefault(name, part)
            else:
                self.parts.append(part)

    def _add_carried(self, param: Tensor, name: str) -> None:
        place, comm = self.places.get(param), self.optimizer.comm
        if place is None or place.gradients is None:
            return
        for carried, values in place.gradients.carried_of(place.index).items():
            self.parts.append(Part(
                name=of_exchange(name, carried), shape=(comm.world_size, *values.shape),
                dtype=values.dtype, values=values, offset=comm.rank * values.numel(),
                is_per_rank=True,
            ))  # fmt: skip

    def all_parts(self) -> list[Part]:
        """Of everything that is saved in boxes."""
        return [*self.parts, *self.steps.values()]

    # Settings: of the groups, and how many steps were done

    def settings(self) -> dict[str, Any]:
        """The state of the optimizer without tensors, with names in place of parameters."""
        found = self.optimizer.settings()
        names = [[self.named[param] for param in group] for group in self.groups]
        for group, theirs in zip(found["param_groups"], names, strict=True):
            group["params"] = theirs
        return found

    def whole_groups(self) -> Sequence[Sequence[str]]:
        """The names in the groups of the whole model's optimizer."""
        if self.names is not None:
            return self.names.groups
        return [[self.named[param] for param in group] for group in self.groups]

    def check(self, settings: Any, saved: Mapping[str, StoredTensor]) -> None:
        """Whether states of a checkpoint fit.

        Raises:
            ValueError: groups, shapes or kinds of numbers are not those of this optimizer, or loss
                scaling needs a scale and there is none.
        """
        schema.check(settings, SETTINGS, "optimizer state")
        got = [group["params"] for group in settings["param_groups"]]
        mine = self.whole_groups()
        if [len(group) for group in got] != [len(group) for group in mine]:
            raise ValueError(
                f"optimizer state: groups of {[len(g) for g in mine]} parameters expected, got "
                f"{[len(g) for g in got]}"
            )
        for number, (theirs, ours) in enumerate(zip(got, mine, strict=True)):
            if set(theirs) != set(ours):
                other = sorted(set(ours) - set(theirs))[0]
                raise ValueError(f"optimizer state: group {number} with {other} expected")
        self.optimizer.check_settings(settings)
        if dropped := carried_in(saved) - carried_in(part.name for part in self.parts):
            warnings.warn(
                f"the checkpoint has what an exchange carried ({', '.join(sorted(dropped))}), and "
                "this optimizer's has no such thing: what was owed to gradients is dropped",
                stacklevel=2,
            )
        states = states_of(saved)
        for param, name in self.named.items():
            self._check_states(name, self.optimizer.state[param], states.get(name, set()), saved)

    def _check_states(
        self, name: str, mine: Mapping[str, Tensor], found: set[str], saved: Any
    ) -> None:
        held = {part.name: part for part in [*self.parts, *self.steps.values()]}
        wanted = {state: held[of_state(name, state)].shape for state in mine}
        got = {state: saved[of_state(name, state)].shape for state in found}
        if MASTER not in wanted or MASTER not in got:
            for shapes in (wanted, got):  # saved with float32 weights, or loaded into such
                shapes.pop(MASTER, None)
        if wanted != got:
            raise ValueError(f"optimizer state of {name}: shapes {wanted} expected, got {got}")
        for state in wanted:
            dtype = saved[of_state(name, state)].dtype
            if dtype.is_floating_point != mine[state].is_floating_point() or dtype == torch.bool:
                raise ValueError(
                    f"optimizer state of {name}: {state} of {mine[state].dtype} expected, got "
                    f"{dtype}"
                )

    def finish(
        self, settings: Mapping[str, Any], steps: Mapping[str, float], saved: Collection[str]
    ) -> None:
        """Takes over what is left when the parts have their values. With masters a collective call.

        Args:
            settings: that were checked.
            steps: step counts by the parameters' names.
            saved: names of the parts that have values.
        """
        of = {name: group for group in settings["param_groups"] for name in group["params"]}
        mine = [of[self.named[group[0]]] if group else {} for group in self.groups]
        for group in self.groups:
            counts: dict[float, Tensor] = {}  # parameters that had counted together go on so
            for param in group:
                count, entry = steps[self.named[param]], self.optimizer.state[param]
                if count not in counts:
                    counts[count] = torch.full_like(entry[STEP], count)
                entry[STEP] = counts[count]
        self.optimizer.load_settings({**settings, "param_groups": mine})
        self.finish_weights(saved)

    def leave_out_states(self) -> None:
        """Holds the model alone from now on."""
        self.steps = {}
        self.parts = [part for part in self.parts if part.name.startswith(of_model(""))]

    def finish_weights(self, saved: Collection[str] = ()) -> None:
        """Makes of the parts' values what the model computes with. With masters a collective call.

        Args:
            saved: names of the parts that have values; a master that has none is made of its
                weight.
        """
        sharded = self.optimizer.sharded
        if sharded is None:
            return
        if sharded.partition.weights:
            sharded.updated(self.places)
            return
        masters = [param for param in self.named if MASTER in self.optimizer.state[param]]
        given = [p for p in masters if of_state(self.named[p], MASTER) in saved]
        sharded.updated(given)
        sharded.written([param for param in masters if param not in set(given)])


def _named(
    model: nn.Module, names: Names | None, groups: Sequence[Sequence[Tensor]]
) -> dict[Tensor, str]:
    """Of each trained parameter the first name in the whole model."""
    first: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    of = {} if names is None else names.of
    params = [param for group in groups for param in group]
    found = [first.get(param, f"parameter_{number}") for number, param in enumerate(params)]
    return {param: of.get(name, name) for param, name in zip(params, found, strict=True)}


def holder(
    model: nn.Module, optimizer: Stateful, names: Names | None, rank: int
) -> Held | HeldWithStates:
    """What a rank of the job holds."""
    if isinstance(optimizer, Optimizer):
        return HeldWithStates(model, optimizer, names)
    return Held(model, names, rank)
