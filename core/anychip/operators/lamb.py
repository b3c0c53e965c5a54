"""lamb: AdamW whose step is scaled per tensor by ||w|| / ||u||; and the norms that this needs.

A shard does not know the norms of its whole tensor. ``lamb_sums_of_squares`` gives its share of
them, exactly (:mod:`.squares`), without a write; the caller adds up the shares of all ranks, and
:func:`trust_ratios` makes them the ``trust`` that ``lamb`` is given. Without ``trust`` the tensors
are whole, and ``lamb`` does the same by itself: the bits are equal.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import lists
from anychip.operators.rule import (
    Move,
    UpdateCall,
    UpdateFormula,
    operator_of,
    sampled_tensors,
    scaled,
)
from anychip.operators.squares import WIDTH, root, rows_of
from anychip.operators.update import adam_update


def trust_ratios(rows: Tensor) -> Tensor:
    """||w|| / ||u|| per tensor; 1 where one of the two is 0.

    Args:
        rows: (2, tensors, WIDTH) int64 of w and of u, added up over all shards.

    Returns:
        (tensors,) float32.
    """
    weight, step = root(rows)
    usable = (weight > 0.0) & (step > 0.0)
    return torch.where(usable, weight / torch.where(usable, step, 1.0), 1.0)


def _directions(
    count: Tensor, *, beta1: float, beta2: float, eps: float, weight_decay: float
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Gives the step's direction u and both averages after this step."""
    adam = adam_update(count, beta1, beta2, eps)

    def direction(param: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        update, first, second = adam(*given)
        return update + weight_decay * param, first, second

    return direction


_ATTRS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
_STATES = ("exp_avgs", "exp_avg_sqs")
_SCHEMA = "float beta1=0.9, float beta2=0.999, float eps=1e-06, float weight_decay=0.01"


# lamb_sums_of_squares


def _sums_forward(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    **attrs: float,
) -> Tensor:
    if not params:
        return _sums_fake(params, grads, exp_avgs, exp_avg_sqs, step)
    direction = _directions(step + 1.0, **attrs)
    steps = (
        direction(param.float(), scaled(grad, scale, clip), *averages)[0]
        for param, grad, *averages in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)
    )
    return torch.stack([rows_of(params), rows_of(steps)])


def _sums_fake(
    params: Sequence[Tensor], grads: Any, exp_avgs: Any, exp_avg_sqs: Any, step: Tensor, *_: Any,
    **attrs: float,
) -> Tensor:  # fmt: skip
    return step.new_empty((2, len(params), WIDTH), dtype=torch.int64)


def _sums_check(params: Sequence[Tensor], *given: Any, **attrs: float) -> None:
    others, scalars = zip(("grads", *_STATES), given, strict=False), given[3:]
    lists.check_shapes("params", params, **dict(others))
    lists.check_numbers(attrs)
    lists.check_scalars(**dict(zip(("step", "scale", "clip"), scalars, strict=True)))


def _sums_samples(maker: SampleMaker) -> Iterator[Sample]:
    yield Sample((*sampled_tensors(maker, _STATES), maker.scalar(3.0), None, None), _ATTRS, "plain")
    scalars = (maker.scalar(0.0), maker.scalar(1024.0), maker.scalar(0.5))
    yield Sample((*sampled_tensors(maker, _STATES), *scalars), _ATTRS, "scale,clip")


lamb_sums_of_squares = OperatorSpec(
    name="lamb_sums_of_squares",
    signature=(
        "(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor step, "
        f"Tensor? scale=None, Tensor? clip=None, *, {_SCHEMA}) -> Tensor"),
    equation="sums_of_squares of the parameters, and of lamb's u; nothing is written",
    source="You et al. 2019, arXiv:1904.00962, algorithm 2",
    forward=_sums_forward, fake=_sums_fake, check=_sums_check,
    fixed_dtypes=dict.fromkeys((*_STATES, "step", "scale", "clip"), "float32"),
    sizes=lambda params, *_, **__: {"numel": lists.numel(params), "tensors": len(params)},
    cost=lambda params, grads, m, v, *_, **__: Cost(
        lists.nbytes(params, grads, m, v), 17 * lists.numel(params)),
    samples=_sums_samples, bound=Bound(forward=28, backward=0, length=lambda *_, **__: 1),
)  # fmt: skip


# lamb


def _lamb(count: Tensor, **attrs: float) -> Move:
    direction = _directions(count, **attrs)

    def move(rate: Tensor, param: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found, first, second = direction(param, *given)
        return param - rate * found, first, second

    return move


def _trust(call: UpdateCall, **attrs: float) -> Tensor:
    params, grads, (exp_avgs, exp_avg_sqs), _, step, scale, clip, *_ = call
    rows = _sums_forward(params, grads, exp_avgs, exp_avg_sqs, step, scale, clip, **attrs)
    return trust_ratios(rows)


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
    bound=Bound(forward=40, backward=0, length=lambda *_, **__: 1),
)
