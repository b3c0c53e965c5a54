"""Tokens to the experts of a mixture, and back."""

from torch import Tensor

from anychip import operators
from anychip.dispatch.operator import operator


@operator(operators.permute)
def permute(
    x: Tensor,
    indices: Tensor,
    key: Tensor | None = None,
    num_tokens: Tensor | None = None,
    *,
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A copy of each token for every expert that was chosen for it, sorted by expert.

    Within an expert, copies are in the order of keys, then of tokens and choices. An index outside
    0 to ``num_experts - 1``, like -1 for a choice that was dropped, belongs to no expert: its copy
    stands behind those of all experts, where :func:`grouped_linear` gives 0. No number is looked at
    on the host.

    Args:
        x: (T, H) float, the tokens.
        indices: (T, K) int64 or int32, the experts of each token.
        key: (T,) int64 or int32, like the place of each token in the whole: an expert's rows are
            then in one order however the tokens were spread over ranks. None: their own order.
        num_tokens: () int64 or int32, on the tokens' device: tokens from this one on belong to no
            expert, whatever their indices are. None: T.
        num_experts: how many there are.

    Returns:
        permuted: (T * K, H), x's dtype. The gradient of a token is the sum of those of its copies.
        row_map: (T, K) int64, the row of each copy, as :func:`unpermute` takes it.
        offsets: (num_experts,) int64, the end of each expert's rows, as :func:`grouped_linear`
            takes them. Their differences are the numbers of rows.

    Source: Gale et al. 2022, arXiv:2211.15841.
    """
    raise NotImplementedError


@operator(operators.unpermute)
def unpermute(x: Tensor, row_map: Tensor, weights: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's rows: ``y[t] = sum_j weights[t, j] x[row_map[t, j]]``.

    Terms are added in the order of the choices, in float32.

    Args:
        x: (T * K, H) float, rows in the order of :func:`permute`.
        row_map: (T, K) int64, as permute gave it: each row once.
        weights: (T, K) float, of any of the float dtypes; None: 1.

    Returns:
        (T, H), x's dtype.

    Raises:
        ValueError: on a host, a row_map that does not hold each row once.

    Source: Gale et al. 2022, arXiv:2211.15841.
    """
    raise NotImplementedError
