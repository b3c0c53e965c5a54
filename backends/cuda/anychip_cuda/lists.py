"""Rows over lists of tensors: l2_norm, sums_of_squares, clip, unscale_and_check.

An operator that writes in place has two rows: one for contiguous tensors, and one that copies the
others, and copies the results back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from anychip.operators.squares import WIDTH
from anychip_cuda.native import Kernels
from anychip_cuda.table import declared

_dtype = attrgetter("dtype")


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor begins."""
    # A thousand tensors are common: map over C functions takes half the time of a loop.
    return list(map(Tensor.data_ptr, tensors))


def codes(kernels: Kernels, tensors: Sequence[Tensor]) -> list[int]:
    """The module's numbers for the tensors' dtypes."""
    return list(map(kernels.codes.__getitem__, map(_dtype, tensors)))


def described(
    kernels: Kernels, tensors: Sequence[Tensor]
) -> tuple[list[int], list[int], list[int]]:
    """Addresses, elements, and dtypes."""
    return addresses(tensors), list(map(Tensor.numel, tensors)), codes(kernels, tensors)


def contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, those that are not contiguous as copies."""
    return list(map(Tensor.contiguous, tensors))


def by_copies(row: Callable[..., None], reads: tuple[int, ...] = ()) -> Callable[..., None]:
    """The row for tensors of any layout: works on contiguous copies, and writes them back.

    Args:
        reads: positions of the lists that the operator only reads.
    """

    def function(kernels: Kernels, *args: Any, **attrs: Any) -> None:
        copies = [contiguous(arg) if isinstance(arg, (list, tuple)) else arg for arg in args]
        row(kernels, *copies, **attrs)
        for position, (tensors, moved) in enumerate(zip(args, copies, strict=True)):
            if isinstance(moved, list) and position not in reads:
                for tensor, copy in zip(tensors, moved, strict=True):
                    if tensor is not copy:
                        tensor.copy_(copy)

    function.__module__, function.__doc__ = row.__module__, row.__doc__
    function.__name__ = function.__qualname__ = f"{row.__name__}_by_copies"
    return function


@declared.forward("l2_norm", accepts=lambda tensors: len(tensors) > 0)
def l2_norm(kernels: Kernels, tensors: Sequence[Tensor]) -> Tensor:
    """Of one tensor at least: the norm of none has no device, and the reference refuses it."""
    tensors = contiguous(tensors)
    data, numels, dtypes = described(kernels, tensors)
    # Each tensor has a last chunk that may be short, and a first one that a head may lengthen.
    room = len(numels) + sum(numels) // kernels.native.LIST_CHUNK
    scratch = tensors[0].new_empty((room,), dtype=torch.float32)
    norm = tensors[0].new_empty((), dtype=torch.float32)
    kernels.native.l2_norm(
        data, numels, dtypes, scratch.data_ptr(), room, norm.data_ptr(), *kernels.place(norm)
    )
    return norm


@declared.forward("sums_of_squares")
def sums_of_squares(kernels: Kernels, tensors: Sequence[Tensor]) -> Tensor:
    """Chunks add their digits to rows by integers, in any order; then those are carried."""
    tensors = contiguous(tensors)
    rows = tensors[0].new_zeros((len(tensors), WIDTH), dtype=torch.int64)
    kernels.native.sums_of_squares(
        *described(kernels, tensors), rows.data_ptr(), *kernels.place(rows)
    )
    kernels.native.carry_sums(rows.data_ptr(), len(tensors), *kernels.place(rows))
    return rows


@declared.forward("clip", contiguous=True)
def clip(kernels: Kernels, tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
    kernels.native.clip(
        *described(kernels, tensors), norm.data_ptr(), max_norm, *kernels.place(norm)
    )


@declared.forward("unscale_and_check", contiguous=True)
def unscale_and_check(
    kernels: Kernels, grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor
) -> None:
    kernels.native.unscale_and_check(
        *described(kernels, grads), scale.data_ptr(), found_inf.data_ptr(), *kernels.place(scale)
    )


declared.forward("clip")(by_copies(clip))
declared.forward("unscale_and_check")(by_copies(unscale_and_check))
