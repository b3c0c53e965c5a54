"""The output layer and the loss on the host: products, and between them the native loss.

Logits of all rows are never held: a chunk's are made, used up, and made anew in the backward. Where
all gradients are wanted, of one number, and take less room than the logits would, a paired row
makes them in the forward, while it has a chunk's logits: three products in place of four.

Memory, in numbers of float32, for R rows of K inputs and V classes: a chunk's logits, 2^20 (4 MiB)
or 256 V where that is more; in 16 bits also the weight, V K. Where products of 16 bits have results
of float32: 16-bit gradients of the logits of four chunks, twice as much as one's logits, and the
weight as a product reads it, V K / 2 for the logits and as much for the rows' gradient.

Between forward and backward the paired row keeps (R + V) K + V gradients, which the four products
made only in the backward, and the backward makes them again, scaled. torch's own way keeps R V
logits and as many probabilities.

linear_cross_entropy_partials has no such row: its gradients depend on what becomes of its results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.operators.linear_cross_entropy import CHUNK
from anychip.operators.loss import check_targets
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.products import INTO_FLOAT32, Panels, multiply
from anychip_cpu.table import Needs, declared

_kernels: Any = native.kernels
_below_autograd = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_ROWS = 256
"""A product of fewer rows takes longer for each: 1.2 times of 128, 1.06 of 256 (8192 x 512)."""
_CHUNKS_AT_ONCE = 4
"""Of 16-bit gradients: by one at a time a step of 2048 rows takes 1.15 to 1.2 times as long."""


class _Head:
    """The output layer, and its logits in float32, a chunk of rows at a time.

    Its factors are converted to float32 where no product of theirs has such a result.
    """

    def __init__(self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
        self.is_wide = x.dtype not in INTO_FLOAT32
        self.factor = torch.float32 if self.is_wide else x.dtype
        self.rows, self.labels = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1)
        self.labels = self.labels.contiguous()
        self.weight = weight.to(self.factor)
        self.bias = None if bias is None else bias.float().contiguous()
        self.num_classes = weight.shape[0]
        self.step = max(CHUNK // self.num_classes, _ROWS)

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, these as a factor, and their logits, which are overwritten by the next ones."""
        total = self.rows.shape[0]
        room = self.new_empty(min(self.step, total), self.num_classes)
        right = self.factor_of(self.weight.t())
        for start in range(0, total, self.step):
            chunk = slice(start, min(start + self.step, total))
            rows, logits = self.rows[chunk].to(self.factor), room[: chunk.stop - start]
            multiply(rows, right, logits, bias=self.bias)
            yield chunk, rows, logits

    def factor_of(self, right: Tensor) -> Tensor | Panels:
        """The right one of several products."""
        return right if self.is_wide else Panels(right)

    def new_empty(self, *shape: int) -> Tensor:
        """Of float32."""
        return self.weight.new_empty(shape, dtype=torch.float32)


class _Gradients:
    """Of the rows, the weight and the bias, in float32, as far as they are wanted."""

    def __init__(self, head: _Head, needs: Needs) -> None:
        self.head = head
        self.dx = head.new_empty(*head.rows.shape) if needs[0] else None
        self.dweight = head.new_empty(*head.weight.shape).zero_() if needs[1] else None
        self.dbias = head.new_empty(head.num_classes).zero_() if needs[2] else None
        self.right = head.factor_of(head.weight) if needs[0] else None
        self.kept = _Kept(head) if any(needs[:2]) and not head.is_wide else None

    def add(self, chunk: slice, rows: Tensor, dlogits: Tensor) -> None:
        """The rows as a factor, and the gradient of their logits, which as a factor is rounded."""
        if self.dbias is not None:
            self.dbias += dlogits.sum(0)
        if self.kept is not None:
            if not self.kept.add(chunk, dlogits):
                return
            chunk, dlogits = self.kept.take()
            rows = self.head.rows[chunk]
        if self.dx is not None and self.right is not None:
            multiply(dlogits, self.right, self.dx[chunk])
        if self.dweight is not None:
            multiply(dlogits.t(), rows, self.dweight, adds=True)

    def like(self, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the shapes and dtypes of the arguments."""
        dx, dweight, dbias = self.dx, self.dweight, self.dbias
        return (
            None if dx is None else dx.to(x.dtype).view(x.shape),
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(weight.dtype),
        )


class _Kept:
    """Gradients of the logits of some chunks, for products of so many rows at a time.

    The weight's gradient is read and written by each: with four times as many terms, a quarter.
    """

    def __init__(self, head: _Head) -> None:
        self.total, self.rows = head.rows.shape[0], slice(0, 0)
        most = min(_CHUNKS_AT_ONCE * head.step, self.total)
        self.room = head.weight.new_empty(most, head.num_classes)

    def add(self, chunk: slice, dlogits: Tensor) -> bool:
        """Whether it is time to take them: there is no room for more, or there are no more."""
        first = self.rows.start
        self.room[chunk.start - first : chunk.stop - first] = dlogits
        self.rows = slice(first, chunk.stop)
        return bool(chunk.stop >= min(first + len(self.room), self.total))

    def take(self) -> tuple[slice, Tensor]:
        """The rows that have come together, and their gradients."""
        rows, self.rows = self.rows, slice(self.rows.stop, self.rows.stop)
        return rows, self.room[: rows.stop - rows.start]


def _loss(
    head: _Head, logits: Tensor, chunk: slice, loss: Tensor, lse: Tensor, options: dict[str, Any]
) -> None:
    _kernels.cross_entropy_forward(
        logits.data_ptr(),
        head.labels[chunk].data_ptr(),
        loss.view(-1)[chunk].data_ptr(),
        lse.view(-1)[chunk].data_ptr(),
        *logits.shape,
        **options,
        reduction=_kernels.REDUCTION_NONE,
        dtype=CODES[torch.float32],
    )


def _slope(
    head: _Head, logits: Tensor, chunk: slice, slope: Tensor, lse: Tensor, options: dict[str, Any]
) -> None:
    """The gradient of a chunk's logits in their place, for that of each row's loss."""
    _kernels.cross_entropy_backward(
        slope[chunk].data_ptr(),
        logits.data_ptr(),
        head.labels[chunk].data_ptr(),
        lse.view(-1)[chunk].data_ptr(),
        logits.data_ptr(),
        *logits.shape,
        **options,
        reduction=_kernels.REDUCTION_NONE,
        dtype=CODES[torch.float32],
    )


def _forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    reduction: str,
    with_gradients: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, _Gradients | None]:
    """The loss, lse, and if wanted the gradients for a loss whose own is 1."""
    ignored = options["ignore_index"]
    check_targets("linear_cross_entropy", target, weight.shape[0], ignored)
    head = _Head(x, weight, target, bias)
    loss, lse = (head.new_empty(*target.shape) for _ in range(2))
    counted = (head.labels != ignored).sum()
    gradients = slope = None
    if with_gradients:
        gradients = _Gradients(head, (True, True, bias is not None))
        one = torch.ones(()) if reduction == "sum" else 1.0 / counted
        slope = one.expand(head.labels.shape).contiguous()
    for chunk, rows, logits in head.chunks():
        _loss(head, logits, chunk, loss, lse, options)
        if gradients is not None and slope is not None:
            _slope(head, logits, chunk, slope, lse, options)
            gradients.add(chunk, rows, logits)
    if reduction != "none":
        loss = loss.sum() if reduction == "sum" else loss.sum() / counted
    return loss, lse, gradients


def linear_cross_entropy(*args: Any, **attrs: Any) -> tuple[Tensor, Tensor]:
    return _forward(*args, **attrs, with_gradients=False)[:2]


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    *,
    reduction: str,
    needs: Needs,
    **options: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    head, lse = _Head(x, weight, target, bias), lse.contiguous()
    slope = grad
    if reduction == "mean":
        slope = grad / (head.labels != options["ignore_index"]).sum()
    slope = slope.expand(target.shape).reshape(-1).contiguous()
    gradients = _Gradients(head, needs)
    for chunk, rows, logits in head.chunks():
        _slope(head, logits, chunk, slope, lse, options)
        gradients.add(chunk, rows, logits)
    return gradients.like(x, weight)


# With gradients from the forward


def _wants_gradients(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, reduction: str, **_: Any
) -> bool:
    """Whether all gradients will be wanted, of one number, and are smaller than the logits."""
    given = [t for t in (x, weight, bias) if t is not None]
    smaller = sum(t.numel() for t in given) <= target.numel() * weight.shape[0]
    return reduction != "none" and smaller and _is_recorded(given)


def _is_recorded(given: Sequence[Tensor]) -> bool:
    if torch.is_grad_enabled():
        return all(t.requires_grad for t in given)
    # Below autograd torch calls what was chosen when the call was recorded, or traced, with tensors
    # that do not say it any more.
    return _below_autograd(_AUTOGRAD) and not torch.is_inference_mode_enabled()


def _forward_with_gradients(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **attrs: Any
) -> tuple[Tensor, ...]:
    loss, _, gradients = _forward(x, weight, target, bias, **attrs, with_gradients=True)
    assert gradients is not None
    assert gradients.dx is not None
    assert gradients.dweight is not None
    dbias = loss.new_empty(0) if gradients.dbias is None else gradients.dbias
    return loss, gradients.dx, gradients.dweight, dbias


def _scaled_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *residuals: Tensor,
    needs: Needs,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    is_one = grad.item() == 1.0

    def like(argument: Tensor, found: Tensor) -> Tensor:
        # Of another dtype there is a copy anyway; what was found stays as it is for a second time.
        scaled = found if is_one and argument.dtype != found.dtype else found * grad
        return scaled.to(argument.dtype).view(argument.shape)

    arguments = zip((x, weight, bias), residuals, needs, strict=True)
    return tuple(
        like(argument, found) if need and argument is not None else None
        for argument, found, need in arguments
    )


def _empty_gradients(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight = (
        x.new_empty(shape, dtype=torch.float32)
        for shape in ((target.numel(), x.shape[-1]), weight.shape)
    )
    return dx, dweight, dx.new_empty(0 if bias is None else weight.shape[0])


# Parts of a vocabulary


def linear_cross_entropy_partials(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    head = _Head(x, weight, target, bias)
    lse, picked, total = (head.new_empty(*target.shape) for _ in range(3))
    for chunk, _, logits in head.chunks():
        results = (t.view(-1)[chunk] for t in (head.labels, lse, picked, total))
        addresses = (t.data_ptr() for t in (logits, *results))
        _kernels.logit_partials_forward(*addresses, *logits.shape, first)
    return lse, picked, total


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
    head = _Head(x, weight, target, bias)
    grads = [t.reshape(-1).contiguous() for t in (grad_lse, grad_picked, grad_total)]
    lse, gradients = lse.reshape(-1).contiguous(), _Gradients(head, needs)
    for chunk, rows, logits in head.chunks():
        given = [*(t[chunk] for t in grads), logits, head.labels[chunk], lse[chunk], logits]
        _kernels.logit_partials_backward(*(t.data_ptr() for t in given), *logits.shape, first)
        gradients.add(chunk, rows, logits)
    return gradients.like(x, weight)


if native.kernels is not None:
    declared.pair(
        "linear_cross_entropy",
        kind="mapped",
        accepts=_wants_gradients,
        forward=_forward_with_gradients,
        backward=_scaled_gradients,
        num_residuals=3,
        fake_residuals=_empty_gradients,
    )
    for _row in (linear_cross_entropy, linear_cross_entropy_partials):
        declared.forward(_row.__name__, kind="mapped")(_row)
    declared.backward("linear_cross_entropy", kind="mapped")(linear_cross_entropy_backward)
    declared.backward("linear_cross_entropy_partials", kind="mapped")(
        linear_cross_entropy_partials_backward
    )
