"""lamb: AdamW whose step is scaled per tensor by ||w|| / ||u||; and the norms that this needs.

A shard does not know the norms of its whole tensor. ``lamb_partials`` gives its share of them on
the grid of :mod:`.partials`, without a write; the caller adds up the shares of all ranks, and
:func:`trust_ratios` makes them the ``trust`` that ``lamb`` is given. Without ``trust`` the tensors
are whole, and ``lamb`` does the same by itself: the bits are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import lists, update
from anychip.operators.partials import BLOCK, grid_places, num_blocks, partials_of, sum_in_pairs


def trust_ratios(partials: Tensor, sizes: Sequence[int], *, block: int = BLOCK) -> Tensor:
    """||w|| / ||u|| per tensor; 1 where one of the two is 0.

    Args:
        partials: (2, blocks of all tensors) float32, of w and of u, added up over all shards.
        sizes: elements of each whole tensor.

    Returns:
        (len(sizes),) float32.
    """
    counts = [num_blocks(size, block) for size in sizes]
    squares = [sum_in_pairs(part) for part in partials.split(counts, dim=-1)]
    weight, step = torch.stack(squares, dim=-1).sqrt()
    usable = (weight > 0.0) & (step > 0.0)
    return torch.where(usable, weight / torch.where(usable, step, 1.0), 1.0)


def _moved(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    count: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The moments after this step, and the step's direction u."""
    first = beta1 * exp_avg + (1.0 - beta1) * grad
    second = beta2 * exp_avg_sq + (1.0 - beta2) * grad.square()
    correction1 = 1.0 - torch.pow(beta1, count)
    correction2 = 1.0 - torch.pow(beta2, count)
    adam = (first / correction1) / ((second / correction2).sqrt() + eps)
    return first, second, adam + weight_decay * param.float()


def _check_lists(params: Sequence[Tensor], *, beta1: float, beta2: float, eps: float,
                 **others: Sequence[Tensor]) -> None:  # fmt: skip
    lists.check_shapes("params", params, **others)
    update.check_fractions(beta1=beta1, beta2=beta2)
    if eps < 0.0:
        raise ValueError(f"eps must be at least 0, got {eps}")


def _tensors(maker: SampleMaker) -> tuple[list[Tensor], ...]:
    params = [maker.normal(*shape, dtype=torch.float32) for shape in lists.SHAPES]
    grads = [maker.normal(*shape) for shape in lists.SHAPES]
    moments = [maker.normal(*shape, scale=0.1, dtype=torch.float32) for shape in lists.SHAPES]
    squares = [maker.normal(*shape, dtype=torch.float32).square() for shape in lists.SHAPES]
    return params, grads, moments, squares


_ATTRS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}


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
    found = [partials_of(params, places, block)]
    directions = []
    for given, place in zip(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True), places,
                            strict=True):  # fmt: skip
        param, grad, first, second = given
        grad = update.scaled(grad, scale, clip)
        direction = _moved(param, grad, first, second, step + 1.0, **attrs)[2]
        directions.append(partials_of([direction], [place], block))
    return torch.stack([*found, torch.cat(directions)])


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
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    given = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    _check_lists(params, beta1=beta1, beta2=beta2, eps=eps, **given)
    lists.check_scalars(step=step, scale=scale, clip=clip)
    grid_places(params, offsets, sizes, block)


def _partials_samples(maker: SampleMaker) -> Iterator[Sample]:
    grid = {"offsets": None, "sizes": None, "block": 64}
    args = (*_tensors(maker), maker.scalar(3.0), None, None)
    yield Sample(args, {**_ATTRS, **grid}, "plain")
    shard = {"offsets": [64, 0, 64, 0], "sizes": [84, 17, 65, 1000], "block": 64}
    args = (*_tensors(maker), maker.scalar(0.0), maker.scalar(1024.0), maker.scalar(0.5))
    yield Sample(args, {**_ATTRS, **shard}, "shards,scale,clip")


lamb_partials = OperatorSpec(
    name="lamb_partials",
    signature=(
        "(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor step, "
        "Tensor? scale=None, Tensor? clip=None, *, int[]? offsets=None, int[]? sizes=None, "
        "int block=1024, float beta1=0.9, float beta2=0.999, float eps=1e-06, "
        "float weight_decay=0.01) -> Tensor"
    ),
    equation="row 0: l2_norm_partials(params); row 1: those of lamb's u; nothing is written",
    source="You et al. 2019, arXiv:1904.00962, algorithm 2",
    forward=_partials_forward,
    fake=_partials_fake,
    check=_partials_check,
    fixed_dtypes={name: "float32" for name in ("exp_avgs", "exp_avg_sqs", "step", "scale", "clip")},
    sizes=lambda params, *_, **__: {"numel": lists.numel(params), "tensors": len(params)},
    reduction="sum",
    cost=lambda params, grads, m, v, *_, **__: Cost(
        lists.nbytes(params, grads, m, v), 17 * lists.numel(params)
    ),
    aten=frozenset({"mul", "add", "div", "sqrt", "pow", "square", "constant_pad_nd", "cat"}),
    samples=_partials_samples,
    bound=Bound(forward=28, backward=0, length=lambda *_, block, **__: block),
)


# lamb


def _lamb_forward(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    trust: Tensor | None,
    **attrs: float,
) -> None:
    skip = update.is_skipped(found_inf, lr)
    if trust is None and params:
        grid: dict[str, Any] = {"offsets": None, "sizes": None, "block": BLOCK, **attrs}
        partials = _partials_forward(
            params, grads, exp_avgs, exp_avg_sqs, step, scale, clip, **grid
        )
        trust = trust_ratios(partials, [p.numel() for p in params])
    for index, param in enumerate(params):
        assert trust is not None
        exp_avg, exp_avg_sq = exp_avgs[index], exp_avg_sqs[index]
        grad = update.scaled(grads[index], scale, clip)
        first, second, direction = _moved(param, grad, exp_avg, exp_avg_sq, step + 1.0, **attrs)
        exp_avg.copy_(torch.where(skip, exp_avg, first))
        exp_avg_sq.copy_(torch.where(skip, exp_avg_sq, second))
        low = low_precision[index] if low_precision else None
        update.store(skip, param, param.float() - lr * trust[index] * direction, low)
    step.copy_(torch.where(skip, step, step + 1.0))


def _lamb_check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    trust: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    given = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if low_precision:
        given["low_precision"] = low_precision
    _check_lists(params, beta1=beta1, beta2=beta2, eps=eps, **given)
    lists.check_scalars(lr=lr, step=step, scale=scale, clip=clip, found_inf=found_inf)
    if trust is not None and tuple(trust.shape) != (len(params),):
        raise ValueError(
            f"trust must have one entry per tensor, shape ({len(params)},), got "
            f"{tuple(trust.shape)}"
        )


def _lamb_samples(maker: SampleMaker) -> Iterator[Sample]:
    for label, scalars in update.sampled_scalars(maker):
        params, grads, moments, squares = _tensors(maker)
        low = update.sampled_copies(params, label)
        trust = torch.stack([maker.scalar(value) for value in (0.5, 1.0, 2.0, 3.0)])
        args = (params, grads, moments, squares, maker.scalar(1e-2), maker.scalar(3.0), *scalars,
                low, trust if label == "found_inf" else None)  # fmt: skip
        yield Sample(args, _ATTRS, label)


_LAMB_FLOAT32 = ("exp_avgs", "exp_avg_sqs", "lr", "step", "scale", "clip", "found_inf", "trust")

lamb = OperatorSpec(
    name="lamb",
    signature=(
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor lr, Tensor(d!) step, Tensor? scale=None, Tensor? clip=None, "
        "Tensor? found_inf=None, Tensor(e!)[]? low_precision=None, Tensor? trust=None, *, "
        "float beta1=0.9, float beta2=0.999, float eps=1e-06, float weight_decay=0.01) -> ()"
    ),
    equation=(
        "unless found_inf: t = step = step + 1; g = g / scale * clip; m = b1 m + (1 - b1) g; "
        "v = b2 v + (1 - b2) g^2; "
        "u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd p; "
        "trust = ||p|| / ||u|| per tensor, 1 where one of them is 0; p = p - lr trust u"
    ),
    source="You et al. 2019, arXiv:1904.00962, algorithm 2, phi the identity",
    forward=_lamb_forward,
    fake=lambda *args, **attrs: None,
    check=_lamb_check,
    fixed_dtypes={name: "float32" for name in _LAMB_FLOAT32},
    sizes=lambda params, *_, **__: {"numel": lists.numel(params), "tensors": len(params)},
    reduction="elementwise",
    cost=lambda params, grads, m, v, *_, **__: Cost(
        3 * lists.nbytes(params, m, v) + 2 * lists.nbytes(grads), 34 * lists.numel(params)
    ),
    aten=frozenset({"mul", "add", "div", "sqrt", "pow", "square", "where", "copy_"}),
    samples=_lamb_samples,
    bound=Bound(forward=40, backward=0, length=lambda *_, **__: BLOCK),
)
