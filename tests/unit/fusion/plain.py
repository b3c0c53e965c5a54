"""Two decoders as people write them in plain torch: modules of torch, and attention by torch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.unit.fusion import modules

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS, KV_HEADS = 61, 24, 32, 2, 4, 2


class RMSNorm(modules.RMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        mean = hidden.square().mean(-1, keepdim=True)
        return hidden * torch.rsqrt(mean + self.variance_epsilon) * self.weight


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.double().cos().to(x.dtype), angle.double().sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class CausalAttention(nn.Module):
    def __init__(self, kv_heads: int, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.widths, self.turn = [WIDTH, *[WIDTH // HEADS * kv_heads] * 2], turn
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.widths)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).split(self.widths, dim=-1)
        q, k, v = (t.view(*t.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for t in split)
        y = functional.scaled_dot_product_attention(
            self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=k.shape != q.shape
        )
        return self.out(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 56, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(56, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, norms: list[nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norms, self.attention, self.mlp = nn.ModuleList(norms), attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """A head that is tied to the embedding, and positions that are learned or none."""

    def __init__(self, blocks: list[nn.Module], norm: nn.Module, *, learned: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH) if learned else None
        self.blocks, self.norm = nn.Sequential(*blocks), norm
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return self.loss(logits.flatten(0, 1), targets.flatten())


def gpt() -> Decoder:
    """GPT-2: layer norm, GELU, learned positions."""

    def block() -> Block:
        layers = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))
        norms: list[nn.Module] = [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]
        return Block(norms, CausalAttention(HEADS, torch.positive), nn.Sequential(*layers))

    return Decoder([block() for _ in range(LAYERS)], nn.LayerNorm(WIDTH), learned=True)


def llama() -> Decoder:
    """Llama: RMS norm, rotary positions, SwiGLU, grouped queries."""

    def block() -> Block:
        norms = [RMSNorm(WIDTH, 1e-6), nn.RMSNorm(WIDTH, eps=1e-6)]
        return Block(norms, CausalAttention(KV_HEADS, rotate), GatedMLP())

    return Decoder([block() for _ in range(LAYERS)], RMSNorm(WIDTH), learned=False)
