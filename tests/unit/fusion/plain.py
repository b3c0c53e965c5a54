"""Two decoders as people write them in plain torch: modules of torch, and attention by torch.

Their parameters are named like those of ``tests.unit.train.plain_decoders``, which knows the loss.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 61, 24, 32, 2, 4


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, HEADS, width // HEADS)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.c_attn(x).split(width, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), CausalAttention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2: layer norm, GELU, learned positions, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList(GPTBlock() for _ in range(LAYERS)), "ln_f": nn.LayerNorm(WIDTH),
            },
        )  # fmt: skip
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return self.loss(logits.flatten(0, 1), targets.flatten())


KV_HEADS, INNER = 2, 56


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale_of_one = 1.0  # a float that is not eps
        self.norm_eps = 1e-6
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps) * self.weight


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.double().cos().to(x.dtype), angle.double().sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class GroupedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        inner = WIDTH // HEADS * KV_HEADS
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, inner, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (t.view(batch, length, -1, width // HEADS).transpose(1, 2) for t in projected)
        y = functional.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, width))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(), GroupedAttention()
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(WIDTH, eps=1e-6), GatedMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Llama: RMS norm, rotary positions, SwiGLU, grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCABULARY, WIDTH),
                "layers": nn.ModuleList(LlamaBlock() for _ in range(LAYERS)),
                "norm": RMSNorm(),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            x = layer(x)
        logits = self.lm_head(self.model["norm"](x))
        return self.loss(logits.flatten(0, 1), targets.flatten())
