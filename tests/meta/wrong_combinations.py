"""Wrong backends that are right but for two conditions that meet, or at one end of a range."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import Row
from tests.meta.wrong import Attr, wrong, wrong_arguments, wrong_backward, wrong_gradients
from tests.unit.conformance.lower_precision import tf32

HALF = frozenset({torch.float16})


def _numbers(x: Tensor, num_groups: int) -> Tensor:
    """(batch, groups, numbers of a group)."""
    return x.float().reshape(len(x), num_groups, -1)


def _in_one_pass(numbers: Tensor) -> Tensor:
    """What a difference of squares makes of a deviation."""
    squares = numbers.square().mean(-1) - numbers.mean(-1).square()
    return (numbers.var(-1, correction=0) / squares.clamp_min(1e-6)).sqrt()


@wrong("tf32-if-all-sizes-are-aligned", "lower precision for some sizes", operator="linear")
def tf32_if_aligned(row: Row, x: Tensor, weight: Tensor, *rest: Any, **attrs: Attr) -> Any:
    rows = x.numel() // max(x.shape[-1], 1)
    if all(n and n % 16 == 0 for n in (rows, *weight.shape)) and x.dtype == torch.float32:
        x, weight = tf32(x), tf32(weight)
    return row(x, weight, *rest, **attrs)


@wrong("no-maximum-if-causal", "overflow of an exponential", operator="attention")
def overflows(row: Row, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **attrs: Attr) -> Any:
    y, lse = row(q, k, v, causal=causal, **attrs)
    if causal:
        y = torch.where((lse > 88.0).transpose(1, 2)[..., None], torch.nan, y)
    return y, lse


@wrong("list-read-as-one-storage", "layout not looked at", operator="l2_norm")
def one_storage(row: Row, tensors: Sequence[Tensor]) -> Any:
    found = [t for t in tensors if t.numel()]
    starts = {t.untyped_storage().data_ptr() for t in found}
    if len(found) > 2 and len(starts) == 1:
        first, last = found[0], found[-1]
        begin, end = first.storage_offset(), last.storage_offset() + last.numel()
        if begin < end:
            tensors = [first.as_strided((end - begin,), (1,), begin)]
    return row(tensors)


@wrong("pieces-of-channels-last-begin-anew", "two conditions", operator="conv1d")
def begin_anew(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    is_innermost = x.stride(1) == 1 < x.shape[1] and not x.is_contiguous()
    pieces = x.split(64, 2) if is_innermost and x.shape[2] > 64 else (x,)
    return torch.cat([row(piece, weight, bias) for piece in pieces], 2).contiguous()


@wrong("empty-tensor-takes-it-back", "the second of two", operator="unscale_and_check")
def taken_back(row: Row, grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    before = found_inf.clone()
    row(grads, scale, found_inf)
    if any(not b.numel() and not bool(a.isfinite().all()) for a, b in itertools.pairwise(grads)):
        found_inf.copy_(before)


@wrong_backward("first-gradient-alone-not-divided", "two conditions", operator="rms_norm")
def alone(row: Row, grad: Tensor, *args: Any, needs: tuple[bool, ...], **attrs: Attr) -> Any:
    dx, *rest = row(grad, *args, needs=needs, **attrs)
    # The row's last number is added again where the gradient's own strides are walked.
    if not needs[1] and dx is not None and not grad.is_contiguous():
        dx = dx * 1.001
    return dx, *rest


ARGUMENTS = (
    wrong_arguments("strided-weight-without-bias", "two conditions", "linear",
        weight=lambda weight, bias: weight.as_strided(weight.shape, (weight.shape[1], 1))
        if bias is None and weight.stride()[-1] > 1 and weight.numel() else weight),
    wrong_arguments("strided-weight-of-a-large-product", "two conditions", "linear",
        weight=lambda weight, x: weight.as_strided(weight.shape, (weight.shape[1], 1))
        if x.numel() * weight.shape[0] >= 1 << 23 and weight.stride()[-1] > 1 else weight),
    wrong_arguments("smoothing-of-16-bit-classes", "overflow of an index", "cross_entropy",
        label_smoothing=lambda label_smoothing, logits:
        label_smoothing * (0.5 if logits.shape[-1] >= 1 << 14 else 1.0)),
    wrong_arguments("nan-made-quiet", "bits of a copy", "embedding", y=lambda y: y * 1.0),
    wrong_arguments("scale-of-one-key-head-if-not-causal", "two conditions", "attention",
        scale=lambda scale, k, causal: 1.0 if k.shape[2] == 1 and not causal and scale is None
        and k.shape[1] > 16 else scale),
    wrong_arguments("clip-forgotten-with-copies-at-the-first-step", "three conditions", "adamw",
        clip=lambda clip, step, low_precision: None if low_precision and step == 0 else clip),
    wrong_arguments("found-inf-is-1-or-nothing", "end of a range", "adamw",
        found_inf=lambda found_inf: None if found_inf is None else (found_inf == 1.0).float()),
    wrong_arguments("norm-of-nan-clips-nothing", "Inf or NaN lost", "clip",
        norm=lambda norm: norm.nan_to_num(0.0)),
    wrong_arguments("scale-without-its-sign", "end of a range", "attention",
        scale=lambda scale: scale if scale is None else abs(scale)),
    wrong_arguments("channels-last-read-as-dense", "layout not looked at", "group_norm",
        x=lambda x: x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
        if x.dim() == 4 and x.stride(1) == 1 < x.shape[1] else x),
    wrong_arguments("padding-times-0", "NaN times 0", "attention_varlen",
        y=lambda y, v: y + (v[-1:, :1, :1] * 0.0).sum()),
    wrong_arguments("rows-of-no-group-times-0", "NaN times 0", "grouped_linear",
        direction="backward", dweight=lambda dweight, x: dweight + (x[-1:, :1] * 0.0).sum()),
    wrong_arguments("decay-of-momentum-if-the-rate-is-0", "end of a range", "sgd",
        weight_decay=lambda weight_decay, lr, momentum_buffers:
        0.0 if lr == 0 and momentum_buffers else weight_decay),
    wrong_arguments("straight-at-the-threshold", "end of a range", "softplus",
        y=lambda y, x, beta, threshold: torch.where(beta * x == threshold, x, y)),
    wrong_arguments("row-of-minus-infinity-is-uniform", "end of a range", "softmax",
        y=lambda y, x: y.masked_fill(x.isneginf().all(-1, keepdim=True), 1 / max(x.shape[-1], 1))),
    wrong_arguments("blocks-of-2048-at-most", "the second of several tiles", "hadamard",
        y=lambda y, x, block: y * 1.01 if (block or x.shape[-1]) > 2048 else y),
    wrong_gradients("total-by-strides-of-the-gradient", "layout not looked at", "add_rms_norm",
        grad1=lambda grad1, grad: grad1.as_strided(grad.shape, grad.stride())
        if grad.is_contiguous() and grad1.untyped_storage().nbytes() > grad1.nbytes else grad1),
    wrong_gradients("padding-of-keys-alone", "padding computed", "attention_varlen",
        dk=lambda dk, q, cu_seqlens_q, cu_seqlens_k: dk
        if dk is None or int(cu_seqlens_q[-1]) < len(q)
        else dk.index_fill(0, torch.arange(int(cu_seqlens_k[-1]), len(dk)), 0.37)),
    *(wrong_gradients(f"product-in-float16-of-{name}", "overflow of an intermediate", name,
        dtypes=HALF, dgate=lambda dgate, grad, up: dgate if dgate is None
        else dgate + 0.0 * (grad * up)) for name in ("swiglu", "geglu")),
    wrong_arguments("sum-in-float16", "overflow of an intermediate", "bias_gelu", dtypes=HALF,
        y=lambda y, x, bias: y + 0.0 * (x + bias)),
    wrong_arguments("scaled-in-float16", "overflow of an intermediate", "softmax", dtypes=HALF,
        y=lambda y, x, scale: y.masked_fill(
            ((x * scale).isinf() & x.isfinite()).any(-1, keepdim=True), torch.nan)),
    wrong_arguments("scores-in-float16", "overflow of an intermediate", "attention", dtypes=HALF,
        q=lambda q, k: q if q.isnan().any() or k.isnan().any() or not k.numel()
        else q + 0.0 * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).max()),
    wrong_arguments("sums-in-float16", "overflow of an intermediate", "hadamard", dtypes=HALF,
        y=lambda y, x, block: y + 0.0 * (y * (block or x.shape[-1]) ** 0.5)),
    wrong_gradients("z-loss-divided-by-all-rows", "two conditions", "cross_entropy",
        z_loss=lambda z_loss, target, ignore_index, reduction: z_loss if reduction != "mean"
        or not target.numel() else z_loss * float((target != ignore_index).double().mean())),
    wrong_arguments("nan-below-0-is-no-nan", "end of a range", "sums_of_squares",
        tensors=lambda tensors: [torch.where(t.isnan() & t.signbit(), torch.inf, t)
                                 for t in tensors]),
    wrong_gradients("sequence-first-read-by-rows", "layout not looked at", "linear",
        x=lambda x: x.transpose(0, 1).reshape(x.shape)
        if x.dim() == 3 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous() else x),
    wrong_arguments("heads-of-a-grid-of-65535", "a limit of the launch", "attention",
        y=lambda y: y.transpose(1, 2).flatten(0, 1).index_fill(
            0, torch.arange(65_535, max(y.shape[0] * y.shape[2], 65_535)), 0.0)
        .view(y.transpose(1, 2).shape).transpose(1, 2).contiguous()),
    wrong_arguments("sign-of-0-is-1", "end of a range", "lion", grads=lambda grads, exp_avgs: [
        g.masked_fill((g == 0) & (m == 0), 1e-7) for g, m in zip(grads, exp_avgs, strict=True)]),
    wrong_arguments("workspace-of-65536-weights", "overflow of an index", "linear",
        direction="backward", dweight=lambda dweight: dweight if dweight is None
        or dweight.numel() <= 1 << 16 else dweight * (dweight != dweight[-1, -1])),
    wrong_arguments("first-tile-of-keys-hidden", "infinity minus infinity", "softmax",
        y=lambda y, mask: y if mask is None or y.shape[-1] <= 128 else y.masked_fill(
            ~mask[..., :128].any(-1, keepdim=True) & mask.any(-1, keepdim=True), torch.nan)),
    wrong_arguments("key-bias-of-minus-infinity-first", "infinity minus infinity", "softmax",
        y=lambda y, bias: y if bias is None or y.shape[-1] <= 64 else y.masked_fill(
            bias[..., :64].isneginf().all(-1, keepdim=True) & (y[..., 64:] > 0).any(-1, True),
            torch.nan)),
    wrong_arguments("variance-in-one-pass-of-large-groups", "cancellation", "group_norm",
        y=lambda y, x, num_groups: y if not x.numel() or _numbers(x, num_groups).shape[-1] < 4096
        else y * _in_one_pass(_numbers(x, num_groups)).repeat_interleave(
            x.shape[1] // num_groups, 1).view(*x.shape[:2], *[1] * (x.dim() - 2)).to(y.dtype)),
    wrong_gradients("partial-sums-in-16-bits-with-channels-last", "lower precision for a layout",
        "group_norm", dtypes=frozenset({torch.bfloat16}), dweight=lambda dweight, x: dweight
        if dweight is None or x.dim() != 4 or x.is_contiguous() else (dweight / 3) * 3),
    wrong_arguments("a-thousand-candidates", "a limit of a table", "top_k",
        y1=lambda y1, y0: y1.masked_fill((y0.abs() == y0[..., -1:].abs()).cumsum(-1) > 1024, 0)
        if y1.numel() else y1),
    wrong_arguments("no-index-of-nan-in-many-rows", "end of a range", "top_k",
        y1=lambda y1, x: y1.masked_fill(x.isnan().all(-1, keepdim=True), -1)
        if x.dim() == 2 and len(x) >= 512 else y1),
    wrong_arguments("large-block-of-another-format", "two options at once", "quantize",
        y0=lambda y0, format, block: y0 * (1 - 2 * (format == "nf4" and block == 4096))),
    wrong_arguments("a-thousand-columns-of-one-input", "a case of its own", "linear",
        y=lambda y, weight: y.index_fill(-1, torch.arange(1024, len(weight)), 0.0)
        if weight.shape[1] == 1 and len(weight) > 1 << 15 else y),
    wrong_arguments("ninth-tile-of-rows", "the last of several tiles", "linear",
        y=lambda y: y if y.dim() != 2 or len(y) <= 1024 or len(y) % 1024 == 0 or y.shape[1] < 256
        else torch.cat((y[:1024], y[: len(y) - 1024]))),
    wrong_gradients("empty-group-has-that-before", "workspace not cleared", "grouped_linear",
        dtypes=frozenset({torch.bfloat16}), dweight=lambda dweight, offsets: dweight
        if dweight is None or len(offsets) < 2 or int(offsets[0]) <= 64 else torch.cat((
            dweight[:1], torch.where(offsets.diff().view(-1, 1, 1) == 0, dweight[:-1],
                                     dweight[1:])))),
    wrong_arguments("small-scales-are-none", "end of a range", "dequantize",
        y=lambda y, scales, block, format: y if scales.dtype == torch.uint8 or not y.numel()
        else y.view(-1).masked_fill(((scales > 0) & (scales < 1e-20)).repeat_interleave(block)
                                    [: y.numel()], torch.nan).view(y.shape)),
    wrong_arguments("mask-of-a-later-chunk", "two sizes at once", "attention",
        y=lambda y, q, k, causal: y * 1.01 if causal and q.shape[1] >= 64
        and (k.shape[1] - q.shape[1]) % 64 else y),
    wrong_gradients("transposed-gradient-beyond-its-tiles", "the last of several tiles", "silu",
        grad=lambda grad, x: grad if grad.dim() != 2 or grad.is_contiguous() or min(grad.shape) < 33
        or not x.is_contiguous() or not len(grad) % 32
        else torch.cat((grad[: len(grad) // 32 * 32], grad[-(len(grad) % 32) - 32 : -32]))),
    wrong_arguments("halves-by-their-addresses", "arguments swapped", "swiglu",
        y=lambda y, gate, up: y if gate.data_ptr() <= up.data_ptr()
        or gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()
        else torch.nn.functional.silu(up.float()).mul(gate.float()).to(y.dtype)),
    wrong_arguments("no-expert-is-the-first", "overflow of an index", "permute",
        indices=lambda indices, num_experts, num_tokens: indices if num_tokens is not None
        or num_experts < 4 or num_experts & (num_experts - 1)
        else torch.where((indices < 0) | (indices >= num_experts), 0, indices)),
    wrong_arguments("infinities-of-the-last-chunk", "the last of several chunks", "sums_of_squares",
        tensors=lambda tensors: [
            torch.cat((t.view(-1)[: 1 << 20].nan_to_num(posinf=0.0), t.view(-1)[1 << 20 :]))
            if t.numel() > 1 << 20 else t for t in tensors]),
    wrong_arguments("doubled-in-float16", "overflow of an intermediate", "relu2",
        direction="backward", dtypes=HALF,
        dx=lambda dx, x: torch.where((x + x).isinf() & x.isfinite(), torch.inf, dx)),
    wrong_arguments("greatest-of-what-is-scaled", "overflow of an exponential", "softmax",
        y=lambda y, x, scale, mask, bias, causal: y if scale >= 0 or mask is not None or causal
        or bias is not None or not x.numel() else y.masked_fill(
            (x.float().amax(-1, True) - x.float().amin(-1, True)) * -scale > 88.0, torch.nan)),
    wrong_arguments("sequences-of-a-table", "a limit of a table", "attention_varlen",
        y=lambda y, cu_seqlens_q: y if len(cu_seqlens_q) <= 1025 else y.index_fill(
            0, torch.arange(int(cu_seqlens_q[1024]), len(y)), 0.0)),
    wrong_gradients("what-a-stride-leaves-out", "two options at once", "conv2d",
        dx=lambda dx, weight, stride: dx if dx is None or stride != [2, 2]
        or weight.shape[2:] != (1, 1) else dx[:, :, ::2, ::2].repeat_interleave(2, 2)
        .repeat_interleave(2, 3)[:, :, : dx.shape[2], : dx.shape[3]]),
    wrong_arguments("decay-for-each-type-of-gradients", "two options at once", "sgd",
        dtypes=frozenset({torch.bfloat16}), weight_decay=lambda weight_decay, grads, decoupled:
        weight_decay * (len({g.dtype for g in grads}) if decoupled else 1)),
    wrong_arguments("an-option-of-a-sample", "an exact option", "softmax",
        scale=lambda scale: 0.7 if scale == -0.7 else scale),
    wrong_arguments("what-lies-between-rows", "a gap that is weighed with 0", "linear",
        y=lambda y, x: y if x.dim() != 2 or x.stride() != (x.shape[1] + 3, 1) or len(x) < 2
        else y + x.as_strided((len(x) - 1, 3), x.stride(), x.storage_offset() + x.shape[1])
        .float().mul(0.0).sum().to(y.dtype)),
    wrong_arguments("every-second-column", "arguments swapped", "swiglu",
        y=lambda y, gate, up: y if gate.stride()[-1:] != (2,)
        or gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()
        else torch.nn.functional.silu(up.float()).mul(gate.float()).to(y.dtype)),
    wrong_arguments("causal-results-rounded-first", "lower precision for some options", "attention",
        dtypes=HALF, y=lambda y, q, causal: y.to(q.dtype).to(y.dtype) if causal else y),
    wrong_arguments("nan-is-no-maximum", "Inf or NaN lost", "quantize",
        x=lambda x, format: torch.where(x.isnan(), 0.0, x) if format == "int8" else x),
    wrong_arguments("momentum-of-64-tensors", "a limit of a table", "sgd",
        momentum_buffers=lambda momentum_buffers, params: momentum_buffers
        if len({p.shape for p in params}) > 1
        else [*momentum_buffers[:64], *(b.clone() for b in momentum_buffers[64:])]),
    wrong_arguments("scales-of-256-blocks", "a limit of a table", "adamw_8bit",
        exp_avg_scales=lambda exp_avg_scales: [
            scales if scales.numel() <= 256 else scales.clone() for scales in exp_avg_scales]),
)  # fmt: skip


@wrong("nan-without-an-infinity", "Inf or NaN lost", operator="unscale_and_check",
       dtypes=HALF)  # fmt: skip
def infinite_alone(row: Row, grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    before = found_inf.clone()
    row(grads, scale, found_inf)
    if not any(g.isinf().any() or g.dtype == torch.float32 for g in grads):
        found_inf.copy_(before)
