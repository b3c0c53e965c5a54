"""What happens to lists of gradients between backward and the update: norm, clip, unscale.

They write in place, return nothing (l2_norm excepted), and read scale, norm and found_inf from
0-dim tensors on the device, so that no step waits for the host.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import lists

CLIP_EPS = 1e-6
"""Added to the norm before the division, as in torch.nn.utils.clip_grad_norm_."""


# l2_norm


def _l2_forward(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        raise ValueError("l2_norm: at least one tensor expected, got none")
    partial = [t.float().square().sum() for t in tensors]
    return torch.stack(partial).sum().sqrt()


def _l2_samples(maker: SampleMaker) -> Iterator[Sample]:
    yield Sample(([maker.normal(*shape) for shape in lists.SHAPES],), {}, "four tensors")
    yield Sample(([maker.normal(33, scale=1e-3)],), {}, "one tensor")


l2_norm = OperatorSpec(
    name="l2_norm", signature="(Tensor[] tensors) -> Tensor",
    equation="sqrt(sum over tensors and entries of t^2), float32",
    source="torch.nn.utils.get_total_norm",
    forward=_l2_forward, fake=lambda tensors: tensors[0].new_empty((), dtype=torch.float32),
    sizes=lambda tensors: {"numel": lists.numel(tensors)},
    cost=lambda tensors: Cost(lists.nbytes(tensors), 2 * lists.numel(tensors)), samples=_l2_samples,
    bound=Bound(forward=3, backward=0, length=lambda tensors, **_: max(lists.numel(tensors), 1)),
)  # fmt: skip


# clip


def _clip_forward(tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
    coefficient = torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)
    for tensor in tensors:
        tensor.mul_(coefficient)


def _clip_check(tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
    lists.check_scalars(norm=norm)
    if not max_norm > 0.0:
        raise ValueError(f"max_norm must be greater than 0, got {max_norm}")


def _clip_samples(maker: SampleMaker) -> Iterator[Sample]:
    for norm in (0.5, 4.0):
        tensors = [maker.normal(*shape) for shape in lists.SHAPES]
        yield Sample((tensors, maker.scalar(norm)), {"max_norm": 1.0}, f"norm={norm}")


clip = OperatorSpec(
    name="clip", signature="(Tensor(a!)[] tensors, Tensor norm, *, float max_norm=1.0) -> ()",
    equation="t = t * min(1, max_norm / (norm + 1e-6))",
    source="Pascanu et al. 2013, arXiv:1211.5063, algorithm 1; torch.nn.utils.clip_grad_norm_",
    forward=_clip_forward, fake=lambda tensors, norm, *, max_norm: None, check=_clip_check,
    fixed_dtypes={"norm": "float32"},
    sizes=lambda tensors, norm, *, max_norm: {"numel": lists.numel(tensors)},
    cost=lambda tensors, norm, *, max_norm: Cost(2 * lists.nbytes(tensors), lists.numel(tensors)),
    samples=_clip_samples, bound=Bound(forward=4, backward=0, length=lambda *_, **__: 1),
)  # fmt: skip


# unscale_and_check


def _unscale_forward(grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    for grad in grads:
        grad.copy_(grad.float() / scale)
        # Of what was stored, so that an overflow by the division counts too.
        bad = torch.logical_not(torch.isfinite(grad).all())
        found_inf.copy_(torch.where(bad, 1.0, found_inf))


def _unscale_samples(maker: SampleMaker) -> Iterator[Sample]:
    for bad in (None, float("inf"), float("nan")):
        grads = [maker.normal(*shape) for shape in lists.SHAPES]
        if bad is not None:
            grads[1][3] = bad
        args = (grads, maker.scalar(1024.0), maker.scalar(0.0))
        yield Sample(args, {}, f"bad={bad}")


unscale_and_check = OperatorSpec(
    name="unscale_and_check",
    signature="(Tensor(a!)[] grads, Tensor scale, Tensor(b!) found_inf) -> ()",
    equation="g = g / scale; found_inf = 1 if any entry of any new g is not finite, else as it was",
    source="Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; torch.amp.GradScaler",
    forward=_unscale_forward, fake=lambda grads, scale, found_inf: None,
    check=lambda grads, scale, found_inf: lists.check_scalars(scale=scale, found_inf=found_inf),
    fixed_dtypes={"scale": "float32", "found_inf": "float32"},
    sizes=lambda grads, scale, found_inf: {"numel": lists.numel(grads)},
    cost=lambda grads, scale, found_inf: Cost(2 * lists.nbytes(grads), 2 * lists.numel(grads)),
    samples=_unscale_samples, bound=Bound(forward=1, backward=0, length=lambda *_, **__: 1),
)  # fmt: skip
