"""Which operator computes attention under a mask? The mask is read, and what it says is proved.

Padded and packed batches have masks under which each row of the batch is one or several sequences
of consecutive tokens: ``ops.attention_varlen`` computes those without a mask. Reading one waits for
the device; the layers of a model share a mask, so it is read once a step.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Pattern(NamedTuple):
    """Which keys a query sees.

    Attributes:
        causal: all up to its own, as ``ops.attention`` aligns them; otherwise all.
        tokens: int64 (T,), numbers in the batch of (B S) tokens; the others are padding. None: all
            tokens, and each row of the batch is one sequence.
        cu_seqlens: int64 (sequences + 1,), where the sequences begin and end among the tokens.
    """

    causal: bool
    tokens: Tensor | None = None
    cu_seqlens: Tensor | None = None


_read = WeakIdKeyDictionary()


def pattern(mask: Tensor, shape: tuple[int, int, int], *, pads: bool) -> Pattern | str:
    """What a mask says, or why no operator computes it.

    Args:
        mask: bool, (Sq, Sk), (B, Sq, Sk) or (B, 1, Sq, Sk), True where a query sees a key.
        shape: (B, Sq, Sk), to which a mask is expanded.
        pads: in a causal mask a token that no query sees is padding, whose result nobody reads;
            otherwise its query must not see anything either.
    """
    if torch.compiler.is_compiling() or type(mask) is not Tensor:
        return "a mask, in compiled code"
    seen = mask[:, 0] if mask.dim() == 4 and mask.shape[1] == 1 else mask
    if seen.dtype != torch.bool or seen.dim() not in (2, 3):
        return "a mask of numbers, or of each head"
    if any(n not in (1, m) for n, m in zip(seen.shape[::-1], shape[::-1], strict=False)):
        return "a mask of another shape"
    key = (None if mask.is_inference() else mask._version, shape, pads)
    known = _read.get(mask)
    if known is None or known[0] != key or key[0] is None:
        known = _read[mask] = key, _pattern(seen.expand(shape), pads)
    found: Pattern | str = known[1]
    return found


def _pattern(seen: Tensor, pads: bool) -> Pattern | str:
    queries, keys = seen.shape[1:]
    everything = seen.new_ones(queries, keys)
    for causal in (False, True):
        if bool((seen == (everything.tril(keys - queries) if causal else everything)).all()):
            return Pattern(causal)
    if queries != keys:
        return "a mask"
    present, first = seen.diagonal(dim1=1, dim2=2), seen.int().argmax(-1)
    together = (first[:, :, None] == first[:, None, :]) & present[:, :, None] & present[:, None, :]
    in_order = first.where(present, 0).cummax(-1).values == first
    for causal in (True, False):
        differs = (together.tril() if causal else together) != seen
        if pads and causal:
            differs &= present[:, :, None]
        if not bool((differs.any(-1) | present & ~in_order).any()):
            tokens = present.flatten().nonzero()[:, 0]
            rows = torch.arange(len(first), device=first.device)[:, None] * queries
            lengths = (rows + first).flatten()[tokens].unique_consecutive(return_counts=True)[1]
            return Pattern(causal, tokens, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    return "a mask"
