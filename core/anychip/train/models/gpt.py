"""A GPT-2 style decoder: layer norm, learned positions, tanh GELU, tied head.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3. Parameter
names are those in wide use for it (``transformer.h.0.attn.c_attn.weight``).
Shapes: B batch, S sequence, D width, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.train.models.decoder import Decoder, Parts, Past
from anychip.train.models.layers import Dropout, Embedding, LayerNorm, Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Sizes of a :class:`GPT`.

    Attributes:
        vocab_size: tokens that there are; 256 for bytes.
        context: tokens of the longest sequence.
        layers: blocks of attention and MLP.
        heads: of attention, which share the width.
        width: of a token's vector.
        dropout: the part of activations that is left out in training.
    """

    vocab_size: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got width {self.width} and heads {self.heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")


class Attention(nn.Module):
    """Causal self-attention with one projection for q, k and v."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.c_attn = Linear(config.width, 3 * config.width)
        self.c_proj = Linear(config.width, config.width)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, past: Past | None = None) -> Tensor:
        batch, length, width = x_BSD.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.reshape(shape) for part in self.c_attn(x_BSD).chunk(3, dim=-1))
        if past is not None:
            k, v = past.joined(self, k, v)
        y = ops.attention(q, k, v, causal=True).reshape(batch, length, width)
        return self.dropout(self.c_proj(y))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers with GELU between, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.width, 4 * config.width)
        self.c_proj = Linear(4 * config.width, config.width)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        inner = ops.gelu(self.c_fc(x), approximate="tanh")
        return self.dropout(self.c_proj(inner))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then MLP, each on the normed input and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        inner, x = self.ln_2(self.attn(self.ln_1(x), past), x)
        return x + self.mlp(inner)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """The parameters of everything below the head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.width)
        self.wpe = Embedding(config.context, config.width)
        self.drop = Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = LayerNorm(config.width)


class GPT(Decoder):
    """The decoder."""

    parts = Parts(
        below=("transformer.wte", "transformer.wpe", "transformer.drop"),
        blocks="transformer.h",
        above=("transformer.ln_f", "lm_head"),
    )

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = Linear(config.width, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.apply(_init)
        # Section 2.3: layers that write to the residual stream start smaller by 1 / sqrt(2 layers).
        for name, param in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * config.layers))

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first block is given: tokens (B, S) as vectors (B, S, D), with positions."""
        end = self.end_of(tokens)
        below = self.transformer
        x = below.wte(tokens) + below.wpe(torch.arange(self.read, end, device=tokens.device))
        return below.drop(x)  # type: ignore[no-any-return]

    def run_block(self, block: nn.Module, x_BSD: Tensor) -> Tensor:
        """One of the blocks, with what came before."""
        return block(x_BSD, self.past)  # type: ignore[no-any-return]

    def logits(self, x_BSD: Tensor) -> Tensor:
        """The head's, of the normed vectors."""
        return self.lm_head(self.transformer.ln_f(x_BSD))  # type: ignore[no-any-return]


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        bias = getattr(module, "bias", None)
        if bias is not None:
            nn.init.zeros_(bias)
