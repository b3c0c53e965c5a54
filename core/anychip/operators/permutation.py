"""permute and unpermute: tokens to the experts that were chosen for them, and back.

permute copies each token once for every choice, sorted by expert and, within an expert, by the
token's key, then by token and choice: the rows of an expert are a group of ``grouped_linear``. With
the tokens' places in the whole for keys, an expert's rows lie in one order however the tokens were
spread over ranks before. How many tokens there are may be known to the device alone, as of rows
that came from other ranks: those beyond belong to no expert. unpermute adds a token's rows
up again, weighted. ``row_map[t, j]`` is the row of token t's j-th choice; both directions of both
operators read or write along it, and nothing else of the order has to be known.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import HOST, Bound, Cost, OperatorSpec, Sample, SampleMaker, Sharding
from anychip.operators.extents import nbytes
from anychip.operators.values import has_values


def _rows_of(rows: Tensor, row_map: Tensor) -> Tensor:
    """float32 (T, K, H): the row of each choice."""
    chosen = rows.index_select(0, row_map.reshape(-1)).float()
    return chosen.reshape(*row_map.shape, rows.shape[1])


def _added(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    """float32 (T, H): each token's rows in the order of its choices."""
    each = _rows_of(rows, row_map)
    if weights is not None:
        each = each * weights.float().unsqueeze(-1)
    total = each[:, 0].clone()
    for choice in range(1, row_map.shape[1]):
        # In place: a sum of meta tensors, for a form, has torch import its compiler, for seconds.
        total += each[:, choice]
    return total


def _spread(values: Tensor, row_map: Tensor) -> Tensor:
    """(T, K, H) to (T * K, H): the value of a choice at its row."""
    flat = row_map.reshape(-1)
    entry = torch.empty_like(flat).scatter(0, flat, torch.arange(flat.shape[0], device=flat.device))
    return values.flatten(0, 1).index_select(0, entry)


# permute


def in_order_of_key(
    indices: Tensor, key: Tensor | None, num_tokens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """For a row that sorts by expert alone: indices of the tokens as the key has them, and which.

    Those beyond num_tokens are -1. The order is None for the tokens' own. Nothing waits for the
    device.
    """
    if num_tokens is not None:
        token = torch.arange(indices.shape[0], device=indices.device)
        indices = indices.masked_fill((token >= num_tokens).unsqueeze(-1), -1)
    if key is None:
        return indices, None
    order = torch.sort(key, stable=True).indices
    return indices.index_select(0, order), order


def as_given(row_map: Tensor, order: Tensor | None) -> Tensor:
    """The map of the tokens as they were before :func:`in_order_of_key`."""
    if order is None:
        return row_map
    return torch.empty_like(row_map).scatter(0, order.unsqueeze(1).expand_as(row_map), row_map)


def _permute_forward(
    x: Tensor,
    indices: Tensor,
    key: Tensor | None = None,
    num_tokens: Tensor | None = None,
    *,
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    indices, by_key = in_order_of_key(indices, key, num_tokens)
    chosen = indices.reshape(-1).long()
    # What belongs to no expert stands behind the last one.
    outside = (chosen < 0) | (chosen >= num_experts)
    chosen = torch.where(outside, num_experts, chosen)
    experts, order = torch.sort(chosen, stable=True)
    place = torch.arange(order.shape[0], device=order.device)
    row_map = torch.empty_like(order).scatter(0, order, place).view(indices.shape)
    ends = torch.arange(num_experts, device=experts.device)
    offsets = torch.searchsorted(experts, ends, right=True)
    token = torch.div(order, indices.shape[1], rounding_mode="floor")
    token = token if by_key is None else by_key.index_select(0, token)
    return x.index_select(0, token), as_given(row_map, by_key), offsets


def _permute_fake(
    x: Tensor, indices: Tensor, *_: Tensor | None, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty((indices.shape[0] * indices.shape[1], x.shape[1])),
        x.new_empty(indices.shape, dtype=torch.int64),
        x.new_empty((num_experts,), dtype=torch.int64),
    )


def _permute_check(
    x: Tensor, indices: Tensor, key: Tensor | None, num_tokens: Tensor | None, *, num_experts: int
) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must be (T, H), got {tuple(x.shape)}")
    if indices.dim() != 2 or indices.shape[0] != x.shape[0] or indices.shape[1] < 1:
        raise ValueError(
            f"indices must be ({x.shape[0]}, K) with K at least 1, the experts of each row of x; "
            f"got {tuple(indices.shape)}"
        )
    if key is not None and key.shape != (x.shape[0],):
        raise ValueError(f"key must be ({x.shape[0]},), as many as x has rows; got {[*key.shape]}")
    if num_tokens is not None and num_tokens.dim():
        raise ValueError(f"num_tokens must be one number, (); got shape {tuple(num_tokens.shape)}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")


def _permute_samples(maker: SampleMaker) -> Iterator[Sample]:
    for tokens, choices, experts, hidden in ((7, 2, 4, 8), (5, 1, 3, 17), (6, 4, 2, 16)):
        args = (maker.normal(tokens, hidden), maker.integers(experts, tokens, choices))
        label = f"{tokens}x{hidden},{choices}of{experts}"
        yield Sample((*args, None, None), {"num_experts": experts}, label)
        key, count = maker.integers(tokens, tokens), maker.integers(tokens, 1)[0]
        yield Sample((*args, key, count), {"num_experts": experts}, f"{label},key,some tokens")
    dropped = maker.integers(5, 6, 2) - 1
    args = (maker.normal(6, 9), dropped)
    yield Sample((*args, None, None), {"num_experts": 3}, "some of no expert")


def _permute_cost(x: Tensor, indices: Tensor, *rest: Tensor | None, num_experts: int) -> Cost:
    return Cost(
        nbytes(x, indices, *rest)
        + indices.numel() * (8 + x.shape[1] * x.element_size())
        + 8 * num_experts,
        0,
    )


def _permute_backward_cost(x: Tensor, indices: Tensor, *_: Tensor | None, num_experts: int) -> Cost:
    copies = indices.numel() * x.shape[1]
    return Cost(copies * x.element_size() + 8 * indices.numel() + nbytes(x), copies)


permute = OperatorSpec(
    name="permute",
    signature=(
        "(Tensor x, Tensor indices, Tensor? key=None, Tensor? num_tokens=None, *, "
        "int num_experts) -> (Tensor, Tensor, Tensor)"),
    equation=(
        "row_map[t, j] = place of (indices[t, j], key[t], t, j) in their ascending order, indices "
        "outside 0 to num_experts - 1, and all of tokens from num_tokens on, behind all others; "
        "y[row_map[t, j]] = x[t]; offsets[e] = number of indices from 0 to e; key 0 if None"),
    source="Gale et al. 2022, arXiv:2211.15841 (MegaBlocks), section 5; Megatron-LM, permute",
    forward=_permute_forward,
    backward=lambda grad, _, __, row_map, **___: (_added(grad, row_map, None).to(grad.dtype),),
    fake=_permute_fake, saved=("y1",), differentiable=("x",), check=_permute_check,
    # The backward direction is given gradients of the map and the offsets, as for every output.
    fixed_dtypes=dict.fromkeys(("indices", "key", "num_tokens"), ("int64", "int32")),
    sizes=lambda x, indices, *_, num_experts: {
        "tokens": x.shape[0], "hidden": x.shape[1], "choices": indices.shape[1],
        "experts": num_experts},
    # Not by tokens: a row's place counts those of all of them.
    sharding=Sharding(
        lambda x, indices, key, count, *_: [
            ([1, None, None], [1, None, *(None for given in (key, count) if given is not None)])
        ],
        lambda *_: [([1], [1, None, None, None])],
    ),
    cost=_permute_cost, backward_cost=_permute_backward_cost, samples=_permute_samples,
    bound=Bound(forward=0, backward=1, length=lambda x, indices, *_, **__: indices.shape[1]),
)  # fmt: skip


# unpermute


def refuse_no_permutation(row_map: Tensor) -> None:
    """Raises ValueError for a map that does not hold each row once.

    Only on a host: a device cannot look without a synchronisation.
    """
    if row_map.device.type != HOST or not row_map.numel() or not has_values(row_map):
        return
    flat = row_map.reshape(-1)
    low, high = flat.min().item(), flat.max().item()
    if low < 0 or high >= flat.shape[0]:
        raise ValueError(
            f"unpermute: row_map must be from 0 to {flat.shape[0] - 1}, got {low} to {high}"
        )
    if bool((torch.bincount(flat, minlength=flat.shape[0]) != 1).any()):
        raise ValueError(f"unpermute: row_map must hold each of the {flat.shape[0]} rows once")


def _unpermute_forward(x: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    refuse_no_permutation(row_map)
    return _added(x, row_map, weights).to(x.dtype)


def _unpermute_backward(
    grad: Tensor, x: Tensor, row_map: Tensor, weights: Tensor | None, *, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    each = grad.float().unsqueeze(1).expand(-1, row_map.shape[1], -1)
    dx = dweights = None
    if needs[0]:
        scaled = each if weights is None else each * weights.float().unsqueeze(-1)
        dx = _spread(scaled, row_map).to(x.dtype)
    if needs[1] and weights is not None:
        dweights = (each * _rows_of(x, row_map)).sum(-1).to(weights.dtype)
    return dx, dweights


def _unpermute_check(x: Tensor, row_map: Tensor, weights: Tensor | None) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must be (T * K, H), got {tuple(x.shape)}")
    fits = row_map.dim() == 2 and row_map.shape[1] >= 1
    if not fits or row_map.shape[0] * row_map.shape[1] != x.shape[0]:
        raise ValueError(
            f"row_map must be (T, K) with K at least 1 and T * K = {x.shape[0]}, the rows of x; "
            f"got {tuple(row_map.shape)}"
        )
    if weights is not None and weights.shape != row_map.shape:
        raise ValueError(
            f"weights must be {tuple(row_map.shape)}, as row_map; got {tuple(weights.shape)}"
        )


def _unpermute_samples(maker: SampleMaker) -> Iterator[Sample]:
    for tokens, choices, hidden in ((7, 2, 8), (5, 1, 17), (3, 4, 16)):
        rows = tokens * choices
        # 11 has no factor in common with any of these numbers of rows: each is met once.
        row_map = torch.arange(rows, device=maker.device) * 11 % rows
        args = (maker.normal(rows, hidden), row_map.view(tokens, choices))
        label = f"{tokens}x{hidden},{choices}"
        yield Sample((*args, maker.normal(tokens, choices)), {}, label)
        yield Sample((*args, None), {}, f"{label},unweighted")


def _unpermute_cost(x: Tensor, row_map: Tensor, weights: Tensor | None) -> Cost:
    written = row_map.shape[0] * x.shape[1] * x.element_size()
    return Cost(nbytes(x, row_map, weights) + written, (2 if weights is not None else 1)
                * x.numel())  # fmt: skip


def _unpermute_backward_cost(x: Tensor, row_map: Tensor, weights: Tensor | None) -> Cost:
    given = row_map.shape[0] * x.shape[1] * x.element_size()
    if weights is None:
        return Cost(given + nbytes(x, row_map), 0)
    return Cost(given + 2 * nbytes(x, weights) + nbytes(row_map), 3 * x.numel())


unpermute = OperatorSpec(
    name="unpermute", signature="(Tensor x, Tensor row_map, Tensor? weights=None) -> Tensor",
    equation="y[t] = sum over j of weights[t, j] x[row_map[t, j]], j ascending; weights 1 if None",
    source="Gale et al. 2022, arXiv:2211.15841 (MegaBlocks), section 5; Megatron-LM, unpermute",
    forward=_unpermute_forward, backward=_unpermute_backward,
    fake=lambda x, row_map, weights: x.new_empty((row_map.shape[0], x.shape[1])),
    saved=("x", "row_map", "weights"), differentiable=("x", "weights"), check=_unpermute_check,
    fixed_dtypes={"row_map": "int64"}, indexes={"row_map": "each of x[0]"},
    sizes=lambda x, row_map, weights: {
        "tokens": row_map.shape[0], "hidden": x.shape[1], "choices": row_map.shape[1]},
    sharding=Sharding(
        lambda *_: [([1], [1, None, None]), (["partial"], ["partial", None, None])],
        lambda *_: [([1, "partial"], [1, 1, None, None])]),
    cost=_unpermute_cost, backward_cost=_unpermute_backward_cost, samples=_unpermute_samples,
    bound=Bound(
        forward=2, backward=2, length=lambda x, row_map, weights: max(row_map.shape[1], x.shape[1])
    ),
)  # fmt: skip
