"""A Llama style decoder: RMS norm, rotary positions, SwiGLU, grouped-query attention, no biases.

Touvron et al. 2023, arXiv:2302.13971 (section 2.2) and arXiv:2307.09288 (GQA). Parameter names are
those in wide use for it (``model.layers.0.self_attn.q_proj.weight``).
Shapes: B batch, S sequence, D width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.train.models.decoder import Decoder, Parts, Past
from anychip.train.models.layers import Embedding, Linear, RMSNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Sizes of a :class:`Llama`.

    Attributes:
        vocab_size: tokens that there are; 256 for bytes.
        context: tokens of the longest sequence.
        layers: blocks of attention and MLP.
        heads: of queries, which share the width.
        kv_heads: of keys and values, each for as many heads of queries.
        width: of a token's vector.
        hidden: width inside the MLP; None: 8/3 of the width, rounded up to a multiple of 32.
        rope_base: of the rotary angles, ``base^(-2i / head_dim)``.
        norm_eps: of every RMS norm.
    """

    vocab_size: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    width: int = 128
    hidden: int | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "kv_heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"width must be an even multiple of heads, got width {self.width} and heads "
                f"{self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got heads {self.heads} and kv_heads "
                f"{self.kv_heads}"
            )

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP."""
        return self.hidden or -(-self.width * 8 // 3 // 32) * 32


class Attention(nn.Module):
    """Causal self-attention with rotary positions; groups of query heads share a key head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        kv_width = config.kv_heads * self.head_dim
        self.q_proj = Linear(config.width, config.width, bias=False)
        self.k_proj = Linear(config.width, kv_width, bias=False)
        self.v_proj = Linear(config.width, kv_width, bias=False)
        self.o_proj = Linear(config.width, config.width, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, past: Past | None = None) -> Tensor:
        shape = (*x_BSD.shape[:2], -1, self.head_dim)
        q, k, v = (p(x_BSD).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = ops.rope(q, k, cos, sin)
        if past is not None:
            k, v = past.joined(self, k, v)
        y = ops.attention(q, k, v, causal=True)
        return self.o_proj(y.reshape(x_BSD.shape))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """``down(swiglu(gate(x), up(x)))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = ops.swiglu(self.gate_proj(x), self.up_proj(x))
        return self.down_proj(inner)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then MLP, each on the normed input and added to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | None = None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, past)
        inner, x = self.post_attention_layernorm(attended, x)
        return x + self.mlp(inner)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """The parameters of everything below the head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps)


class Llama(Decoder):
    """The decoder."""

    parts = Parts(
        below=("model.embed_tokens",), blocks="model.layers", above=("model.norm", "lm_head")
    )

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Transformer(config)
        self.lm_head = Linear(config.width, config.vocab_size, bias=False)
        # No buffers: model.bfloat16() would round the angles' cosines, which stay float32.
        self._rotary = rotary_table(config.context, config.width // config.heads, config.rope_base)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first block is given: tokens (B, S) as vectors (B, S, D)."""
        self.end_of(tokens)
        return self.model.embed_tokens(tokens)  # type: ignore[no-any-return]

    def run_block(self, block: nn.Module, x_BSD: Tensor) -> Tensor:
        """One of the blocks, with the positions' angles."""
        if self._rotary[0].device != x_BSD.device:
            self._rotary = (self._rotary[0].to(x_BSD.device), self._rotary[1].to(x_BSD.device))
        cos, sin = (table[self.read :][: x_BSD.shape[1]] for table in self._rotary)
        return block(x_BSD, cos, sin, self.past)  # type: ignore[no-any-return]

    def logits(self, x_BSD: Tensor) -> Tensor:
        """The head's, of the normed vectors."""
        return self.lm_head(self.model.norm(x_BSD))  # type: ignore[no-any-return]


def rotary_table(length: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``position * base^(-2i / head_dim)``, each (length, head_dim / 2)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle = torch.arange(length, dtype=torch.float64)[:, None] * base**-exponent
    return angle.cos().float(), angle.sin().float()
