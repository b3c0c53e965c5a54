"""Wrong backends whose attention the operators and gradients chapters have to find."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip import operators
from tests.meta.honest import Row
from tests.meta.wrong import Wrong, wrong_row

wrong = partial(wrong_row, chapter="operators")
wrong_backward = partial(wrong_row, chapter="gradients", direction="backward")
wrong_bias = partial(wrong_backward, operator="softmax", select="/softmax/ and bias")
Attr = Any


@wrong("causal-from-the-first-key", "mask aligned at the wrong end", operator="attention")
def first_aligned(
    row: Row, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> Any:
    extra = k.shape[1] - q.shape[1]
    if not causal or extra <= 0:
        return row(q, k, v, causal=causal, scale=scale)
    return row(q, k[:, :-extra], v[:, :-extra], causal=True, scale=scale)


@wrong("blind-query-is-a-mean", "a case of its own forgotten", operator="attention")
def uniform_blind(
    row: Row, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> Any:
    y, lse = row(q, k, v, causal=causal, scale=scale)
    blind = max(q.shape[1] - k.shape[1], 0) if causal and k.shape[1] else 0
    y[:, :blind] = v.mean(1, keepdim=True).repeat_interleave(q.shape[2] // k.shape[2], 2)
    return y, lse


@wrong("rope-rest-dropped", "dropped tail", operator="rope")
def rest_dropped(row: Row, q: Tensor, k: Tensor, cos: Tensor, *given: Tensor, **attrs: Attr) -> Any:
    turned = row(q, k, cos, *given, **attrs)
    for y in turned:
        y[..., 2 * cos.shape[1] :] = 0.0
    return turned


@wrong("weights-not-scaled", "missing factor", operator="attention_dropout")
def unscaled(row: Row, *args: Tensor, p: float, **attrs: Attr) -> Any:
    y, lse = row(*args, p=p, **attrs)
    return y * (1.0 - p), lse


@wrong("one-mask-for-all-heads", "physical for logical index", operator="attention_dropout")
def shared_mask(
    row: Row, q: Tensor, k: Tensor, v: Tensor, rng: Tensor, *index: Any, **attrs: Attr
) -> Any:
    if index[1] is not None:
        return row(q, k, v, rng, *index, **attrs)
    groups = q.shape[2] // k.shape[2]
    found = [
        row(q[:, :, h : h + 1], k[:, :, (g := h // groups) : g + 1], v[:, :, g : g + 1], rng,
            **attrs)
        for h in range(q.shape[2])
    ]  # fmt: skip
    return torch.cat([y for y, _ in found], 2), torch.cat([lse for _, lse in found], 1)


@wrong("dropout-before-softmax", "an argument at the wrong place", operator="attention_dropout")
def renormalised(row: Row, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **attrs: Attr) -> Any:
    # The weights that are left are normalised again: those of all values 1 add up to 1.
    y, lse = row(q, k, v, *rest, **attrs)
    total, _ = row(q, k, torch.ones_like(v), *rest, **attrs)
    return torch.where(total > 0.0, y / total, y), lse


@wrong_backward("mask-of-another-call", "mask reused wrongly", operator="attention_dropout")
def other_mask(row: Row, *args: Tensor, **attrs: Attr) -> Any:
    rng = args[6] + torch.tensor([0, 1])
    return row(*args[:6], rng, *args[7:], **attrs)


@wrong_backward("value-gradient-undropped", "mask forgotten", operator="attention_dropout")
def undropped_values(row: Row, *args: Tensor, p: float, **attrs: Attr) -> Any:
    dq, dk, _ = row(*args, p=p, **attrs)
    return dq, dk, row(*args, p=0.0, **attrs)[2]


@wrong_backward("blind-query-has-gradient", "NaN of nothing over nothing", operator="attention")
def blind_nan(row: Row, grad: Tensor, q: Tensor, k: Tensor, *rest: Tensor, **attrs: Attr) -> Any:
    dq, dk, dv = row(grad, q, k, *rest, **attrs)
    blind = max(q.shape[1] - k.shape[1], 0) if attrs["causal"] else 0
    dq[:, :blind] = torch.nan
    return dq, dk, dv


@wrong_backward("lse-of-its-own-keys", "an argument without effect", operator="attention")
def own_lse(
    row: Row, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, **attrs: Attr
) -> Any:
    own = operators.attention.forward(q, k, v, causal=attrs["causal"], scale=attrs["scale"])[1]
    return row(grad, q, k, v, y, own, **attrs)


def _joined(cu_seqlens: Tensor) -> Tensor:
    """The same rows as one sequence."""
    return cu_seqlens[[0, -1]]


@wrong(
    "sequences-see-each-other", "boundary of sequences not looked at", operator="attention_varlen"
)
def joined(row: Row, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **attrs: Attr) -> Any:
    return row(q, k, v, _joined(cu_seqlens), **attrs)


@wrong("boundary-off-by-one", "off by one", operator="attention_varlen")
def late_boundary(
    row: Row, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **attrs: Attr
) -> Any:
    moved = cu_seqlens.clone()
    moved[1:-1] = (moved[1:-1] + 1).clamp(max=int(cu_seqlens[-1]))
    return row(q, k, v, moved, **attrs)


@wrong("padding-is-a-sequence", "padding computed", operator="attention_varlen")
def sees_padding(
    row: Row, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **attrs: Attr
) -> Any:
    return row(q, k, v, torch.cat((cu_seqlens, torch.tensor([q.shape[0]]))), **attrs)


@wrong_backward("last-sequence-has-no-gradient", "dropped tail", operator="attention_varlen")
def last_forgotten(row: Row, *args: Tensor, **attrs: Attr) -> Any:
    *given, cu_seqlens = args
    return row(*given, cu_seqlens[: max(len(cu_seqlens) - 1, 1)], **attrs)


@wrong("entries-of-32-bits-read-as-64", "wrong width of an index", operator="attention_varlen")
def wide_entries(
    row: Row, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **attrs: Attr
) -> Any:
    return row(q, k, v, read_as_int64(cu_seqlens, q.shape[0]), **attrs)


def read_as_int64(ends: Tensor, num_rows: int) -> Tensor:
    """What a kernel for 64-bit row numbers makes of 32-bit ones, with zeros after their end."""
    if ends.dtype == torch.int64:
        return ends
    twice = torch.nn.functional.pad(ends, (0, len(ends)))
    return twice.view(torch.int64).clamp(0, num_rows).cummax(0).values


@wrong_bias("bias-gradient-scaled", "a factor at the wrong place")
def scaled_bias(row: Row, *args: Tensor, scale: float, **attrs: Attr) -> Any:
    dx, dbias = row(*args, scale=scale, **attrs)
    return dx, (None if dbias is None else dbias * scale)


@wrong_bias("bias-gradient-of-the-last-row", "= for +=")
def last_term(row: Row, grad: Tensor, y: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    dx, dbias = row(grad, y, bias, **attrs)
    if dbias is None or bias is None or not y.numel():
        return dx, dbias
    whole = row(grad, y, bias.expand(y.shape), **attrs)[1]
    for dim, size in enumerate((1,) * (y.dim() - bias.dim()) + bias.shape):
        whole = whole if size == y.shape[dim] else whole.narrow(dim, y.shape[dim] - 1, 1)
    return dx, whole.reshape(bias.shape)


@wrong_bias("bias-gradient-over-one-dim", "sum over too little")
def one_dim(row: Row, grad: Tensor, y: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    # A sum over what is before the bias's own dims, and none over those of size 1.
    dx, dbias = row(grad, y, bias, **attrs)
    if dbias is None or bias is None or bias.dim() < 2:
        return dx, dbias
    whole = row(grad, y, bias.expand(y.shape[y.dim() - bias.dim() :]), **attrs)[1]
    return dx, whole[tuple(slice(size) for size in bias.shape)].clone()


@wrong_bias(
    "bias-gradient-added-up-in-16-bits", "sum in the storage type",
    dtypes=frozenset({torch.bfloat16, torch.float32}),
)  # fmt: skip
def short_sum(row: Row, grad: Tensor, y: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    dx, dbias = row(grad, y, bias, **attrs)
    if dbias is None or bias is None or y.dim() <= bias.dim():
        return dx, dbias
    total = torch.zeros_like(dbias)
    for part in zip(grad, y, strict=True):
        total += row(*part, bias, **attrs)[1]
    return dx, total


CATALOGUE: tuple[Wrong, ...] = tuple(
    entry for entry in globals().values() if isinstance(entry, Wrong)
)
