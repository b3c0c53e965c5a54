"""The operators, as functions: ``from anychip import ops; y = ops.rms_norm(x, weight)``.

One typed function per operator. Shapes, dtypes and equations are in the docstrings and, in full, in
``anychip.operators``. Each function also has ``explain(...)``, which says for a call which
implementation would serve it, and ``spec``.

float tensors are float32, bfloat16 or float16; sums are float32. Outputs are fresh, contiguous, and
have the dtype of the first argument unless said otherwise. Shapes that do not fit raise ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from anychip import operators, runtime
from anychip.dispatch.operator import operator

runtime.connect()


@operator(operators.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Root-mean-square norm over the last dim: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: (..., H) float.
        weight: (H,) float, x's dtype or float32.
        eps: added to the mean square.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    raise NotImplementedError


@operator(operators.layer_norm)
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Layer norm over the last dim: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Args:
        x: (..., H) float.
        weight, bias: (H,) float, x's dtype or float32.
        eps: added to the (biased) variance.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    raise NotImplementedError


@operator(operators.dropout)
def dropout(x: Tensor, rng: Tensor, *, p: float = 0.5) -> Tensor:
    """Zeroes each element with probability p and scales the others by 1 / (1 - p).

    The mask is a function of ``rng`` and the element's index alone: word ``i % 4`` of the
    Philox4x32-10 block at counter ``offset + i // 4``. The same on every chip.

    Args:
        x: float, any shape.
        rng: int64[2] (seed, offset). The call uses ``ceil(numel / 4)`` counters from offset on.
        p: from 0 to 1.
    """
    raise NotImplementedError


@operator(operators.gelu)
def gelu(x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Gaussian error linear unit, exact or with the tanh approximation.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    raise NotImplementedError


@operator(operators.swiglu)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``gate * sigmoid(gate) * up``, both of one shape.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    raise NotImplementedError


@operator(operators.rope)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their position.

    Args:
        q: (B, S, H, D) float, D even.
        k: (B, S, Hk, D).
        cos, sin: (S, D/2) float32.
        interleaved: pairs are (0, 1), (2, 3) ...; otherwise (0, D/2), (1, D/2 + 1) ...

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    raise NotImplementedError


@operator(operators.attention)
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Scaled dot-product attention, grouped when k and v have fewer heads than q.

    Args:
        q: (B, S, H, D) float.
        k, v: (B, S, Hk, D), H a multiple of Hk; query head h reads key head ``h // (H / Hk)``.
        causal: position i sees positions up to i.
        scale: of the scores; 1 / sqrt(D) when None.

    Source: Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245.
    """
    raise NotImplementedError


@operator(operators.linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for x (..., K), weight (N, K), bias (N,), all of one dtype."""
    raise NotImplementedError


@operator(operators.embedding)
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """``weight[indices]`` for int64 indices of any shape and weight (V, H).

    An index outside 0 to V - 1 is an IndexError on a host; on a device it is not looked for.
    """
    raise NotImplementedError


@operator(operators.cross_entropy)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Cross entropy of logits (..., V) with class indices target (...), in float32.

    Args:
        ignore_index: rows with this target count for nothing.
        label_smoothing: share of the target that is spread over all classes.
        z_loss: factor of log(sum exp logits)^2 per row.
        reduction: over rows that are not ignored; a mean over none is NaN.

    Returns:
        float32, 0-dim, or the shape of target for ``none``.
    """
    raise NotImplementedError


@operator(operators.l2_norm)
def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all entries of all tensors: 0-dim float32. Not differentiable."""
    raise NotImplementedError


@operator(operators.clip)
def clip(tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float = 1.0) -> None:
    """Scales the tensors in place by ``min(1, max_norm / (norm + 1e-6))``; norm 0-dim float32."""
    raise NotImplementedError


@operator(operators.unscale_and_check)
def unscale_and_check(grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    """Divides gradients in place by ``scale``; sets ``found_inf`` to 1 if one is not finite.

    Args:
        scale, found_inf: 0-dim float32. found_inf is never set back to 0.
    """
    raise NotImplementedError


@operator(operators.adamw)
def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    low_precision: Sequence[Tensor] | None = None,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """One AdamW step over lists of tensors, in place and in one pass.

    Args:
        params: float, written. grads: float. exp_avgs, exp_avg_sqs: float32, written.
        lr: 0-dim float32.
        step: 0-dim float32, updates done so far; written, plus one.
        scale: 0-dim float32 loss scale; gradients are divided by it.
        clip: 0-dim float32 coefficient; gradients are multiplied by it.
        found_inf: 0-dim float32; when it is not 0, nothing is written, step included.
        low_precision: written with the new params in their own dtype.

    Raises:
        OverlapError: two arguments share memory. Nothing was written.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    raise NotImplementedError


__all__ = [
    "adamw",
    "attention",
    "clip",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "l2_norm",
    "layer_norm",
    "linear",
    "rms_norm",
    "rope",
    "swiglu",
    "unscale_and_check",
]
