"""The order in which the host joins the ranks' values, written down once for all references."""

import operator
from collections.abc import Callable, Sequence
from typing import Any


def pairwise(values: Sequence[Any], join: Callable[[Any, Any], Any] = operator.add) -> Any:
    """The values of ranks 0, 1, ... joined by the tree of docs/communication.md.

    Its left side are as many ranks as the largest power of two below their number.
    """
    if len(values) == 1:
        return values[0]
    half = 1 << ((len(values) - 1).bit_length() - 1)
    return join(pairwise(values[:half], join), pairwise(values[half:], join))
