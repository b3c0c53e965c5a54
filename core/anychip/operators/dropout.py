"""dropout, bias_dropout_add: the mask is a function of (seed, offset, logical index) alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import philox


def keep_threshold(p: float) -> int:
    """An element is kept when its 32-bit word is at least this: floor(p * 2^32), in integers."""
    return int(p * 4294967296.0)  # p * 2^32 is exact in float64, int() floors


def _dropped(x: Tensor, rng: Tensor, p: float) -> Tensor:
    """Dropout of x in float32."""
    keep = philox.words(rng, x.numel()).reshape(x.shape) >= keep_threshold(p)
    # 1 / (1 - p) is rounded to float32 once, on the host, so that every chip multiplies by the
    # same number. p = 1 keeps nothing.
    scale = torch.tensor(0.0 if p == 1.0 else 1.0 / (1.0 - p), dtype=torch.float32)
    return torch.where(keep, x.float() * scale.to(x.device), 0.0)


def _forward(x: Tensor, rng: Tensor, *, p: float) -> Tensor:
    return _dropped(x, rng, p).to(x.dtype)


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
    shaped_like={"x": "grad0"},
    check=_check,
    fixed_dtypes={"rng": "int64"},
    sizes=lambda x, rng, *, p: {"numel": x.numel()},
    cost=lambda x, rng, *, p: Cost(2 * x.numel() * x.element_size(), 30 * x.numel()),
    backward_cost=lambda x, rng, *, p: Cost(2 * x.numel() * x.element_size(), 30 * x.numel()),
    samples=_samples,
    bound=Bound(forward=1, backward=1, length=lambda *_, **__: 1),
    random=True,
)


# bias_dropout_add


def _add_forward(
    x: Tensor, residual: Tensor, rng: Tensor, bias: Tensor | None, *, p: float
) -> Tensor:
    inner = x.float() if bias is None else x.float() + bias.float()
    return (residual.float() + _dropped(inner, rng, p)).to(residual.dtype).contiguous()


def _add_backward(
    grad: Tensor, rng: Tensor, *, p: float, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dropped = _dropped(grad, rng, p) if needs[0] or needs[2] else None
    dx = dresidual = dbias = None
    if dropped is not None and needs[0]:
        # In the residual's dtype, which is never narrower than x's; autograd casts it to x's.
        dx = dropped.to(grad.dtype)
    if needs[1]:
        dresidual = grad.clone(memory_format=torch.contiguous_format)
    if dropped is not None and needs[2]:
        dbias = dropped.unsqueeze(0).flatten(0, -2).sum(0)
    return dx, dresidual, dbias


def _add_fake(x: Tensor, residual: Tensor, rng: Tensor, bias: Tensor | None, *, p: float) -> Tensor:
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


def _add_check(x: Tensor, residual: Tensor, rng: Tensor, bias: Tensor | None, *, p: float) -> None:
    _check(x, rng, p=p)
    if residual.shape != x.shape:
        raise ValueError(
            f"residual must have the shape of x {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    # The gradient of x is known in the residual's dtype only.
    if residual.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"residual must be {x.dtype} like x, or float32; got {residual.dtype}")
    if bias is not None and (x.dim() == 0 or bias.shape != x.shape[-1:]):
        raise ValueError(
            f"bias must have shape {tuple(x.shape[-1:])}, the last dim of x {tuple(x.shape)}; "
            f"got {tuple(bias.shape)}"
        )


def _add_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, p in (((7, 9), 0.1), ((64,), 0.5), ((3, 4, 5), 0.0), ((8, 8), 1.0)):
        args = (maker.normal(*shape), maker.normal(*shape), maker.rng(seed=1234, offset=5))
        label = f"{'x'.join(map(str, shape))},p={p}"
        yield Sample((*args, maker.normal(shape[-1])), {"p": p}, label)
    args = (maker.normal(6, 10), maker.normal(6, 10), maker.rng(seed=4, offset=2**32 - 3))
    yield Sample((*args, None), {"p": 0.3}, "6x10,bias=None")


def _add_bytes(x: Tensor, residual: Tensor, bias: Tensor | None) -> int:
    stream = residual.numel() * residual.element_size()
    return 2 * stream + x.numel() * x.element_size() + (0 if bias is None else bias.nbytes)


bias_dropout_add = OperatorSpec(
    name="bias_dropout_add",
    signature=(
        "(Tensor x, Tensor residual, Tensor rng, Tensor? bias=None, *, float p=0.5) -> Tensor"
    ),
    equation="y = residual + dropout(x + bias, rng, p), in residual's dtype",
    source="Srivastava et al. 2014, JMLR 15; Vaswani et al. 2017, section 5.4 (residual dropout)",
    forward=_add_forward,
    backward=_add_backward,
    fake=_add_fake,
    saved=("rng",),
    differentiable=("x", "residual", "bias"),
    shaped_like={"x": "grad0", "residual": "grad0"},
    check=_add_check,
    fixed_dtypes={"rng": "int64"},
    sizes=lambda x, residual, rng, bias, *, p: {"numel": x.numel(), "hidden": x.shape[-1]},
    # No sharding: a shard does not know its elements' index in the whole tensor, which the mask
    # depends on.
    cost=lambda x, residual, rng, bias, *, p: Cost(_add_bytes(x, residual, bias), 32 * x.numel()),
    backward_cost=lambda x, residual, rng, bias, *, p: Cost(
        _add_bytes(x, residual, bias), 31 * x.numel()
    ),
    samples=_add_samples,
    bound=Bound(forward=3, backward=2, length=lambda *_, **__: 1),
    random=True,
)
