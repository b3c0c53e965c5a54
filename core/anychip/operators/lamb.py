"""lamb: AdamW whose step is scaled per tensor by ||w|| / ||u||; and the norms that this needs.

A shard does not know the norms of its whole tensor. ``lamb_partials`` gives its share of them on
the grid of :mod:`.partials`, without a write; the caller adds up the shares of all ranks, and
:func:`trust_ratios` makes them the ``trust`` that ``lamb`` is given. Without ``trust`` the tensors
are whole, and ``lamb`` does the same by itself: the bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import lists
from anychip.operators.partials import BLOCK, grid_places, num_blocks, partials_of, sum_in_pairs
from anychip.operators.rule import (
    Move,
    UpdateCall,
    UpdateFormula,
    operator_of,
    sampled_tensors,
    scaled,
)
from anychip.operators.update import bias_corrections


def trust_ratios(partials: Tensor, sizes: Sequence[int], *, block: int = BLOCK) -> Tensor:
    """||w|| / ||u|| per tensor; 1 where one of the two is 0.

    Args:
        partials: (2, blocks of all tensors) float32, of w and of u, added up over all shards.
        sizes: elements of each whole tensor.

    Returns:
        (len(sizes),) float32.
    """
    squares = _squared_norms(partials, [num_blocks(size, block) for size in sizes])
    weight, step = squares.sqrt()
    usable = (weight > 0.0) & (step > 0.0)
    return torch.where(usable, weight / torch.where(usable, step, 1.0), 1.0)


def _squared_norms(partials: Tensor, counts: Sequence[int]) -> Tensor:
    """(2, len(counts)) sums in pairs. Tensors of one padded width share the operations."""
    widths: dict[int, list[int]] = {}
    for index, count in enumerate(counts):
        widths.setdefault(1 << max(count - 1, 0).bit_length(), []).append(index)
    parts = partials.split(list(counts), dim=-1)
    found = partials.new_empty((2, len(counts)))
    for width, members in widths.items():
        missing = [torch.nn.functional.pad(parts[i], (0, width - counts[i])) for i in members]
        found[:, members] = sum_in_pairs(torch.stack(missing, dim=1))
    return found


def _directions(
    count: Tensor, *, beta1: float, beta2: float, eps: float, weight_decay: float
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Gives the step's direction u and both averages after this step."""
    correction1, correction2 = bias_corrections(count, beta1, beta2)

    def direction(
        param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        first = beta1 * exp_avg + (1.0 - beta1) * grad
        second = beta2 * exp_avg_sq + (1.0 - beta2) * grad.square()
        adam = (first / correction1) / ((second / correction2).sqrt() + eps)
        return adam + weight_decay * param, first, second

    return direction


_ATTRS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
_STATES = ("exp_avgs", "exp_avg_sqs")
_SCHEMA = "float beta1=0.9, float beta2=0.999, float eps=1e-06, float weight_decay=0.01"


# lamb_partials


def _partials_forward(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
    **attrs: float,
) -> Tensor:
    places = grid_places(params, offsets, sizes, block)
    direction = _directions(step + 1.0, **attrs)
    sums = []
    for *given, place in zip(params, grads, exp_avgs, exp_avg_sqs, places, strict=True):
        param, grad, *averages = given
        found = direction(param.float(), scaled(grad, scale, clip), *averages)[0]
        sums.append(partials_of([found], [place], block))
    return torch.stack([partials_of(params, places, block), torch.cat(sums)])


def _partials_fake(
    params: Sequence[Tensor],
    *_: Any,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
    **attrs: float,
) -> Tensor:
    total = sum(count for _, count in grid_places(params, offsets, sizes, block))
    return params[0].new_empty((2, total), dtype=torch.float32)


def _partials_check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *scalars: Tensor | None,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
    **attrs: float,
) -> None:
    given = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists.check_shapes("params", params, **given)
    lists.check_numbers(attrs)
    lists.check_scalars(**dict(zip(("step", "scale", "clip"), scalars, strict=True)))
    grid_places(params, offsets, sizes, block)


def _partials_samples(maker: SampleMaker) -> Iterator[Sample]:
    grid = {"offsets": None, "sizes": None, "block": 64}
    args = (*sampled_tensors(maker, _STATES), maker.scalar(3.0), None, None)
    yield Sample(args, {**_ATTRS, **grid}, "plain")
    shard = {"offsets": [64, 0, 64, 0], "sizes": [84, 17, 65, 1000], "block": 64}
    scalars = (maker.scalar(0.0), maker.scalar(1024.0), maker.scalar(0.5))
    args = (*sampled_tensors(maker, _STATES), *scalars)
    yield Sample(args, {**_ATTRS, **shard}, "shards,scale,clip")


lamb_partials = OperatorSpec(
    name="lamb_partials",
    signature=(
        "(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor step, "
        "Tensor? scale=None, Tensor? clip=None, *, int[]? offsets=None, int[]? sizes=None, "
        f"int block=1024, {_SCHEMA}) -> Tensor"
    ),
    equation="row 0: l2_norm_partials(params); row 1: those of lamb's u; nothing is written",
    source="You et al. 2019, arXiv:1904.00962, algorithm 2",
    forward=_partials_forward,
    fake=_partials_fake,
    check=_partials_check,
    fixed_dtypes=dict.fromkeys((*_STATES, "step", "scale", "clip"), "float32"),
    sizes=lambda params, *_, **__: {"numel": lists.numel(params), "tensors": len(params)},
    cost=lambda params, grads, m, v, *_, **__: Cost(
        lists.nbytes(params, grads, m, v), 17 * lists.numel(params)
    ),
    samples=_partials_samples,
    bound=Bound(forward=28, backward=0, length=lambda *_, block, **__: block),
)


# lamb


def _lamb(count: Tensor, **attrs: float) -> Move:
    direction = _directions(count, **attrs)

    def move(rate: Tensor, param: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found, first, second = direction(param, *given)
        return param - rate * found, first, second

    return move


def _trust(call: UpdateCall, **attrs: float) -> Tensor:
    exp_avgs, exp_avg_sqs = call.states
    partials = _partials_forward(
        call.params,
        call.grads,
        exp_avgs,
        exp_avg_sqs,
        call.step,
        call.scale,
        call.clip,
        offsets=None,
        sizes=None,
        block=BLOCK,
        **attrs,
    )
    return trust_ratios(partials, [p.numel() for p in call.params])


lamb = operator_of(
    "lamb",
    UpdateFormula(
        states=_STATES,
        attrs=_SCHEMA,
        prepare=_lamb,
        trust=_trust,
        flops=34,
        sampled_attrs=lambda _: _ATTRS,
    ),
    equation=(
        "unless found_inf: t = step = step + 1; g = g / scale * clip; m = b1 m + (1 - b1) g; "
        "v = b2 v + (1 - b2) g^2; "
        "u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd p; "
        "trust = ||p|| / ||u|| per tensor, 1 where one of them is 0; p = p - lr trust u"
    ),
    source="You et al. 2019, arXiv:1904.00962, algorithm 2, phi the identity",
    bound=Bound(forward=40, backward=0, length=lambda *_, **__: BLOCK),
)
