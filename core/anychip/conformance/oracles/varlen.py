"""Oracle of attention_varlen: attention of each packed sequence alone. Layout (tokens, heads, dim).

Queries and keys have ends of their own. Rows from the last entry on are padding: exactly 0, with
the lse -inf.
"""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.oracles.attention import Mask, attend
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Ends = NDArray[np.int64]


def _hidden(shape: tuple[int, int], of_queries: Ends, of_keys: Ends, causal: bool) -> Mask:
    """All is hidden but a rectangle for each sequence; causal, what is below its last diagonal."""
    hidden = np.ones(shape, dtype=np.bool_)
    for (first, last), (start, end) in zip(
        itertools.pairwise(of_queries), itertools.pairwise(of_keys), strict=True
    ):
        queries, keys = int(last - first), int(end - start)
        seen = np.tri(queries, keys, keys - queries if causal else keys, dtype=np.bool_)
        hidden[first:last, start:end] = ~seen
    return hidden


def _unpadded(x: Rounded, cu_seqlens: Ends) -> Rounded:
    """(1, T, heads, dim), and what lies in the padding does not matter."""
    inside = (np.arange(x.shape[0]) < cu_seqlens[-1])[:, None, None]
    return x.shaped(lambda array: np.where(inside, array, 0.0))[None]


def _answer(
    q: Rounded, k: Rounded, v: Rounded, of_queries: Ends, of_keys: Ends, *, causal: bool,
    scale: float | None, **out_dtype: Any,
) -> Answer:  # fmt: skip
    hidden = _hidden((q.shape[0], k.shape[0]), of_queries, of_keys, causal)
    three = (_unpadded(q, of_queries), _unpadded(k, of_keys), _unpadded(v, of_keys))
    (y, lse), of_whole = attend(*three, hidden, scale, **out_dtype)

    def backward(grad: Rounded) -> Gradients:
        found = of_whole(_unpadded(grad, of_queries))
        return tuple(gradient[0] for gradient in found if gradient is not None)

    return (y[0], lse[0]), backward


ATTENTION_VARLEN = differentiable(_answer)
