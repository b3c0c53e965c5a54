"""The two decoders in plain torch, on the parameters of ours: what torch itself makes of them.

Written as its users write them: SDPA for attention, one product for packed projections, and
``torch.nn.functional`` for the rest, so that torch.compile sees all of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from anychip.train.models import GPTConfig, LlamaConfig

Params = Mapping[str, Tensor]


def gpt_loss(params: Params, config: GPTConfig, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of the GPT-2 style decoder."""
    embedding = params["transformer.wte.weight"]
    x = embedding[tokens] + params["transformer.wpe.weight"][: tokens.shape[1]]
    batch, length, width = x.shape
    shape = (batch, length, 3, config.heads, width // config.heads)
    for layer in range(config.layers):
        p = f"transformer.h.{layer}"
        packed = _linear(params, f"{p}.attn.c_attn", _layer_norm(params, f"{p}.ln_1", x))
        q, k, v = packed.view(shape).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + _linear(params, f"{p}.attn.c_proj", y.transpose(1, 2).reshape(x.shape))
        inner = _linear(params, f"{p}.mlp.c_fc", _layer_norm(params, f"{p}.ln_2", x))
        x = x + _linear(params, f"{p}.mlp.c_proj", functional.gelu(inner, approximate="tanh"))
    logits = functional.linear(_layer_norm(params, "transformer.ln_f", x), embedding)
    return _mean_loss(logits, targets)


def llama_loss(params: Params, config: LlamaConfig, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of the Llama style decoder."""
    x = params["model.embed_tokens.weight"][tokens]
    batch, length, width = x.shape
    dim = width // config.heads
    cos, sin = _angles(length, dim, config.rope_base, x)
    for layer in range(config.layers):
        p = f"model.layers.{layer}"
        normed = _rms_norm(params, f"{p}.input_layernorm", x, config.norm_eps)
        q, k, v = (
            _linear(params, f"{p}.self_attn.{name}_proj", normed)
            .view(batch, length, -1, dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + _linear(params, f"{p}.self_attn.o_proj", y.transpose(1, 2).reshape(x.shape))
        normed = _rms_norm(params, f"{p}.post_attention_layernorm", x, config.norm_eps)
        gate = functional.silu(_linear(params, f"{p}.mlp.gate_proj", normed))
        inner = gate * _linear(params, f"{p}.mlp.up_proj", normed)
        x = x + _linear(params, f"{p}.mlp.down_proj", inner)
    logits = _linear(params, "lm_head", _rms_norm(params, "model.norm", x, config.norm_eps))
    return _mean_loss(logits, targets)


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.flatten(0, 1).to(_at_least_float32(logits))
    return functional.cross_entropy(wide, targets.flatten())


def _linear(params: Params, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))


def _layer_norm(params: Params, name: str, x: Tensor) -> Tensor:
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def _rms_norm(params: Params, name: str, x: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), params[f"{name}.weight"], eps)


def _angles(length: int, dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    device, dtype = like.device, _at_least_float32(like)
    rates = base ** -(torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)
    angle = torch.arange(length, device=device, dtype=dtype)[:, None] * rates
    return angle.cos(), angle.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)
