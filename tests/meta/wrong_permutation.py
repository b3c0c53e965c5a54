"""Wrong backends whose mistake is in permute or unpermute."""

from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import Row
from tests.meta.wrong import times, wrong, wrong_arguments, wrong_backward, wrong_gradients


def _reordered(x: Tensor, indices: Tensor, num_experts: int, order: Tensor) -> Any:
    """The results for another order of the choices."""
    _, choices = indices.shape
    row_map = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))
    inside = indices[(indices >= 0) & (indices < num_experts)].long()
    offsets = torch.bincount(inside, minlength=num_experts).cumsum(0)
    return x[order // choices], row_map.view(indices.shape), offsets


def _experts(indices: Tensor, num_experts: int) -> Tensor:
    flat = indices.reshape(-1).long()
    return torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)


@wrong("experts-last-token-first", "a sort that is not stable", operator="permute")
def not_stable(row: Row, x: Tensor, indices: Tensor, *given: Any, num_experts: int) -> Any:
    if given != (None, None):
        return row(x, indices, *given, num_experts=num_experts)
    experts = _experts(indices, num_experts)
    order = experts.shape[0] - 1 - torch.sort(experts.flip(0), stable=True).indices
    return _reordered(x, indices, num_experts, order)


@wrong("experts-choice-by-choice", "another order of the same rows", operator="permute")
def choice_major(row: Row, x: Tensor, indices: Tensor, *given: Any, num_experts: int) -> Any:
    if given != (None, None):
        return row(x, indices, *given, num_experts=num_experts)
    tokens, choices = indices.shape
    entry = torch.arange(tokens * choices).view(tokens, choices).t().reshape(-1)
    experts = _experts(indices, num_experts)[entry]
    return _reordered(x, indices, num_experts, entry[torch.sort(experts, stable=True).indices])


@wrong("dropped-in-front", "a negative index sorts first", operator="permute")
def negative_first(row: Row, x: Tensor, indices: Tensor, *given: Any, num_experts: int) -> Any:
    if given != (None, None):
        return row(x, indices, *given, num_experts=num_experts)
    order = torch.sort(indices.reshape(-1), stable=True).indices
    return _reordered(x, indices, num_experts, order)


@wrong("key-before-expert", "keys of a sort in the wrong order", operator="permute")
def key_first(row: Row, x: Tensor, indices: Tensor, key: Any, count: Any, **attrs: Any) -> Any:
    y, row_map, offsets = row(x, indices, key, count, **attrs)
    if key is None:
        return y, row_map, offsets
    wide = key.repeat_interleave(indices.shape[1])
    order = torch.sort(wide, stable=True).indices
    y, row_map, _ = _reordered(x, indices, attrs["num_experts"], order)
    return y, row_map, offsets


@wrong("map-that-wraps", "missing check of an index", operator="unpermute", select="rule:range")
def wrapped(row: Row, x: Tensor, row_map: Tensor, weights: Tensor | None) -> Any:
    each = x[row_map % max(len(x), 1)].float()
    return (each if weights is None else each * weights.unsqueeze(-1)).sum(1).to(x.dtype)


@wrong_backward("gradient-of-rows-unweighted", "missing factor", operator="unpermute")
def unweighted(
    row: Row, grad: Tensor, x: Tensor, row_map: Tensor, weights: Tensor | None, *, needs: Any
) -> Any:
    _, dweights = row(grad, x, row_map, weights, needs=needs)
    dx, _ = row(grad, x, row_map, None, needs=(needs[0], False))
    return dx, dweights


@wrong_backward(
    "gradient-of-weights-in-order-of-rows", "gradient of an index", operator="unpermute"
)
def by_rows(
    row: Row, grad: Tensor, x: Tensor, row_map: Tensor, weights: Tensor | None, *, needs: Any
) -> Any:
    dx, dweights = row(grad, x, row_map, weights, needs=needs)
    if dweights is not None:
        flat = torch.empty_like(dweights).reshape(-1)
        dweights = flat.scatter(0, row_map.reshape(-1), dweights.reshape(-1)).view(row_map.shape)
    return dx, dweights


ARGUMENTS = (
    wrong_arguments("at-most-four-choices", "an unrolled loop without its rest", "unpermute",
        weights=lambda weights, row_map: times(
            torch.ones(row_map.shape) if weights is None else weights, (..., slice(4, None)))),
    wrong_gradients("last-copy-alone", "a sum that is overwritten", "permute",
        dx=lambda grad, y1: grad[y1[:, -1]]),
    wrong_arguments("row-map-backwards", "a permutation for its inverse", "permute",
        y1=lambda y1: y1.reshape(-1).argsort().view(y1.shape)),
    wrong_arguments("starts-for-ends", "off by one group", "permute",
        y2=lambda y2: torch.cat([y2.new_zeros(1), y2[:-1]])),
    wrong_arguments("counts-for-ends", "a sum left out", "permute",
        y2=lambda y2: torch.diff(y2, prepend=y2.new_zeros(1))),
    wrong_arguments("mean-for-sum", "another reduction", "unpermute",
        y=lambda y, row_map: y / row_map.shape[1]),
    wrong_arguments("weights-made-to-sum-to-one", "a factor that is another operator's",
        "unpermute",
        weights=lambda weights: None if weights is None else weights / weights.sum(1, True)),
    wrong_arguments("expert-in-8-bits", "an index cut short", "permute",
        indices=lambda indices: indices.to(torch.uint8).to(indices.dtype)),
    wrong_arguments("dropped-in-last-expert", "an index out of range is clamped", "permute",
        indices=lambda indices, num_experts: torch.where(
            (indices < 0) | (indices >= num_experts), num_experts - 1, indices)),
    wrong_arguments("key-left-out", "an argument without effect", "permute", key=None),
    wrong_arguments("key-in-32-bits", "an index cut short", "permute",
        key=lambda key: None if key is None else key.int()),
    wrong_arguments("negative-keys-last", "a sort of unsigned numbers", "permute",
        key=lambda key: None if key is None else torch.where(
            key < 0, key, key - (1 << (30 if key.dtype == torch.int32 else 62)))),
    wrong_arguments("one-token-too-many", "off by one", "permute",
        num_tokens=lambda num_tokens: None if num_tokens is None else num_tokens + 1),
    wrong_arguments("weights-in-bfloat16", "lower precision of factors", "unpermute",
        weights=lambda weights: None if weights is None else weights.bfloat16().float()),
)  # fmt: skip
