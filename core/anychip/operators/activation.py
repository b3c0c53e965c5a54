"""Element-wise activations: gelu, bias_gelu, swiglu, geglu."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Placements, Sample, SampleMaker, Sharding
from anychip.operators.extents import nbytes

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_SQRT_HALF = math.sqrt(0.5)
_SHAPES = ((5, 7), (2, 3, 16), (1000,))


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _any_dim(results: int, tensors: int, x: Tensor) -> Placements:
    return [([d] * results, [d] * tensors) for d in range(x.dim())]


def _label(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


# gelu


def _gelu_forward(x: Tensor, *, approximate: str) -> Tensor:
    wide = x.float()
    if approximate == "none":
        # Not torch's gelu, which on some chips is the tanh form whatever is asked for.
        return (0.5 * wide * (1.0 + torch.erf(wide * _SQRT_HALF))).to(x.dtype).contiguous()
    return torch.nn.functional.gelu(wide, approximate=approximate).to(x.dtype).contiguous()


def _gelu_backward(
    grad: Tensor, x: Tensor, *, approximate: str, needs: tuple[bool]
) -> tuple[Tensor]:
    return ((grad.float() * _gelu_slope(x.float(), approximate)).to(x.dtype),)


def _gelu_slope(wide: Tensor, approximate: str) -> Tensor:
    if approximate == "tanh":
        inner = _SQRT_2_OVER_PI * (wide + 0.044715 * wide**3)
        tanh = torch.tanh(inner)
        slope = _SQRT_2_OVER_PI * (1.0 + 3 * 0.044715 * wide.square())
        return 0.5 * (1.0 + tanh) + 0.5 * wide * (1.0 - tanh.square()) * slope
    cumulative = 0.5 * (1.0 + torch.erf(wide / math.sqrt(2.0)))
    density = torch.exp(-0.5 * wide.square()) / math.sqrt(2.0 * math.pi)
    return cumulative + wide * density


def _gelu_check(x: Tensor, *, approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")


def _gelu_samples(
    maker: SampleMaker, *others: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> Iterator[Sample]:
    """Of x and of others, whose shapes follow from x's, in both forms."""
    for shape in _SHAPES:
        for approximate in ("none", "tanh"):
            rest = (maker.normal(*other(shape)) for other in others)
            args = (maker.normal(*shape, scale=2.0), *rest)
            yield Sample(args, {"approximate": approximate}, f"{_label(shape)},{approximate}")


gelu = OperatorSpec(
    name="gelu",
    signature='(Tensor x, *, str approximate="none") -> Tensor',
    equation="none: x/2 (1 + erf(x/sqrt 2)); tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))",
    source="Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2",
    forward=_gelu_forward,
    backward=_gelu_backward,
    fake=lambda x, *, approximate: _empty(x),
    saved=("x",),
    differentiable=("x",),
    check=_gelu_check,
    sizes=lambda x, *, approximate: {"numel": x.numel()},
    sharding=Sharding(
        lambda x, approximate: _any_dim(1, 1, x),
        lambda grad, x, approximate, needs: _any_dim(1, 2, x),
    ),
    cost=lambda x, *, approximate: Cost(2 * nbytes(x), 10 * x.numel()),
    backward_cost=lambda x, *, approximate: Cost(3 * nbytes(x), 20 * x.numel()),
    samples=_gelu_samples,
    bound=Bound(forward=8, backward=16, length=lambda *_, **__: 1),
)


# bias_gelu


def _bias_gelu_forward(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    # The sum stays in float32: there is one rounding to x's dtype, at the end.
    return _gelu_forward(x.float() + bias.float(), approximate=approximate).to(x.dtype)


def _bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor, *, approximate: str, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    total = grad.float() * _gelu_slope(x.float() + bias.float(), approximate)
    dx = total.to(x.dtype) if needs[0] else None
    dbias = total.unsqueeze(0).flatten(0, -2).sum(0).to(bias.dtype) if needs[1] else None
    return dx, dbias


def _bias_gelu_check(x: Tensor, bias: Tensor, *, approximate: str) -> None:
    _gelu_check(x, approximate=approximate)
    if x.dim() == 0 or bias.shape != x.shape[-1:]:
        raise ValueError(
            f"bias must have shape {tuple(x.shape[-1:])}, the last dim of x {tuple(x.shape)}; "
            f"got {tuple(bias.shape)}"
        )


def _bias_gelu_shards(x: Tensor, bias: Tensor, approximate: str) -> Placements:
    last = x.dim() - 1
    return [([d], [d, None]) for d in range(last)] + [([last], [last, 0])]


def _bias_gelu_backward_shards(
    grad: Tensor, x: Tensor, bias: Tensor, approximate: str, needs: list[bool]
) -> Placements:
    last = x.dim() - 1
    rows: Placements = [([d, "partial"], [d, d, None]) for d in range(last)]
    return [*rows, ([last, 0], [last, last, 0])]


bias_gelu = OperatorSpec(
    name="bias_gelu",
    signature='(Tensor x, Tensor bias, *, str approximate="none") -> Tensor',
    equation="y = gelu(x + bias)",
    source="Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2",
    forward=_bias_gelu_forward,
    backward=_bias_gelu_backward,
    fake=lambda x, bias, *, approximate: _empty(x),
    saved=("x", "bias"),
    differentiable=("x", "bias"),
    check=_bias_gelu_check,
    sizes=lambda x, bias, *, approximate: {"numel": x.numel(), "hidden": x.shape[-1]},
    sharding=Sharding(_bias_gelu_shards, _bias_gelu_backward_shards),
    cost=lambda x, bias, *, approximate: Cost(2 * nbytes(x) + nbytes(bias), 11 * x.numel()),
    backward_cost=lambda x, bias, *, approximate: Cost(
        3 * nbytes(x) + 2 * nbytes(bias), 22 * x.numel()
    ),
    samples=lambda maker: _gelu_samples(maker, lambda shape: shape[-1:]),
    bound=Bound(forward=10, backward=20, length=lambda *_, **__: 1),
)


# swiglu


def _swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.float()
    return (wide * torch.sigmoid(wide) * up.float()).to(gate.dtype).contiguous()


def _swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    wide, slope = gate.float(), grad.float()
    sigmoid = torch.sigmoid(wide)
    silu = wide * sigmoid
    dgate = dup = None
    if needs[0]:
        dgate = (slope * up.float() * (sigmoid + silu * (1.0 - sigmoid))).to(gate.dtype)
    if needs[1]:
        dup = (slope * silu).to(up.dtype)
    return dgate, dup


def _swiglu_check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape:
        raise ValueError(
            f"gate and up must have the same shape, got {tuple(gate.shape)} and {tuple(up.shape)}"
        )


def _swiglu_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape in _SHAPES:
        yield Sample((maker.normal(*shape, scale=2.0), maker.normal(*shape)), {}, _label(shape))


swiglu = OperatorSpec(
    name="swiglu",
    signature="(Tensor gate, Tensor up) -> Tensor",
    equation="y = gate * sigmoid(gate) * up",
    source="Shazeer 2020, arXiv:2002.05202, equation 6",
    forward=_swiglu_forward,
    backward=_swiglu_backward,
    fake=lambda gate, up: _empty(gate),
    saved=("gate", "up"),
    differentiable=("gate", "up"),
    check=_swiglu_check,
    sizes=lambda gate, up: {"numel": gate.numel()},
    autocast="promote",
    sharding=Sharding(
        lambda gate, up: _any_dim(1, 2, gate), lambda grad, gate, up, needs: _any_dim(2, 3, gate)
    ),
    cost=lambda gate, up: Cost(3 * nbytes(gate), 6 * gate.numel()),
    backward_cost=lambda gate, up: Cost(5 * nbytes(gate), 12 * gate.numel()),
    samples=_swiglu_samples,
    bound=Bound(forward=6, backward=10, length=lambda *_, **__: 1),
)


# geglu


def _geglu_forward(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    return (_gelu_forward(gate.float(), approximate=approximate) * up.float()).to(gate.dtype)


def _geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *, approximate: str, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    wide, slope = gate.float(), grad.float()
    dgate = dup = None
    if needs[0]:
        dgate = (slope * up.float() * _gelu_slope(wide, approximate)).to(gate.dtype)
    if needs[1]:
        dup = (slope * _gelu_forward(wide, approximate=approximate)).to(up.dtype)
    return dgate, dup


def _geglu_check(gate: Tensor, up: Tensor, *, approximate: str) -> None:
    _gelu_check(gate, approximate=approximate)
    _swiglu_check(gate, up)


geglu = OperatorSpec(
    name="geglu",
    signature='(Tensor gate, Tensor up, *, str approximate="none") -> Tensor',
    equation="y = gelu(gate) * up",
    source="Shazeer 2020, arXiv:2002.05202, equation 6",
    forward=_geglu_forward,
    backward=_geglu_backward,
    fake=lambda gate, up, *, approximate: _empty(gate),
    saved=("gate", "up"),
    differentiable=("gate", "up"),
    check=_geglu_check,
    sizes=lambda gate, up, *, approximate: {"numel": gate.numel()},
    autocast="promote",
    sharding=Sharding(
        lambda gate, up, approximate: _any_dim(1, 2, gate),
        lambda grad, gate, up, approximate, needs: _any_dim(2, 3, gate),
    ),
    cost=lambda gate, up, *, approximate: Cost(3 * nbytes(gate), 11 * gate.numel()),
    backward_cost=lambda gate, up, *, approximate: Cost(5 * nbytes(gate), 32 * gate.numel()),
    samples=lambda maker: _gelu_samples(maker, lambda shape: shape),
    bound=Bound(forward=9, backward=18, length=lambda *_, **__: 1),
)
