"""Rows of embedding: a gather, and a gradient that is summed in one order on every run."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip.operators.linear import check_indices
from anychip_cuda.native import Kernels
from anychip_cuda.table import Needs, declared


def _indices(tensor: Tensor) -> tuple[int, bool]:
    """Address of contiguous indices, and whether they are int64, not int32."""
    return tensor.data_ptr(), tensor.dtype == torch.int64


@declared.forward("embedding")
def embedding(kernels: Kernels, indices: Tensor, weight: Tensor) -> Tensor:
    """On a device the row of a wrong index is NaN; on a host it is an IndexError."""
    check_indices(indices, weight.shape[0])
    indices, weight = indices.contiguous(), weight.contiguous()
    y = weight.new_empty(*indices.shape, weight.shape[1])
    kernels.native.embedding_forward(
        *_indices(indices),
        weight.data_ptr(),
        y.data_ptr(),
        indices.numel(),
        *weight.shape,
        kernels.codes[weight.dtype],
        *kernels.place(weight),
    )
    return y


@declared.backward("embedding")
def embedding_backward(
    kernels: Kernels, grad: Tensor, indices: Tensor, weight: Tensor, *, needs: Needs
) -> tuple[Tensor]:
    grad = grad.contiguous()
    ordered, order = torch.sort(indices.reshape(-1), stable=True)
    dweight = weight.new_empty(weight.shape)
    starts = ordered.new_empty(kernels.native.embedding_starts(weight.shape[0]), dtype=torch.int64)
    num_partials = kernels.native.embedding_partials(ordered.numel(), weight.shape[1])
    partials = weight.new_empty(num_partials, dtype=torch.float32)
    kernels.native.embedding_backward(
        grad.data_ptr(),
        *_indices(ordered),
        order.data_ptr(),
        dweight.data_ptr(),
        starts.data_ptr(),
        partials.data_ptr(),
        ordered.numel(),
        *weight.shape,
        kernels.codes[weight.dtype],
        kernels.multiprocessors(weight),
        *kernels.place(weight),
    )
    return (dweight,)


@declared.forward("embedding", kind="mapped")
def embedding_by_torch(indices: Tensor, weight: Tensor) -> Tensor:
    """Without kernels of ours. A wrong index ends the process's use of the device."""
    return torch.nn.functional.embedding(indices, weight)
