"""One parameter model under all stages: parameters in flat buffers, of which ranks have parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from anychip import runtime
from anychip.contract import HOST, Communicator
from anychip.train.zero import checks
from anychip.train.zero.exchange import (
    Coded,
    Exchange,
    Flat,
    GradientReduction,
    Grouped,
    OnStreams,
    Secondary,
)
from anychip.train.zero.gradients import FlatGradients
from anychip.train.zero.hooks import Action, UnitHooks
from anychip.train.zero.layout import by_size, plan
from anychip.train.zero.reduce_queue import ReduceQueue
from anychip.train.zero.streaming import Tiers
from anychip.train.zero.tiers import CHUNK_NBYTES, Tier, in_memory, tiers_of
from anychip.train.zero.units import Init, Policy, Unit, divide, materialise, own_parameters
from anychip.train.zero.weights import STAGES, FlatWeights

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter is.

    Attributes:
        weights, gradients: of the buffer; no gradients where it is frozen.
        index: in the buffer.
    """

    weights: FlatWeights
    gradients: FlatGradients | None
    index: int


class ShardingOptions(TypedDict, total=False):
    """How parameters are cut, beside the stage. Most of it is for stage 3.

    Attributes:
        units: what is gathered together; see :data:`~anychip.train.zero.units.Policy`. The blocks.
        prefetch: units that are gathered ahead of the one that runs: each hides its gathering, and
            takes the memory of its weights. 1.
        shard_group: so many neighbouring ranks hold all parts together, and each such group the
            whole (hybrid sharding): weights are gathered within a group. All ranks.
        gather_format: of codes that are gathered in place of weights, like ``int8``: a quarter of
            the bytes of float32, and weights within half a step of their block's grid; see
            :func:`anychip.ops.quantize`. What is updated and saved stays exact. No codes.
        secondary_group: so many neighbouring ranks keep what was gathered until the next step, and
            gather it again among themselves (hpZ), at the price of their parts of it. Nobody.
        exchange: makes one of what weights and gradients would go over, at any stage; see
            :class:`~anychip.train.zero.exchange.Around`. One rank sends nothing, and has none. What
            it carries is in checkpoints, and not in ``state_dict``. None.
        init: first values of a module on the meta device, which is made unit by unit, so that no
            rank ever holds the whole model; see :data:`~anychip.train.zero.units.Init`. Rank 0's
            count. ``module.reset_parameters()``.
        param_dtype: of the weights that modules see, at any stage, with masters in float32 that the
            rule updates, and that are a state, ``master``. As they are; weights of 16 bits have
            masters anyway.
        roots: modules that are called by themselves in place of the model, like the stages of a
            pipeline's rank: each has buffers of its own, so that its weights come and its
            gradients go when :class:`~anychip.train.zero.Explicit` is told. The model.
    """

    units: Policy
    prefetch: int
    shard_group: int | None
    gather_format: str | None
    secondary_group: int | None
    exchange: Callable[[Exchange], Exchange]
    init: Init | None
    param_dtype: torch.dtype | None
    roots: Sequence[nn.Module]
    offload: Mapping[str, str | Tier]
    chunk_nbytes: int


class ShardedModel:
    """The parameters of a model on one rank, of which the ranks hold parts.

    Args:
        comm: the ranks that hold the same parameters, and see different data.
        stage: of ZeRO; 0 cuts nothing.
        dtype: in which gradients are sent.
        reduction: of the ranks' gradients.
        how: see :class:`ShardingOptions`.
    """

    def __init__(
        self,
        comm: Communicator,
        stage: int,
        *,
        dtype: torch.dtype = torch.float32,
        reduction: GradientReduction = "avg",
        **how: Unpack[ShardingOptions],
    ) -> None:
        self.comm, self.stage, self.partition = comm, stage, STAGES[stage]
        self.dtype, self.how = dtype, how
        self.reduction: GradientReduction = reduction
        self.tiers: Tiers | None = None
        offload = how.get("offload")
        if offload:
            kinds, nbytes = tiers_of(offload), how.get("chunk_nbytes", CHUNK_NBYTES)
            self.tiers = Tiers(kinds, comm.device, nbytes)
        self.exchange = self._exchange()
        self.queue = ReduceQueue(comm, self.partition)
        self.places: dict[Tensor, Place] = {}
        self.module: nn.Module | None = None
        self._hooks: UnitHooks | None = None

    def _exchange(self) -> Exchange:
        world, group = self.comm.world_size, self.how.get("shard_group")
        if group is not None:
            _check_group("shard_group", group, world)
        if group is not None and group < world and self.stage:
            found: Exchange = Grouped(self.comm, group)
        else:
            # A rank that misses a gradient reduces later, and must not gather later for it.
            everyone = [list(range(world))]
            gathers = self.comm.split(everyone, name="gather") if self.partition.weights else None
            found = Flat(self.comm, gathers)
        format, secondary = self.how.get("gather_format"), self.how.get("secondary_group")
        if format is not None and self.partition.weights:
            found = Coded(found, format)
        if secondary is not None and self.partition.weights:
            _check_group("secondary_group", secondary, found.world_size)
            found = Secondary(found, self.comm, secondary)
        if (around := self.how.get("exchange")) is not None and world > 1:
            found = around(found)
        backend = runtime.owner(self.comm.device)
        return OnStreams(found, backend) if "streams" in backend.capabilities else found

    # Parameters

    def add(self, params: Sequence[Tensor], names: Sequence[str], *, max_nbytes: int) -> None:
        """Takes parameters into buffers of a size; those of a module are in units already.

        Raises:
            ValueError: a parameter that the module does not have.
        """
        self._unfreeze(params)
        known = [param in self.places for param in params]
        if self.module is not None and not all(known):
            name = names[known.index(False)]
            raise ValueError(f"{name} is no parameter of the {type(self.module).__name__}")
        if self.module is not None:
            return
        max_numel = max(1, max_nbytes // torch.float32.itemsize)
        roots: dict[Tensor, int] = {
            p: n for n, root in enumerate(self.how.get("roots", ())) for p in root.parameters()
        }
        kinds = [(roots.get(param), param.dtype) for param in params]
        for kind in dict.fromkeys(kinds):
            same = [index for index, other in enumerate(kinds) if other == kind]
            for members in by_size([params[index].numel() for index in same], max_numel):
                indices = [same[member] for member in members]
                self._buffer([params[i] for i in indices], [names[i] for i in indices])

    def add_module(self, module: nn.Module) -> None:
        """Takes all parameters of a model into units, whose weights are cut.

        Those on the meta device get memory and first values, one unit after the other.

        Raises:
            ValueError: units that the model does not have.
        """
        found = divide(module, self.how.get("units", "blocks"), self.how.get("roots", ()))
        owned = own_parameters(module, found)
        for unit, params in reversed(list(zip(found, owned, strict=True))):  # as backward has them
            materialise(unit, params, self.comm.device, self.how.get("init"))
            self._fill(unit, params)
        self.module = module
        used = [unit for unit in found if unit.weights or unit.is_root]
        self._hooks = UnitHooks(used, self.how.get("prefetch", 1))
        queue = self.queue
        self._hooks.passed = lambda unit: queue.pass_over(unit.trained)
        for unit, params in zip(found, owned, strict=True):
            self._hooks.watch_also(unit, [p for p in params.values() if p.requires_grad])

    def _fill(self, unit: Unit, params: Mapping[str, nn.Parameter]) -> None:
        kinds: dict[tuple[bool, torch.dtype], list[str]] = {}
        for name, param in params.items():
            kinds.setdefault((param.requires_grad, param.dtype), []).append(name)
        for (is_trained, _), names in kinds.items():
            members = [params[name] for name in reversed(names)]
            unit.weights.append(self._buffer(members, names[::-1], is_trained=is_trained))

    def _buffer(
        self, params: Sequence[Tensor], names: Sequence[str], *, is_trained: bool = True
    ) -> FlatWeights:
        checks.check_memory(params)
        numels = [param.numel() for param in params]
        layout = plan(numels, self._num_parts, alignment=self.exchange.alignment)
        given = params, names, layout, self.exchange, self.partition, self.how.get("param_dtype")
        weights = FlatWeights(*given, self.tiers)
        gradients = None
        if is_trained:
            gradients = FlatGradients(
                params, layout, self.exchange, self.partition, self.dtype, self.reduction,
                self.tiers, weights.cuts if self.tiers is not None else (),
            )  # fmt: skip
            self.queue.add(gradients)
        for index, param in enumerate(params):
            self.places[param] = Place(weights, gradients, index)
        return weights

    def _unfreeze(self, params: Sequence[Tensor]) -> None:
        """Gives parameters that were frozen when the model was cut buffers with gradients."""
        wanted = {p for p in params if p in self.places and self.places[p].gradients is None}
        for unit in self.units if wanted else ():
            assert self._hooks is not None
            if not any(param in wanted for weights in unit.weights for param in weights.params):
                continue
            with self._hooks.kept([unit]):
                unit.weights = [new for old in unit.weights for new in self._divided(old, wanted)]
            self._hooks.watch_also(unit, [p for w in unit.weights for p in w.params if p in wanted])

    def _divided(self, weights: FlatWeights, wanted: Collection[Tensor]) -> list[FlatWeights]:
        """In place of a buffer one of what is trained from now on, and one of the rest."""
        named = list(zip(weights.params, weights.names, strict=True))
        parts = [[pair for pair in named if (pair[0] in wanted) is want] for want in (True, False)]
        if not parts[0]:
            return [weights]
        return [
            self._buffer([p for p, _ in part], [n for _, n in part], is_trained=part is parts[0])
            for part in parts
            if part
        ]

    @torch.no_grad()
    def keep_states(
        self, param: Tensor, init: Callable[[Tensor], dict[str, Tensor]], blocks: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """The states of what this rank updates of a parameter, in their tier.

        Args:
            init, blocks: of the rule, as :class:`~anychip.train.optim.Rule` has them.
        """
        place, tiers = self.places[param], self.tiers
        weights, values = place.weights, place.weights.values[place.index]
        assert tiers is not None
        segments = [segment for chunk in weights.chunks for segment in chunk.segments]
        mine = [segment for segment in segments if segment.number == place.index]
        device, shape = param.device, values.shape
        if not tiers.is_away("states"):
            return init(in_memory(values).to(device))
        found = {
            name: weights.room_for(name, tensor.dtype, blocks.get(name, 1))[place.index]
            for name, tensor in init(torch.empty(shape, device="meta")).items()
        }
        for segment in mine:
            elements = slice(segment.start, segment.start + segment.numel)
            for name, made in init(in_memory(values.view(-1)[elements]).to(device)).items():
                start = segment.start // blocks.get(name, 1)
                found[name][start : start + made.numel()].copy_(made)
        return {n: t if n in blocks else t.view(shape) for n, t in found.items()}

    def kept_low(self) -> dict[int, Tensor]:
        """This rank's 16-bit parts that are kept beside masters, by their ``id``."""
        every = dict.fromkeys(place.weights for place in self.places.values())
        found = [w.low for w in every if w.low is not None and w.partition.weights]
        return {id(low): low for low in found}

    @property
    def _num_parts(self) -> int:
        return self.exchange.world_size if self.partition.states else 1

    # Steps

    def updated(self, params: Collection[Tensor], *, by_step: bool = False) -> None:
        """Says that these have new values; weights that stay whole are gathered."""
        if self._hooks is not None:
            self._hooks.before_update()
        works = [weights.updated(by_step=by_step) for weights in self._holding(params)]
        for work in works:
            if work is not None:
                work.wait()

    def written(self, params: Collection[Tensor]) -> None:
        """Says that the weights that modules see have been written; masters follow."""
        with self.whole():
            for weights in self._holding(params):
                weights.keep_written()

    def _holding(self, params: Collection[Tensor]) -> list[FlatWeights]:
        """The buffers that have any of them, in one order on all ranks."""
        wanted = set(params)
        found = [place.weights for param, place in self.places.items() if param in wanted]
        return list(dict.fromkeys(found))

    def check(self) -> None:
        """RuntimeError when a parameter is not the model's any more, or its memory not ours."""
        for weights in dict.fromkeys(place.weights for place in self.places.values()):
            weights.check()
        for name, param in self.module.named_parameters() if self.module is not None else ():
            if param not in self.places:
                raise RuntimeError(
                    f"{name} is another parameter than when the optimizer was made, so that its "
                    "update would be lost (as after load_state_dict(assign=True)); make the "
                    "optimizer after that"
                )

    def reset(self) -> None:
        """Forgets a forward or backward that has ended in an error: its weights, its gradients."""
        self.queue.clear(set_to_none=True)
        if self._hooks is not None:
            self._hooks.reset()

    def hold(self, params: Collection[Tensor]) -> Callable[[], None]:
        """UNSHARD of the units that have any of these, until what is returned is called."""
        if (hooks := self._hooks) is None:
            return lambda: None
        units = [u for u in hooks.units if any(p in params for w in u.weights for p in w.params)]
        hooks.hold(units)
        return lambda: hooks.let_go(units)

    # Reading and writing

    @contextmanager
    def whole(self, names: Iterable[str] | None = None, *, writes: bool = False) -> Iterator[None]:
        """Within it parameters can be read anywhere. A collective call.

        Args:
            names: of parameters, or of modules that have them; None: all.
            writes: what is written into them within it, the same on all ranks, is taken over.

        Raises:
            ValueError: a name that the model does not have.
            RuntimeError: something was written, and ``writes`` is False.
        """
        if self._hooks is None:
            yield
            for weights in dict.fromkeys(place.weights for place in self.places.values()):
                if writes:
                    weights.keep_written()
            return
        units = self._units_of(self._hooks, names)
        with self._hooks.kept(units):
            before = [param._version for unit in units for w in unit.weights for param in w.params]
            yield
            after = [param._version for unit in units for w in unit.weights for param in w.params]
            if before != after and not writes:
                raise RuntimeError(
                    "parameters were written under whole(), and what was written is lost; to keep "
                    "it: whole(names, writes=True)"
                )
            for unit in units if writes else ():
                for weights in unit.weights:
                    weights.keep_written()

    def _units_of(self, hooks: UnitHooks, names: Iterable[str] | None) -> list[Unit]:
        if names is None:
            return hooks.units
        wanted = [names] if isinstance(names, str) else list(names)
        owned = {unit: [n for w in unit.weights for n in w.names] for unit in hooks.units}
        tied = self._tied_names()
        found: dict[Unit, None] = {}
        for name in wanted:
            first = tied.get(name, name)
            holders = [
                unit
                for unit, theirs in owned.items()
                if any(n == first or n.startswith(f"{first}.") for n in theirs) or not name
            ]
            if not holders:
                raise ValueError(
                    f"{type(self.module).__name__} has no parameter, and no module with one, that "
                    f"is called {name!r}"
                )
            found |= dict.fromkeys(holders)
        return list(found)

    def _tied_names(self) -> dict[str, str]:
        """Every name of a parameter to its first."""
        assert self.module is not None
        first = {param: name for name, param in self.module.named_parameters()}
        every = self.module.named_parameters(remove_duplicate=False)
        return {name: first[param] for name, param in every}

    @property
    def whole_nbytes(self) -> int:
        """Bytes of weights that are whole, or on their way, beside this rank's parts."""
        return self._hooks.whole_nbytes if self._hooks is not None else 0

    @property
    def peak_whole_nbytes(self) -> int:
        """The most that :attr:`whole_nbytes` was so far."""
        return self._hooks.peak_nbytes if self._hooks is not None else 0

    @property
    def units(self) -> list[Unit]:
        """What is gathered together, the root last; none where weights stay whole."""
        return self._hooks.units if self._hooks is not None else []

    def recorded(self) -> Any:
        """Within it: a list of what is gathered and released, ``("UNSHARD", name of the unit)``."""
        no_actions: list[Action] = []
        return nullcontext(no_actions) if self._hooks is None else self._hooks.recorded()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of the model."""
        assert self.module is not None
        return self.module.parameters()

    def state_dict(self, *, to_rank: int | None = None) -> dict[str, Any]:
        """The model's, in whole tensors on the host; the device holds one unit at a time.

        A collective call.

        Args:
            to_rank: the only rank that keeps what is gathered; the others get nothing.
        """
        assert self.module is not None
        assert self._hooks is not None
        found = dict(self.module.state_dict(keep_vars=True))
        keeps = to_rank is None or to_rank == self.comm.rank
        copies: dict[Tensor, Tensor] = {}
        for unit in self._hooks.units:
            with self._hooks.kept([unit]):
                for param in (p for w in unit.weights for p in w.params) if keeps else ():
                    copies[param] = param.detach().to(HOST, copy=True)
        if not keeps:
            return {}
        for name, value in found.items():
            if isinstance(value, Tensor):
                found[name] = copies[value] if value in copies else value.detach()
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this rank's parts of whole tensors; nothing is sent.

        Raises:
            KeyError: a parameter or buffer of the model is not in it.
        """
        assert self.module is not None
        assert self._hooks is not None
        self._hooks.before_update()
        for name, value in self.module.state_dict(keep_vars=True).items():
            place = self.places.get(value) if isinstance(value, Tensor) else None
            if place is not None:
                place.weights.load(place.index, state_dict[name])
            elif isinstance(value, Tensor):
                value.copy_(state_dict[name])
        for weights in dict.fromkeys(place.weights for place in self.places.values()):
            weights.updated()


def _check_group(name: str, size: int, world: int) -> None:
    if size < 1 or world % size:
        raise ValueError(f"{name} must divide the {world} ranks, got {size}")
