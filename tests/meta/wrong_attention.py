"""Wrong backends whose attention the operators and gradients chapters have to find."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip import operators
from tests.meta.honest import Row
from tests.meta.wrong import Attr, Wrong, wrong, wrong_arguments, wrong_backward, wrong_gradients

wrong_bias = partial(wrong_backward, operator="softmax")


@wrong("causal-from-the-first-key", "mask aligned at the wrong end", operator="attention")
def first_aligned(row: Row, q: Tensor, k: Tensor, v: Tensor, **attrs: Attr) -> Any:
    extra = k.shape[1] - q.shape[1]
    if not attrs["causal"] or extra <= 0:
        return row(q, k, v, **attrs)
    return row(q, k[:, :-extra], v[:, :-extra], **attrs)


@wrong("blind-query-is-a-mean", "a case of its own forgotten", operator="attention")
def uniform_blind(row: Row, q: Tensor, k: Tensor, v: Tensor, **attrs: Attr) -> Any:
    y, lse = row(q, k, v, **attrs)
    blind = max(q.shape[1] - k.shape[1], 0) if attrs["causal"] and k.shape[1] else 0
    y[:, :blind] = v.mean(1, keepdim=True).repeat_interleave(q.shape[2] // k.shape[2], 2)
    return y, lse


@wrong("rope-rest-dropped", "dropped tail", operator="rope")
def rest_dropped(row: Row, q: Tensor, k: Tensor, cos: Tensor, *given: Tensor, **attrs: Attr) -> Any:
    turned = row(q, k, cos, *given, **attrs)
    for y in turned:
        y[..., 2 * cos.shape[1] :] = 0.0
    return turned


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


def own_lse(row: Row, *args: Tensor, **attrs: Attr) -> Any:
    (q, k, v), ends = args[1:4], args[6:]
    forward = operators.attention_varlen.forward if ends else operators.attention.forward
    named = {name: value for name, value in attrs.items() if name != "needs"}
    own = forward(q, k, v, *ends, **named)[1]
    return row(*args[:5], own, *ends, **attrs)


OWN_LSE = [
    wrong_backward(name, "an argument without effect", operator=operator)(own_lse)
    for name, operator in {
        "lse-of-its-own-keys": "attention", "lse-of-its-own-packed-keys": "attention_varlen"
    }.items()
]  # fmt: skip


def wrong_ends(name: str, bug: str) -> Any:
    """Decorator: ``change(ends, tokens)`` in place of the ends of the queries, and of the keys."""

    def wrap(change: Any) -> Wrong:
        def changed(row: Row, q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, **attrs: Attr) -> Any:
            tokens = (q.shape[0], k.shape[0])
            return row(q, k, v, *(change(e, n) for e, n in zip(ends, tokens, strict=True)), **attrs)

        return wrong(name, bug, operator="attention_varlen")(changed)

    return wrap


@wrong_ends("sequences-see-each-other", "boundary of sequences not looked at")
def joined(ends: Tensor, tokens: int) -> Tensor:
    return ends[[0, -1]]


@wrong_ends("boundary-off-by-one", "off by one")
def late_boundary(ends: Tensor, tokens: int) -> Tensor:
    moved = ends.clone()
    moved[1:-1] = (moved[1:-1] + 1).clamp(max=int(ends[-1]))
    return moved


@wrong_ends("padding-is-a-sequence", "padding computed")
def sees_padding(ends: Tensor, tokens: int) -> Tensor:
    return torch.cat((ends, ends.new_tensor([tokens])))


@wrong_backward("last-sequence-has-no-gradient", "dropped tail", operator="attention_varlen")
def last_forgotten(row: Row, *args: Tensor, **attrs: Attr) -> Any:
    ends = (e[: max(len(e) - 1, 1)] for e in args[6:])
    return row(*args[:6], *ends, **attrs)


@wrong(
    "packed-causal-from-the-first-key", "mask aligned at the wrong end", operator="attention_varlen"
)
def first_aligned_packed(
    row: Row, q: Tensor, k: Tensor, v: Tensor, of_queries: Tensor, of_keys: Tensor, **attrs: Attr
) -> Any:
    # Without the keys that a mask from the first key hides from every query.
    extra = (of_keys.diff() - of_queries.diff()).clamp(min=0) * int(attrs["causal"])
    place = torch.arange(k.shape[0])[:, None]
    last = (place >= (of_keys[1:] - extra)) & (place < of_keys[1:])
    kept = ~last.any(1)
    moved = of_keys - torch.cat((extra.new_zeros(1), extra.cumsum(0)))
    return row(q, k[kept], v[kept], of_queries, moved, **attrs)


@wrong(
    "entries-clamped", "missing check of an index", operator="attention_varlen",
    select="/attention_varlen/ and rule:range",
)  # fmt: skip
def clamped_ends(row: Row, q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, **attrs: Attr) -> Any:
    pairs = zip(ends, (q.shape[0], k.shape[0]), strict=True)
    inside = [e.clamp(0, n).cummax(0).values for e, n in pairs]
    return row(q, k, v, *(torch.cat((e[:1] * 0, e[1:])) for e in inside), **attrs)


@wrong("entries-of-32-bits-read-as-64", "wrong width of an index", operator="attention_varlen")
def wide_entries(row: Row, q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, **attrs: Attr) -> Any:
    read = (read_as_int64(e, n) for e, n in zip(ends, (q.shape[0], k.shape[0]), strict=True))
    return row(q, k, v, *read, **attrs)


def read_as_int64(ends: Tensor, num_rows: int) -> Tensor:
    """What a kernel for 64-bit row numbers makes of 32-bit ones, with zeros after their end."""
    if ends.dtype == torch.int64:
        return ends
    twice = torch.nn.functional.pad(ends, (0, len(ends)))
    return twice.view(torch.int64).clamp(0, num_rows).cummax(0).values


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


ARGUMENTS = (
    wrong_arguments("float32-of-rounded-attention", "intermediate result in the storage type",
        "attention", select="/attention/bf16", dtypes=frozenset({torch.bfloat16, torch.float32}),
        out_dtype=None, y=lambda y, out_dtype: y.to(out_dtype or y.dtype)),
    wrong_arguments("weights-not-scaled", "missing factor", "attention_dropout",
        y=lambda y, p: y * (1.0 - p)),
    wrong_arguments("lse-of-no-keys-is-zero", "a case of its own forgotten", "attention_varlen",
        lse=lambda lse: lse.masked_fill(lse.isneginf(), 0.0)),
    wrong_gradients("bias-gradient-scaled", "a factor at the wrong place", "softmax",
        dbias=lambda dbias, scale: dbias * scale),
    wrong_gradients("mask-of-another-call", "mask reused wrongly", "attention_dropout",
        rng=lambda rng: rng + torch.tensor([0, 1])),
    wrong_arguments("keys-by-the-ends-of-queries", "an argument without effect", "attention_varlen",
        cu_seqlens_k=lambda cu_seqlens_q, k: cu_seqlens_q.clamp(max=k.shape[0])),
)  # fmt: skip
