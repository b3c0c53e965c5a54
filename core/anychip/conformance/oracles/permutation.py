"""Oracles of permute and unpermute: a stable order of the choices by expert, and sums along it.

permute copies, so that rows, map and offsets are exact; the gradient of a token adds up those of
its copies, K terms. unpermute adds K products per element; the gradient of a weight adds H of them,
and that of a row is one product.
"""

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Integers = NDArray[np.int64]


def _order(
    indices: Integers, key: Integers | None, num_tokens: Integers | None, *, num_experts: int
) -> tuple[Integers, Integers]:
    """The choices, counted row by row, as they are sorted; and the expert of each."""
    flat = indices.reshape(-1).astype(np.int64)
    token = np.arange(flat.size) // indices.shape[1]
    inside = (flat >= 0) & (flat < num_experts)
    if num_tokens is not None:
        inside &= token < int(num_tokens)
    experts = np.where(inside, flat, num_experts)
    keys = np.zeros_like(flat) if key is None else key[token].astype(np.int64)
    order = np.lexsort((np.arange(flat.size), keys, experts))
    return order, experts


def _permute(x: Rounded, indices: Integers, *given: Integers | None, num_experts: int) -> Answer:
    order, experts = _order(indices, *given, num_experts=num_experts)
    offsets = np.bincount(experts, minlength=num_experts)[:num_experts].cumsum()
    row_map = np.argsort(order).reshape(indices.shape)  # where each choice stands in the order
    results = (x[order // indices.shape[1]], Rounded.exact(row_map), Rounded.exact(offsets))
    return results, lambda dy, *_: (dy[row_map].sum(1),)


def _unpermute(x: Rounded, row_map: Integers, weights: Rounded | None) -> Answer:
    taken = x[row_map]

    def backward(grad: Rounded) -> Gradients:
        each = grad[:, None]
        spread = each.shaped(lambda array: np.repeat(array, row_map.shape[1], 1))
        scaled = spread if weights is None else spread * weights[..., None]
        rows = np.argsort(row_map.reshape(-1))
        dx = scaled.reshape(*x.shape)[rows]
        return dx, None if weights is None else (each * taken).sum(-1)

    return ((taken if weights is None else taken * weights[..., None]).sum(1),), backward


PERMUTE = differentiable(_permute)
UNPERMUTE = differentiable(_unpermute)
