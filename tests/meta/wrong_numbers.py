"""Wrong backends that are right for ordinary numbers: signs of zero, NaN, ends of the range."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import Row
from tests.meta.wrong import Attr, wrong, wrong_arguments, wrong_backward, wrong_gradients

HALF = frozenset({torch.float16, torch.float32})
BRAIN = frozenset({torch.bfloat16, torch.float32})


@wrong(
    "squares-in-half", "overflow of an intermediate result", operator="rms_norm",
    select="/rms_norm/", dtypes=HALF,
)  # fmt: skip
def squares_in_half(row: Row, x: Tensor, weight: Tensor, *, eps: float) -> Any:
    y, rstd = row(x, weight, eps=eps)
    if x.dtype == torch.float16:
        lost = x.square().isinf().any(-1)
        rstd = torch.where(lost, 0.0, rstd)
        y = torch.where(lost.unsqueeze(-1), 0.0, y).to(y.dtype)
    return y, rstd


@wrong("tanh-of-exponentials", "overflow", operator="geglu")
def tanh_by_exp(row: Row, gate: Tensor, up: Tensor, *, approximate: str) -> Any:
    if approximate != "tanh":
        return row(gate, up, approximate=approximate)
    inner = 2.0 * math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    tanh = (inner.exp() - 1.0) / (inner.exp() + 1.0)
    return (0.5 * gate * (1.0 + tanh) * up).contiguous()


@wrong("root-of-12-bits", "fast mathematics", operator="rms_norm")
def fast_root(row: Row, x: Tensor, weight: Tensor, *, eps: float) -> Any:
    _, rstd = row(x, weight, eps=eps)
    rough = (rstd.view(torch.int32) & ~0xFFF).view(torch.float32)
    return (x * rough.unsqueeze(-1) * weight).contiguous(), rough


@wrong("exp-of-a-short-logarithm", "fast mathematics", operator="softmax")
def fast_exp(row: Row, x: Tensor, mask: Any, bias: Any, *, scale: float, causal: bool) -> Any:
    if mask is not None or bias is not None or causal or not x.shape[-1]:
        return row(x, mask, bias, scale=scale, causal=causal)
    z = x * scale
    weights = torch.exp2((z - z.amax(-1, keepdim=True)) * 1.4427)
    return (weights / weights.sum(-1, keepdim=True)).contiguous()


@wrong("division-by-a-rough-reciprocal", "fast mathematics", operator="attention")
def rough_division(row: Row, *args: Tensor, **attrs: Attr) -> Any:
    y, lse = row(*args, **attrs)
    total = lse.exp().transpose(1, 2).unsqueeze(-1)
    rough = ((1.0 / total).view(torch.int32) & ~0x3FF).view(torch.float32)
    usable = total.isfinite() & (total > 0.0)
    return torch.where(usable, y * total * rough, y).contiguous(), lse


@wrong(
    "sums-in-bfloat16", "bf16 accumulation", operator="linear", select="/linear/bf16", dtypes=BRAIN
)
def brain_sums(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    if x.dtype != torch.bfloat16 or x.shape[-1] < 32:
        return row(x, weight, bias, **attrs)
    parts = zip(x.split(16, -1), weight.split(16, -1), strict=True)
    total = sum(row(a.contiguous(), b.contiguous(), None, **attrs) for a, b in parts)
    rounded = attrs["out_dtype"] or x.dtype
    return total if bias is None else (total + bias).to(rounded)  # type: ignore[union-attr,operator]


@wrong(
    "mean-in-half", "sum in the storage type", operator="layer_norm", select="/layer_norm/fp16",
    dtypes=HALF,
)  # fmt: skip
def half_mean(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Any:
    y, mean, rstd = row(x, weight, bias, eps=eps)
    if x.dtype != torch.float16:
        return y, mean, rstd
    rough = mean.half().float()
    y = (x.float() - rough.unsqueeze(-1)) * rstd.unsqueeze(-1) * weight.float()
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype).contiguous(), rough, rstd


@wrong("second-moment-not-corrected", "one of two corrections", operator="adamw")
def one_correction(row: Row, *args: Any, beta2: float, **attrs: Attr) -> Any:
    step = float(args[5]) + 1.0
    factor = math.sqrt(1.0 - beta2**step)
    before = [p.clone() for p in args[0]]
    row(*args, beta2=beta2, **attrs)
    for param, old in zip(args[0], before, strict=True):
        param.copy_(old + (param - old) * factor)


@wrong("trust-at-most-10", "another definition of a term", operator="lamb")
def bounded_trust(row: Row, *args: Any, **attrs: Attr) -> Any:
    before = [p.clone() for p in args[0]]
    row(*args, **attrs)
    rate = abs(float(args[4]))
    for param, old in zip(args[0], before, strict=True):
        far = 10.0 * rate * 10.0
        param.copy_(old + (param - old).clamp(-far, far))


@wrong("finite-above-half-is-infinite", "a flag too early", operator="unscale_and_check")
def too_early(row: Row, grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> Any:
    large = any(bool((g.abs() > 65504.0).any()) for g in grads)
    row(grads, scale, found_inf)
    if large:
        found_inf.fill_(1.0)


@wrong("last-tensor-decides", "a flag that is lost", operator="unscale_and_check")
def last_decides(row: Row, grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> Any:
    before = float(found_inf)
    row(grads, scale, found_inf)
    if not before and len(grads):
        found_inf.fill_(float(not bool(grads[-1].isfinite().all())))


@wrong("finite-as-far-as-16-bits", "a loop that ends early", operator="unscale_and_check")
def late_is_finite(row: Row, grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> Any:
    before = found_inf.clone()
    row(grads, scale, found_inf)
    if all(bool(g.reshape(-1)[: 1 << 16].isfinite().all()) for g in grads):
        found_inf.copy_(before)


@wrong("norm-without-floor", "division by zero", operator="clip")
def no_floor(row: Row, tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> Any:
    factor = min(max_norm / float(norm), 1.0) if float(norm) else math.nan
    for tensor in tensors:
        tensor.mul_(factor)


@wrong_backward("large-logits-without-gradient", "overflow", operator="softmax")
def large_logits(row: Row, grad: Tensor, y: Tensor, *rest: Any, **attrs: Attr) -> Any:
    found = row(grad, y, *rest, **attrs)
    return tuple(None if f is None else torch.where(f.abs() < 1e-12, 0.0, f) for f in found)


ARGUMENTS = (
    wrong_arguments("sigmoid-overflows", "overflow", "swiglu",
        y=lambda gate, up: (gate * (gate.exp() / (1.0 + gate.exp())) * up).contiguous()),
    wrong_arguments("eps-before-the-correction", "eps at the wrong place", "adamw",
        eps=lambda eps, beta2, step: eps / math.sqrt(1.0 - beta2 ** (float(step) + 1.0))),
    wrong_arguments("decay-without-rate", "missing factor", "lion",
        weight_decay=lambda weight_decay, lr: weight_decay / float(lr) if float(lr) else 0.0),
    wrong_arguments("zero-added-to-a-copy", "sign of zero", "embedding",
        y=lambda y: y + 0.0),
    wrong_arguments("maximum-swallows-nan", "Inf or NaN lost", "softmax",
        x=lambda x: torch.where(x.isnan(), -math.inf, x)),
    wrong_arguments("clamped-before-the-function", "Inf or NaN lost", "gelu",
        x=lambda x: torch.nan_to_num(x, nan=0.0)),
    wrong_arguments("minus-infinity-is-nan", "Inf or NaN made", "gelu",
        y=lambda y, x: torch.where(x < -1e4, x * math.inf * 0.0, y)),
    wrong_arguments("half-subnormals-flushed", "subnormal numbers", "swiglu",
        select="/swiglu/", dtypes=HALF,
        y=lambda y: torch.where(y.abs() < torch.finfo(y.dtype).tiny, 0.0, y).to(y.dtype)),
    wrong_gradients("gradient-clipped-at-one", "range of a gradient", "gelu",
        dx=lambda dx, grad: torch.minimum(dx, grad.abs()).maximum(-grad.abs())),
    wrong_arguments("norm-by-maximum-swallows-nan", "Inf or NaN lost", "l2_norm",
        tensors=lambda tensors: [torch.where(t.isnan(), 0.0, t) for t in tensors]),
    wrong_arguments("loss-of-nan-is-a-number", "Inf or NaN lost", "cross_entropy",
        logits=lambda logits: torch.where(logits.isnan(), 0.0, logits)),
    wrong_arguments("smoothing-on-the-target", "label smoothing on the wrong side", "cross_entropy",
        label_smoothing=lambda label_smoothing: 1.0 - label_smoothing if label_smoothing else 0.0),
)  # fmt: skip
