"""Attention and what belongs to it: rotary positions, softmax.

Over keys that lie in blocks, on several ranks perhaps, attention is joined by lse, the logarithm of
the sum of exponentials that :meth:`forward` gives beside y (Dao et al. 2022, section 3.1; Liu et
al. 2023, arXiv:2310.01889)::

    parts = [ops.attention.forward(q, k, v, out_dtype=torch.float32) for k, v in blocks]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    y = sum((part_lse - lse).exp().transpose(1, 2)[..., None] * y for y, part_lse in parts)

and each block's gradients come of the y and lse of all keys, those of q to be added up::

    dq, dk, dv = ops.attention.backward(grad, q, k, v, y, lse, out_dtype=torch.float32)

So it is over packed sequences, whose blocks have ends of their own: ``cu_seqlens_k``. A block that
has no key of a sequence gives its queries y = 0 and lse = -inf, which weighs nothing. Queries that
see no key in any block have the lse -inf here too, and a weight that is not a number: it is 0.
"""

import torch
from torch import Tensor

from anychip import operators
from anychip.dispatch.operator import operator


@operator(operators.rope)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their position.

    Args:
        q: (B, S, H, D) float, D even.
        k: (B, S, Hk, D).
        cos, sin: (S, R/2) float32, of the positions of this call; R is at most D. The dims from R
            on are not rotated.
        interleaved: pairs are (0, 1), (2, 3) ...; otherwise (0, R/2), (1, R/2 + 1) ...

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    raise NotImplementedError


@operator(operators.softmax)
def softmax(
    x: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
) -> Tensor:
    """Softmax over the last dim of ``x * scale + bias``, over the keys that are visible.

    A hidden key has the weight 0. A row in which every key is hidden is all zeros, not NaN, and so
    is its gradient; a score of -inf hides like the mask.

    Args:
        x: (..., K) float, or (..., S, K) when causal.
        mask: bool, broadcastable to x; True is visible, as in torch's attention.
        bias: float, broadcastable to x, added to the scores: an additive mask or position bias.
            Its gradient is summed over the dims along which it is broadcast.
        scale: multiplies x, before the bias is added.
        causal: query i of S sees keys up to ``i + (K - S)``: the last query sees all keys.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
    """
    raise NotImplementedError


@operator(operators.attention)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Scaled dot-product attention, grouped when k and v have fewer heads than q.

    Args:
        q: (B, Sq, H, D) float.
        k, v: (B, Sk, Hk, D), H a multiple of Hk; query head h reads key head ``h // (H / Hk)``.
        causal: query i sees keys up to ``i + Sk - Sq``: the last query sees all. A query that sees
            none has the output 0.
        scale: of the scores; 1 / sqrt(D) when None.
        out_dtype: of the result: q's own, which None stands for, or float32, to which it is rounded
            once, as for blocks of keys that are yet to be joined. Its gradient has that dtype too.

    Source: Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245.
    """
    raise NotImplementedError


@operator(operators.attention_dropout)
def attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, rng: Tensor, batch_index: Tensor | None = None,
    head_index: Tensor | None = None, query_index: Tensor | None = None,
    key_index: Tensor | None = None, *, p: float = 0.5, causal: bool = False,
    scale: float | None = None, heads: int = 0, queries: int = 0, keys: int = 0,
) -> Tensor:  # fmt: skip
    """Attention whose normalised weights go through dropout before they meet the values.

    The mask is that of :func:`dropout` over a contiguous (B, H, Sq, Sk) tensor of weights, hidden
    ones included, so that it is the same on every chip. Of a part of a whole attention, such as
    some heads or a block of keys, the indices say where it lies; a dim without one is whole.

    Args:
        q, k, v, causal, scale: as in :func:`attention`.
        rng: int64[2] (seed, offset). Uses ``ceil(B H Sq Sk / 4)`` counters from offset on, of the
            whole.
        batch_index, head_index, query_index, key_index: int64, the position in the whole of each
            batch, head of q, query and key. They are not looked at: positions beyond the whole draw
            the words that the formula gives, the same everywhere.
        p: from 0 to 1. At 0 this is :func:`attention`.
        heads, queries, keys: the sizes of the whole, each with its index; 0 without.

    Source: Vaswani et al. 2017, section 5.4; Dao et al. 2022, arXiv:2205.14135, algorithm 2.
    """
    raise NotImplementedError


@operator(operators.attention_varlen)
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    causal: bool = False, scale: float | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Attention within each of several sequences that are packed one after the other.

    Args:
        q: (Tq, H, D) float.
        k, v: (Tk, Hk, D), H a multiple of Hk.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int64 or int32, 0 and then the end of each
            sequence among the rows of q, and of k and v. Rows from the last entry on are padding:
            queries whose output is 0, keys that nothing sees.
        causal: query i of the Sq of a sequence sees its keys up to ``i + Sk - Sq``: the last query
            sees all. A query that sees none, as all of a sequence that has no key, has the output 0
            and the lse -inf.
        scale, out_dtype: as in :func:`attention`.

    Raises:
        ValueError: on a host, entries that are not sorted or not within 0 to Tq, or Tk.

    Source: packing: Dao 2023, arXiv:2307.08691.
    """
    raise NotImplementedError
