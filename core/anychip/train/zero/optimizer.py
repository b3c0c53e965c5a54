"""``zero.Optimizer``: an update rule applied to a model, on one rank or partitioned over many."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from anychip.contract import Communicator
from anychip.train.optim import Rule, clip_by_global_norm
from anychip.train.optim.average import EMA
from anychip.train.precision import LossScaler, PrecisionPolicy
from anychip.train.watching import part
from anychip.train.zero import checks, dtensors, state
from anychip.train.zero.exchange import GradientReduction
from anychip.train.zero.explicit import Explicit
from anychip.train.zero.layout import default_nbytes
from anychip.train.zero.reduce_queue import watch
from anychip.train.zero.sharded import ShardedModel, ShardingOptions
from anychip.train.zero.tiers import in_memory, tier_of
from anychip.train.zero.update import MASTER, Updates
from anychip.train.zero.weights import STAGES

if TYPE_CHECKING:
    from typing_extensions import Unpack

# torch hides them from its compiler, and imports that for it: two seconds of the first step.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class StepResult(NamedTuple):
    """What one step did.

    Attributes:
        grad_norm: 0-dim float32 on the device, before clipping; None when no rule measured it, or
            the update was skipped.
        lr: learning rate that was applied to the first group; 0.0 when the update was skipped.
        loss_scale: by which the loss was multiplied; 1.0 without loss scaling.
        skipped: the update was left out because a gradient was not finite.
        shared: (world_size, n) what the ranks gave to share, on the host when there are several.
        loss: what the closure returned, if there was one.
    """

    grad_norm: Tensor | None
    lr: float | Tensor
    loss_scale: float
    skipped: bool
    shared: Tensor | None = None
    loss: Any = None


class MemoryUse(NamedTuple):
    """Bytes on one rank.

    Attributes:
        parameters: of the parameters that are trained.
        gradients: between backward and the update, when all parameters have one.
        states: of the rule.
    """

    parameters: int
    gradients: int
    states: int


class Optimizer(torch.optim.Optimizer):
    """Applies a rule to parameters.

    Args:
        model: a module (its parameters that require gradients), parameters, or torch's parameter
            groups, with any of ``rule.options``. With several ranks the parameters become those of
            rank 0; buffers of the module are not looked at.
        rule: see :mod:`anychip.train.optim`.
        comm: the ranks that hold the same parameters, and see different data.
        stage: what is partitioned among them: 0 nothing, 1 states, 2 gradients too, 3 weights too.
        precision: the policy under which the loss is computed; None: no loss scaling, gradients
            reduced in float32.
        bucket_nbytes: of gradients that are sent together; None: 8 MiB, or 256 KiB per rank where
            that is more, so that gaps stay below 3 %.
        reduction: what the ranks' gradients become: ``avg``, their mean, or ``sum``, for a loss
            that every rank has divided by what all of them have seen.
        model_comm: the ranks that hold *other* parameters of the same model (a pipeline): norm
            and overflow are those of all of them.
        duplicates: parameters of this rank that another rank of ``model_comm`` holds too, and
            counts in the norm.
        module: the model, for stage 3, where ``model`` is parameters or groups.
        how: parameters are cut, like ``prefetch=2``: what
            :class:`~anychip.train.zero.ShardingOptions` has.

    Raises:
        ValueError: no parameter requires gradients, or a stage outside 0 to 3; stage 3 without the
            module, or units that it does not have.

    Note: Options
        Every group has all options of the rule, by torch's names (``lr``, ``betas``,
        ``weight_decay``, ...), and each step applies what stands there: a person, or a scheduler of
        torch, sets them. ``lr_scale`` multiplies ``lr``. A schedule of the rule sets ``lr`` before
        each step, until somebody else does, or a scheduler of torch is made: from then on the
        schedule has no say in that group, as a warning tells.

    Note: The sum
        With several ranks a gradient is a sum in this tree: each rank adds up the gradients of its
        backward passes, in their order; then the ranks' sums are joined by the communicator,
        neighbours first, then neighbours of those, and for ``avg`` divided by the number of ranks
        at the end (where the communicator keeps that order; ours do on the host). What passes of
        one step reduce separately (no ``no_sync``) is added up after that. All stages have the same
        bits.
    """

    def __init__(
        self, model: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]], rule: Rule,
        comm: Communicator, *, stage: int = 0, precision: PrecisionPolicy | None = None,
        bucket_nbytes: int | None = None, reduction: GradientReduction = "avg",
        model_comm: Communicator | None = None, duplicates: Collection[Tensor] = (),
        module: nn.Module | None = None, **how: Unpack[ShardingOptions],
    ) -> None:  # fmt: skip
        checks.check_names(how, ShardingOptions.__annotations__)
        checks.check_arguments(stage, bucket_nbytes, reduction, rule, how)
        self.rule, self.comm, self.stage, self.precision = rule, comm, stage, precision
        self.model_comm = model_comm
        self.bucket_nbytes = bucket_nbytes or default_nbytes(comm.world_size)
        self.num_steps = 0
        scaling = precision.loss_scaling if precision else None
        self.scaler = LossScaler(scaling) if scaling else None
        module = model if isinstance(model, nn.Module) else module
        self._names = {} if module is None else {p: n for n, p in module.named_parameters()}
        given = checks.trainable(model)
        self.sharded: ShardedModel | None = None
        has_masters = how.get("param_dtype") is not None or checks.has_16_bits(given)
        is_offloading = bool(how.get("offload"))
        if comm.world_size > 1 or has_masters or is_offloading:
            checks.check_offload(how, stage, rule, has_masters=has_masters)
            cut = stage if comm.world_size > 1 or is_offloading else 0  # one rank has everything
            dtype = precision.reduce_dtype if precision else torch.float32
            self.sharded = ShardedModel(comm, cut, dtype=dtype, reduction=reduction, **how)
            is_scaled, are_tied = self.scaler is not None, bool(duplicates)
            carries = self.sharded.exchange.carries
            checks.check_carries(carries, is_scaled=is_scaled, are_tied=are_tied)
            if cut == 3:
                self.sharded.add_module(checks.module_of_stage_3(module))
        self._updates = Updates(comm, self.sharded, model_comm, set(duplicates), rule.blocks)
        self._is_synchronizing, self._is_in_backward, self._is_reduced_once = True, False, False
        self._scheduled: list[Any] = []
        super().__init__(given, dict(rule.options))
        checks.check_duplicates(self._updates.duplicates, self.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. With several ranks a collective call.

        Raises:
            ValueError: a parameter that is frozen, or an option that the rule does not have.
            UnsupportedError: a parameter of 8 or 64 bits; one of 16 bits among others of 32 that
                were there before, on one rank.
        """
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        checks.check_options(set(param_group), self.rule.options)
        for param in param_group["params"]:
            each = param[1] if isinstance(param, tuple) else param
            checks.check_parameter(each, self.comm.device, may_have_master=self.sharded is not None)
        self._scheduled.append(None if "lr" in param_group else self.defaults["lr"])
        _add_param_group(self, param_group)
        every = [p for group in self.param_groups for p in group["params"]]
        dtensors.check(every, self.comm, is_scaled=self.scaler is not None, blocks=self.rule.blocks)
        params = self.param_groups[-1]["params"]
        if self.scaler is not None:
            watch(self, params, Optimizer._check_backward)
        if self.sharded is not None:
            names = [self._names.get(p, f"parameter {n}") for n, p in enumerate(params)]
            self.sharded.add(params, names, max_nbytes=self.bucket_nbytes)
        self._init_state(params)

    def _init_state(self, params: list[Tensor]) -> None:
        """State of parameters that are new here, with one step count for all of them."""
        fresh = [p for p in params if p not in self.state]
        if not fresh:
            return
        step = torch.zeros((), dtype=torch.float32, device=fresh[0].device)
        for param in fresh:
            values = self._updates.values(param)
            made = self._made(param, values)
            if self._updates.has_master(param):
                made[MASTER] = values
            if self._updates.span(param) is not None:
                checks.check_state(made, values, self.rule.blocks)
            self.state[param] = {"step": step, **made}

    def _made(self, param: Tensor, values: Tensor) -> dict[str, Tensor]:
        """The rule's states of what is updated of a parameter, where they are to be."""
        if self.sharded is None or self.sharded.tiers is None:
            return dtensors.cut_like(param, self.rule.init(values))
        return self.sharded.keep_states(param, self.rule.init, self.rule.blocks)

    def _check_backward(self, param: Tensor) -> None:
        """Called by autograd when a parameter has a gradient, under loss scaling."""
        if not self._is_in_backward:
            raise RuntimeError(
                "a backward that is not the optimizer's has made gradients without the loss scale, "
                "by which step() divides them: call opt.backward(loss) and not loss.backward()"
            )

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        gradient: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        """Adds the gradients of a loss, and reduces them over the ranks while it computes.

        May be called several times before a step; every rank calls it as often. To accumulate over
        micro-batches, divide each loss by their number, and put all calls but the last one under
        :meth:`no_sync`: otherwise each sends everything.

        With several ranks ``.grad`` then holds the mean over them in stage 0, and from stage 1 on a
        :class:`~anychip.train.zero.gradients.Partitioned`, which has no values: the last ones may
        still be under way until the step. Under loss scaling gradients are multiplied by the scale.

        Args:
            loss: 0-dim; multiplied by the loss scale. Or, with ``gradient``, outputs of a part of
                the model.
            gradient: of the (scaled) loss with respect to those outputs, as they came from a
                backward of what follows.
        """
        with self.reducing():
            self._run_backward(loss, gradient)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """A backward of torch's within it, one, is as :meth:`backward`: for who cannot call that.

        Under loss scaling that is an error.
        """
        if self.sharded is None or not self._is_synchronizing:
            if self.sharded is not None:
                self.sharded.queue.hide()
            yield
            return
        with self.sharded.queue.round():
            yield
        self.sharded.queue.end()

    def _run_backward(
        self, loss: Tensor | Sequence[Tensor], gradient: Tensor | Sequence[Tensor | None] | None
    ) -> None:
        if gradient is None and self.scaler is not None:
            if not isinstance(loss, Tensor):
                raise ValueError(f"backward: one loss expected, got {len(loss)} tensors")
            loss = loss.float() * self.scaler.scale
        self._is_in_backward = True
        try:
            torch.autograd.backward(loss, gradient)
        finally:
            self._is_in_backward = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of :meth:`backward` within it stay on this rank, in ``.grad``, and add up.

        They go with the next backward outside of it, or with the step. In stage 2 a rank that
        accumulates so holds its gradients whole.
        """
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch's function of all parameters, at every stage and on any number of ranks.

        A rule that clips (``optim.clip_by_global_norm``) saves writing the gradients. With several
        ranks a collective call, which reduces what backward has left local.

        Returns:
            The norm of all gradients before, without the loss scale: 0-dim float32.

        Raises:
            RuntimeError: no parameter has a gradient.
            UnsupportedError: gradients are not on the device.
        """
        present, _ = self._present(None)
        tiers = None if self.sharded is None else self.sharded.tiers
        checks.check_clip(present, are_away=tiers is not None and tiers.is_away("gradients"))
        scale = None if self.scaler is None else self.scaler.scale
        given = self.param_groups, self.state, present
        update = self._updates.update(*given, count=self.num_steps, scale=scale)
        clip_by_global_norm(max_norm).update(update)
        assert update.norm is not None
        if update.clip is not None and max_norm < math.inf:
            torch._foreach_mul_([self._updates.gradient(p) for p in present], update.clip)
        return update.norm

    @contextmanager
    def explicit(self) -> Iterator[Explicit]:
        """Within it gradients stay on this rank, and units come and go, but where it is said."""
        with self.no_sync(), Explicit(self.sharded).ending() as told:
            yield told

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. The model's does the same, but keeps memory of partitioned gradients."""
        if self.sharded is not None:
            self.sharded.queue.clear(set_to_none=set_to_none)
        _zero_grad(self, set_to_none)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, share: Tensor | None = None
    ) -> StepResult:
        """Updates every parameter that has a gradient (on any rank), in place.

        With several ranks a collective call, which reduces what backward has left local. Under
        loss scaling, a gradient on any rank that is not finite leaves everything as it was but the
        scale.

        Args:
            closure: called once before the update; it calls :meth:`backward` and returns the loss.
            share: (n,) of a few numbers, like the loss, on the parameters' device, alike in dtype
                and size on all ranks of ``comm``: each gets those of all, without a message of
                their own.

        Raises:
            RuntimeError: no parameter has a gradient.
            LossScaleError: a gradient is not finite at the smallest loss scale.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with part("exchange"):
            present, shared = self._present(share)
        if not present:
            raise RuntimeError("step: no parameter has a gradient; call backward() first")
        scale = 1.0 if self.scaler is None else self.scaler.scale
        if self.scaler is not None:
            found_inf = self._updates.found_inf(self.param_groups, self.state, present)
            self.scaler.update(found_inf)
            if found_inf:
                return StepResult(None, 0.0, scale, True, shared, loss)
        self._set_rates()
        factor = None if self.scaler is None else scale
        update = self._updates.update(
            self.param_groups, self.state, present, count=self.num_steps, scale=factor
        )
        self.rule.update(update)
        if self.sharded is not None:
            self.sharded.updated(present, by_step=True)
        self.num_steps += 1
        return StepResult(update.norm, self.param_groups[0]["lr"], scale, False, shared, loss)

    def _set_rates(self) -> None:
        """The schedule's rate, in groups where nobody has set another."""
        if self.rule.schedule is None:
            return
        rate = self.rule.schedule(self.num_steps)
        for number, group in enumerate(self.param_groups):
            shown = self._scheduled[number]
            if shown is None:
                continue
            if group["lr"] is shown and "initial_lr" not in group:
                group["lr"] = self._scheduled[number] = rate
                continue
            self._scheduled[number] = None
            warnings.warn(
                f"parameter group {number}: its lr was set to {group['lr']}, by hand or by a "
                "scheduler of torch, and the rule's schedule has no say in it any more; if that is "
                "meant, make the rule with a number as lr",
                stacklevel=4,
            )

    def _present(self, share: Tensor | None) -> tuple[set[Tensor], Tensor | None]:
        """Parameters that have a gradient on any rank; what was local is reduced."""
        if self.sharded is not None:
            self.sharded.check()
            if self.comm.world_size > 1 and not self._is_reduced_once:
                checks.check_reduced_once(self.state)
                self._is_reduced_once = True
            return self.sharded.queue.agree(share)
        params = [p for group in self.param_groups for p in group["params"]]
        present = {p for p in params if p.grad is not None}
        return present, None if share is None else share[None]

    def whole(
        self, names: Iterable[str] | None = None, *, writes: bool = False
    ) -> AbstractContextManager[None]:
        """Within it parameters can be read anywhere, as in evaluation. A collective call.

        Only stage 3 needs it; elsewhere they always can.

        Args:
            names: of parameters, or of modules that have them; None: all.
            writes: what is written into them within it, the same on all ranks, is taken over.
        """
        return nullcontext() if self.sharded is None else self.sharded.whole(names, writes=writes)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it parameters are the averages that the rule keeps, and then what they were.

        A collective call. Weights and averages change places, bit for bit, which takes memory for
        one of them more; so there is no step, and nothing is saved, within it. A backward through a
        forward from before is an error afterwards.

        Raises:
            ValueError: the rule keeps none.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        if any(EMA not in self.state[param] for param in params):
            raise ValueError(
                "averaged: the rule keeps no average of the weights; make it with "
                "optim.averaged(rule, 0.999)"
            )
        self._exchange_with_averages(params)
        try:
            yield
        finally:
            self._exchange_with_averages(params)

    @torch.no_grad()
    def _exchange_with_averages(self, params: Sequence[Tensor]) -> None:
        for param in params:
            values, average = self._updates.values(param), dtensors.local(self.state[param][EMA])
            kept = values.clone()
            values.copy_(average)
            average.copy_(kept)
        if self.sharded is not None:
            self.sharded.updated(params)

    def stands_for(self, model: nn.Module) -> nn.Module | ShardedModel:
        """What has the state dict of a model: the model, but in stage 3, where ranks have parts."""
        is_cut = self.sharded is not None and self.sharded.module is model
        return self.sharded if is_cut and self.sharded is not None else model

    def memory(self, tier: str | None = None) -> MemoryUse:
        """Bytes on this rank: the formula of the stage, with the sizes of this model.

        For float32 parameters and AdamW, per parameter and with N ranks: 4 + 4 + 8 in stage 0,
        4 + 4 + 8 / N in stage 1, 4 + 4 / N + 8 / N in stage 2, 16 / N in stage 3 beside the units
        that are whole; a part may be larger by the gaps of its buffer. States in 8 bits are
        2 + 8 / 256 in place of the 8. Parameters of 16 bits are 2 in place of 4, with a master of
        4 among the states; in stage 3 the master alone, or 6 when that is not on the device.

        Args:
            tier: ``device``, ``host`` or ``file``: what is there; None: in all.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        partition, tiers = STAGES[self.stage], None if self.sharded is None else self.sharded.tiers
        owned = [self._updates.values(param) for param in params]
        # A part of a weight that has a master is made from it when it is gathered.
        parts = [v for p, v in zip(params, owned, strict=True) if not self._updates.has_master(p)]
        weights = {id(t): t for t in (parts if partition.weights else params)}
        low = {} if self.sharded is None else self.sharded.kept_low()
        states = {id(t): t for p in params for t in self.state[p].values()}
        gradients = sum(each.numel() for each in (owned if partition.gradients else params)) * 4
        where = "device" if tiers is None else str(tiers.kinds["gradients"])
        return MemoryUse(
            sum(t.nbytes for t in (weights | low).values() if tier in (None, tier_of(t))),
            gradients if tier in (None, where) else 0,
            sum(t.nbytes for t in states.values() if tier in (None, tier_of(t))),
        )

    def state_dict(self, *, to_rank: int | None = None) -> dict[str, Any]:
        """torch's form with whole tensors, ``num_steps``, and the loss scale if there is one.

        When states are partitioned a collective call, and the tensors are on the host: the device
        holds one whole tensor at a time. The result loads at any stage and number of ranks.

        Args:
            to_rank: the only rank that keeps what is gathered; the others get no states.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = {"state": self._entries(to_rank), **self.settings()}
        for hook in self._optimizer_state_dict_post_hooks.values():
            saved = hook(self, saved) or saved
        return saved

    def settings(self) -> dict[str, Any]:
        """All of a state dict but the states of parameters; nothing is sent."""
        groups = state.numbered(self.param_groups)
        for group, rate in zip(groups, self._scheduled, strict=True):
            if self.rule.schedule is not None:
                group[state.IS_SCHEDULED] = rate is not None
        found: dict[str, Any] = {"param_groups": groups, "num_steps": self.num_steps}
        return found if self.scaler is None else {**found, "loss_scale": self.scaler.state_dict()}

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError when loss scaling needs a scale, and settings have none."""
        if self.scaler is not None and "loss_scale" not in settings:
            raise ValueError(
                "optimizer state: a loss scale expected, got none; it was saved under another "
                "precision than fp16"
            )

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Takes over settings that were checked; ``lr`` not where a schedule decides it."""
        options = [state.options(other, self.rule) for other in settings["param_groups"]]
        if self.scaler is not None:
            self.scaler.load_state_dict(settings["loss_scale"])
        for group, given in zip(self.param_groups, options, strict=True):
            group.update(given)
        self.num_steps = int(settings["num_steps"])

    def _entries(self, to_rank: int | None) -> dict[int, dict[str, Tensor]]:
        """The states of the parameters by their numbers, whole."""
        params = [param for group in self.param_groups for param in group["params"]]
        if self.sharded is None or not self.sharded.partition.states:
            entries = [self.state[param] for param in params]
            return {n: {k: in_memory(t) for k, t in each.items()} for n, each in enumerate(entries)}
        keeps, blocks = to_rank is None or to_rank == self.comm.rank, self.rule.blocks
        places = self.sharded.places
        whole = [state.gather(self.state[p], places[p], blocks, keeps=keeps) for p in params]
        return dict(enumerate(whole)) if keeps else {}

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Whether :meth:`load_state_dict` takes a state; nothing is changed.

        Raises:
            ValueError: it is none, its groups or shapes are not those of this optimizer, or loss
                scaling needs a scale and it has none.
        """
        self._matched(state_dict)

    def _matched(
        self, state_dict: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[Tensor, state.Entry]]:
        """The state in our form, and the entry of each parameter."""
        params = [param for group in self.param_groups for param in group["params"]]
        state_dict = state.in_form(state_dict, self.rule, params)
        blocks = self.rule.blocks
        partitioned = self.sharded is not None and self.sharded.partition.states
        entries = state.matched(
            state_dict, self.param_groups, self.state, blocks, partitioned=partitioned
        )
        self.check_settings(state_dict)
        return state_dict, entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a state into this one's tensors, which keep their dtype and place in memory.

        Each rank takes its part of the whole tensors; nothing is sent, but weights of 16 bits,
        which become those of the masters (or the masters theirs, if none were saved). As with
        torch's, options of the groups become those of the state; ``lr`` does not where a schedule
        decides it. A state of torch's AdamW or SGD, or of an Adam without weight decay, is one for
        adamw or sgd.

        Raises:
            ValueError: as :meth:`check_state_dict`. Nothing is changed.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        state_dict, entries = self._matched(state_dict)
        blocks = self.rule.blocks
        for group in self.param_groups:
            steps: dict[float, Tensor] = {}
            for param in group["params"]:
                span = self._updates.span(param)
                state.load(entries[param], self.state[param], span, steps, blocks)
        self.load_settings(state_dict)
        self._load_masters(entries)
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    def _load_masters(self, entries: Mapping[Tensor, state.Entry]) -> None:
        if self.sharded is None:
            return
        mine = [param for param in entries if self._updates.has_master(param)]
        self.sharded.updated([param for param in mine if MASTER in entries[param]])
        self.sharded.written([param for param in mine if MASTER not in entries[param]])
