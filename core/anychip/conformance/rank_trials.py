"""Tensors of a trial among ranks, and what has to come out of a reduction of them.

A sum is compared with the float64 sum in rank order, within the roundings of one addition per
further rank in the tensor's own type (and one division for ``avg``); all else, and integers,
exactly. These functions run in the processes of :mod:`.ranks`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anychip.conformance.case import CheckFailedError, check, check_equal_bits
from anychip.contract import Communicator, Reduction, Work

GUARD = 16


class Trial:
    """Tensors of one trial, on the device, each between guard elements.

    Args:
        label: of the trial, for messages and for its numbers.
    """

    def __init__(
        self, comm: Communicator, device: torch.device, dtype: torch.dtype, label: str
    ) -> None:
        self.comm, self.device, self.dtype, self.label = comm, device, dtype, label
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def input(self, rank: int, numel: int) -> Tensor:
        """What a rank brings, on the host: the same on every process that asks."""
        text = f"{self.label}/{rank}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
        generator = np.random.Generator(np.random.PCG64(seed))
        if self.dtype.is_floating_point:
            values = generator.standard_normal(numel)
            values[2::5] = -0.0  # what only moves has to keep the sign; x + 0 would lose it
            return torch.from_numpy(values).to(self.dtype)
        low, high = _range(self.dtype)
        return torch.from_numpy(generator.integers(low, high, numel)).to(self.dtype)

    def inputs(self, numel: int) -> list[Tensor]:
        """Of all ranks."""
        return [self.input(rank, numel) for rank in range(self.comm.world_size)]

    def place(self, values: Tensor | int) -> Tensor:
        """A tensor with these values, or with as many elements and poison."""
        numel = values if isinstance(values, int) else values.numel()
        whole = torch.full((numel + 2 * GUARD,), self._poison(), dtype=self.dtype)
        if isinstance(values, Tensor):
            whole[GUARD : GUARD + numel] = values
        placed = whole.to(self.device)
        self.buffers.append((placed, whole))
        return placed[GUARD : GUARD + numel]

    def _poison(self) -> float:
        return float("nan") if self.dtype.is_floating_point else 1.0

    def check_guards(self) -> None:
        """Nothing was written beside the tensors."""
        for now, before in self.buffers:
            for part in (slice(0, GUARD), slice(len(before) - GUARD, None)):
                name = f"{self.label}: elements beside a tensor"
                check_equal_bits(name, now[part].cpu(), before[part])


def _range(dtype: torch.dtype) -> tuple[int, int]:
    """Integers whose sum over 16 ranks fits; the wide types' are beyond what float32 holds."""
    if dtype == torch.bool:
        return 0, 2
    largest = torch.iinfo(dtype).max // 16
    return (0 if dtype == torch.uint8 else -largest), largest + 1


def finish(work: Work, label: str) -> None:
    """Waits; an unfinished work says so, a finished one too."""
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
    unit = torch.finfo(dtype).eps / 2
    total = values[0].copy()
    for row in values[1:]:
        total += row
    # One rounding per addition, of at most the sum of sizes; float64's own sum has them too.
    additions = (len(parts) - 1) * (2 if dtype == torch.float64 else 1)
    bound = additions * unit * np.abs(values).sum(0)
    if reduction == "avg":
        total, bound = total / len(parts), bound / len(parts)
        bound = bound + unit * np.abs(total) * 1.01 + torch.finfo(dtype).smallest_normal
    return total, bound


def check_joined(label: str, got: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> None:
    """Compares a reduced tensor with the ranks' inputs."""
    want, bound = joined(parts, reduction)
    floating = got.dtype.is_floating_point
    actual = got.cpu().double().numpy() if floating else got.cpu().numpy().astype(np.int64)
    check(actual.shape == want.shape, f"{label}: shape {want.shape} expected, got {actual.shape}")
    wrong = ~(np.abs(actual - want) <= bound)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise CheckFailedError(
            f"{label}: {int(wrong.sum())} of {wrong.size} elements are wrong; first at [{at}]: got "
            f"{actual[at]:.9g}, want {want[at]:.9g} within {bound[at]:.3g}; the ranks have "
            f"{[float(part[at]) for part in parts]}"
        )


def digest(tensor: Tensor) -> str:
    """Of the bits."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def cuts(numel: int, parts: int) -> Iterator[list[int] | None]:
    """Ways to give elements to ranks: even where it goes, nearly even, unlike, all to the last."""
    if numel % parts == 0:
        yield None
    yield [numel * (i + 1) // parts - numel * i // parts for i in range(parts)]
    few = [numel // (parts + 1 + i) for i in range(1, parts)]
    yield [numel - sum(few), *few]
    yield [0] * (parts - 1) + [numel]
