"""Stage 3 on a device that is really asynchronous: a wait that is missing is a wrong number.

The gathers, the reductions, and the ways to host memory and files and back are on streams that
lag behind by a random time, each with memory of its own: nothing is there before it was waited for.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from anychip import runtime
from anychip.comm import staged, threads
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator, Membership, Transport, Work
from anychip.train import optim, zero
from anychip.train.zero import streaming, tiers
from benchmarks.late_link import Clock, late
from tests.meta.asynchronous import AsynchronousBackend
from tests.unit.train import test_zero_masters as masters
from tests.unit.train.zero_oracle import descend, on_models

CHUNK_NBYTES = 8_000


class OnHost(Work):
    """Work of the host, which no stream of the device has a part in."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def wait(self) -> None:
        with _disable_current_modes():
            self.work.wait()

    def is_done(self) -> bool:
        return self.work.is_done()


class Staged(staged.Staged):
    """As of any device: a copy to the host waits for its stream, and the host's work is done at
    once. What is received is copied to the device on the stream that waits for it.
    """

    backend: ClassVar[AsynchronousBackend]

    def __init__(self, host: Any, device: str) -> None:
        super().__init__(host, device)
        self._host = Plain(host)

    def part(self, group: Membership) -> Transport:
        return type(self)(self._host.host.part(group), self.device)

    @classmethod
    def to_host(cls, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().to("cpu", copy=True)
        cls.backend.current_stream().synchronize()
        return copy


class Plain:
    """A transport of the host, called without the mode that leaves work to a stream."""

    def __init__(self, host: Transport) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            given = [arg.work if isinstance(arg, OnHost) else arg for arg in args]
            with _disable_current_modes():
                found = getattr(self.host, name)(*given)
            return OnHost(found) if isinstance(found, Work) else found

        return call


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsynchronousBackend]:
    """Serves the host."""
    backend = AsynchronousBackend()
    monkeypatch.setattr(runtime, "_active", backend)
    monkeypatch.setattr(Staged, "backend", backend, raising=False)
    monkeypatch.setattr(staged, "_to_host", Staged.to_host)
    monkeypatch.setattr(threads, "Staged", Staged)
    yield backend
    backend.synchronize()


def train(comm: Communicator, model: torch.nn.Module, **how: Any) -> list[torch.Tensor]:
    opt = zero.Optimizer(model, masters.rule(), comm, stage=3, **how)
    for step in range(3):
        with opt.no_sync():
            opt.backward(masters.loss_of(model, step, comm.rank, 0))
        opt.backward(masters.loss_of(model, step, comm.rank, 1))
        descend(opt, masters.loss_of(model, step, comm.rank, 2))  # is added up where it waits
    with opt.whole():
        found = [param.detach().clone() for param in model.parameters()]
    states = opt.state_dict()["state"]
    return [*found, *(states[n][name] for n in states for name in sorted(states[n]))]


@pytest.mark.parametrize("tier", ["device", "host", "file"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_on_side_streams_has_the_bits_of_one_stream(
    device: AsynchronousBackend, tier: str, dtype: torch.dtype, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kinds = ["states", "gradients", "weights", *["masters"] * (dtype == torch.bfloat16)]
    offload = dict.fromkeys(kinds, str(tmp_path) if tier == "file" else tier)
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "_active", None)
        want = on_models(2, partial(masters.build, dtype), train)
    how = {"offload": offload, "chunk_nbytes": CHUNK_NBYTES, "prefetch": 2}
    got = on_models(2, partial(masters.build, dtype), partial(train, **how), staged="cpu")
    for rank in range(2):
        for number, (one, other) in enumerate(zip(got[rank], want[rank], strict=True)):
            assert torch.equal(one, other), (rank, number)


def test_what_was_given_to_be_written_is_what_is_read(device: AsynchronousBackend) -> None:
    """As gradients that backward has sent away, and somebody looks at before the step."""
    away = streaming.Tiers(tiers.tiers_of({"gradients": "host"}), "cpu", CHUNK_NBYTES)
    stored = away.store("gradients", torch.float32, [0, 3000, 5000])
    stored.room.write(0, torch.zeros(20_480, dtype=torch.uint8))
    values = torch.arange(5000.0)
    away.send(stored, values)
    assert torch.equal(stored.all().cpu(), values)
    out = torch.zeros(5000)
    away.send(stored, values + 1.0)
    away.bring(stored, out)
    assert torch.equal(out, values + 1.0)


class VirtualClock(Clock):
    """Goes on when somebody computes for a while, or waits."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.slept_s += seconds


class Busy(torch.autograd.Function):
    """Computes for 10 units of time forward, and for 20 backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: VirtualClock) -> torch.Tensor:
        ctx.clock = clock
        clock.time += 10.0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.time += 20.0
        return grads[0], None


class Scaled(torch.nn.Module):
    """The root has a parameter whose gradient is the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(32))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: torch.Tensor, clock: VirtualClock) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = Busy.apply(torch.tanh(block(x)), clock)  # type: ignore[no-untyped-call]
        return x.square().mean()


@pytest.mark.parametrize(("stage", "how", "clips", "delays"), [
    (0, {}, False, 2),  # the last reduction, whose values may be changed, then who has a gradient
    (0, {}, True, 2),
    (1, {}, False, 2),  # the last reduction with that question, then the weights
    (2, {}, False, 2),
    (2, {}, True, 3),  # and the norm
    (3, {}, False, 2),  # the first gathers, and the last reduction with that question
    (3, {}, True, 3),
    (3, {"prefetch": 2}, False, 2),
    (3, {"prefetch": 0}, False, 11),  # every gather: root, five blocks, and four of them again
], ids=str)  # fmt: skip
def test_a_step_waits_for_few_calls_and_computes_during_all_others(
    stage: int, how: dict[str, Any], clips: bool, delays: int
) -> None:
    """Over a link where each call takes one unit of time, by a clock of our own."""

    def work(comm: Communicator, model: nn.Module) -> list[float]:
        clock, waits = VirtualClock(), []
        rule = optim.adamw(1e-3)
        rule = optim.chain(optim.clip_by_global_norm(1.0), rule) if clips else rule
        slow = late(comm, 1.0, clock)
        opt = zero.Optimizer(model, rule, slow, stage=stage, bucket_nbytes=4 * 33 * 32, **how)
        for _ in range(3):
            clock.slept_s = 0.0
            descend(opt, model(torch.ones(2, 32), clock))
            waits.append(clock.slept_s)
        return waits

    for waits in on_models(2, Scaled, work):
        assert waits[1:] == [delays] * 2


class Partly(torch.nn.Linear):
    """Uses its bias on some ranks."""

    def forward(self, x: torch.Tensor, has_bias: bool = True) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias if has_bias else None)


@pytest.mark.parametrize("how", ["plain", "twice", "checkpoint", "reentrant"])
@pytest.mark.parametrize("blocks", [3, 6])
def test_rank_that_lacks_a_gradient_makes_no_other_calls(blocks: int, how: str) -> None:
    """Of the last block: the others wait for its reduction, and it for gathers that they make."""

    def run(block: torch.nn.Module, x: torch.Tensor, has_bias: bool) -> torch.Tensor:
        if how in ("checkpoint", "reentrant"):
            again = torch.utils.checkpoint.checkpoint
            y: torch.Tensor = again(block, x, has_bias, use_reentrant=how == "reentrant")
            return y
        y = block(x, has_bias)
        return block(y, has_bias) if how == "twice" else y

    def work(comm: Communicator, stage: int) -> list[torch.Tensor]:
        model = models[comm.rank]
        opt = zero.Optimizer(model, masters.rule(), comm, stage=stage)
        for _ in range(3):
            x = torch.ones(2, 32, requires_grad=True)
            for number, block in enumerate(model):
                x = torch.tanh(run(block, x, comm.rank == 0 or number < blocks - 1))
            descend(opt, x.square().mean())
        with opt.whole():
            return [param.detach().clone() for param in model.parameters()]

    found = []
    for stage in (0, 3):
        torch.manual_seed(5)
        models = [torch.nn.ModuleList(Partly(32, 32) for _ in range(blocks)) for _ in range(2)]
        found += run_ranks(2, lambda comm, stage=stage: work(comm, stage))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))
