"""Bytes: what each stage holds, by its formula and as found in memory, and what goes between ranks.

Psi is the number of parameters; all of them float32.
"""

import gc
import time
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn

import anychip
from anychip.comm.group import Group
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.operators.squares import WIDTH
from anychip.train import optim, precision, zero
from anychip.train.optim.rule import BLOCK
from anychip.train.zero.exchange import Flat
from anychip.train.zero.layout import ALIGNMENT
from tests.unit.train.zero_oracle import descend, on_models

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3], ids="stage{}".format)
BUCKET_NBYTES = 200_000
SIZES = (150, 333, 200, 7)


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(SIZES)))


GAPS = (ALIGNMENT - 1) * 2 * (len(SIZES) - 1)
"""At most as many elements, so that each parameter is aligned."""
PSI = sum(a * b + b for a, b in pairwise(SIZES))


def padding(world_size: int, num_buffers: int) -> int:
    """At most so many elements of all buffers, so that no cut goes through a block."""
    return GAPS + 2 * BLOCK * world_size * num_buffers


def policy(reduce_dtype: torch.dtype) -> precision.PrecisionPolicy:
    return precision.policy("fp32", anychip.backend(), reduce_dtype=reduce_dtype)


def live_nbytes() -> int:
    """Bytes of all storages that a tensor in this process holds, each counted once."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # Of other classes are tensors without data, which other tests may have left.
        if type(thing) not in (torch.Tensor, torch.nn.Parameter) or thing.layout != torch.strided:
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()  # some refuse their address
    return sum(storages.values())


def kept_nbytes(comm: Communicator) -> int:
    """Memory that a group keeps for what it receives, from one reduction to the next."""
    return sum(room.nbytes for room in comm.transport._kept) if isinstance(comm, Group) else 0


@pytest.mark.grid
@pytest.mark.parametrize(("world_size", "stage"), [
    (1, 2), (3, 0), (3, 1), (3, 2), (3, 3),
], ids=["one-rank", "stage0", "stage1", "stage2", "stage3"])  # fmt: skip
def test_bytes_per_rank_follow_the_formula_and_are_what_tensors_hold(
    world_size: int, stage: int
) -> None:
    gc.collect()
    start = live_nbytes()
    released: list[int] = []

    def work(comm: Communicator, model: nn.Module) -> tuple[zero.MemoryUse, int, list[int], int]:
        opt = zero.Optimizer(
            model, optim.adamw(1e-2), comm, stage=stage, bucket_nbytes=BUCKET_NBYTES
        )
        num_buffers = len(opt.sharded.queue.buffers) if opt.sharded else 0
        released.append(sum(unit.nbytes for unit in opt.sharded.units) if opt.sharded else 0)
        found = []
        for step in range(2):
            opt.backward(model(torch.ones(1, SIZES[0])).sum())
            if opt.sharded:
                opt.sharded.queue.finish()  # till then a few buffers more
            if step:  # the first one might leave something behind
                found.append(measured(comm))
            opt.step()
            opt.zero_grad()
        found.append(measured(comm))
        return opt.memory(), num_buffers, found, kept_nbytes(comm)

    def measured(comm: Communicator) -> int:
        comm.barrier()
        nbytes = live_nbytes() if comm.rank == 0 else 0
        comm.barrier()
        return nbytes - start - sum(released)  # which have no memory, and sizes all the same

    check_formula(on_models(world_size, build, work), stage)


def check_formula(results: list[tuple[zero.MemoryUse, int, list[int], int]], stage: int) -> None:
    world_size = len(results)
    num_buffers = results[0][1]
    assert world_size == 1 or num_buffers >= 2 or stage == 3
    slack = 4 * (2 * BLOCK * num_buffers + GAPS)
    weight_share = world_size if stage == 3 else 1
    gradient_share = world_size if stage >= 2 else 1
    state_share = world_size if stage else 1
    for memory, _, _, kept in results:
        # What comes of one buffer from the other ranks.
        most = PSI + padding(world_size, num_buffers)
        assert kept <= 4 * most * (world_size - 1) / world_size
        assert abs(memory.parameters - 4 * PSI / weight_share) <= slack * (weight_share > 1)
        assert abs(memory.gradients - 4 * PSI / gradient_share) <= slack * (gradient_share > 1)
        assert abs(memory.states - 8 * PSI / state_share) <= 2 * slack * (state_share > 1) + 4
    # What is there in all: the parts of all ranks are the whole, so that nothing is left over but
    # a few scalars.
    gradients = sum(memory.gradients for memory, *_ in results)
    rest = sum(memory.parameters + memory.states + kept for memory, _, _, kept in results)
    after_backward, after_step = results[0][2]
    gaps = 4 * (padding(world_size, num_buffers) if stage else GAPS) * world_size
    assert 0 <= after_backward - gradients - rest <= 1024 + 2 * gaps
    assert 0 <= after_step - rest <= 1024 + gaps


@pytest.mark.parametrize("stage", [0, 1, 2], ids="stage{}".format)
def test_stage_2_frees_buffers_while_backward_goes_on(stage: int) -> None:
    """At the end of backward stage 2 has held few buckets, the others all of them."""

    def work(comm: Communicator, layers: nn.Module) -> int:
        opt = zero.Optimizer(layers, optim.sgd(0.1), comm, stage=stage, bucket_nbytes=1)
        assert opt.sharded is not None
        held = []

        def count(*_: object) -> None:
            assert opt.sharded is not None
            held.append(sum(b.filling is not None for b in opt.sharded.queue.buffers))

        x = torch.ones(1, 64, requires_grad=True)
        x.register_hook(count)
        y = x
        for layer in layers:
            y = layer(y)
        if comm.rank == 1:
            time.sleep(0.2)  # what rank 0 has sent cannot be reduced meanwhile
        opt.backward(y.sum())
        return held[0]

    for held in on_models(
        2, lambda: nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(12)), work
    ):
        assert held <= 2 if stage == 2 else held >= 11


def asked(comms: set[Communicator]) -> tuple[Counter[str], Counter[str]]:
    """Calls, and their bytes, so far."""
    calls = sum((comm.traffic.calls for comm in comms), Counter[str]())
    return calls, sum((comm.traffic.nbytes for comm in comms), Counter[str]())


@STAGES
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_one_step_sends_each_gradient_and_each_parameter_once(
    stage: int, world_size: int, dtype: torch.dtype
) -> None:
    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))

    def work(
        comm: Communicator, model: nn.Module
    ) -> tuple[dict[str, int], dict[str, int], list[int]]:
        opt = zero.Optimizer(
            model, rule, comm, stage=stage, precision=policy(dtype), bucket_nbytes=BUCKET_NBYTES
        )
        assert opt.sharded is not None

        def step() -> None:
            with opt.no_sync():
                opt.backward(model(torch.ones(1, SIZES[0])).sum())
            descend(opt, model(torch.ones(1, SIZES[0])).sum())

        step()  # the first one also tells the order of buffers
        assert isinstance(opt.sharded.exchange, Flat)
        comms = {comm, opt.sharded.exchange.gather_comm}
        calls, nbytes = asked(comms)
        step()
        calls, nbytes = asked(comms)[0] - calls, asked(comms)[1] - nbytes
        numels = [buffer.layout.numel for buffer in opt.sharded.queue.buffers]
        return dict(calls), dict(nbytes), numels

    # Beside 2 Psi: a byte per parameter tensor (has it a gradient?), and a row for the norm.
    tensors = 2 * (len(SIZES) - 1)
    for calls, nbytes, numels in on_models(world_size, build, work):
        buffers, sent = len(numels), sum(numels)
        assert PSI <= sent <= PSI + (padding(world_size, buffers) if stage else GAPS)
        gathers = 2 if stage == 3 else 1  # before the forward of each batch, or once after the step
        if stage == 0:
            assert nbytes == {"all_reduce": dtype.itemsize * sent + tensors}
            assert calls == {"all_reduce": buffers + 1}
        else:
            assert nbytes == {
                "reduce_scatter": dtype.itemsize * sent, "all_gather": 4 * sent * gathers,
                "all_reduce": tensors + 8 * WIDTH,
            }  # fmt: skip
            all_gathers = buffers * gathers
            assert calls == {"reduce_scatter": buffers, "all_gather": all_gathers, "all_reduce": 2}


def test_reduction_in_bfloat16_rounds_the_sum_and_keeps_float32_gradients() -> None:
    def work(comm: Communicator) -> torch.Tensor:
        layer = nn.Linear(3, 1, bias=False)
        opt = zero.Optimizer(layer, optim.sgd(1.0), comm, precision=policy(torch.bfloat16))
        weights = torch.tensor([[1.0 + 2.0**-10, 3.0 + comm.rank, 2.0**-3]])
        opt.backward((layer.weight * weights).sum())
        assert layer.weight.grad is not None
        return layer.weight.grad

    for grad in run_ranks(2, work):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, torch.tensor([[1.0, 3.5, 2.0**-3]]))
