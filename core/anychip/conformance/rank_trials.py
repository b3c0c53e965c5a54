"""Tensors of a trial among ranks, what has to come out of it, and which trials there are.

A sum is compared with the float64 sum in rank order, within the roundings of one addition per
further rank in the tensor's own type (and one division for ``avg``); all else, and integers,
exactly. Trials are rows of a design in which any two values of two options meet. These functions
run in the processes of :mod:`.ranks`.
"""

import hashlib
import math
import time
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anychip.conformance.case import CheckFailedError, check, check_equal_bits
from anychip.contract import Communicator, Reduction, Work

GUARD = 16
PERIOD = 99991
"""Random elements there are of a type, of which each input is a part from a place of its own; a
prime, so that no two pieces of a large tensor are alike."""
POISONS = (math.nan, 1.0, -1.0, math.inf)
"""What lies in outputs before, and beside all tensors."""
EQUAL = 8
"""Of so many inputs one has all numbers equal; more would hide what goes to another place."""
POLL_S = 30.0
"""So long may work take that is under way on all ranks, before is_done() has to say so."""


class Trial:
    """Tensors of one trial, on the device, each between guard elements.

    Args:
        label: of the trial, for messages and for its numbers.
        shift: elements by which tensors begin beyond an aligned address.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        dtype: torch.dtype,
        label: str,
        shift: int = 0,
    ) -> None:
        self.comm, self.device, self.dtype, self.label = comm, device, dtype, label
        self.start = GUARD + shift
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def input(self, rank: int, numel: int, *, bits: bool = False) -> Tensor:
        """What a rank brings, on the host: the same on every process that asks.

        Args:
            bits: any bits that the type has, of numbers that are only moved.
        """
        place = zlib.crc32(f"{self.label}/{rank}".encode()) % PERIOD
        pool = _pool(self.dtype, bits=bits)
        if place % EQUAL == 0 and not bits:
            return pool[place].repeat(numel)
        ends = [pool[place:], *[pool] * (numel // PERIOD), pool[:place]]
        return torch.cat(ends)[:numel] if place + numel > PERIOD else ends[0][:numel].clone()

    def inputs(self, numel: int, reduction: Reduction | None = None) -> list[Tensor]:
        """Of all ranks; with a reduction, among them what is rare in it."""
        found = [self.input(rank, numel) for rank in range(self.comm.world_size)]
        if reduction is not None and self.dtype != torch.bool:
            _make_rare(found, reduction, first=zlib.crc32(self.label.encode()))
        return found

    def place(self, values: Tensor | int) -> Tensor:
        """A tensor with these values, or with as many elements and poison."""
        numel = values if isinstance(values, int) else values.numel()
        poison = POISONS[zlib.crc32(f"{self.label}/poison".encode()) % len(POISONS)]
        has_all = self.dtype.is_floating_point and self.dtype.itemsize > 1  # not all have infinity
        poison = poison if has_all else 1.0
        whole = torch.full((numel + self.start + GUARD,), poison, dtype=self.dtype)
        if isinstance(values, Tensor):
            whole[self.start : self.start + numel] = values
        placed = whole.to(self.device, copy=True)  # of a host, too: guards are compared
        self.buffers.append((placed, whole))
        return placed[self.start : self.start + numel]

    def bring(self, part: Tensor, values: Tensor) -> None:
        """Writes what a rank brings into a part of what was placed last."""
        part.copy_(values)
        now, before = self.buffers[-1]
        start = part.storage_offset() - now.storage_offset()
        before[start : start + part.numel()] = values

    def restore(self) -> None:
        """All tensors have what they were placed with."""
        for now, before in self.buffers:
            now.copy_(before)

    def scribble(self, work: Work) -> None:
        """Writes over all tensors, as their owner may after a wait; another wait writes nothing."""
        fill = 0 if self.dtype == torch.bool else 64  # which every type has
        tensors = [now[self.start : -GUARD].fill_(fill) for now, _ in self.buffers]
        work.wait()
        is_kept = all(bool((tensor.float() == fill).all()) for tensor in tensors)
        check(
            is_kept, f"{self.label}: another wait() writes over what its caller has written since"
        )

    def check_guards(self) -> None:
        """Nothing was written beside the tensors."""
        for now, before in self.buffers:
            for part in (slice(0, self.start), slice(len(before) - GUARD, None)):
                name = f"{self.label}: elements beside a tensor"
                check_equal_bits(name, now[part].cpu(), before[part])


@lru_cache(maxsize=32)
def _pool(dtype: torch.dtype, *, bits: bool) -> Tensor:
    """Random elements: numbers whose sum over 16 ranks fits, or all that the type has."""
    generator = np.random.Generator(np.random.PCG64(2 * dtype.itemsize + bits))
    if bits and dtype != torch.bool:
        whole = generator.integers(0, 256, (PERIOD, dtype.itemsize), dtype=np.uint8)
        found = torch.from_numpy(whole).view(dtype).view(-1)
        if dtype.is_floating_point:
            # A NaN that signals may become quiet wherever it passes through arithmetic.
            mantissa = 1 - int(np.log2(torch.finfo(dtype).eps))
            as_integers = found.view(_INTEGERS[dtype.itemsize])
            as_integers[found.isnan()] |= 1 << (mantissa - 2)
        return found
    if dtype.is_floating_point:
        values = generator.standard_normal(PERIOD)
        values[2::5] = -0.0  # what only moves has to keep the sign; x + 0 would lose it
        return torch.from_numpy(values).to(dtype)
    low, high = _range(dtype)
    return torch.from_numpy(generator.integers(low, high, PERIOD)).to(dtype)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _range(dtype: torch.dtype) -> tuple[int, int]:
    """Integers whose sum over 16 ranks fits; the wide types' are beyond what float32 holds."""
    if dtype == torch.bool:
        return 0, 2
    largest = torch.iinfo(dtype).max // 16
    return (0 if dtype == torch.uint8 else -largest), largest + 1


def _make_rare(parts: list[Tensor], reduction: Reduction, first: int) -> None:
    """Writes columns of rare numbers over the ranks' inputs, seven of them in turn from a first.

    Sums that end at the largest and the smallest number of the type; Inf and NaN of one rank, and
    Inf of two signs; floats that overflow only together, unless they are averaged, where the
    contract leaves open whether the sum or its terms are divided; of a largest one zeros of two
    signs, of which all ranks get one.
    """
    world, dtype = len(parts), parts[0].dtype
    limits: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    for rank, part in enumerate(parts):
        is_first, is_last = rank == 0, rank == world - 1
        # Of a largest one it stands amid numbers, behind which nobody may begin anew.
        has_nan = rank == world // 2 if reduction in ("max", "min") else is_last
        column = [part[(at - first) % 7 :: 7] for at in range(7)]
        if not dtype.is_floating_point:
            if reduction in ("max", "min"):
                ends = [limits.max if is_first else None, limits.min if is_last else None]
            else:
                ends = [end // world + (rank < end % world) for end in (limits.max, limits.min)]
            fills = dict(enumerate(ends))
        else:
            together = 0.75 * limits.max if reduction == "sum" else limits.max / 4 / world
            fills = {
                0: float("nan") if has_nan else None,
                1: float("inf") if is_first else None,
                2: -float("inf") if is_last else None,
                3: float("inf") if is_first else -float("inf") if is_last else None,
                4: together,
                5: -0.98 * limits.max / world,
                6: (-0.0 if rank % 2 else 0.0) if reduction in ("max", "min") else None,
            }
        for at, value in fills.items():
            if value is not None:
                column[at].fill_(value)


def finish(work: Work, label: str, *, polled: bool = False) -> None:
    """Waits; an unfinished work says so, a finished one too.

    Args:
        polled: asks is_done() until it says so, before.
    """
    deadline = time.monotonic() + POLL_S
    while polled and not work.is_done():
        check(time.monotonic() < deadline, f"{label}: is_done() is False for {POLL_S:g} s")
        time.sleep(0.0002)
    work.wait()
    check(work.is_done(), f"{label}: is_done() is False after wait()")
    work.wait()


def joined(parts: Sequence[Tensor], reduction: Reduction) -> tuple[Any, Any]:
    """What a reduction of the ranks' tensors gives, and how far off it may be."""
    dtype = parts[0].dtype
    if not dtype.is_floating_point:
        values = np.stack([part.numpy() for part in parts])
        exact = values.sum(0) if reduction == "sum" else getattr(values, reduction)(0)
        return exact.astype(np.int64), np.zeros(len(parts[0]))
    values = np.stack([part.double().numpy() for part in parts])
    if reduction in ("max", "min"):
        return (values.max(0) if reduction == "max" else values.min(0)), np.zeros(len(parts[0]))
    unit, largest = torch.finfo(dtype).eps / 2, torch.finfo(dtype).max
    with np.errstate(over="ignore", invalid="ignore"):
        total = values[0].copy()
        for row in values[1:]:
            total += row
        # One rounding per addition, of at most the sum of sizes; float64's own sum has them too.
        additions = (len(parts) - 1) * (2 if dtype == torch.float64 else 1)
        bound = additions * unit * np.abs(values).sum(0)
        total = np.where(np.abs(total) > largest, np.copysign(np.inf, total), total)
        if reduction == "avg":
            total, bound = total / len(parts), bound / len(parts)
            bound = bound + unit * np.abs(total) * 1.01 + torch.finfo(dtype).smallest_normal
    return total, bound


def check_joined(label: str, got: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> None:
    """Compares a reduced tensor with the ranks' inputs.

    A maximum of numbers and NaN may be NaN, or that of the numbers: chips differ.
    """
    want, bound = joined(parts, reduction)
    floating = got.dtype.is_floating_point
    actual = got.cpu().double().numpy() if floating else got.cpu().numpy().astype(np.int64)
    check(actual.shape == want.shape, f"{label}: shape {want.shape} expected, got {actual.shape}")
    with np.errstate(invalid="ignore"):
        fits = (actual == want) | (np.isfinite(want) & (np.abs(actual - want) <= bound))
    if floating:
        fits |= np.isnan(actual) & np.isnan(want)
        if reduction in ("max", "min"):
            numbers = np.stack([part.double().numpy() for part in parts])
            fits |= (np.fmax if reduction == "max" else np.fmin).reduce(numbers) == actual
    if not fits.all():
        at = int(np.argmin(fits))
        raise CheckFailedError(
            f"{label}: {int((~fits).sum())} of {fits.size} elements are wrong; first at [{at}]: "
            f"got {actual[at]:.9g}, want {want[at]:.9g} within {bound[at]:.3g}; the ranks have "
            f"{[part[at].item() for part in parts]}"
        )


def digest(tensor: Tensor) -> str:
    """Of the bits, where one NaN is like another."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.is_floating_point():
        flat = torch.where(flat.isnan(), float("nan"), flat)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


CUTS = ("even", "near", "unlike", "last", "gap")


def cut(way: str, numel: int, parts: int) -> list[int] | None:
    """How elements are given to ranks: None, for even parts, where it goes; else nearly even.

    Or the largest part first, all to the last rank, and none to the rank in the middle.
    """
    if way == "even" and numel % parts == 0:
        return None
    if way == "unlike":
        few = [numel // (parts + 1 + i) for i in range(1, parts)]
        return [numel - sum(few), *few]
    if way == "last":
        return [0] * (parts - 1) + [numel]
    if way == "gap" and parts > 1:
        sizes = cut("near", numel, parts - 1) or [numel // (parts - 1)] * (parts - 1)
        return [*sizes[: parts // 2], 0, *sizes[parts // 2 :]]
    return [numel * (i + 1) // parts - numel * i // parts for i in range(parts)]
