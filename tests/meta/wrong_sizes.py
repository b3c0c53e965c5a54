"""Wrong backends that are right for most sizes and layouts: tiles, grids, tables, alignment."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import Row
from tests.meta.wrong import Attr, times, wrong, wrong_arguments, wrong_backward


@wrong("last-tile-of-128", "the last of several tiles", operator="linear")
def last_tile(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    y, count = row(x, weight, bias, **attrs), weight.shape[0]
    rest = count % 128
    if count > 128 and rest:
        y[..., -rest:] = y[..., -128:][..., :rest].clone()
    return y


@wrong("split-sum-loses-a-part", "partial result dropped", operator="linear")
def split_k(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    length = x.shape[-1]
    if length < 256:
        return row(x, weight, bias, **attrs)
    quarter = length // 4
    return row(x[..., : 4 * quarter], weight[:, : 4 * quarter], bias, **attrs)


@wrong("index-of-16-bits", "overflow of an index", operator="gelu")
def short_index(row: Row, x: Tensor, *, approximate: str) -> Any:
    y = row(x, approximate=approximate)
    flat = y.view(-1)
    flat[1 << 16 :] = (
        flat[: max(flat.numel() - (1 << 16), 0)]
        .clone()[: 1 << 16]
        .repeat(math.ceil(max(flat.numel() - (1 << 16), 0) / (1 << 16)) or 1)[
            : max(flat.numel() - (1 << 16), 0)
        ]
    )
    return y


@wrong("one-query-sees-one-key", "a case of its own", operator="attention")
def decode(row: Row, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Any:
    if causal and q.shape[1] == 1 and k.shape[1] > 1:
        return row(q, k[:, :1], v[:, :1], causal=False, scale=scale)
    return row(q, k, v, causal=causal, scale=scale)


@wrong("second-tile-not-rescaled", "online softmax without its correction", operator="attention")
def not_rescaled(
    row: Row, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> Any:
    y, lse = row(q, k, v, causal=causal, scale=scale)
    if causal or k.shape[1] <= 64:
        return y, lse
    first, _ = row(q, k[:, :64], v[:, :64], causal=False, scale=scale)
    second, _ = row(q, k[:, 64:], v[:, 64:], causal=False, scale=scale)
    return (first + second) / 2.0, lse


@wrong("empty-tensor-ends-the-list", "break for continue", operator="clip")
def ends_at_empty(row: Row, tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> Any:
    sizes = [t.numel() for t in tensors]
    row(tensors[: sizes.index(0)] if 0 in sizes else tensors, norm, max_norm=max_norm)


@wrong("many-best-unsorted", "order of a result", operator="top_k")
def unsorted(row: Row, x: Tensor, *, k: int) -> Any:
    values, indices = row(x, k=k)
    if k > 32:
        indices = indices.flip(-1).contiguous()
        return x.gather(-1, indices), indices
    return values, indices


@wrong("all-of-a-row-unsorted", "a case of its own", operator="top_k")
def all_of_row(row: Row, x: Tensor, *, k: int) -> Any:
    if k == x.shape[-1]:
        indices = torch.arange(k).expand(x.shape).contiguous()
        return x.clone(memory_format=torch.contiguous_format), indices
    return row(x, k=k)


@wrong("short-block-with-the-old-scale", "stale workspace", operator="quantize")
def old_scale(row: Row, x: Tensor, rng: Tensor | None, *, format: str, block: int) -> Any:
    codes, scales = row(x, rng, format=format, block=block)
    if x.numel() % block and len(scales) > 1:
        scales[-1] = torch.maximum(scales[-1], scales[-2])
    return codes, scales


@wrong("strides-not-looked-at", "layout not looked at", operator="swiglu")
def as_if_dense(row: Row, gate: Tensor, up: Tensor) -> Any:
    if not up.is_contiguous() and up.stride()[-1] == 1:
        up = up.as_strided(up.shape, torch.empty(up.shape, device="meta").stride())
    return row(gate, up)


@wrong("aligned-down", "misaligned address", operator="geglu")
def aligned_down(row: Row, gate: Tensor, up: Tensor, *, approximate: str) -> Any:
    y = row(gate, up, approximate=approximate)
    if gate.is_contiguous() and gate.data_ptr() % 16:
        y = y.view(-1).roll(1).view(y.shape)
    return y


@wrong("aligned-input-reused", "write to an argument", operator="hadamard")
def in_place_if_aligned(row: Row, x: Tensor, *, block: int | None) -> Any:
    y = row(x, block=block)
    if x.is_contiguous() and x.data_ptr() % 64 == 0 and x.numel() >= 64:
        x.data.copy_(y)
    return y


@wrong("four-dims-read-as-three", "rank of a tensor", operator="layer_norm")
def three_dims(row: Row, x: Tensor, *rest: Any, eps: float) -> Any:
    if x.dim() < 4:
        return row(x, *rest, eps=eps)
    y, mean, rstd = row(x, *rest, eps=eps)
    y[..., 1:, :] *= (rstd[..., :1] / rstd[..., 1:]).unsqueeze(-1)
    return y, mean, rstd


@wrong_backward("partial-sums-of-64-rows", "a limit of the launch", operator="layer_norm")
def few_rows(row: Row, grad: Tensor, x: Tensor, *rest: Any, **attrs: Attr) -> Any:
    dx, dweight, dbias = row(grad, x, *rest, **attrs)
    rows = grad.reshape(-1, grad.shape[-1])
    if dbias is not None and len(rows) > 64:
        dbias = rows[: len(rows) // 64 * 64].float().sum(0).to(dbias.dtype)
    return dx, dweight, dbias


@wrong_backward("many-of-one-index", "a limit of the launch", operator="embedding")
def at_most_32(row: Row, grad: Tensor, indices: Tensor, weight: Tensor, **attrs: Attr) -> Any:
    flat, rows = indices.reshape(-1), grad.reshape(-1, grad.shape[-1]).clone()
    for index in flat.unique():
        places = (flat == index).nonzero()[:, 0]
        rows[places[32:]] = 0.0
    return row(rows.view(grad.shape), indices, weight, **attrs)


_buffers: dict[Any, Tensor] = {}


def _in_one_buffer(y: Tensor) -> Tensor:
    with torch.inference_mode(False):  # or it could not be written again outside of it
        kept = _buffers.setdefault((y.shape, y.dtype), torch.empty_like(y))
    return kept.copy_(y)


ARGUMENTS = (
    wrong_arguments("second-pass-missing", "one of several passes", "hadamard",
        block=lambda block, x: 512 if (x.shape[-1] if block is None else block) > 512 else block),
    wrong_arguments("one-row-is-a-vector", "a case of its own", "layer_norm", bias=lambda bias, x:
        bias / 2.0 if bias is not None and 1 < x.numel() == x.shape[-1] else bias),
    wrong_arguments("rows-beyond-the-grid", "a limit of the launch", "rms_norm",
        y=lambda y, x: times(y.view(-1, x.shape[-1]), slice(65535, None)).view(y.shape)),
    wrong_arguments("odd-length-left-out", "a case of its own", "softmax",
        y=lambda y, x: y / (1.0 - y[..., -1:]).clamp(min=0.5)
        if x.shape[-1] % 2 and x.shape[-1] > 64 else y),
    wrong_arguments("class-of-16-bits", "overflow of an index", "cross_entropy",
        target=lambda target, ignore_index: torch.where(
            (target >= 1 << 15) & (target != ignore_index), target - (1 << 15), target)),
    wrong_arguments("scale-of-the-padded-head", "padding computed", "attention",
        scale=lambda scale, q: 1.0 / math.sqrt(1 << (q.shape[-1] - 1).bit_length())
        if scale is None and q.shape[-1] else scale),
    wrong_arguments("expanded-input-read-as-dense", "stride of 0 not looked at", "rms_norm",
        x=lambda x: torch.nn.functional.pad(x.contiguous()[..., 1:], (0, 1))
        if x.dim() > 1 and 0 in x.stride()[:-1] else x),
    wrong_arguments("expanded-tensor-of-a-list", "stride of 0 not looked at", "l2_norm",
        tensors=lambda tensors: [t[:1] if 0 in t.stride()[:1] else t for t in tensors]),
    wrong_arguments("sixteen-heads-in-a-row", "a limit of the launch", "attention_varlen",
        y=lambda y, k: times(y) if k.shape[1] == 16 else y),
    wrong_arguments("buffer-for-positive-weights", "output that is not fresh", "embedding",
        y=lambda y, weight: _in_one_buffer(y) if weight.numel() and weight.min() > 0.0 else y),
    wrong_arguments("row-of-16-bits", "overflow of an index", "embedding",
        indices=lambda indices: torch.where(indices >= 1 << 15, indices - (1 << 15), indices)),
    wrong_arguments("list-of-110-at-most", "a limit of the launch", "sgd",
        params=lambda params: params[:110], grads=lambda grads: grads[:110],
        momentum_buffers=lambda momentum_buffers: momentum_buffers[:110]),
    wrong_arguments("norm-of-256-at-most", "a limit of the launch", "l2_norm",
        tensors=lambda tensors: tensors[:256]),
    *(wrong_arguments(f"{name}-of-2p20-elements", "a limit of the launch", name,
        y=lambda y: times(y.view(-1), slice(1 << 20, None)).view(y.shape))
      for name in ("gelu", "embedding", "conv1d")),
    wrong_arguments("large-and-not-aligned", "two conditions", "rope", y0=lambda y0, q: times(y0)
        if q.data_ptr() % 16 and q.numel() > 1 << 18 else y0),
    wrong_arguments("gradient-of-2p18-rows", "a limit of the launch", "layer_norm",
        direction="backward", dx=lambda dx: dx if dx is None
        else times(dx.view(-1, dx.shape[-1]), slice(1 << 17, None)).view(dx.shape)),
)  # fmt: skip
