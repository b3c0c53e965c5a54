"""``zero.Optimizer``: an update rule applied to a model, on one rank or partitioned over many."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anychip.contract import Communicator
from anychip.train.optim import Rule
from anychip.train.precision import LossScaler, PrecisionPolicy
from anychip.train.zero import checks, partition, state
from anychip.train.zero.bucket import GradientReduction
from anychip.train.zero.pieces import Pieces
from anychip.train.zero.reducer import Reducer, watch
from anychip.train.zero.shards import Shards, broadcast

# torch hides them from its compiler, and imports that for it: two seconds of the first step.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

BUCKET_NBYTES = 8 << 20
"""Default size of a bucket: large enough for full bandwidth, small enough that the last one, which
nothing hides, is soon over."""


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
        stage: what is partitioned among them: 0 nothing, 1 states, 2 gradients too.
        precision: the policy under which the loss is computed; None: no loss scaling, gradients
            reduced in float32.
        bucket_nbytes: of gradients that are sent together.
        reduction: what the ranks' gradients become: ``avg``, their mean, or ``sum``, for a loss
            that every rank has divided by what all of them have seen.
        model_comm: the ranks that hold *other* parameters of the same model (a pipeline): norm
            and overflow are those of all of them.
        duplicates: parameters of this rank that another rank of ``model_comm`` holds too, and
            counts in the norm.

    Raises:
        ValueError: no parameter requires gradients, or a stage outside 0 to 3.
        UnsupportedError: stage 3.

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
        self,
        model: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]],
        rule: Rule,
        comm: Communicator,
        *,
        stage: int = 0,
        precision: PrecisionPolicy | None = None,
        bucket_nbytes: int = BUCKET_NBYTES,
        reduction: GradientReduction = "avg",
        model_comm: Communicator | None = None,
        duplicates: Collection[Tensor] = (),
    ) -> None:
        checks.check_stage(stage)
        if bucket_nbytes < 1:
            raise ValueError(f"bucket_nbytes must be at least 1, got {bucket_nbytes}")
        if reduction not in ("avg", "sum"):
            raise ValueError(f"reduction must be 'avg' or 'sum', got {reduction!r}")
        if not rule.writes:
            raise ValueError("the rule writes no parameter; chain one that does, like optim.adamw")
        self.rule, self.comm, self.stage, self.precision = rule, comm, stage, precision
        self.model_comm, self.bucket_nbytes = model_comm, bucket_nbytes
        self.num_steps = 0
        scaling = precision.loss_scaling if precision else None
        self.scaler = LossScaler(scaling) if scaling else None
        dtype = precision.reduce_dtype if precision else torch.float32
        several = comm.world_size > 1
        self._reducer = Reducer(comm, stage, dtype, reduction) if several else None
        self._shards = Shards(comm) if several and stage else None
        self._pieces = Pieces(comm, self._reducer, self._shards, model_comm, set(duplicates))
        self._is_synchronizing = True
        self._is_in_backward = False
        self._scheduled: list[Any] = []
        super().__init__(checks.trainable(model), dict(rule.options))
        foreign = self._pieces.duplicates - self.state.keys()
        if foreign:
            raise ValueError(f"duplicates: {len(foreign)} parameters that are not trained here")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. With several ranks a collective call.

        Raises:
            ValueError: a parameter that is frozen, or an option that the rule does not have.
            UnsupportedError: a 16-bit parameter, whose small updates would be rounded away.
        """
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        checks.check_options(set(param_group), self.rule.options)
        for param in param_group["params"]:
            checks.check_parameter(param[1] if isinstance(param, tuple) else param)
        self._scheduled.append(None if "lr" in param_group else self.defaults["lr"])
        _add_param_group(self, param_group)
        params = self.param_groups[-1]["params"]
        if self.scaler is not None:
            watch(self, params, Optimizer._check_backward)
        if self._reducer is not None:
            self._distribute(params, self._reducer)
        self._init_state(params)

    def _distribute(self, params: list[Tensor], reducer: Reducer) -> None:
        """Puts new parameters into buckets; their values become rank 0's."""
        checks.check_memory(params)
        numels = [param.numel() for param in params]
        max_numel = max(1, self.bucket_nbytes // torch.float32.itemsize)
        layouts = partition.plan(numels, self.comm.world_size, max_numel=max_numel)
        reducer.add(params, layouts)
        if self._shards is not None:
            self._shards.add(params, layouts)
            return
        for layout in layouts:
            members = [params[index] for index in layout.members]
            values = broadcast(members, layout, self.comm)
            for param, start in zip(members, layout.starts, strict=True):
                param.data.copy_(values[start : start + param.numel()].view(param.shape))

    def _init_state(self, params: list[Tensor]) -> None:
        """State of parameters that are new here, with one step count for all of them."""
        fresh = [p for p in params if p not in self.state]
        if not fresh:
            return
        step = torch.zeros((), dtype=torch.float32, device=fresh[0].device)
        for param in fresh:
            made = self.rule.init(self._pieces.values(param))
            checks.check_state(made, self._pieces.shard(param), self.rule.blocks)
            self.state[param] = {"step": step, **made}

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

        With several ranks ``.grad`` then holds the mean over them in stage 0, and in stages 1 and 2
        a :class:`~anychip.train.zero.bucket.Partitioned`, which has no values. Under loss scaling
        gradients are multiplied by the scale.

        Args:
            loss: 0-dim; multiplied by the loss scale. Or, with ``gradient``, outputs of a part of
                the model.
            gradient: of the (scaled) loss with respect to those outputs, as they came from a
                backward of what follows.
        """
        if self._reducer is None or not self._is_synchronizing:
            if self._reducer is not None:
                self._reducer.hide()
            self._run_backward(loss, gradient)
            return
        with self._reducer.round():
            self._run_backward(loss, gradient)

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. The model's does the same, but keeps memory of partitioned gradients."""
        if self._reducer is not None:
            self._reducer.clear(set_to_none=set_to_none)
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
        present, shared = self._present(share)
        if not present:
            raise RuntimeError("step: no parameter has a gradient; call backward() first")
        scale = 1.0 if self.scaler is None else self.scaler.scale
        if self.scaler is not None:
            found_inf = self._pieces.found_inf(present)
            self.scaler.update(found_inf)
            if found_inf:
                return StepResult(None, 0.0, scale, True, shared, loss)
        self._set_rates()
        factor = None if self.scaler is None else scale
        update = self._pieces.update(
            self.param_groups, self.state, present, count=self.num_steps, scale=factor
        )
        self.rule.update(update)
        if self._shards is not None:
            self._shards.gather(present)
        self.num_steps += 1
        lr = self.param_groups[0]["lr"]
        return StepResult(update.norm, lr, scale, False, shared, loss)

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
        if self._shards is not None:
            self._shards.check()
        if self._reducer is not None:
            return self._reducer.agree(share)
        params = [p for group in self.param_groups for p in group["params"]]
        present = {p for p in params if p.grad is not None}
        return present, None if share is None else share[None]

    def memory(self) -> MemoryUse:
        """Bytes on this rank: the formula of the stage, with the sizes of this model.

        For float32 parameters and AdamW, per parameter and with N ranks: 4 + 4 + 8 in stage 0,
        4 + 4 + 8 / N in stage 1, 4 + 4 / N + 8 / N in stage 2; parts differ by a block per bucket.
        States in 8 bits are 2 + 8 / 256 in place of the 8.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        whole = sum(param.nbytes for param in params)
        owned = sum(self._pieces.values(param).nbytes for param in params)
        states = {t for p in params for t in self.state[p].values()}
        return MemoryUse(whole, owned if self.stage == 2 else whole, sum(t.nbytes for t in states))

    def state_dict(self, *, to_rank: int | None = None) -> dict[str, Any]:
        """torch's form with whole tensors, ``num_steps``, and the loss scale if there is one.

        When states are partitioned a collective call, and the tensors are on the host: the device
        holds one whole tensor at a time. The result loads at any stage and number of ranks.

        Args:
            to_rank: the only rank that keeps what is gathered; the others get no states.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        groups = state.numbered(self.param_groups)
        for group, rate in zip(groups, self._scheduled, strict=True):
            if self.rule.schedule is not None:
                group[state.IS_SCHEDULED] = rate is not None
        saved: dict[str, Any] = {"state": self._entries(to_rank), "param_groups": groups}
        saved["num_steps"] = self.num_steps
        if self.scaler is not None:
            saved["loss_scale"] = self.scaler.state_dict()
        for hook in self._optimizer_state_dict_post_hooks.values():
            saved = hook(self, saved) or saved
        return saved

    def _entries(self, to_rank: int | None) -> dict[int, dict[str, Tensor]]:
        """The states of the parameters by their numbers, whole."""
        params = [param for group in self.param_groups for param in group["params"]]
        if self._shards is None:
            return {number: self.state[param] for number, param in enumerate(params)}
        keeps, blocks = to_rank is None or to_rank == self.comm.rank, self.rule.blocks
        whole = [state.gather(self.state[p], p, self._shards, blocks, keeps=keeps) for p in params]
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
        blocks, partitioned = self.rule.blocks, self._shards is not None
        entries = state.matched(
            state_dict, self.param_groups, self.state, blocks, partitioned=partitioned
        )
        if self.scaler is not None and "loss_scale" not in state_dict:
            raise ValueError(
                "optimizer state: a loss scale expected, got none; it was saved under another "
                "precision than fp16"
            )
        return state_dict, entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a state into this one's tensors, which keep their dtype and place in memory.

        Each rank takes its part of the whole tensors; nothing is sent. As with torch's, options of
        the groups become those of the state; ``lr`` does not where a schedule decides it. A state
        of torch's AdamW or SGD, or of an Adam without weight decay, is one for adamw or sgd.

        Raises:
            ValueError: as :meth:`check_state_dict`. Nothing is changed.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        state_dict, entries = self._matched(state_dict)
        blocks = self.rule.blocks
        options = [state.options(other, self.rule) for other in state_dict["param_groups"]]
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict["loss_scale"])
        for group, given in zip(self.param_groups, options, strict=True):
            steps: dict[float, Tensor] = {}
            for param in group["params"]:
                shard = self._pieces.shard(param)
                state.load(entries[param], self.state[param], shard, steps, blocks)
            group.update(given)
        self.num_steps = int(state_dict["num_steps"])
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)
