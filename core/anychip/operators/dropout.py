"""Dropout whose mask is a function of (seed, offset, logical element index) alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import philox


def keep_threshold(p: float) -> int:
    """An element is kept when its 32-bit word is at least this: floor(p * 2^32), in integers."""
    return int(p * 4294967296.0)  # p * 2^32 is exact in float64, int() floors


def _forward(x: Tensor, rng: Tensor, *, p: float) -> Tensor:
    keep = philox.words(rng, x.numel()).reshape(x.shape) >= keep_threshold(p)
    # 1 / (1 - p) is rounded to float32 once, on the host, so that every chip multiplies by the
    # same number. p = 1 keeps nothing.
    scale = torch.tensor(0.0 if p == 1.0 else 1.0 / (1.0 - p), dtype=torch.float32)
    return torch.where(keep, x.float() * scale.to(x.device), 0.0).to(x.dtype)


def _backward(grad: Tensor, rng: Tensor, *, p: float, needs: tuple[bool]) -> tuple[Tensor]:
    return (_forward(grad, rng, p=p),)


def _fake(x: Tensor, rng: Tensor, *, p: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _check(x: Tensor, rng: Tensor, *, p: float) -> None:
    if rng.dim() != 1 or rng.shape[0] != 2:
        raise ValueError(f"rng must be int64[2] (seed, offset), got shape {tuple(rng.shape)}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be from 0 to 1, got {p}")


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, p in (((7, 9), 0.1), ((64,), 0.5), ((3, 4, 5), 0.0), ((8, 8), 1.0)):
        rng = maker.rng(seed=1234, offset=5)
        yield Sample((maker.normal(*shape), rng), {"p": p}, f"{'x'.join(map(str, shape))},p={p}")


dropout = OperatorSpec(
    name="dropout",
    signature="(Tensor x, Tensor rng, *, float p=0.5) -> Tensor",
    equation="y_i = x_i / (1 - p) if u_i >= floor(p 2^32) else 0; u_i = word i of Philox(rng)",
    source="Srivastava et al. 2014, JMLR 15; Salmon et al. 2011 (Philox4x32-10)",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    saved=("rng",),
    differentiable=("x",),
    check=_check,
    fixed_dtypes={"rng": "int64"},
    sizes=lambda x, rng, *, p: {"numel": x.numel()},
    cost=lambda x, rng, *, p: Cost(2 * x.numel() * x.element_size(), 30 * x.numel()),
    backward_cost=lambda x, rng, *, p: Cost(2 * x.numel() * x.element_size(), 30 * x.numel()),
    aten=frozenset({"arange", "bitwise_and", "bitwise_xor", "__rshift__", "mul", "where"}),
    samples=_samples,
    bound=Bound(forward=1, backward=1, length=lambda *_, **__: 1),
    random=True,
)
