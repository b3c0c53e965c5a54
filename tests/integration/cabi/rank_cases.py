"""Two ranks on a chip that is a C library, asked by ``test_ranks.py``: torch's own parallel forms.

    python rank_cases.py LIBRARY DIRECTORY CASE...

Two processes are forked; each writes DIRECTORY/rank<r>.json: case to "" or what went wrong.
"""

import ctypes
import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import anychip
from anychip.cabi import Library
from anychip.comm.joining import loopback_store, one_machine
from anychip.contract import CommunicationError, Communicator
from anychip.train import optim, precision, zero

WORLD_SIZE, STEPS = 2, 4


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module, device: torch.device, part: slice) -> nn.Module:
    """Some steps of AdamW on a part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        model(batch(step)[part].to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def reference() -> dict[str, torch.Tensor]:
    """One process on the host."""
    return trained(make(), torch.device("cpu"), slice(None)).state_dict()


def compare(found: dict[str, Any]) -> None:
    """Both in float32; the order of sums over the batch differs."""
    for name, want in reference().items():
        got = found[name]
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-6)


def same(got: Any, want: Any) -> None:
    got = got.cpu().tolist() if isinstance(got, torch.Tensor) else got
    assert got == want, f"{want} expected, got {got}"


def mine() -> slice:
    return slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)


def calls(device: torch.device, folder: Path) -> None:
    """Every call of torch.distributed, on tensors of the device and of the host."""
    rank = dist.get_rank()
    same([dist.get_world_size(), dist.get_backend()], [2, device.type])
    for where in (device, torch.device("cpu")):
        x = torch.full((2,), rank + 1.0, device=where)
        for operation, want in ((dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2.0)):
            y = x.clone()
            work = dist.all_reduce(y, operation, async_op=True)
            assert work is not None
            work.wait()
            same(y, [want] * 2)
        y = x.clone()
        dist.reduce(y, 1)
        same(y, [3.0] * 2 if rank else [1.0] * 2)
        dist.broadcast(y, 1)
        same(y, [3.0] * 2)
        rooms = [torch.empty(2, device=where) for _ in range(2)]
        dist.all_gather(rooms, x)
        same(torch.cat(rooms), [1.0, 1.0, 2.0, 2.0])
        whole, part = torch.empty(4, device=where), torch.empty(2, device=where)
        dist.all_gather_into_tensor(whole, x)
        same(whole, [1.0, 1.0, 2.0, 2.0])
        dist.reduce_scatter_tensor(part, whole)
        same(part, [2.0 + 2 * rank] * 2)
        dist.reduce_scatter(part, list(whole.split(2)))
        same(part, [2.0 + 2 * rank] * 2)
        uneven = torch.empty(2 + 2 * rank, device=where)
        dist.all_to_all_single(uneven, torch.cat([x, x[:1]])[:3], [1 + rank] * 2, [1, 2])
        same(uneven, [1.0, 2.0] if rank == 0 else [1.0, 1.0, 2.0, 2.0])
        dist.all_to_all(rooms, [x, x * 10])
        same(torch.cat(rooms), [1.0, 1.0, 2.0, 2.0] if rank == 0 else [10.0, 10.0, 20.0, 20.0])
    for where in (device, torch.device("cpu")):
        between_ranks(where)
    objects_and_groups(device)


def between_ranks(where: torch.device) -> None:
    """Calls with a root, messages, and calls that are made at once."""
    rank = dist.get_rank()
    x = torch.full((2,), rank + 1.0, device=where)
    rooms, part = [torch.empty(2, device=where) for _ in range(2)], torch.empty(2, device=where)
    dist.gather(x, rooms if rank == 0 else None)
    if rank == 0:
        same(torch.cat(rooms), [1.0, 1.0, 2.0, 2.0])
    dist.scatter(part, rooms if rank == 0 else None)
    same(part, [rank + 1.0] * 2)
    letters = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, part, 1 - rank)]
    for request in dist.batch_isend_irecv(letters):
        request.wait()
    same(part, [2.0 - rank] * 2)
    many = [x.clone(), x.clone()]
    with dist._coalescing_manager(device=where):  # type: ignore[attr-defined]
        for y in many:
            dist.all_reduce(y)
    same(torch.cat(many), [3.0] * 4)


def objects_and_groups(device: torch.device) -> None:
    """Objects, groups of some ranks, and what is refused."""
    rank = dist.get_rank()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    same(objects, [{"rank": 0}, {"rank": 1}])
    told = ["zero"] if rank == 0 else [None]
    dist.broadcast_object_list(told, 0)
    same(told, ["zero"])
    dist.barrier()
    group = dist.new_group([1, 0])
    y = torch.ones(3, device=device)
    dist.all_reduce(y, group=group)
    same(y, [2.0] * 3)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    dist.all_reduce(y, group=alone)
    same([*y.tolist(), dist.get_world_size(alone)], [2.0, 2.0, 2.0, 1])
    with pytest.raises(anychip.UnsupportedError, match="PRODUCT"):
        dist.all_reduce(y, dist.ReduceOp.PRODUCT)


def ddp(device: torch.device, folder: Path) -> None:
    model = DistributedDataParallel(make().to(device))
    compare(trained(model, device, mine()).module.state_dict())


def fsdp2(device: torch.device, folder: Path) -> None:
    """Sharded training; its checkpoint, loaded into a model that is sharded anew."""
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    models = [make().to(device) for _ in range(2)]
    for model in models:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained(models[0], device, mine())
    compare(models[0].state_dict())
    dcp.save({"model": get_model_state_dict(models[0])}, checkpoint_id=folder / "saved")
    there = {"model": get_model_state_dict(models[1])}
    dcp.load(there, checkpoint_id=folder / "saved")
    set_model_state_dict(models[1], there["model"])
    compare(models[1].state_dict())


def dtensor(device: torch.device, folder: Path) -> None:
    """A product of sharded matrices; a model whose layers are cut by columns, then rows."""
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    a, b = torch.randn(6, 8), torch.randn(8, 4)
    dist.broadcast(a, 0)
    dist.broadcast(b, 0)
    pieces = [distribute_tensor(a.to(device), mesh, [Shard(1)])]
    pieces.append(distribute_tensor(b.to(device), mesh, [Shard(0)]))
    product: Any = torch.mm(*pieces)
    torch.testing.assert_close(product.full_tensor().cpu(), a @ b)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make().to(device), mesh, plan)  # type: ignore[arg-type]
    compare(trained(model, device, slice(None)).state_dict())


def zero_3(device: torch.device, folder: Path) -> None:
    """A loop of one's own, in the same job as torch's group."""
    chip = anychip.backend()
    comm, model = chip.communicator(), make().to(device)
    policy = precision.policy("fp32", chip)
    rule = optim.chain(optim.adamw(lr=1e-2, weight_decay=1e-2))
    opt = zero.Optimizer(model, rule, comm, stage=3, precision=policy)
    for step in range(STEPS):
        opt.backward(model(batch(step)[mine()].to(device)).square().mean())
        opt.step()
        opt.zero_grad()
    with opt.whole():
        compare(model.state_dict())


def call_and_wait(chip: Library, comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce(x)
    chip.synchronize()


def wrong(device: torch.device, folder: Path) -> None:
    """What a library does wrong on one rank ends in an error on both, and the device goes on.

    1: ENOTSUP after something was written; 2: an error that comes later; 3: a call that is never
    done; 4: another call than the other rank's.
    """
    chip = anychip.backend()
    assert isinstance(chip, Library)
    told = ctypes.c_int.in_dll(ctypes.CDLL(str(chip.table.path)), "sharechip_wrong")
    for number, words in enumerate(("ENOTSUP", "a call has failed", "2 s", "a call has failed"), 1):
        chip.communicator().close()
        comm = chip.communicator(timeout_s=2.0)
        x = torch.ones(5, device=device)
        comm.all_reduce(x)
        same(x, [2.0] * 5)
        told.value = number
        with pytest.raises(CommunicationError, match=words):
            call_and_wait(chip, comm, x)
        told.value = 0
    chip.communicator().close()
    comm = chip.communicator()
    calls = ctypes.c_int.in_dll(ctypes.CDLL(str(chip.table.path)), "sharechip_calls")
    before = calls.value
    for dtype in (torch.float32, torch.int8):  # which the library does not sum
        x = torch.ones(5, dtype=dtype, device=device)
        comm.all_reduce(x)
        same(x, [2.0] * 5)
    same(calls.value - before, 1)
    assert "all_reduce sum of uint8, int8" in comm.description


CASES: dict[str, Callable[[torch.device, Path], None]] = {
    case.__name__: case for case in (calls, ddp, fsdp2, dtensor, zero_3, wrong)
}


def run_rank(rank: int, port: int, library: str, folder: Path, names: list[str]) -> None:
    place = {"RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(240, exit=True)
    outcomes = {}
    try:
        chip = anychip.use(library)
        assert isinstance(chip, Library)
        chip.set_device(rank % chip.device_count())
        for name in names:
            outcomes[name] = "it did not end"
            dist.init_process_group(
                f"cpu:gloo,{chip.name}:{chip.name}" if name == "ddp" else chip.name
            )
            CASES[name](chip.device(), folder)
            dist.destroy_process_group()
            outcomes[name] = ""
    except BaseException:
        outcomes[name if outcomes else "start"] = traceback.format_exc()
    (folder / f"rank{rank}.json").write_text(json.dumps(outcomes))


def main(library: str, folder: str, *names: str) -> None:
    store = loopback_store()
    os.environ |= one_machine()
    children = []
    for rank in range(WORLD_SIZE):
        child = os.fork()
        if child == 0:
            run_rank(rank, store.port, library, Path(folder), list(names or CASES))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
