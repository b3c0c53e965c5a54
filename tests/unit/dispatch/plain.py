"""Every differentiable operator in plain torch, written from its definition; takes float64 too.

What references and rows are differentiated against, and what oracles have to agree with.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anychip import ops


def _plain_weights(scores: Tensor, visible: Tensor) -> Tensor:
    """exp over its sum, with weights of 0; sums of 0 are those of rows that see nothing."""
    scores = torch.where(visible, scores, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else torch.zeros(())
    weights = torch.exp(scores - torch.where(top.isneginf(), 0.0, top))
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0.0, 1.0, total)


def _plain_scores(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.einsum("bqhd,bkhd->bhqk", q, k) * scale


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, rng: Tensor | None = None, *index: Any, causal: bool,
    scale: Any, p: float = 0.0, out_dtype: torch.dtype | None = None, **sizes: int,
) -> Tensor:  # fmt: skip
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    visible = visible.tril(k.shape[1] - q.shape[1]) if causal else visible
    weights = _plain_weights(_plain_scores(q, k, scale), visible)
    if rng is not None:
        each = weights.unsqueeze(-1)  # an element is a row of the whole's weights, 1 wide
        numbers = weight_numbers(weights.shape, index, sizes)
        weights = _plain_dropout(each, rng, numbers, p=p, width=1).squeeze(-1)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def weight_numbers(shape: Sequence[int], index: Any, sizes: dict[str, int]) -> Tensor:
    """Where each of the (B, H, Sq, Sk) weights lies among those of the whole."""
    wholes = [0, *(sizes.get(n) or s for n, s in zip(("heads", "queries", "keys"), shape[1:]))]  # noqa: B905
    numbers = torch.zeros((), dtype=torch.int64)
    for whole, own, size in zip(wholes, index or [None] * 4, shape, strict=True):
        numbers = numbers[..., None] * whole + (torch.arange(size) if own is None else own)
    return numbers


def _plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, out_dtype: torch.dtype | None = None,
    **attrs: Any,
) -> Tensor:  # fmt: skip
    """Attention of each sequence alone."""
    pairs = zip(*(itertools.pairwise(t.tolist()) for t in ends), strict=True)
    parts = [
        _plain_attention(q[None, a:b], k[None, c:d], v[None, c:d], **attrs)[0]
        if c < d else 0.0 * q[a:b]
        for (a, b), (c, d) in pairs
        if a < b
    ]  # fmt: skip
    # The last term is 0; it makes the result depend on all, also where there is padding alone.
    q, k, v = (t.nan_to_num() for t in (q, k, v))
    return torch.cat([*parts, 0.0 * q[int(ends[0][-1]) :]]) + 0.0 * (k.sum() + v.sum())


def _plain_grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    ends = [0, *offsets.tolist()]
    parts = [x[a:b] @ w.t() for a, b, w in zip(ends, ends[1:], weight, strict=False)]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - ends[-1], weight.shape[1])])


def _plain_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, ...]:
    turn = torch.complex(cos, sin)[:, None]

    def rotated(whole: Tensor) -> Tensor:
        x, rest = whole.split([2 * cos.shape[-1], whole.shape[-1] - 2 * cos.shape[-1]], -1)
        if interleaved:
            z = torch.complex(x[..., 0::2], x[..., 1::2]) * turn
            return torch.cat([torch.stack([z.real, z.imag], -1).flatten(-2), rest], -1)
        z = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([z.real, z.imag, rest], -1)

    return rotated(q), rotated(k)


def _plain_dropout(
    x: Tensor, rng: Tensor, rows: Tensor | None = None, *, p: float, **place: int
) -> Tensor:
    """The mask is tested elsewhere; here it is a constant."""
    mask = ops.dropout(torch.ones(x.shape), rng, rows, p=p, **place) != 0
    return torch.where(mask, x / (1 - p) if p < 1 else 0 * x, 0.0)


def _plain_add_norm(x: Tensor, residual: Tensor, normed: Callable[[Tensor], Tensor]) -> Any:
    return normed(x + residual), x + residual


def _plain_bias_dropout_add(
    x: Tensor, residual: Tensor, rng: Tensor, bias: Tensor | None, *rows: Any, **attrs: Any
) -> Tensor:
    return residual + _plain_dropout(x if bias is None else x + bias, rng, *rows, **attrs)


def _plain_dropped_row(x: Tensor, rng: Tensor, rows: Tensor | None, p: float) -> Tensor:
    return _plain_dropout(x, rng, rows, p=p, width=0 if rows is None else x.shape[-1])


def _plain_softmax(
    x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, *, scale: float, causal: bool
) -> Tensor:
    visible = torch.ones(x.shape[-2:], dtype=torch.bool)
    visible = visible.tril(x.shape[-1] - x.shape[-2]) if causal else visible
    visible = visible if mask is None else visible & mask
    return _plain_weights(x * scale + (0.0 if bias is None else bias), visible)


def _plain_cross_entropy(
    logits: Tensor, target: Tensor, *, z_loss: float, reduction: str, **attrs: Any
) -> Tensor:
    flat, labels = logits.reshape(-1, logits.shape[-1]), target.flatten()
    rows = F.cross_entropy(flat, labels, reduction="none", **attrs)
    kept = labels != attrs["ignore_index"]
    rows = rows + torch.where(kept, z_loss * torch.logsumexp(flat, -1) ** 2, 0.0)
    if reduction == "none":
        return rows.view(target.shape)
    return rows.sum() / (kept.sum() if reduction == "mean" else 1)


def _plain_linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **attrs: Any
) -> Tensor:
    return _plain_cross_entropy(F.linear(x, weight, bias), target, **attrs)


def _plain_linear_cross_entropy_partials(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, first: int
) -> tuple[Tensor, ...]:
    logits = F.linear(x, weight, bias)
    here = target.unsqueeze(-1) == first + torch.arange(weight.shape[0])
    return logits.logsumexp(-1), torch.where(here, logits, 0.0).sum(-1), logits.sum(-1)


def _plain_hadamard(x: Tensor, *, block: int | None) -> Tensor:
    """The Kronecker power of [[1, 1], [1, -1]], block by block."""
    length = x.shape[-1] if block is None else block
    matrix = torch.ones(1, 1, dtype=x.dtype)
    for _ in range(length.bit_length() - 1):
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=x.dtype))
    return (x.unflatten(-1, (-1, length)) @ matrix / length**0.5).flatten(-2)


def _plain_top_k(x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """By counting: an element comes after all larger ones and the equal ones before it."""
    size, index = x.abs(), torch.arange(x.shape[-1])
    larger = size.unsqueeze(-2) > size.unsqueeze(-1)
    equal = (size.unsqueeze(-2) == size.unsqueeze(-1)) & (index < index.unsqueeze(-1))
    rank = (larger | equal).sum(-1)
    if not x.shape[-1]:
        return x, rank
    place = (rank.unsqueeze(-2) == torch.arange(k).unsqueeze(-1)).long().argmax(-1)
    return x.gather(-1, place), place


def _plain_permute(
    x: Tensor, indices: Tensor, key: Tensor | None, num_tokens: Tensor | None, *, num_experts: int
) -> tuple[Tensor, ...]:
    """Expert by expert, then what is of none; each by key, which a sort that is stable keeps."""
    choices, tokens = indices.shape[1], len(x) if num_tokens is None else int(num_tokens)
    numbers = [e if i // choices < tokens else -1 for i, e in enumerate(indices.flatten().tolist())]
    by_expert = [[i for i, e in enumerate(numbers) if e == expert] for expert in range(num_experts)]
    none = [i for i, e in enumerate(numbers) if not 0 <= e < num_experts]
    keys = [0] * len(x) if key is None else key.tolist()
    groups = [sorted(group, key=lambda i: keys[i // choices]) for group in [*by_expert, none]]
    order = torch.tensor([i for group in groups for i in group], dtype=torch.int64)
    offsets = torch.tensor([len(group) for group in by_expert]).cumsum(0)
    return x[order // indices.shape[1]], order.argsort().view(indices.shape), offsets


PLAIN: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, w, *, eps: F.rms_norm(x, w.shape, w, eps),
    "layer_norm": lambda x, w, b, *, eps: F.layer_norm(x, w.shape, w, b, eps),
    "add_rms_norm": lambda x, r, w, *, eps: _plain_add_norm(
        x, r, lambda total: F.rms_norm(total, w.shape, w, eps)
    ),
    "add_layer_norm": lambda x, r, w, b, *, eps: _plain_add_norm(
        x, r, lambda total: F.layer_norm(total, w.shape, w, b, eps)
    ),
    "dropout": _plain_dropout, "bias_dropout_add": _plain_bias_dropout_add,
    "dropout_add_rms_norm": lambda x, r, w, rng, rows, *, p, eps: _plain_add_norm(
        _plain_dropped_row(x, rng, rows, p), r, lambda total: F.rms_norm(total, w.shape, w, eps)
    ),
    "dropout_add_layer_norm": lambda x, r, w, rng, b, rows, *, p, eps: _plain_add_norm(
        _plain_dropped_row(x, rng, rows, p),
        r,
        lambda total: F.layer_norm(total, w.shape, w, b, eps),
    ),
    "group_norm": lambda x, w, b, *, num_groups, eps: torch.group_norm(x, num_groups, w, b, eps),
    "gelu": F.gelu, "silu": F.silu, "relu": F.relu, "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softplus": F.softplus,
    "bias_gelu": lambda x, bias, *, approximate: F.gelu(x + bias, approximate=approximate),
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up, *, approximate: F.gelu(gate, approximate=approximate) * up,
    "softmax": _plain_softmax, "rope": _plain_rope, "attention": _plain_attention,
    "attention_dropout": _plain_attention, "attention_varlen": _plain_varlen,
    "linear": lambda x, weight, bias, out_dtype=None: F.linear(x, weight, bias),
    "grouped_linear": _plain_grouped_linear,
    "conv1d": lambda x, w, b: F.conv1d(F.pad(x, (w.shape[1], 0)), w[:, None], b, groups=x.shape[1])[
        ..., 1:
    ],
    "conv2d": F.conv2d, "permute": _plain_permute,
    "unpermute": lambda x, row_map, weights: torch.einsum(
        "tkh,tk->th", x[row_map], torch.ones(row_map.shape).to(x) if weights is None else weights
    ),
    "embedding": F.embedding, "cross_entropy": _plain_cross_entropy,
    "linear_cross_entropy": _plain_linear_cross_entropy,
    "linear_cross_entropy_partials": _plain_linear_cross_entropy_partials,
    "hadamard": _plain_hadamard, "top_k": _plain_top_k,
}  # fmt: skip
