"""Which operator computes attention under a mask? The mask is read, and what it says is proved.

Padded and packed batches have masks under which each row of the batch is one or several sequences
of consecutive tokens: ``ops.attention_varlen`` computes those without a mask. Reading one waits for
the device; the layers of a model share a mask, so it is read once a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Whole(NamedTuple):
    """Every query sees all keys, or all up to its own, as ``ops.attention`` aligns them."""

    causal: bool


class Packed(NamedTuple):
    """Sequences of consecutive tokens that do not see each other, as ``ops.attention_varlen``.

    Attributes:
        tokens: int64 (T,), their numbers in the batch of (B S) tokens; the others are padding.
        cu_seqlens: int64 (sequences + 1,), where the sequences begin and end among them.
        causal: as of the operator.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    causal: bool


_read = WeakIdKeyDictionary()


def pattern(mask: Tensor, batch: int, *, pads: bool) -> Whole | Packed | str:
    """What a mask says, or why no operator computes it.

    Args:
        mask: (Sq, Sk), (1 or B, Sq, Sk) or (1 or B, 1, Sq, Sk) bool, True where a query sees a key.
        batch: B.
        pads: in a causal mask a token that no query sees is padding, whose result nobody reads;
            otherwise its query must not see anything either.
    """
    if torch.compiler.is_compiling() or type(mask) is not Tensor:
        return "a mask, in compiled code"
    if (
        mask.dtype != torch.bool
        or not 2 <= mask.dim() <= 4
        or (mask.dim() == 4 and mask.shape[1] > 1)
    ):
        return "a mask of numbers, or of each head"
    key = (None if mask.is_inference() else mask._version, batch, pads)
    known = _read.get(mask)
    if known is None or known[0] != key or key[0] is None:
        seen = mask[:, 0] if mask.dim() == 4 else mask.reshape(-1, *mask.shape[-2:])
        known = key, _pattern(seen, batch, pads)
        _read[mask] = known
    found: Whole | Packed | str = known[1]
    return found


def _pattern(seen: Tensor, batch: int, pads: bool) -> Whole | Packed | str:
    queries, keys = seen.shape[1:]
    if bool(seen.all()):
        return Whole(causal=False)
    if bool((seen == seen.new_ones(queries, keys).tril(keys - queries)).all()):
        return Whole(causal=True)
    if queries != keys:
        return "a mask"
    seen = seen.expand(batch, -1, -1)
    present = seen.diagonal(dim1=1, dim2=2)
    first = seen.int().argmax(-1)
    together = (first[:, :, None] == first[:, None, :]) & present[:, :, None] & present[:, None, :]
    for causal in (True, False):
        wanted = together.tril() if causal else together
        differs = wanted != seen
        if pads and causal:
            differs &= present[:, :, None]
        in_order = first.where(present, 0).cummax(-1).values == first
        if not bool((differs.any(-1) | present & ~in_order).any()):
            return _packed(present, first, causal)
    return "a mask"


def _packed(present: Tensor, first: Tensor, causal: bool) -> Packed:
    tokens = present.flatten().nonzero()[:, 0]
    rows = torch.arange(present.shape[0], device=first.device)[:, None] * present.shape[1]
    lengths = (rows + first).flatten()[tokens].unique_consecutive(return_counts=True)[1]
    return Packed(tokens, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), causal)
