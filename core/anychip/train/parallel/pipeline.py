"""What does a rank of a pipeline do in a step? The actions of its row of the schedule, in order.

Outputs go to the next stage, gradients to the one before, as the schedule says; sends are not
waited for, a receive only by the computation that needs it. Two stages on one rank hand on without
a message. What a schedule says of weights and gradients the optimizer is told. What it cannot say
is here: microbatches, the loss, activations until their backward, tied parameters.

Note: The sum
    A stage adds up the gradients of its microbatches in the order of its backwards, which is that
    of the microbatches in every schedule that is made here; each loss is divided by their number
    before. These are the bits of the whole model that accumulates over the same microbatches on one
    rank. A parameter tied over the first and the last stage is the exception: each sums its own
    uses, then both add first + last, also when both are on one rank.

Note: Split backward
    An I computes what the stage before waits for. Gradients of parameters that our operators can
    put off (:mod:`anychip.dispatch.deferral`) are computed by the W of the same stage and
    microbatch, all others by the I; a parameter that has both kinds gets one sum, in the W. A stage
    without our operators has empty Ws: right, and no quicker.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from anychip.contract import HOST, Communicator, Transfer, UnsupportedError, Work
from anychip.dispatch.deferral import Deferred, deferring
from anychip.runtime import on_host
from anychip.train import zero
from anychip.train.parallel.actions import COMPUTE, Action, Schedule
from anychip.train.parallel.lowering import add_communication, add_weights, received, sent
from anychip.train.parallel.message import Link
from anychip.train.parallel.saved import Saved
from anychip.train.parallel.simulator import Span, Timeline
from anychip.train.parallel.validation import validate
from anychip.train.watching import part


class Local(zero.Explicit):
    """What a pipeline asks of an optimizer. This one: gradients stay in ``.grad``, on this rank."""

    def backward(self, tensors: Any, gradient: Any = None) -> None:
        """Of the loss on the last stage, of outputs with their gradient on the others; of lists of
        both where a split backward adds to its parameters what it has computed.
        """
        torch.autograd.backward(tensors, gradient)

    def explicit(self) -> AbstractContextManager[zero.Explicit]:
        """Entered for a run: is told when weights are whole, and what goes to other replicas."""
        return nullcontext(self)


_Rest = list[tuple[GradientEdge, Tensor]]
"""Gradients that an I has computed of what its W has more of, and where they belong."""


@dataclass(slots=True)
class _Step:
    """What is under way in one call of ``run``."""

    tokens: Sequence[Tensor]
    targets: Sequence[Tensor]
    weight: float | None
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None
    loss: Tensor
    told: zero.Explicit
    saved: Saved | None
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    deferred: dict[tuple[int, int], tuple[Deferred, _Rest]] = field(default_factory=dict)
    ready: dict[Action, Tensor] = field(default_factory=dict)
    receives: dict[Action, tuple[Work, Tensor]] = field(default_factory=dict)
    sends: list[tuple[Work, Tensor]] = field(default_factory=list)
    reduces: set[int] = field(default_factory=set)


class Pipeline:
    """One rank's stages of a model, and the schedule that it works by.

    Args:
        stages: this rank's one, or several in ascending order. ``stage(x)`` gives the
            (floating-point, one) tensor for the next stage, where x is what the stage before gave,
            or the first stage's tokens. The last one is called with targets too, and gives the
            0-dim loss. Who has ``needs_tokens`` is called with ``tokens=`` as well.
        comm: the ranks of the pipeline, one per row of the schedule.
        schedule: of all ranks. Without messages it gets those of
            :func:`~anychip.train.parallel.lowering.add_communication`, without REDUCE_GRAD those
            of :func:`~anychip.train.parallel.lowering.add_weights`.
        loss_fn: called with the last stage's output and targets, when the stage takes none.
        tied: parameters of which the first and the last stage have a copy each, in one order. On
            a rank that has both stages: the first one's, then the last one's.
        autocast: made and entered around each forward, like ``policy.autocast``.
        measure: waits for the device. When given, each computation is timed; see :meth:`timeline`.
        count_bytes: look at what forwards save, which takes time; see ``bytes_in_use``.

    Attributes:
        bytes_in_use: with ``count_bytes``, after each action of this rank's row but messages, in
            the last run: what is saved for backwards, and weights that are whole for now.

    Raises:
        ScheduleError: the schedule cannot be carried out.
        ValueError: it has another number of rows than ``comm`` has ranks, or gives this rank
            another number of stages; or ``tied`` where neither of both stages is.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        comm: Communicator,
        schedule: Schedule,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        tied: Sequence[nn.Parameter] = (),
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        measure: Callable[[], None] | None = None,
        count_bytes: bool = False,
    ) -> None:
        if len(schedule.rows) != comm.world_size:
            raise ValueError(
                f"pipeline: one row of the schedule per rank expected, got {len(schedule.rows)} "
                f"rows and {comm.world_size} ranks"
            )
        schedule = add_weights(add_communication(schedule))
        validate(schedule)
        modules = [stages] if isinstance(stages, nn.Module) else list(stages)
        self.comm, self.schedule, self.loss_fn = comm, schedule, loss_fn
        self.autocast, self.measure, self.tied = autocast, measure, tuple(tied)
        self._ranks = schedule.owners()
        self.numbers = tuple(sorted(s for s, rank in self._ranks.items() if rank == comm.rank))
        if len(modules) != len(self.numbers):
            raise ValueError(
                f"pipeline: the schedule gives rank {comm.rank} {len(self.numbers)} stages, got "
                f"{len(modules)}"
            )
        self.stages = dict(zip(self.numbers, modules, strict=True))
        self.num_stages, self.num_microbatches = schedule.num_stages, schedule.num_microbatches
        params = (param for module in modules for param in module.parameters())
        self.device = next((param.device for param in params), torch.device(HOST))
        if self.tied and not self.is_first and not self.is_last:
            raise ValueError(
                f"pipeline: tied parameters are on the first and the last stage, this is "
                f"{self._name(*self.numbers)}"
            )
        self._row = schedule.rows[comm.rank]
        self._link = Link(schedule, self.device)
        tied_here = set(self.tied)
        self._joins = {n for n, m in self.stages.items() if tied_here & set(m.parameters())}
        self._reducing = _reducing(self._row)
        self._spans: list[Span] = []
        self._begin = 0.0
        self.count_bytes, self.bytes_in_use = count_bytes, list[int]()

    def __repr__(self) -> str:
        return f"Pipeline({self._name(*self.numbers)})"

    def _name(self, *numbers: int) -> str:
        which = " and ".join(map(str, numbers))
        return f"stage{'s' * (len(numbers) > 1)} {which} of {self.num_stages}"

    @property
    def is_first(self) -> bool:
        """A stage here takes tokens."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """A stage here gives the loss."""
        return self.num_stages - 1 in self.stages

    @property
    def _takes_tokens(self) -> bool:
        return self.is_first or any(map(_needs_tokens, self.stages.values()))

    def run(
        self,
        tokens: Tensor | None,
        targets: Tensor | None,
        *,
        weight: float | None = None,
        optimizer: zero.Optimizer | Local | None = None,
        more: bool = False,
        share_loss: bool = True,
    ) -> Tensor | None:
        """Forward and backward of all microbatches. Every rank of the pipeline calls it.

        Args:
            tokens, targets: (B, ...) where the first and the last stage are, tokens also where a
                stage has ``needs_tokens``, B a multiple of the number of microbatches; not looked
                at elsewhere.
            weight: of each microbatch's loss, 1 / (number of all targets) where it is a sum; None:
                1 / (number of microbatches), for means over as many targets in each.
            optimizer: whose backward adds gradients, so that the loss gets its scale, and which is
                told what the schedule says of weights and gradients; those of a stage with tied
                parameters its step reduces. None: see :class:`Local`.
            more: another run comes before the step: gradients stay local, tied ones unjoined.
            share_loss: give the loss to all ranks, at the price of one small message.

        Returns:
            0-dim float32: the sum of the weighted losses; None where it is not known.

        Raises:
            ValueError: a batch that does not divide, a stage that gives what is not expected.
            CommunicationError: another stage has failed, which every rank is told.
            UnsupportedError: a parameter with a hook, where the schedule splits its backward.
        """
        optimizer = optimizer or Local()
        with self._telling_others(), optimizer.explicit() as told:
            step = self._step(tokens, targets, weight, told)
            step.reduces = set() if more else {*self.numbers} - self._joins
            self._start_clock()
            for action in self._actions(step, self._row):
                start = time.perf_counter()
                goes = action in self._reducing and action.stage in step.reduces
                with told.reducing(self.stages[action.stage]) if goes else nullcontext():
                    self._compute(step, action, optimizer.backward)
                self._count(step)
                self._stop_clock(action, start)
            self._finish(step)
            if not more:
                self._join_tied()
            return self._loss(step, share_loss)

    @torch.no_grad()
    def evaluate(
        self,
        tokens: Tensor | None,
        targets: Tensor | None,
        *,
        weight: float | None = None,
        share_loss: bool = True,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor | None:
        """The loss alone; arguments, result and errors as those of :meth:`run`.

        Args:
            loss_fn: in place of the pipeline's, called for each microbatch in order.
        """
        forward = self.schedule.only("F", "SEND_F", "RECV_F")
        with self._telling_others():
            step = self._step(tokens, targets, weight, zero.Explicit())
            step.loss_fn = loss_fn or self.loss_fn
            for action in self._actions(step, forward.rows[self.comm.rank]):
                self._forward(step, action)
                del step.kept[action.stage, action.microbatch]
            self._finish(step)
            return self._loss(step, share_loss)

    def timeline(self) -> Timeline:
        """When each rank computed what in the last run, in seconds. Every rank calls it.

        Each rank counts from when it left a barrier at the start, so that rows may be shifted
        against each other by the time in which the ranks leave it.

        Raises:
            RuntimeError: nothing was measured.
        """
        if not self._spans:
            raise RuntimeError("timeline: make the pipeline with measure, and call run() first")
        times = [time for span in self._spans for time in (span.start, span.end)]
        rows = self.schedule.only(*COMPUTE).rows
        # Ranks that split other backwards have other numbers of computations.
        padding = 2 * max(map(len, rows)) - len(times)
        here = torch.tensor([*map(float, times), *[0.0] * padding], dtype=torch.float64)
        here = here.to(self.device)
        everywhere = here.new_empty(self.comm.world_size * len(here))
        self.comm.all_gather(everywhere, here)
        values = on_host(everywhere).view(len(rows), -1, 2).tolist()
        return Timeline(
            tuple(
                tuple(Span(action, *time) for action, time in zip(row, mine, strict=False))
                for row, mine in zip(rows, values, strict=True)
            )
        )

    def _start_clock(self) -> None:
        if self.measure is not None:
            self.comm.barrier()
            self._spans, self._begin = [], time.perf_counter()

    def _stop_clock(self, action: Action, start: float) -> None:
        if self.measure is not None:
            self.measure()
            end = time.perf_counter()
            self._spans.append(Span(action, start - self._begin, end - self._begin))

    # Messages

    def _actions(self, step: _Step, row: Sequence[Action]) -> Iterator[Action]:
        """The computations of a row; all else is started, and inputs waited for, in between."""
        for action in row:
            if action.is_message:
                self._start(step, action)
            elif action.is_of_weights:
                self._tell(step, action)
                self._count(step)
            else:
                receive = received(action)
                if receive in step.receives:
                    work, step.ready[receive] = step.receives.pop(receive)
                    work.wait()
                yield action

    def _tell(self, step: _Step, action: Action) -> None:
        """What is done to the weights of a stage."""
        stage = self.stages[action.stage]
        if action.kind == "UNSHARD":
            step.told.unshard(stage)
        elif action.kind == "RESHARD":
            step.told.reshard(stage)
        elif action.stage in step.reduces:
            with step.told.reducing(stage):
                pass  # what its last backward has sent is not sent again

    def _start(self, step: _Step, message: Action) -> None:
        """Posts a send or a receive; nothing is waited for."""
        peer, tag = self._ranks[message.counterpart().stage], self._link.tag(message)
        if message.kind.startswith("SEND"):
            tensor = step.ready.pop(message)
            if message.kind == "SEND_F":
                self._link.announce(self.comm, peer, message.stage, tensor)
            work = self.comm.exchange([Transfer("send", tensor, peer, tag)], async_op=True)
            # A send's tensor must live until it is done, and no longer.
            step.sends = [entry for entry in step.sends if not entry[0].is_done()]
            step.sends.append((work, tensor))
            return
        if message.kind == "RECV_F":
            self._link.listen(self.comm, peer, message.stage)
        tensor = self._link.room(message)
        work = self.comm.exchange([Transfer("recv", tensor, peer, tag)], async_op=True)
        step.receives[message] = (work, tensor)

    def _hand_on(self, step: _Step, action: Action, tensor: Tensor) -> None:
        """What a computation made: for a message, or for another stage of this rank."""
        send = sent(action)
        is_here = send.counterpart().stage in self.stages
        step.ready[send.counterpart() if is_here else send] = tensor.contiguous()

    def _finish(self, step: _Step) -> None:
        for work, _ in step.sends:
            work.wait()

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """An error here must not leave the other stages waiting until their time is over."""
        try:
            yield
        except BaseException as error:
            where = f"pipeline {self._name(*self.numbers)}"
            self.comm.abort(f"{where}: {type(error).__name__}: {error}")
            raise

    # Computations

    def _step(
        self,
        tokens: Tensor | None,
        targets: Tensor | None,
        weight: float | None,
        told: zero.Explicit,
    ) -> _Step:
        self.bytes_in_use = []
        owned = [t for m in self.stages.values() for t in (*m.parameters(), *m.buffers())]
        owned += [t for t in (tokens, targets) if t is not None]
        return _Step(
            told=told, saved=Saved(owned) if self.count_bytes else None,
            tokens=self._microbatches("tokens", tokens) if self._takes_tokens else [],
            targets=self._microbatches("targets", targets) if self.is_last else [], weight=weight,
            loss_fn=self.loss_fn, loss=torch.zeros((), device=self.device),
        )  # fmt: skip

    def _microbatches(self, name: str, batch: Tensor | None) -> list[Tensor]:
        if batch is None:
            raise ValueError(f"{self}: {name} expected on this stage, got None")
        count, rows = self.num_microbatches, len(batch)
        if not rows or rows % count:
            raise ValueError(
                f"{self}: {name} of a batch that {count} microbatches divide expected, got "
                f"{rows} rows"
            )
        return list(batch.split(rows // count))

    def _compute(self, step: _Step, action: Action, backward: Callable[..., Any]) -> None:
        if action.kind == "F":
            with part("forward"):
                return self._forward(step, action)
        with part("backward"):
            self._backward(step, action, backward)

    def _forward(self, step: _Step, action: Action) -> None:
        number, stage = action.microbatch, self.stages[action.stage]
        is_last = action.stage == self.num_stages - 1
        if action.stage == 0:
            x = step.tokens[number]
        else:
            x = step.ready.pop(received(action)).requires_grad_(torch.is_grad_enabled())
        counting = step.saved.of((action.stage, number)) if step.saved else nullcontext()
        more = {"tokens": step.tokens[number]} if _needs_tokens(stage) else {}
        with self.autocast(), counting:
            if not is_last:
                output = stage(x, **more)
            elif step.loss_fn is None:
                output = stage(x, step.targets[number], **more)
            else:
                output = step.loss_fn(stage(x, **more), step.targets[number])
        if is_last:
            loss = self._check_loss(output)
            # Divided, not multiplied by the inverse: so a loop on one rank does it.
            output = loss / self.num_microbatches if step.weight is None else loss * step.weight
            step.loss += output.detach()
        else:
            self._link.check(f"Pipeline({self._name(action.stage)})", action.stage, output)
            self._hand_on(step, action, output.detach())
        step.kept[action.stage, number] = (x, output)

    def _check_loss(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.dim():
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"{self}: a 0-dim loss expected of the last stage, got {got}")
        return loss

    def _backward(self, step: _Step, action: Action, backward: Callable[..., Any]) -> None:
        place = (action.stage, action.microbatch)
        if action.kind == "W":
            deferred, rest = step.deferred.pop(place)
            edges, gradients = deferred.compute(zero.stand_in)  # weights may have gone
            _add(backward, [*zip(edges, gradients, strict=True), *rest])
            if step.saved:
                step.saved.keep(place, [])
            return
        x, output = step.kept.pop(place)
        is_last = action.stage == self.num_stages - 1
        gradient = None if is_last else step.ready.pop(received(action))
        if action.kind == "I":
            x.grad, step.deferred[place] = self._split(action.stage, x, output, gradient, backward)
            if step.saved:
                step.saved.keep(place, step.deferred[place][0].tensors)
        elif is_last:
            backward(output)
        elif output.requires_grad:
            # All that came before the output may be frozen; the gradient is then for nobody.
            backward(output, gradient)
        if action.stage == 0:
            return
        if x.grad is None:
            where = f"Pipeline({self._name(action.stage)})"
            raise ValueError(f"{where}: its output does not depend on its input")
        self._hand_on(step, action, x.grad)

    def _split(
        self,
        stage: int,
        x: Tensor,
        output: Tensor,
        gradient: Tensor | None,
        backward: Callable[..., Any],
    ) -> tuple[Tensor | None, tuple[Deferred, _Rest]]:
        """The gradient of the input; what is left for W, and the other part of its sums."""
        if gradient is None:
            # The caller's backward says by what a loss is multiplied.
            seed = output.detach().requires_grad_()
            backward(seed)
            gradient = seed.grad
        params = [param for param in self.stages[stage].parameters() if param.requires_grad]
        if any(param._backward_hooks for param in params):
            raise UnsupportedError(
                f"Pipeline({self._name(stage)}): a parameter's register_hook would see parts of "
                "a split backward; use register_post_accumulate_grad_hook, or a schedule without I"
            )
        edges = [zero.gradient_edge(param) for param in params]
        wanted: list[Any] = [*edges, *([x] if x.requires_grad else [])]
        with deferring() as deferred:
            grads: Sequence[Tensor | None] = [None] * len(wanted)
            if output.requires_grad:
                grads = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        now, rest = _Rest(), _Rest()
        for param, edge, grad in zip(params, edges, grads, strict=False):
            if grad is not None:
                (rest if param in deferred.parameters else now).append((edge, grad))
        _add(backward, now)
        return grads[-1] if x.requires_grad else None, (deferred, rest)

    def _count(self, step: _Step) -> None:
        if step.saved is not None:
            whole = step.told.sharded.whole_nbytes if step.told.sharded else 0
            self.bytes_in_use.append(step.saved.nbytes + whole)

    def _loss(self, step: _Step, share: bool) -> Tensor | None:
        if share:
            self.comm.broadcast(step.loss, self._ranks[self.num_stages - 1])
        return step.loss if share or self.is_last else None

    @torch.no_grad()
    def _join_tied(self) -> None:
        """Gradients of tied parameters become first + last, with the same bits on both."""
        if not self.tied or self.num_stages == 1:
            return
        for param in self.tied:
            if param.grad is None:  # of a weight that may be elsewhere
                param.grad = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
        if self.is_first and self.is_last:
            half = len(self.tied) // 2
            for first, last in zip(self.tied[:half], self.tied[half:], strict=True):
                total = _gradient(first) + _gradient(last)
                _gradient(first).copy_(total)
                _gradient(last).copy_(total)
            return
        peer = self._ranks[self.num_stages - 1 if self.is_first else 0]
        for param in self.tied:
            here = _gradient(param).contiguous()
            there, tag = torch.empty_like(here), self._link.tied_tag
            self.comm.exchange(
                [Transfer("send", here, peer, tag), Transfer("recv", there, peer, tag)]
            )
            _gradient(param).copy_(here + there if self.is_first else there + here)


def _needs_tokens(stage: nn.Module) -> bool:
    return getattr(stage, "needs_tokens", False)


def _add(backward: Callable[..., Any], found: _Rest) -> None:
    if found:
        backward(*map(list, zip(*found, strict=True)))


def _reducing(row: Sequence[Action]) -> set[Action]:
    """The computations that a REDUCE_GRAD of their stage follows."""
    found, last = set(), None
    for action in row:
        if action.is_compute:
            last = action
        elif action.kind == "REDUCE_GRAD" and last is not None and last.stage == action.stage:
            found.add(last)
    return found


def _gradient(param: nn.Parameter) -> Tensor:
    assert param.grad is not None, "set to zeros before"
    return param.grad
