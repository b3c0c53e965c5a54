"""Stage 3 on a device that is really asynchronous: a wait that is missing is a wrong number.

The gathers, the reductions, and the ways to host memory and files and back are on streams that
lag behind by a random time, each with memory of its own: nothing is there before it was waited for.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from anychip import runtime
from anychip.comm import staged, threads
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator, Membership, Transport, Work
from anychip.train import zero
from anychip.train.zero import streaming, tiers
from tests.meta.asynchronous import AsynchronousBackend
from tests.unit.train import test_zero_masters as masters

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
        opt.backward(masters.loss_of(model, step, comm.rank, 2))  # is added up where it waits
        opt.step()
        opt.zero_grad()
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
        models = [masters.build(dtype) for _ in range(2)]
        want = run_ranks(2, lambda comm: train(comm, models[comm.rank]))
    models = [masters.build(dtype) for _ in range(2)]
    got = run_ranks(
        2,
        lambda comm: train(
            comm, models[comm.rank], offload=offload, chunk_nbytes=CHUNK_NBYTES, prefetch=2
        ),
        staged="cpu",
    )
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


class Logged(Work):
    """Notes when it was waited for."""

    def __init__(self, work: Work, log: list[str], name: str) -> None:
        self.work, self.log, self.name = work, log, name
        log.append(f"begin {name}")

    def wait(self) -> None:
        self.work.wait()
        self.log.append(f"end {self.name}")

    def is_done(self) -> bool:
        return False  # a slow link


def test_only_the_first_gathers_and_the_last_reduction_are_waited_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others have computation between their beginning and the wait for them."""

    def work(comm: Communicator) -> list[str]:
        log: list[str] = []
        names = count()
        model = models[comm.rank]
        blocks: Any = model.blocks
        for number, block in enumerate(blocks):
            block.register_forward_hook(lambda *_, number=number: log.append(f"forward {number}"))
            block.weight.register_post_accumulate_grad_hook(
                lambda _, number=number: log.append(f"backward {number}")
            )
        opt = zero.Optimizer(model, masters.rule(), comm, stage=3)
        opt.backward(masters.loss_of(model, 0, comm.rank, 0))  # learns the order
        opt.step()
        opt.zero_grad()
        assert opt.sharded is not None
        flat: Any = opt.sharded.exchange
        log.clear()
        for kind in ("gather", "reduce"):
            real = getattr(flat, kind)

            def logged(*args: Any, real: Any = real, kind: str = kind, **how: Any) -> Work:
                return Logged(real(*args, **how), log, f"{kind} {next(names)}")

            monkeypatch.setattr(flat, kind, logged)
        opt.backward(masters.loss_of(model, 0, comm.rank, 0))
        return log

    models = [masters.build(torch.float32) for _ in range(2)]
    for log in run_ranks(2, work):
        begun = [entry.removeprefix("begin ") for entry in log if entry.startswith("begin")]
        exposed = []
        for name in begun:
            between = log[log.index(f"begin {name}") : log.index(f"end {name}")]
            if not any(entry.startswith(("forward", "backward")) for entry in between):
                exposed.append(name)
        gathers = [name for name in begun if name.startswith("gather")]
        assert len(gathers) == 6  # the root, three blocks, and two of them again
        assert exposed == [gathers[0], gathers[1], begun[-1]]
        assert begun[-1].startswith("reduce")


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
            opt.backward(x.square().mean())
            opt.step()
            opt.zero_grad()
        with opt.whole():
            return [param.detach().clone() for param in model.parameters()]

    found = []
    for stage in (0, 3):
        torch.manual_seed(5)
        models = [torch.nn.ModuleList(Partly(32, 32) for _ in range(blocks)) for _ in range(2)]
        found += run_ranks(2, lambda comm, stage=stage: work(comm, stage))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))
