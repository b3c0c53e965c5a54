"""Wrong backends that the operators chapter has to find."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import Row
from tests.meta.wrong import Attr, wrong, wrong_arguments
from tests.unit.conformance.lower_precision import tf32


@wrong("tail-dropped", "dropped tail", operator="gelu")
def tail(row: Row, x: Tensor, *, approximate: str) -> Any:
    y = row(x, approximate=approximate)
    y.view(-1)[x.numel() // 16 * 16 :][-1:] = 0.0
    return y


@wrong("tail-not-written", "output never written", operator="swiglu")
def unwritten_tail(row: Row, gate: Tensor, up: Tensor) -> Any:
    y, whole = torch.empty(gate.shape, dtype=gate.dtype), row(gate, up)
    count = gate.numel() // 8 * 8
    y.view(-1)[:count] = whole.view(-1)[:count]
    return y


@wrong("eps-outside-root", "eps at the wrong place", operator="rms_norm")
def eps_outside(row: Row, x: Tensor, weight: Tensor, *, eps: float) -> Any:
    rstd = 1.0 / (x.square().mean(-1, keepdim=True).sqrt() + eps)
    return (x * rstd * weight).contiguous(), rstd.squeeze(-1)


@wrong("hidden-padded", "wrong reduction length with padding", operator="rms_norm")
def padded(row: Row, x: Tensor, weight: Tensor, *, eps: float) -> Any:
    hidden = x.shape[-1]
    length = -(-hidden // 8) * 8
    rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) / length + eps)
    return (x * rstd * weight).contiguous(), rstd.squeeze(-1)


@wrong("variance-in-one-pass", "cancellation", operator="layer_norm")
def one_pass(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Any:
    mean = x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True) - mean.square()
    rstd = torch.rsqrt(variance.clamp(min=0) + eps)
    y = (x - mean) * rstd * weight + (0.0 if bias is None else bias)
    return y.contiguous(), mean.squeeze(-1), rstd.squeeze(-1)


@wrong("variance-unbiased", "n - 1 for n", operator="layer_norm")
def unbiased(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Any:
    mean, count = x.mean(-1, keepdim=True), x.shape[-1]
    rstd = torch.rsqrt((x - mean).square().sum(-1, keepdim=True) / max(count - 1, 1) + eps)
    y = (x - mean) * rstd * weight + (0.0 if bias is None else bias)
    return y.contiguous(), mean.squeeze(-1), rstd.squeeze(-1)


@wrong("input-overwritten", "write to an argument", operator="rms_norm")
def overwrites(row: Row, x: Tensor, weight: Tensor, *, eps: float) -> Any:
    y, rstd = row(x, weight, eps=eps)
    x.data.mul_(1.0 + 2.0**-20)
    return y, rstd


@wrong("residual-not-added", "an argument without effect", operator="add_rms_norm")
def no_residual(row: Row, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Any:
    _, total, _ = row(x, residual, weight, eps=eps)
    y, _, rstd = row(x, torch.zeros_like(x), weight, eps=eps)
    return y, total, rstd


@wrong(
    "norm-of-the-unrounded-sum", "intermediate result not in the storage type",
    operator="add_rms_norm", select="add_rms_norm and bf16",
    dtypes=frozenset({torch.bfloat16, torch.float32}),
)  # fmt: skip
def unrounded_sum(row: Row, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Any:
    _, total, _ = row(x, residual, weight, eps=eps)
    y, _, rstd = row(x.float(), residual.float(), weight, eps=eps)
    return y.to(x.dtype), total, rstd


@wrong("output-cached", "output that is not fresh", operator="gelu")
def cached(row: Row, x: Tensor, *, approximate: str) -> Any:
    y = row(x, approximate=approximate)
    return _cache.setdefault((tuple(x.shape), approximate), y).copy_(y)


_cache: dict[Any, Tensor] = {}


@wrong(
    "truncated", "wrong rounding", operator="swiglu", select="swiglu and bf16",
    dtypes=frozenset({torch.bfloat16, torch.float32}),
)  # fmt: skip
def truncated(row: Row, gate: Tensor, up: Tensor) -> Any:
    wide = row(gate.float(), up.float())
    if gate.dtype == torch.float32:
        return wide
    cut = (wide.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return cut.to(torch.bfloat16)


@wrong("mask-off-by-one", "off-by-one in a mask", operator="attention")
def strict_mask(
    row: Row, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> Any:
    if not causal or q.shape[1] < 2:
        return row(q, k, v, causal=causal, scale=scale)
    # Query i sees key i + 1 too, in its own place.
    shifted = row(q, k.roll(-1, 1), v.roll(-1, 1), causal=causal, scale=scale)
    y, lse = row(q, k, v, causal=causal, scale=scale)
    y[:, :-1] = shifted[0][:, :-1]
    return y, lse


@wrong("softmax-overflows", "overflow", operator="softmax")
def no_top(row: Row, x: Tensor, mask: Any, bias: Any, *, scale: float, causal: bool) -> Any:
    if causal or mask is not None or bias is not None:
        return row(x, mask, bias, scale=scale, causal=causal)
    weights = torch.exp(x * scale)
    return (weights / weights.sum(-1, keepdim=True)).contiguous()


@wrong("softmax-causal-off-by-one", "off-by-one in a mask", operator="softmax")
def sees_next(row: Row, x: Tensor, mask: Any, bias: Any, *, scale: float, causal: bool) -> Any:
    if not causal:
        return row(x, mask, bias, scale=scale, causal=causal)
    visible = torch.ones(x.shape[-2:], dtype=torch.bool).tril(x.shape[-1] - x.shape[-2] + 1)
    visible = visible if mask is None else visible & mask
    return row(x, visible, bias, scale=scale, causal=False)


@wrong("softmax-causal-from-the-first-key", "mask aligned at the wrong end", operator="softmax")
def first_aligned(row: Row, x: Tensor, mask: Any, bias: Any, *, scale: float, causal: bool) -> Any:
    if not causal:
        return row(x, mask, bias, scale=scale, causal=causal)
    visible = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    visible = visible if mask is None else visible & mask
    return row(x, visible, bias, scale=scale, causal=False)


@wrong("softmax-without-maximum", "overflow", operator="cross_entropy")
def no_maximum(row: Row, logits: Tensor, target: Tensor, **attrs: Attr) -> Any:
    _, lse = row(logits, target, **attrs)
    naive = logits.exp().sum(-1).log()
    return row(logits, target, **attrs)[0] + (naive - lse).sum() * 0.0, naive


@wrong("clip-enlarges", "missing minimum", operator="clip")
def clip_up(row: Row, tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> Any:
    for tensor in tensors:
        tensor.mul_(max_norm / (norm + 1e-6))


@wrong("only-nan-found", "half of a condition", operator="unscale_and_check")
def only_nan(row: Row, grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> Any:
    for grad in grads:
        found_inf.copy_(torch.where(grad.isnan().any(), 1.0, found_inf))
        grad.div_(scale)


@wrong("step-off-by-one", "bias correction step off by one", operator="adamw")
def old_step(row: Row, *args: Any, **attrs: Attr) -> Any:
    step = args[5]
    if float(step) >= 1.0:
        step -= 1.0
        row(*args, **attrs)
        step += 1.0
    else:
        row(*args, **attrs)


@wrong("low-precision-copy-late", "stale copy", operator="adamw")
def late_copy(row: Row, *args: Any, **attrs: Attr) -> Any:
    before = [p.clone() for p in args[0]]
    row(*args, **attrs)
    for copy, old in zip(args[9] or (), before, strict=False):
        copy.copy_(old)


ARGUMENTS = (
    wrong_arguments("bias-after-dropout", "an argument at the wrong place", "bias_dropout_add",
        bias=None, y=lambda y, bias: y if bias is None else y + bias),
    wrong_arguments("output-is-input", "output that is not fresh", "dropout",
        y=lambda y, x, p: x if p == 0.0 else y),
    wrong_arguments("sigmoid-in-half", "fast mathematics", "swiglu",
        y=lambda gate, up: gate * torch.sigmoid(gate).half().float() * up),
    wrong_arguments("last-k-dropped", "dropped tail", "linear",
        x=lambda x: x[..., : x.shape[-1] // 8 * 8 or None],
        weight=lambda weight: weight[:, : weight.shape[-1] // 8 * 8 or None]),
    wrong_arguments("rounded-in-between", "intermediate result in the storage type", "rms_norm",
        select="rms_norm and bf16", dtypes=frozenset({torch.bfloat16, torch.float32}),
        y=lambda x, weight, rstd: ((x.float() * rstd.unsqueeze(-1)).to(x.dtype).float()
                                   * weight.float()).to(x.dtype).contiguous()),
    wrong_arguments("key-head-modulo", "head mapping swapped", "attention",
        k=lambda k, q: k.repeat(1, 1, q.shape[2] // k.shape[2], 1),
        v=lambda v, q: v.repeat(1, 1, q.shape[2] // v.shape[2], 1)),
    wrong_arguments("ignored-rows-counted", "ignore_index counted in the mean", "cross_entropy",
        reduction=lambda reduction: "sum" if reduction == "mean" else reduction,
        y=lambda y, target, reduction: y / target.numel() if reduction == "mean" else y),
    wrong_arguments("smoothing-among-the-others", "label smoothing over V - 1 classes",
        "cross_entropy", label_smoothing=lambda label_smoothing, logits: min(
            label_smoothing * logits.shape[-1] / max(logits.shape[-1] - 1, 1), 1.0)),
    wrong_arguments("last-class-left-out", "off by one", "cross_entropy",
        select="/cross_entropy/ and rule:indices", target=lambda target, logits, ignore_index:
        torch.where(target == logits.shape[-1] - 1, ignore_index, target)),
    wrong_arguments("found-inf-reset", "a flag that is lost", "unscale_and_check",
        found_inf=lambda found_inf: found_inf.zero_()),
    wrong_arguments("decay-coupled", "weight decay coupled instead of decoupled", "adamw",
        weight_decay=0.0, grads=lambda params, grads, weight_decay: [
            g + weight_decay * p for g, p in zip(grads, params, strict=True)]),
    wrong_arguments("found-inf-ignored", "a flag without effect", "adamw", found_inf=None),
    wrong_arguments("eps-missing", "missing epsilon", "rms_norm",
        eps=0.0, y=lambda y: torch.nan_to_num(y)),
    wrong_arguments("residual-is-variance", "residual that is not canonical", "rms_norm",
        rstd=lambda rstd: rstd.square()),
    wrong_arguments("sum-is-old-residual", "stale copy", "add_layer_norm",
        y1=lambda residual: residual.clone(memory_format=torch.contiguous_format)),
    wrong_arguments("kept-not-scaled", "missing factor", "bias_dropout_add",
        y=lambda y, residual, p: residual + (y - residual) * (1.0 - p)),
    wrong_arguments("noise", "non-deterministic where determinism is declared", "swiglu",
        y=lambda y: torch.where(torch.rand(y.shape) < 0.5, torch.nextafter(y, torch.zeros(())), y)),
    wrong_arguments("softmax-mask-inverted", "condition reversed", "softmax",
        mask=lambda mask: None if mask is None else ~mask),
    wrong_arguments("softmax-hidden-row-is-uniform", "a case of its own forgotten", "softmax",
        y=lambda y, x: torch.where((y == 0.0).all(-1, keepdim=True), 1.0 / max(x.shape[-1], 1), y)),
    wrong_arguments("bias-dropped", "an argument without effect", "layer_norm", bias=None),
    wrong_arguments("sum-in-dtype-of-x", "wrong type of a result", "add_layer_norm",
        dtypes=frozenset({torch.bfloat16, torch.float32}),
        residual=lambda residual, x: residual.to(x.dtype)),
    wrong_arguments("residual-dropped-too", "an argument at the wrong place", "bias_dropout_add",
        x=lambda x, residual: x + residual, residual=lambda residual: torch.zeros_like(residual)),
    wrong_arguments("bias-of-another-column", "off by one", "bias_gelu",
        bias=lambda bias: bias.roll(1)),
    wrong_arguments("bias-added-in-storage-type", "intermediate result in the storage type",
        "bias_gelu", select="bias_gelu and bf16", dtypes=frozenset({torch.bfloat16, torch.float32}),
        x=lambda x, bias: (x + bias).to(x.dtype), bias=lambda bias: torch.zeros_like(bias)),
    wrong_arguments("geglu-approximation-fixed", "fast mathematics", "geglu", approximate="tanh"),
    wrong_arguments("geglu-arguments-swapped", "arguments swapped", "geglu", gate=lambda up: up,
        up=lambda gate: gate),
    wrong_arguments("tanh-for-erf", "fast mathematics", "gelu", approximate="tanh"),
    wrong_arguments("product-in-tf32", "lower precision of factors", "linear", x=lambda x: tf32(x),
        weight=lambda weight: tf32(weight)),
    wrong_arguments("rope-layouts-swapped", "layout swapped", "rope",
        interleaved=lambda interleaved: not interleaved),
    wrong_arguments("rope-position-off-by-one", "off by one", "rope",
        cos=lambda cos: cos.roll(-1, 0), sin=lambda sin: sin.roll(-1, 0)),
    wrong_arguments("default-scale-missing", "missing factor", "attention",
        scale=lambda scale: 1.0 if scale is None else scale),
    wrong_arguments("softmax-scale-forgotten", "missing factor", "softmax", scale=1.0),
    wrong_arguments("softmax-scales-the-bias", "a factor too many", "softmax",
        bias=lambda bias, scale: None if bias is None else bias * scale),
    wrong_arguments("indices-of-32-bits", "an index cut short", "embedding", select="rule:range",
        indices=lambda indices: indices.to(torch.int32).to(indices.dtype)),
    wrong_arguments("first-index-not-checked", "missing check of an index", "embedding",
        select="rule:range", indices=lambda indices, weight: torch.cat((
            indices.flatten()[:1].clamp(0, weight.shape[0] - 1), indices.flatten()[1:],
        )).view(indices.shape)),
    wrong_arguments("index-checked-late", "missing check of an index", "embedding",
        indices=lambda indices, weight: indices.clamp(0, weight.shape[0] - 1)),
    wrong_arguments("last-tensor-forgotten", "dropped tail of a list", "l2_norm",
        tensors=lambda tensors: tensors[:-1] if len(tensors) > 1 else tensors),
    wrong_arguments("clip-ignores-scalars", "one of a list forgotten", "clip",
        tensors=lambda tensors: [t for t in tensors if t.dim()]),
    wrong_arguments("adam-eps-inside-root", "eps at the wrong place", "adamw",
        eps=lambda eps: math.sqrt(eps)),
)  # fmt: skip
