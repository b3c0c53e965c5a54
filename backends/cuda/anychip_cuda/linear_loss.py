"""Rows of linear_cross_entropy and of its partials: torch's products of a chunk of rows at a time.

The logits of a chunk are float32, made by a product of 16-bit factors with a float32 result. Their
loss is our kernels'; these write its gradient in the factors' dtype, into the logits themselves
where that is float32. Partials of a chunk are torch's, as in the reference. Products are made as
:data:`~anychip_cuda.numerics.exact_products` says.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.operators.linear_cross_entropy import partials_of_rows, slope_of_rows
from anychip.operators.loss import check_targets
from anychip_cuda.loss import Options, divisor, gradient_of_rows, loss_of_rows, reduced
from anychip_cuda.native import Kernels
from anychip_cuda.numerics import exact_products
from anychip_cuda.table import Needs, declared

LOGITS = 1 << 26
"""Most logits at a time: 256 MiB. Each chunk reads the whole weight, so that it should have several
hundred rows: 384 of 152,064 classes, 2,048 of 32,000."""
_TILE = 128
"""Rows that a product computes together; chunks are whole tiles where they can be."""


def chunks(num_rows: int, num_classes: int) -> Iterator[slice]:
    """Slices of the rows with at most LOGITS logits each, but at least one row."""
    step = max(LOGITS // num_classes, 1)
    step = step // _TILE * _TILE or step
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b as a float32 result."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    # A host has no product of 16-bit factors with a float32 result.
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with exact_products:
        logits = _product(rows, weight.t())
    return logits if bias is None else logits.add_(bias)


@declared.forward("linear_cross_entropy")
def linear_cross_entropy(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    check_targets("linear_cross_entropy", target, weight.shape[0], ignore_index)
    rows, target = x.reshape(target.numel(), x.shape[-1]), target.contiguous()
    labels, options = target.view(-1), Options(ignore_index, label_smoothing, z_loss)
    losses = torch.empty(target.shape, dtype=torch.float32, device=x.device)
    lse = torch.empty_like(losses)
    for chunk in chunks(rows.shape[0], weight.shape[0]):
        logits = _logits(rows[chunk], weight, bias)
        parts = (losses.view(-1)[chunk], lse.view(-1)[chunk])
        loss_of_rows(kernels, logits, labels[chunk], *parts, options)
        del logits  # before the next ones are made
    return reduced(kernels, losses, target, ignore_index, reduction), lse


@declared.backward("linear_cross_entropy")
def linear_cross_entropy_backward(
    kernels: Kernels,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows, target = x.reshape(target.numel(), x.shape[-1]), target.contiguous()
    labels, lse = target.view(-1), lse.contiguous().view(-1)
    options = Options(ignore_index, label_smoothing, z_loss)
    count = divisor(kernels, target, ignore_index, reduction)
    grad = grad.reshape(-1).contiguous() if reduction == "none" else grad.reshape(())
    gradients = _Gradients(rows, weight, needs)
    for chunk in chunks(rows.shape[0], weight.shape[0]):
        logits = _logits(rows[chunk], weight, bias)
        dlogits = logits if x.dtype == torch.float32 else torch.empty_like(logits, dtype=x.dtype)
        slope = grad[chunk] if grad.dim() else grad
        places = (labels[chunk], lse[chunk], dlogits)
        gradient_of_rows(kernels, slope, count, logits, *places, options)
        del logits
        gradients.add(chunk, dlogits)
        del dlogits
    return gradients.finish(x.shape)


@declared.forward("linear_cross_entropy_partials", kind="mapped")
def linear_cross_entropy_partials(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, labels = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1)
    made = [torch.empty(labels.shape, dtype=torch.float32, device=x.device) for _ in range(3)]
    for chunk in chunks(rows.shape[0], weight.shape[0]):
        logits = _logits(rows[chunk], weight, bias)
        for whole, part in zip(made, partials_of_rows(logits, labels[chunk], first), strict=True):
            whole[chunk] = part
        del logits
    lse, picked, total = (t.view(target.shape) for t in made)
    return lse, picked, total


@declared.backward("linear_cross_entropy_partials", kind="mapped")
def linear_cross_entropy_partials_backward(
    grad_lse: Tensor,
    grad_picked: Tensor,
    grad_total: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    *,
    first: int,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows, labels = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1)
    per_row = [t.reshape(-1) for t in (grad_lse, grad_picked, grad_total, lse)]
    gradients = _Gradients(rows, weight, needs)
    for chunk in chunks(rows.shape[0], weight.shape[0]):
        logits = _logits(rows[chunk], weight, bias)
        *grads, whole = (t[chunk] for t in per_row)
        dlogits = slope_of_rows(logits, labels[chunk], grads, whole, first).to(x.dtype)
        del logits
        gradients.add(chunk, dlogits)
        del dlogits
    return gradients.finish(x.shape)


class _Gradients:
    """The gradients that are wanted, of (rows, K) x, (V, K) weight and (V,) bias.

    Those of weight and bias are sums over chunks, and float32 until the end.
    """

    def __init__(self, rows: Tensor, weight: Tensor, needs: Needs) -> None:
        self._rows, self._weight = rows, weight
        self._dx = rows.new_empty(rows.shape) if needs[0] else None
        self._dweight = self._dbias = None
        if needs[1]:
            self._dweight = weight.new_zeros(weight.shape, dtype=torch.float32)
        if needs[2]:
            self._dbias = weight.new_zeros(weight.shape[0], dtype=torch.float32)

    def add(self, chunk: slice, dlogits: Tensor) -> None:
        with exact_products:
            if self._dx is not None:
                self._dx[chunk] = _product(dlogits, self._weight)
            if self._dweight is not None:
                _add_product(self._dweight, dlogits.t(), self._rows[chunk])
        if self._dbias is not None:
            self._dbias += dlogits.sum(0, dtype=torch.float32)

    def finish(self, shape: torch.Size) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dtype = self._weight.dtype
        return (
            None if self._dx is None else self._dx.view(shape),
            None if self._dweight is None else self._dweight.to(dtype),
            None if self._dbias is None else self._dbias.to(dtype),
        )
