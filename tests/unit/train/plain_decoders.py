"""The two decoders written in plain torch, as an independent reference for ours.

Functions of a state dict, so that the same weights serve both and a wrong parameter name fails.
"""

import torch
from torch import Tensor
from torch.nn import functional

State = dict[str, Tensor]


def gpt_loss(state: State, heads: int, layers: int, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of a GPT-2 style decoder."""
    x = state["transformer.wte.weight"][tokens]
    x = x + state["transformer.wpe.weight"][: tokens.shape[1]]
    for layer in range(layers):
        p = f"transformer.h.{layer}"
        x = x + _gpt_attention(state, f"{p}.attn", _layer_norm(state, f"{p}.ln_1", x), heads)
        inner = _linear(state, f"{p}.mlp.c_fc", _layer_norm(state, f"{p}.ln_2", x))
        inner = functional.gelu(inner, approximate="tanh")
        x = x + _linear(state, f"{p}.mlp.c_proj", inner)
    logits = _layer_norm(state, "transformer.ln_f", x) @ state["lm_head.weight"].T
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _gpt_attention(state: State, name: str, x: Tensor, heads: int) -> Tensor:
    batch, length, width = x.shape
    packed = _linear(state, f"{name}.c_attn", x).view(batch, length, 3, heads, width // heads)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    y = _softmax_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
    return _linear(state, f"{name}.c_proj", y)


def llama_loss(
    state: State,
    heads: int,
    kv_heads: int,
    layers: int,
    tokens: Tensor,
    targets: Tensor,
    base: float = 10000.0,
) -> Tensor:
    """Mean loss of a Llama style decoder."""
    x = state["model.embed_tokens.weight"][tokens]
    for layer in range(layers):
        p = f"model.layers.{layer}"
        normed = _rms_norm(state, f"{p}.input_layernorm", x)
        x = x + _llama_attention(state, f"{p}.self_attn", normed, heads, kv_heads, base)
        normed = _rms_norm(state, f"{p}.post_attention_layernorm", x)
        gate = functional.silu(_linear(state, f"{p}.mlp.gate_proj", normed))
        up = _linear(state, f"{p}.mlp.up_proj", normed)
        x = x + _linear(state, f"{p}.mlp.down_proj", gate * up)
    logits = _rms_norm(state, "model.norm", x) @ state["lm_head.weight"].T
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _llama_attention(
    state: State, name: str, x: Tensor, heads: int, kv_heads: int, base: float
) -> Tensor:
    batch, length, width = x.shape
    dim = width // heads
    q = _linear(state, f"{name}.q_proj", x).view(batch, length, heads, dim).transpose(1, 2)
    k = _linear(state, f"{name}.k_proj", x).view(batch, length, kv_heads, dim).transpose(1, 2)
    v = _linear(state, f"{name}.v_proj", x).view(batch, length, kv_heads, dim).transpose(1, 2)
    q, k = _rotate(q, base), _rotate(k, base)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    y = _softmax_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
    return _linear(state, f"{name}.o_proj", y)


def _rotate(x: Tensor, base: float) -> Tensor:
    """Each pair (x[i], x[i + D/2]) as a complex number, times exp(i position base^(-2i/D))."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * base ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    real, imaginary = x[..., :half], x[..., half:]
    return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


def _linear(state: State, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def _layer_norm(state: State, name: str, x: Tensor) -> Tensor:
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def _rms_norm(state: State, name: str, x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), state[f"{name}.weight"], 1e-6)
