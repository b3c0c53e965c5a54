"""Our decoders in plain torch: the same modules, with torch's functions where ours call anychip's.

What a user writes without anychip, at torch's best: scaled_dot_product_attention on views, fused
layer_norm and rms_norm, cross_entropy over all rows at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from anychip.train.models import GPT, GPTConfig, Llama, LlamaConfig

CONFIGS = {"gpt": (GPT, GPTConfig), "llama": (Llama, LlamaConfig)}
_MODULES = ("decoder", "gpt", "layers", "llama")


class TorchFunctions:
    """What our decoders call of ``anychip.ops``, with the same signatures."""

    linear = staticmethod(functional.linear)
    embedding = staticmethod(functional.embedding)
    gelu = staticmethod(functional.gelu)

    @staticmethod
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def add_layer_norm(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        y = functional.layer_norm(total, weight.shape, weight, bias, eps)
        return y.to(x.dtype), total  # under autocast cast once, for all products

    @staticmethod
    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.rms_norm(total, weight.shape, weight, eps).to(x.dtype), total

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    @staticmethod
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.cat((table, table), dim=-1)[:, None] for table in (cos, sin))
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        found = functional.scaled_dot_product_attention(
            *heads, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
        )
        return found.transpose(1, 2)

    @staticmethod
    def cross_entropy(logits: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
        return functional.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), reduction=reduction
        )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers writes it: (B, S, H, D) by the tables (S, 1, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@contextmanager
def plain() -> Iterator[None]:
    """Within it our decoders, made before or not, call torch's functions."""
    modules = [sys.modules[f"anychip.train.models.{name}"] for name in _MODULES]
    kept = [module.__dict__["ops"] for module in modules]
    try:
        for module in modules:
            module.__dict__["ops"] = TorchFunctions
        yield
    finally:
        for module, ours in zip(modules, kept, strict=True):
            module.__dict__["ops"] = ours
