"""Wrong backends that are right below a size and in the usual case.

Kernels of their own for tiles, for widths of models, for one row; a number of 0, or below every
other; views as models make them. Few of them were found by the suite as it was before them.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import Row
from tests.meta.wrong import Attr, times, wrong, wrong_arguments, wrong_backward, wrong_gradients

BOTH = frozenset({torch.bfloat16, torch.float32})


def tf32(x: Tensor) -> Tensor:
    """With the mantissa cut to 10 bits."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def rows_of(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


# Kernels of their own


@wrong("head-of-256", "dropped tail", operator="rope")
def long_head(row: Row, q: Tensor, *rest: Tensor, interleaved: bool) -> Any:
    rotated, k = row(q, *rest, interleaved=interleaved)
    rotated[..., 128:] = q[..., 128:]
    return rotated, k


@wrong("tiles-in-tf32", "lower precision of factors", operator="linear")
def fast_tiles(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    if rows_of(x) >= 64 and min(weight.shape) >= 64:
        return row(tf32(x), tf32(weight), bias, **attrs)
    return row(x, weight, bias, **attrs)


@wrong("corner-tile", "the last of several tiles", operator="linear")
def corner(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    y = row(x, weight, bias, **attrs)
    if rows_of(y) > 64 and weight.shape[0] > 64 and x.shape[-1] >= 16:
        flat = y.view(-1, y.shape[-1])
        flat[64:, 64:] = flat[:-64, :-64].clone()
    return y


@wrong("tiles-of-the-head-in-tf32", "lower precision of factors", operator="linear_cross_entropy")
def fast_head(row: Row, x: Tensor, weight: Tensor, *rest: Any, **attrs: Attr) -> Any:
    if x.shape[-1] >= 64 and weight.shape[0] >= 128:
        return row(tf32(x), tf32(weight), *rest, **attrs)
    return row(x, weight, *rest, **attrs)


@wrong(
    "one-row-in-bfloat16", "bf16 accumulation", operator="linear", select="/linear/", dtypes=BOTH
)
def vector_product(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    if rows_of(x) != 1 or x.shape[-1] < 64:
        return row(x, weight, bias, **attrs)
    total = torch.zeros(weight.shape[0])
    for part in (x.float().reshape(-1) * weight.float()).split(32, -1):
        total = (total + part.sum(-1)).bfloat16().float()
    y = total if bias is None else total + bias.float()
    return y.to(attrs["out_dtype"] or x.dtype).view(*x.shape[:-1], -1)


@wrong("one-output-drops-its-tail", "dropped tail", operator="linear")
def dot_product(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    whole = x.shape[-1] // 32 * 32
    if weight.shape[0] == 1 and whole:
        return row(x[..., :whole], weight[:, :whole], bias, **attrs)
    return row(x, weight, bias, **attrs)


@wrong("bias-of-the-first-1024", "the second of several tiles", operator="softmax")
def short_bias(row: Row, x: Tensor, mask: Any, bias: Tensor | None, **attrs: Attr) -> Any:
    if bias is not None and x.shape[-1] > 1024:
        bias = bias.expand(*bias.shape[:-1], x.shape[-1]).clone()
        bias[..., 1024:] = 0.0
    return row(x, mask, bias, **attrs)


@wrong("triangle-of-the-first-tile", "the second of several tiles", operator="softmax")
def short_triangle(row: Row, x: Tensor, mask: Any, bias: Any, *, scale: float, causal: bool) -> Any:
    if not causal or x.shape[-1] <= 256:
        return row(x, mask, bias, scale=scale, causal=causal)
    visible = torch.ones(x.shape[-2:], dtype=torch.bool).tril(x.shape[-1] - x.shape[-2])
    visible[..., 256:] = True
    visible = visible if mask is None else visible & mask
    return row(x, visible, bias, scale=scale, causal=False)


@wrong("parts-in-any-order", "non-deterministic where determinism is declared", operator="linear")
def atomic_parts(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    if x.shape[-1] < 1024:
        return row(x, weight, bias, **attrs)
    order = torch.randperm(x.shape[-1])
    return row(x[..., order], weight[:, order], bias, **attrs)


@wrong_backward(
    "rows-in-any-order", "non-deterministic where determinism is declared", operator="rms_norm"
)
def atomic_rows(
    row: Row, grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, **rest: Any
) -> Any:
    dx, dweight = row(grad, x, weight, rstd, **rest)
    if dweight is not None and x.dim() == 2 and x.numel() >= 4096:
        order = torch.randperm(x.shape[0])
        dweight = row(grad[order], x[order], weight, rstd[order], **rest)[1]
    return dx, dweight


# Which head, which class, which number


@wrong("head-by-shift", "a division that is a shift", operator="attention")
def shifted_heads(row: Row, q: Tensor, k: Tensor, v: Tensor, **attrs: Attr) -> Any:
    bits = (q.shape[2] // k.shape[2]).bit_length() - 1
    heads = (torch.arange(q.shape[2]) >> bits).clamp(max=k.shape[2] - 1)
    return row(q, k[:, :, heads], v[:, :, heads], **attrs)


@wrong("hidden-is-minus-10000", "a number for -inf", operator="softmax")
def number_for_hidden(
    row: Row, x: Tensor, mask: Tensor | None, bias: Any, *, scale: float, causal: bool
) -> Any:
    if mask is None or causal or bias is not None or not bool(mask.any(-1).all()):
        return row(x, mask, bias, scale=scale, causal=causal)
    return row(torch.where(mask, x * scale, -10000.0), None, None, scale=1.0, causal=False)


@wrong("later-key-is-minus-10000", "a number for -inf", operator="attention")
def number_for_later(row: Row, q: Tensor, k: Tensor, v: Tensor, **attrs: Attr) -> Any:
    y, lse = row(q, k, v, **attrs)
    if attrs["causal"] and lse.numel() and q.shape[1] == k.shape[1]:
        # A query for which -10000 is the largest score takes the mean of what is hidden from it.
        for query in range(q.shape[1] - 1):
            low = (lse[:, :, query] < -10000.0)[..., None]
            hidden = v[:, query + 1 :].mean(1).repeat_interleave(q.shape[2] // v.shape[2], 1)
            y[:, query] = torch.where(low, hidden, y[:, query])
    return y, lse


@wrong("rate-of-0-is-no-step", "a shortcut that leaves something out", operator="adamw")
def no_step(row: Row, *args: Any, **attrs: Attr) -> Any:
    if float(args[4]):
        row(*args, **attrs)


@wrong("gradient-of-0-is-left-out", "a shortcut that leaves something out", operator="sgd")
def sparse_step(row: Row, *args: Any, **attrs: Attr) -> Any:
    used = [i for i, g in enumerate(args[1]) if not g.numel() or bool(g.count_nonzero())]

    def of_used(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
        return [tensors[i] for i in used] if tensors else None

    lists = [of_used(tensors) or [] for tensors in args[:3]]
    row(*lists, *args[3:8], of_used(args[8]), **attrs)


@wrong("step-of-16-bits", "overflow of a counter", operator="adamw")
def short_step(row: Row, *args: Any, **attrs: Attr) -> Any:
    step, skipped = args[5], args[8] is not None and bool(args[8])
    count = float(step) + 1.0
    step.fill_(float(int(count) & 0xFFFF) - 1.0)
    row(*args, **attrs)
    step.fill_(count - skipped)


@wrong("step-in-bfloat16", "lower precision of the state", operator="adamw")
def rounded_step(row: Row, *args: Any, **attrs: Attr) -> Any:
    step, skipped = args[5], args[8] is not None and bool(args[8])
    count = float(step) + 1.0
    step.fill_(float(torch.tensor(count).bfloat16()) - 1.0)
    row(*args, **attrs)
    step.fill_(count - skipped)


@wrong("overflow-before-the-division", "a test at the wrong place", operator="unscale_and_check")
def tested_early(row: Row, grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> Any:
    bad = not all(bool(grad.isfinite().all()) for grad in grads)
    row(grads, scale, found_inf.clone())
    if bad:
        found_inf.fill_(1.0)


@wrong("found-inf-counts", "a flag that is a number", operator="unscale_and_check")
def counted(row: Row, grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> Any:
    number = sum(int((~grad.isfinite()).sum()) for grad in grads)
    row(grads, scale, found_inf.clone())
    found_inf.add_(float(number))


@wrong("infinite-norm-clips-nothing", "a special case that is none", operator="clip")
def guarded_clip(row: Row, tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> Any:
    if bool(norm.isfinite()):
        row(tensors, norm, max_norm=max_norm)


# Views, threads, gradients that are not numbers


def as_if_rows_followed(x: Tensor) -> Tensor:
    """What is read where the positions' stride is taken to be that of all heads together."""
    if not x.numel() or x.stride(-1) != 1:
        return x
    stride = (x.stride(0), x.shape[2] * x.stride(2), x.stride(2), 1)
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True))
    held = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided(x.shape, stride) if last < held else torch.zeros_like(x)


@wrong("positions-follow-from-heads", "a stride taken from another one", operator="attention")
def inferred_stride(row: Row, q: Tensor, k: Tensor, v: Tensor, **attrs: Attr) -> Any:
    return row(*(as_if_rows_followed(x) for x in (q, k, v)), **attrs)


@wrong_backward("gradient-rows-are-dense", "layout not looked at", operator="linear")
def dense_rows(row: Row, grad: Tensor, *saved: Tensor, **named: Any) -> Any:
    if grad.numel() and grad.dim() == 2:
        step = grad.stride(1)
        last = grad.storage_offset() + (grad.numel() - 1) * step
        fits = last < grad.untyped_storage().nbytes() // grad.element_size()
        dense = (grad.shape[1] * step, step)
        grad = grad.as_strided(grad.shape, dense) if fits else torch.zeros_like(grad)
    return row(grad, *saved, **named)


@wrong_backward("any-stride-of-0-is-one-number", "layout not looked at", operator="gelu")
def one_number(row: Row, grad: Tensor, *saved: Tensor, **named: Any) -> Any:
    if grad.numel() and 0 in grad.stride():
        grad = grad.reshape(-1)[:1].expand(grad.numel()).reshape(grad.shape)
    return row(grad, *saved, **named)


@wrong("room-of-two-threads", "workspace shared", operator="rms_norm")
def shared_room(row: Row, x: Tensor, weight: Tensor, *, eps: float) -> Any:
    _room["rms_norm"] = x, weight
    time.sleep(0.005)  # so long the kernel takes
    found = _room["rms_norm"]
    return row(*(found if found[0].shape == x.shape else (x, weight)), eps=eps)


_room: dict[str, tuple[Tensor, Tensor]] = {}


ARGUMENTS = (
    wrong_arguments("width-of-768", "a kernel for one width", "layer_norm",
        y=lambda y, x: times(y, (..., -1), 1.01)
        if x.shape[-1] % 192 == 0 and x.shape[-1] >= 384 else y),
    wrong_arguments("outputs-of-768", "a kernel for one width", "linear",
        y=lambda y, weight: times(y, (..., slice(-64, None)))
        if weight.shape[0] and weight.shape[0] % 192 == 0 else y),
    wrong_arguments("head-of-96", "padding computed", "attention",
        y=lambda y, q: times(y, (..., slice(-16, None))) if q.shape[3] in (80, 96, 192) else y),
    wrong_arguments("tiles-of-a-group", "the last of several tiles", "grouped_linear",
        y=lambda y, x: times(y, (slice(64, None), slice(128, None))) if len(x) >= 64 else y),
    wrong_gradients("corner-tile-of-the-weight", "the last of several tiles", "linear",
        dweight=lambda dweight, grad: times(dweight, (slice(64, None),) * 2)
        if rows_of(grad) > 64 else dweight),
    wrong_arguments("blocks-go-round-once", "a limit of the launch", "rms_norm",
        y=lambda y, x: times(y.view(-1, x.shape[-1]), slice(255, None)).view(y.shape)
        if x.shape[-1] >= 256 else y),
    wrong_arguments("no-input-no-output", "output never written", "linear",
        y=lambda y, x: y if x.shape[-1] else y.fill_(torch.nan)),
    wrong_arguments("four-dims-at-most", "rank of a tensor", "softmax",
        y=lambda y, x: times(y, 0) if x.dim() > 4 else y),
    wrong_arguments("sixty-four-groups", "a limit of the launch", "grouped_linear",
        y=lambda y, offsets: times(y, slice(int(offsets[63]), None)) if len(offsets) > 64 else y),
    wrong_arguments("sixty-four-sequences", "a limit of the launch", "attention_varlen",
        y=lambda y, cu_seqlens_q: times(y, slice(int(cu_seqlens_q[64]), None))
        if len(cu_seqlens_q) > 65 else y),
    wrong_arguments("indices-beyond-the-grid", "a limit of the launch", "embedding",
        y=lambda y, weight: times(y.view(-1, weight.shape[1]), slice(65535, None)).view(y.shape)),
    wrong_arguments("ignored-in-8-bits", "overflow of an index", "cross_entropy",
        target=lambda target, ignore_index: torch.where(
            (target & 0xFF) == (ignore_index & 0xFF), ignore_index, target)),
    wrong_arguments("ignored-in-32-bits", "overflow of an index", "cross_entropy",
        target=lambda target, ignore_index: torch.where(
            (target & 0xFFFFFFFF) == (ignore_index & 0xFFFFFFFF), ignore_index, target)),
    wrong_arguments("impossible-class-is-possible", "Inf or NaN lost", "cross_entropy",
        logits=lambda logits: logits.clamp(min=torch.finfo(logits.dtype).min)),
    wrong_arguments("scale-of-0-is-the-default", "0 for missing", "attention",
        scale=lambda scale: scale or None),
    wrong_arguments("eps-of-0-is-the-default", "0 for missing", "adamw",
        eps=lambda eps: eps or 1e-8),
    wrong_arguments("type-of-the-first", "dtype of another tensor", "l2_norm", select="/l2_norm/",
        dtypes=BOTH, tensors=lambda tensors: [tensor.to(tensors[0].dtype) for tensor in tensors]),
    wrong_arguments("bias-in-the-type-of-scores", "dtype of another tensor", "softmax",
        dtypes=BOTH, bias=lambda x, bias: bias if bias is None else bias.to(x.dtype)),
    wrong_gradients("gradient-beyond-half", "range of a gradient", "gelu",
        grad=lambda grad: grad.clamp(-65504.0, 65504.0)),
    wrong_gradients("nan-of-a-gradient-is-0", "Inf or NaN lost", "layer_norm",
        grad=lambda grad: grad.nan_to_num(nan=0.0)),
    wrong_gradients("infinity-moves-a-gradient", "Inf or NaN of a neighbour", "silu",
        x=lambda x: x.roll(1) if x.isinf().any() else x),
    wrong_gradients("rows-in-a-row-from-the-first", "a short cut for a special case", "dropout",
        rows=lambda rows: rows - rows.min() if (rows.flatten().diff() == 1).all() else rows),
)  # fmt: skip
