"""An attention as the files of transformers have it: a global rope function, and tables from afar.

``attention_of`` makes its class for a rope function, in a file's globals of their own.
"""

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_numbers = itertools.count()
HEADS, KV_HEADS, SIZE = 4, 2, 8
WIDTH = HEADS * SIZE


def halved(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def paired(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def apply_rotary(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, ...]:
    """Llama's: tables in two halves."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + halved(q) * sin, k * cos + halved(k) * sin


def apply_rotary_paired(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    """Cohere's: tables in pairs, products in float32."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = (t.float() * cos + paired(t.float()) * sin for t in (q, k))
    return tuple(y.to(t.dtype) for y, t in zip(turned, (q, k), strict=True))


def apply_rotary_glm(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    """GLM's: tables in two halves for pairs, and the rest of a head stays."""
    width = cos.shape[-1]
    cos, sin = (t.unsqueeze(1)[..., : width // 2].repeat_interleave(2, -1) for t in (cos, sin))
    turned = (t[..., :width] * cos + paired(t[..., :width]) * sin for t in (q, k))
    return tuple(torch.cat((y, t[..., width:]), -1) for y, t in zip(turned, (q, k), strict=True))


def apply_rotary_narrow(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    """GPT-OSS's: every angle once."""
    cos, sin = (torch.cat((t, t), dim=-1) for t in (cos, sin))
    return apply_rotary(q, k, cos, sin)


def backwards(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    return apply_rotary(q, k, cos, -sin)


def swapped(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    return apply_rotary(q, k, sin, cos)


def queries_only(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    return apply_rotary(q, k, cos, sin)[0], k


def permuted(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    """DeepSeek's: turns pairs, and leaves them in two halves."""
    q, k = (torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1) for t in (q, k))
    return apply_rotary(q, k, cos, sin)


def detached(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    y, z = apply_rotary(q, k, cos, sin)
    return y, z.detach() + 0 * k


def last_heads(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    """Turns the last dims of longer heads, where the operator turns the first ones."""
    rest = q.shape[-1] - cos.shape[-1]
    y, z = apply_rotary(q[..., rest:], k[..., rest:], cos, sin)
    return torch.cat((q[..., :rest], y), -1), torch.cat((k[..., :rest], z), -1)


def widened(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    """Makes float32 of everything."""
    return apply_rotary(q.float(), k.float(), cos, sin)


def scaled_by_first(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    """Right for a batch of one table, wrong for one of many."""
    return apply_rotary(q, k, cos[:1], sin[:1])


class Tables(nn.Module):
    """cos and sin of positions: (1 or B, S, SIZE) float32."""

    rate: Tensor

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.register_buffer("rate", 100.0 ** (-torch.arange(size // 2) * 2 / size))

    def angles(self, position_ids: Tensor) -> Tensor:
        return position_ids[..., None].float() * self.rate

    def widen(self, angles: Tensor) -> Tensor:
        return torch.cat((angles, angles), dim=-1)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        wide = self.widen(self.angles(position_ids))
        return wide.cos().to(x.dtype), wide.sin().to(x.dtype)


class PairedTables(Tables):
    def widen(self, angles: Tensor) -> Tensor:
        return angles.repeat_interleave(2, dim=-1)


class NarrowTables(Tables):
    def widen(self, angles: Tensor) -> Tensor:
        return angles


class UnevenTables(Tables):
    """Angles of another kind in the second half, as for images."""

    def widen(self, angles: Tensor) -> Tensor:
        return torch.cat((angles, 2 * angles), dim=-1)


rope: Callable[..., Any] = apply_rotary


class _Attention(nn.Module):
    """Turned queries and keys, so that their gradients can be compared."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.size = size

    def forward(
        self, q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        cos, sin = position_embeddings
        return rope(q, k, cos, sin)


def stretched(self: Any, q: Any, k: Any, position_embeddings: Any) -> tuple[Any, ...]:
    """A forward that changes the second half of its cos."""
    cos, sin = position_embeddings
    cos = torch.cat((cos[..., :4], 2 * cos[..., 4:]), dim=-1)
    return rope(q, k, cos, sin)


def written_into(self: Any, q: Any, k: Any, position_embeddings: Any) -> tuple[Any, ...]:
    cos, sin = position_embeddings
    cos[..., 4:] *= 2
    return rope(q, k, cos, sin)


def exchanged(self: Any, q: Any, k: Any, position_embeddings: Any) -> tuple[Any, ...]:
    cos, sin = position_embeddings
    return rope(q, k, sin, cos)


def once_more(self: Any, q: Any, k: Any, position_embeddings: Any) -> tuple[Any, ...]:
    """A second call with tables of its own."""
    cos, sin = position_embeddings
    q, k = rope(q, k, cos, sin)
    return rope(q, k, q[:, 0], k[:, 0])


FORWARDS = (stretched, written_into, exchanged, once_more)


def attention_of(
    function: Callable[..., Any], own: Callable[..., Any] = _Attention.forward
) -> type[nn.Module]:
    """The class of an attention in whose file ``rope`` is this function."""
    file = types.ModuleType(f"{__name__}_{next(_numbers)}")
    vars(file).update(rope=function, torch=torch, __builtins__=__builtins__)
    sys.modules[file.__name__] = file  # a compiler looks a function's globals up there
    assert isinstance(own, types.FunctionType)
    forward = types.FunctionType(own.__code__, vars(file), own.__name__)
    return type("FileAttention", (_Attention,), {"forward": forward, "__module__": file.__name__})


class Model(nn.Module):
    """Tables, and an attention that is given them."""

    def __init__(
        self, function: Callable[..., Any] = apply_rotary,
        tables: Callable[[int], nn.Module] = Tables, width: int = SIZE,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention = attention_of(function)()
        self.tables = tables(width)

    def forward(self, q: Tensor, k: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(q, k, position_embeddings=self.tables(q, position_ids))
