"""Every call between two processes, at sizes from bytes to tens of megabytes.

Ours next to torch.distributed's own call on the same ranks in the same rounds, and to the bound:
both ranks copy as many bytes at the same time. The first half of this file runs in the process that
reports, the second in the ranks.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anychip.bench.rank import Place
from anychip.bench.ranks import Ranks, slowest
from anychip.bench.report import Report, Timing
from anychip.bench.timing import Samples
from anychip.comm import wire_nbytes
from anychip.contract import Backend, Communicator

RANKS = 2
SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
"""Bytes of payload, as :class:`~anychip.contract.Traffic` counts it."""
COUNTED_FROM = 1 << 20
"""Payload from which bytes on the wire are counted: below it headers are most of them."""
BOUND_FROM = 64 << 10
"""Payload from which a copy is a bound: below it the call that copies takes longer than it does."""
_MODULE = "anychip.bench.collectives"
_TRIES = 3


def run(
    backend: Backend,
    *,
    rounds: int,
    progress: Callable[[int], None],
    names: tuple[str, ...] = (),
    sizes: tuple[int, ...] = SIZES,
    window: float = 0.05,
) -> Report:
    """Times each call at each size.

    Args:
        names: calls; all when empty.
        sizes: bytes of payload.
        window: seconds that one candidate runs per round, about.

    Raises:
        ValueError: fewer than 3 rounds, or a call that there is not.
        RankError: a rank failed.
    """
    if rounds < 3:
        raise ValueError(f"rounds must be at least 3, got {rounds}")
    unknown = [name for name in names if name not in CALLS]
    if unknown:
        raise ValueError(f"no call {', '.join(unknown)}; there are {', '.join(CALLS)}")
    rows = []
    with Ranks(RANKS, backend.name, _MODULE) as ranks:
        setting = ranks.call("start")[0]
        for name in names or CALLS:
            for nbytes in sizes if name != "barrier" else (0,):
                rows.append(_row(ranks, name, nbytes, rounds, window))
                progress(len(rows))
    return Report(
        subject="collectives", backend=backend.name, device=backend.identity(), threads=1,
        rows=rows,
        notes=(
            f"{RANKS} ranks with 1 host thread each; ours: {setting['ours']}; torch: "
            f"torch.distributed over {setting['torch']}",
            "times are of the slowest rank; GB/s: bytes of the tensor over that",
            "x torch: its time over ours, above 1 is faster; x bound: our time over that of a copy "
            "of as many bytes on both ranks at once",
            "x wire: bytes that left the ranks, as the kernel counted them on the loopback device, "
            "over those of the formula (wire B); traffic of other programs is in it, and what goes "
            "through shared memory is not",
        ),
    )  # fmt: skip


def _row(ranks: Ranks, name: str, nbytes: int, rounds: int, window: float) -> Timing:
    nbytes = ranks.call("make", name=name, nbytes=nbytes)[0]["nbytes"]
    counts = {who: _count(ranks, who, window) for who in ("ours", "torch", "copy")}
    seconds: dict[str, list[float]] = {who: [] for who in counts}
    for _ in range(rounds):
        for who, count in counts.items():
            seconds[who].append(_measure(ranks, who, count))
    taken = {who: Samples(name=who, seconds=tuple(found)) for who, found in seconds.items()}
    facts: dict[str, Any] = {"bytes": nbytes, "torch us": taken["torch"].median * 1e6}
    if nbytes:
        facts |= {f"{who} GB/s": nbytes / taken[who].median / 1e9 for who in taken}
    if nbytes >= BOUND_FROM:
        facts["x bound"] = taken["ours"].ratio(taken["copy"])
    facts["x torch"] = taken["torch"].ratio(taken["ours"])
    facts["wire B"] = round(wire_nbytes(name, nbytes, RANKS) * (1 if name == "send" else RANKS))
    if nbytes >= COUNTED_FROM:
        for who in ("ours", "torch"):
            counted = _on_the_wire(ranks, who)
            if counted is not None:
                facts[f"{who} x wire"] = counted / facts["wire B"]
    return Timing(
        name=f"{name} {_size(nbytes)}".strip(),
        microseconds=taken["ours"].median * 1e6,
        best_microseconds=taken["ours"].best * 1e6,
        facts=facts,
    )


def _count(ranks: Ranks, who: str, window: float) -> int:
    _measure(ranks, who, 1)
    best = min(_measure(ranks, who, 1) for _ in range(2))
    return max(1, min(200, round(window / best)))


def _measure(ranks: Ranks, who: str, count: int) -> float:
    return slowest(ranks.call("repeat", who=who, count=count), "seconds") / count


def _on_the_wire(ranks: Ranks, who: str) -> float | None:
    """Bytes of one call, of all ranks; the least of some tries, since others may send too."""
    found = []
    for _ in range(_TRIES):
        before = loopback_nbytes()
        if before is None:
            return None
        ranks.call("repeat", who=who, count=2)
        after = loopback_nbytes()
        assert after is not None
        found.append((after - before) / 2)
    return min(found)


def loopback_nbytes() -> int | None:
    """Bytes that the loopback device has received; None on a system that does not say."""
    file = Path("/proc/net/dev")
    lines = file.read_text().splitlines() if file.exists() else []
    counts = [line.split(":")[1] for line in lines if line.strip().startswith("lo:")]
    return int(counts[0].split()[0]) if counts else None


def _size(nbytes: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B" if nbytes else ""


# In the ranks


def start(place: Place) -> dict[str, str]:
    """Makes the communicator; says how both communicate."""
    comm = place.chip.communicator()
    place.held = {"comm": comm}
    return {"ours": comm.description, "torch": str(dist.get_backend())}


def make(place: Place, name: str, nbytes: int) -> dict[str, int]:
    """Makes the tensors of a call; returns the payload, a multiple of what the ranks need."""
    comm: Communicator = place.held["comm"]
    numel = max(1, nbytes // 4)
    if name in ("reduce_scatter", "all_gather", "all_to_all"):
        numel = -(-numel // comm.world_size) * comm.world_size
    # Zeros stay what they are under sums; written, since fresh ones would all be one page.
    whole = torch.ones(numel, device=place.device).zero_()
    ours, theirs = CALLS[name](comm, whole)
    place.held |= {
        "ours": ours,
        "torch": theirs,
        "copy": partial(torch.empty_like(whole).copy_, whole),
    }
    return {"nbytes": 0 if name == "barrier" else whole.nbytes}


def repeat(place: Place, who: str, count: int) -> dict[str, float]:
    """Makes a call some times, after all ranks have come."""
    call: Callable[[], object] = place.held[who]
    dist.barrier()
    place.chip.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    place.chip.synchronize()
    return {"seconds": time.perf_counter() - begin}


Compared = tuple[Callable[[], object], Callable[[], object]]


def _all_reduce(comm: Communicator, whole: Tensor) -> Compared:
    return partial(comm.all_reduce, whole), partial(dist.all_reduce, whole)


def _reduce_scatter(comm: Communicator, whole: Tensor) -> Compared:
    part = torch.empty_like(whole.chunk(comm.world_size)[0])
    return partial(comm.reduce_scatter, part, whole), partial(_SCATTER, part, whole)


def _all_gather(comm: Communicator, whole: Tensor) -> Compared:
    part = whole.chunk(comm.world_size)[0].clone()
    return partial(comm.all_gather, whole, part), partial(_GATHER, whole, part)


def _broadcast(comm: Communicator, whole: Tensor) -> Compared:
    return partial(comm.broadcast, whole, 0), partial(dist.broadcast, whole, 0)


def _all_to_all(comm: Communicator, whole: Tensor) -> Compared:
    output = torch.empty_like(whole)
    inputs, outputs = whole.chunk(comm.world_size), output.chunk(comm.world_size)
    return (
        partial(comm.all_to_all, outputs, inputs),
        partial(dist.all_to_all_single, output, whole),
    )


def _send(comm: Communicator, whole: Tensor) -> Compared:
    """From rank 0 to rank 1, which has it when its call returns."""
    if comm.rank == 0:
        return partial(comm.send, whole, 1), partial(dist.send, whole, 1)
    return partial(comm.recv, whole, 0), partial(dist.recv, whole, 0)


def _barrier(comm: Communicator, whole: Tensor) -> Compared:
    return comm.barrier, dist.barrier


# torch 2.13 gives these two calls new names, and warns about the old ones.
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

CALLS: Mapping[str, Callable[[Communicator, Tensor], Compared]] = {
    "all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather,
    "broadcast": _broadcast, "all_to_all": _all_to_all, "send": _send, "barrier": _barrier,
}  # fmt: skip
