"""What does a rank of a pipeline do in a step? The actions of its row of the schedule, in order.

Outputs go to the next stage, gradients to the one before, as the schedule says; sends are not
waited for, a receive only by the computation that needs it. What a schedule cannot say is here:
microbatches, the loss, activations until their backward, tied parameters.

Note: The sum
    A stage adds up the gradients of its microbatches in the order of its backwards, which is that
    of the microbatches in GPipe and 1F1B; each loss is divided by their number before. These are
    the bits of the whole model that accumulates over the same microbatches on one rank. A parameter
    tied over the first and the last stage is the exception: each sums its own uses, then both add
    first + last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anychip.contract import HOST, Communicator, Transfer, UnsupportedError, Work
from anychip.runtime import on_host
from anychip.train.parallel.actions import COMPUTE, Action, Schedule
from anychip.train.parallel.lowering import add_communication, received, sent
from anychip.train.parallel.message import Link
from anychip.train.parallel.simulator import Span, Timeline
from anychip.train.parallel.validation import validate

Backward = Callable[..., Any]
"""``backward(loss)`` on the last stage, ``backward(outputs, gradient)`` on the others."""


@dataclass(slots=True)
class _Step:
    """What is under way in one call of ``run``."""

    tokens: Sequence[Tensor]
    targets: Sequence[Tensor]
    weight: float | None
    loss: Tensor
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    ready: dict[Action, Tensor] = field(default_factory=dict)
    receives: dict[Action, tuple[Work, Tensor]] = field(default_factory=dict)
    sends: list[tuple[Work, Tensor]] = field(default_factory=list)


class Pipeline:
    """One rank's stage of a model, and the schedule that it works by.

    Args:
        stage: ``stage(x)`` gives the (floating-point, one) tensor for the next stage, where x is
            what the stage before gave, or the first stage's tokens. The last one is called with
            targets too, and gives the 0-dim loss.
        comm: the ranks of the pipeline, one per row of the schedule.
        schedule: with one stage per rank. Without messages it gets those of
            :func:`~anychip.train.parallel.schedule.add_communication`.
        loss_fn: called with the last stage's output and targets, when the stage takes none.
        tied: parameters of which the first and the last stage have a copy each, in one order.
        autocast: made and entered around each forward, like ``policy.autocast``.
        measure: waits for the device. When given, each computation is timed; see :meth:`timeline`.

    Raises:
        ScheduleError: the schedule cannot be carried out.
        ValueError: it has another number of rows than ``comm`` has ranks.
        UnsupportedError: it gives a rank several stages.
    """

    def __init__(
        self,
        stage: nn.Module,
        comm: Communicator,
        schedule: Schedule,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        tied: Sequence[nn.Parameter] = (),
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        measure: Callable[[], None] | None = None,
    ) -> None:
        if len(schedule.rows) != comm.world_size:
            raise ValueError(
                f"pipeline: one row of the schedule per rank expected, got {len(schedule.rows)} "
                f"rows and {comm.world_size} ranks"
            )
        if not schedule.has_communication:
            schedule = add_communication(schedule)
        validate(schedule)
        self.stage, self.comm, self.schedule = stage, comm, schedule
        self.loss_fn, self.tied = loss_fn, tuple(tied)
        self.autocast, self.measure = autocast, measure
        self.number, self._ranks = _places(schedule, comm.rank)
        self.num_stages, self.num_microbatches = schedule.num_stages, schedule.num_microbatches
        self.device = next((p.device for p in stage.parameters()), torch.device(HOST))
        if self.tied and 0 < self.number < self.num_stages - 1:
            raise ValueError(
                f"pipeline: tied parameters are on the first and the last stage, this is stage "
                f"{self.number} of {self.num_stages}"
            )
        self._row = schedule.rows[comm.rank]
        self._link = Link(schedule, self.device)
        self._last_backward = [a.microbatch for a in self._row if a.kind in ("I", "B")][-1]
        self._spans: list[Span] = []
        self._begin = 0.0

    def __repr__(self) -> str:
        return f"Pipeline(stage {self.number} of {self.num_stages})"

    @property
    def is_first(self) -> bool:
        """This stage takes tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """This stage gives the loss."""
        return self.number == self.num_stages - 1

    def run(
        self,
        tokens: Tensor | None,
        targets: Tensor | None,
        *,
        weight: float | None = None,
        backward: Backward = torch.autograd.backward,
        no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
        more: bool = False,
        share_loss: bool = True,
    ) -> Tensor | None:
        """Forward and backward of all microbatches. Every rank of the pipeline calls it.

        Args:
            tokens: (B, ...) on the first stage, B a multiple of the number of microbatches; not
                looked at elsewhere.
            targets: (B, ...) on the last stage; not looked at elsewhere.
            weight: of each microbatch's loss, 1 / (number of all targets) where it is a sum; None:
                1 / (number of microbatches), for means over as many targets in each.
            backward: adds gradients; an optimizer's, so that the loss gets its scale.
            no_sync: made and entered around each backward but the last one, whose gradients, with
                those before, may be reduced over other ranks; around all of them when parameters
                are tied, which the optimizer's step then reduces.
            more: another run comes before the step: gradients stay local, tied ones unjoined.
            share_loss: give the loss to all ranks, at the price of one small message.

        Returns:
            0-dim float32: the sum of the weighted losses; None where it is not known.

        Raises:
            ValueError: a batch that does not divide, a stage that gives something else than
                expected, or stages that do not fit together.
            CommunicationError: another stage has failed, which every rank is told.
        """
        with self._telling_others():
            step = self._step(tokens, targets, weight)
            self._start_clock()
            for action in self._actions(step, self._row):
                start = time.perf_counter()
                if action.kind == "F":
                    self._forward(step, action)
                elif action.kind != "W":  # the weights' gradients were not put off
                    stays = more or bool(self.tied) or action.microbatch != self._last_backward
                    with no_sync() if stays else nullcontext():
                        self._backward(step, action, backward)
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
    ) -> Tensor | None:
        """The loss alone; arguments, result and errors as those of :meth:`run`."""
        forward = self.schedule.only("F", "SEND_F", "RECV_F")
        with self._telling_others():
            step = self._step(tokens, targets, weight)
            for action in self._actions(step, forward.rows[self.comm.rank]):
                self._forward(step, action)
                del step.kept[action.microbatch]
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
        here = torch.tensor([float(time) for time in times], dtype=torch.float64)
        here = here.to(self.device)
        everywhere = here.new_empty(self.comm.world_size * len(here))
        self.comm.all_gather(everywhere, here)
        values = iter(on_host(everywhere).view(-1, 2).tolist())
        return Timeline(
            tuple(
                tuple(Span(action, *next(values)) for action in row)
                for row in self.schedule.only(*COMPUTE).rows
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
        """The computations of a row; messages are started, and inputs waited for, in between."""
        for action in row:
            if action.is_message:
                self._start(step, action)
                continue
            receive = received(action)
            if receive in step.receives:
                work, tensor = step.receives.pop(receive)
                work.wait()
                step.ready[receive] = tensor
            yield action

    def _start(self, step: _Step, message: Action) -> None:
        """Posts a send or a receive; nothing is waited for."""
        peer, tag = self._ranks[message.counterpart().stage], self._link.tag(message)
        if message.kind.startswith("SEND"):
            tensor = step.ready.pop(message)
            if message.kind == "SEND_F":
                self._link.announce(self.comm, peer, tensor)
            work = self.comm.exchange([Transfer("send", tensor, peer, tag)], async_op=True)
            # A send's tensor must live until it is done, and no longer.
            step.sends = [entry for entry in step.sends if not entry[0].is_done()]
            step.sends.append((work, tensor))
            return
        if message.kind == "RECV_F":
            self._link.listen(self.comm, peer)
        tensor = self._link.room(message)
        work = self.comm.exchange([Transfer("recv", tensor, peer, tag)], async_op=True)
        step.receives[message] = (work, tensor)

    def _finish(self, step: _Step) -> None:
        for work, _ in step.sends:
            work.wait()

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """An error here must not leave the other stages waiting until their time is over."""
        try:
            yield
        except BaseException as error:
            where = f"pipeline stage {self.number} of {self.num_stages}"
            self.comm.abort(f"{where}: {type(error).__name__}: {error}")
            raise

    # Computations

    def _step(self, tokens: Tensor | None, targets: Tensor | None, weight: float | None) -> _Step:
        return _Step(
            tokens=self._microbatches("tokens", tokens) if self.is_first else [],
            targets=self._microbatches("targets", targets) if self.is_last else [],
            weight=weight,
            loss=torch.zeros((), device=self.device),
        )

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

    def _forward(self, step: _Step, action: Action) -> None:
        number = action.microbatch
        x = step.tokens[number] if self.is_first else step.ready.pop(received(action))
        if not self.is_first:
            x.requires_grad_(torch.is_grad_enabled())
        with self.autocast():
            if not self.is_last:
                output = self.stage(x)
            elif self.loss_fn is None:
                output = self.stage(x, step.targets[number])
            else:
                output = self.loss_fn(self.stage(x), step.targets[number])
        if self.is_last:
            loss = self._check_loss(output)
            # Divided, not multiplied by the inverse: so a loop on one rank does it.
            output = loss / self.num_microbatches if step.weight is None else loss * step.weight
            step.loss += output.detach()
        else:
            self._link.check(self, output)
            step.ready[sent(action)] = output.detach().contiguous()
        step.kept[number] = (x, output)

    def _check_loss(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.dim():
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"{self}: a 0-dim loss expected of the last stage, got {got}")
        return loss

    def _backward(self, step: _Step, action: Action, backward: Backward) -> None:
        x, output = step.kept.pop(action.microbatch)
        if self.is_last:
            backward(output)
        else:
            gradient = step.ready.pop(received(action))
            # All that came before the output may be frozen; the gradient is then for nobody.
            if output.requires_grad:
                backward(output, gradient)
        if self.is_first:
            return
        if x.grad is None:
            raise ValueError(f"{self}: its output does not depend on its input")
        step.ready[sent(action)] = x.grad.contiguous()

    def _loss(self, step: _Step, share: bool) -> Tensor | None:
        if share:
            self.comm.broadcast(step.loss, self._ranks[self.num_stages - 1])
        return step.loss if share or self.is_last else None

    @torch.no_grad()
    def _join_tied(self) -> None:
        """Gradients of tied parameters become first + last, with the same bits on both."""
        if not self.tied or self.num_stages == 1:
            return
        peer = self._ranks[self.num_stages - 1 if self.is_first else 0]
        for param in self.tied:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            here = param.grad.contiguous()
            there, tag = torch.empty_like(here), self._link.tied_tag
            self.comm.exchange(
                [Transfer("send", here, peer, tag), Transfer("recv", there, peer, tag)]
            )
            param.grad.copy_(here + there if self.is_first else there + here)


def _places(schedule: Schedule, rank: int) -> tuple[int, dict[int, int]]:
    """The stage of a rank, and the rank of each stage."""
    owners: dict[int, int] = {}
    for owner, row in enumerate(schedule.rows):
        for action in row:
            owners[action.stage] = owner
    mine = [stage for stage, owner in owners.items() if owner == rank]
    if len(mine) != 1:
        raise UnsupportedError(
            f"pipeline: one stage per rank in this version, the schedule gives rank {rank} "
            f"{len(mine)} stages"
        )
    return mine[0], owners
