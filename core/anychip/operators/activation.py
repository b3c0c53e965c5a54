"""Element-wise activations: of one tensor, of a sum with a bias, and gated.

relu(NaN) is NaN, and relu's gradient at 0 is 0, as torch has it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Placements, Sample, SampleMaker, Sharding
from anychip.operators.extents import empty_like, nbytes

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_SQRT_HALF = math.sqrt(0.5)
_SHAPES = ((5, 7), (2, 3, 16), (1000,))
_FORMS = ({"approximate": "none"}, {"approximate": "tanh"})


def _any_dim(results: int, tensors: int, x: Tensor) -> Placements:
    return [([d] * results, [d] * tensors) for d in range(x.dim())]


def _samples(
    maker: SampleMaker,
    *others: Callable[[tuple[int, ...]], tuple[int, ...]],
    forms: Sequence[Mapping[str, Any]] = ({},),
) -> Iterator[Sample]:
    """Of x and of others, whose shapes follow from x's, in each form."""
    for shape in _SHAPES:
        for attrs in forms:
            rest = (maker.normal(*other(shape)) for other in others)
            args = (maker.normal(*shape, scale=2.0), *rest)
            yield Sample(
                args, attrs, ",".join(["x".join(map(str, shape)), *map(str, attrs.values())])
            )


def _rounded_once(
    value: Callable[..., Tensor], gradient: Callable[..., Tensor]
) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor]]]:
    """``y = value(x)`` and ``dx = gradient(grad, x)``, in float32 and rounded once."""

    def forward(x: Tensor, **given: Any) -> Tensor:
        return value(x.float(), **given).to(x.dtype).contiguous()

    def backward(grad: Tensor, x: Tensor, *, needs: tuple[bool], **given: Any) -> tuple[Tensor]:
        return (gradient(grad.float(), x.float(), **given).to(x.dtype),)

    return forward, backward


def _unary(
    name: str, value: Callable[..., Tensor], gradient: Callable[..., Tensor], *, flops: int,
    attrs: str = "", forms: Sequence[Mapping[str, Any]] = ({},), **rest: Any,
) -> OperatorSpec:  # fmt: skip
    forward, backward = _rounded_once(value, gradient)
    return OperatorSpec(
        name=name, signature=f"(Tensor x{attrs}) -> Tensor", forward=forward, backward=backward,
        fake=lambda x, **_: empty_like(x), saved=("x",), differentiable=("x",),
        sizes=lambda x, **_: {"numel": x.numel()},
        sharding=Sharding(lambda x, *_: _any_dim(1, 1, x), lambda grad, x, *_: _any_dim(1, 2, x)),
        cost=lambda x, **_: Cost(2 * nbytes(x), flops * x.numel()),
        backward_cost=lambda x, **_: Cost(3 * nbytes(x), 2 * flops * x.numel()),
        samples=partial(_samples, forms=forms), **rest,
    )  # fmt: skip


def _bound(forward: float, backward: float) -> Bound:
    return Bound(forward, backward, length=lambda *_, **__: 1)


# gelu


def _gelu(x: Tensor, *, approximate: str) -> Tensor:
    if approximate == "none":
        # Not torch's gelu, which on some chips is the tanh form whatever is asked for.
        return 0.5 * x * (1.0 + torch.erf(x * _SQRT_HALF))
    return torch.nn.functional.gelu(x, approximate=approximate)


def _gelu_slope(x: Tensor, *, approximate: str) -> Tensor:
    if approximate == "tanh":
        inner = _SQRT_2_OVER_PI * (x + 0.044715 * x**3)
        # (1 + tanh(u)) / 2: its ends are exact where a chip's tanh is one rounding off 1, of which
        # a large x times its slope would make anything.
        gate = torch.sigmoid(2.0 * inner)
        slope = _SQRT_2_OVER_PI * (1.0 + 3 * 0.044715 * x.square())
        return gate + 2.0 * x * gate * (1.0 - gate) * slope
    cumulative = 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    density = torch.exp(-0.5 * x.square()) / math.sqrt(2.0 * math.pi)
    return cumulative + x * density


def _gelu_check(x: Tensor, *, approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")


gelu = _unary(
    "gelu", _gelu,
    lambda grad, x, *, approximate: grad * _gelu_slope(x, approximate=approximate),
    attrs=', *, str approximate="none"', forms=_FORMS,
    equation="none: x/2 (1 + erf(x/sqrt 2)); tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))",
    source="Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2",
    check=_gelu_check, flops=10, bound=_bound(8, 16),
)  # fmt: skip


# silu, relu, relu2, sigmoid, tanh, softplus


def _silu_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid + x * sigmoid * (1.0 - sigmoid)


def _sigmoid_gradient(grad: Tensor, x: Tensor) -> Tensor:
    # Of x: a y that was rounded to 16 bits leaves 1 - y no digit.
    y = torch.sigmoid(x)
    return grad * (y * (1.0 - y))


def _softplus(x: Tensor, *, beta: float, threshold: float) -> Tensor:
    scaled = x * beta
    # log(1 + exp(scaled)), whose exp overflows where threshold is large.
    soft = scaled.clamp_min(0.0) + torch.log1p(torch.exp(-scaled.abs()))
    return torch.where(scaled > threshold, x, soft / beta)


def _softplus_gradient(grad: Tensor, x: Tensor, *, beta: float, threshold: float) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, grad, grad * torch.sigmoid(scaled))


def _softplus_check(x: Tensor, *, beta: float, threshold: float) -> None:
    if not beta > 0.0:
        raise ValueError(f"beta must be above 0, got {beta}")


silu = _unary(
    "silu", lambda x: x * torch.sigmoid(x), lambda grad, x: grad * _silu_slope(x),
    equation="y = x * sigmoid(x)", source="Elfwing, Uchibe and Doya 2017, arXiv:1702.03118",
    flops=5, bound=_bound(5, 9),
)  # fmt: skip
relu = _unary(
    "relu", torch.relu, lambda grad, x: torch.where(x <= 0.0, 0.0, grad), equation="y = max(x, 0)",
    source="Nair and Hinton 2010, ICML", flops=1, bound=_bound(0, 0),
)  # fmt: skip
relu2 = _unary(
    "relu2", lambda x: torch.relu(x).square(),
    lambda grad, x: torch.where(x <= 0.0, 0.0, 2.0 * x * grad), equation="y = max(x, 0)^2",
    source="So et al. 2021, arXiv:2109.08668", flops=2, bound=_bound(1, 2),
)  # fmt: skip
sigmoid = _unary(
    "sigmoid", torch.sigmoid, _sigmoid_gradient, equation="y = 1 / (1 + exp(-x))",
    source="torch.sigmoid", flops=4, bound=_bound(4, 8),
)  # fmt: skip
tanh = _unary(
    "tanh", torch.tanh, lambda grad, x: grad * (1.0 - torch.tanh(x).square()),
    equation="y = (exp(x) - exp(-x)) / (exp(x) + exp(-x))", source="torch.tanh", flops=6,
    bound=_bound(5, 12),
)  # fmt: skip
softplus = _unary(
    "softplus", _softplus, _softplus_gradient, attrs=", *, float beta=1.0, float threshold=20.0",
    forms=({"beta": 1.0, "threshold": 20.0}, {"beta": 2.0, "threshold": 1.0}),
    equation="y = x if beta x > threshold, else log(1 + exp(beta x)) / beta",
    source="torch.nn.functional.softplus", check=_softplus_check, flops=7, bound=_bound(8, 8),
)  # fmt: skip


# bias_gelu


def _bias_gelu_forward(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    # The sum stays in float32: there is one rounding to x's dtype, at the end.
    return _gelu(x.float() + bias.float(), approximate=approximate).to(x.dtype).contiguous()


def _bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor, *, approximate: str, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    total = grad.float() * _gelu_slope(x.float() + bias.float(), approximate=approximate)
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
    forward=_bias_gelu_forward, backward=_bias_gelu_backward,
    fake=lambda x, bias, *, approximate: empty_like(x), saved=("x", "bias"),
    differentiable=("x", "bias"), check=_bias_gelu_check,
    sizes=lambda x, bias, *, approximate: {"numel": x.numel(), "hidden": x.shape[-1]},
    sharding=Sharding(_bias_gelu_shards, _bias_gelu_backward_shards),
    cost=lambda x, bias, *, approximate: Cost(2 * nbytes(x) + nbytes(bias), 11 * x.numel()),
    backward_cost=lambda x, bias, *, approximate: Cost(
        3 * nbytes(x) + 2 * nbytes(bias), 22 * x.numel()
    ),
    samples=lambda maker: _samples(maker, lambda shape: shape[-1:], forms=_FORMS),
    bound=_bound(10, 20),
)  # fmt: skip


# swiglu, geglu


def _gated_directions(
    value: Callable[..., Tensor], slope: Callable[..., Tensor]
) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor | None, Tensor | None]]]:
    """``y = value(gate) * up``, in float32 and rounded once, and its gradients."""

    def forward(gate: Tensor, up: Tensor, **given: Any) -> Tensor:
        return (value(gate.float(), **given) * up.float()).to(gate.dtype).contiguous()

    def backward(
        grad: Tensor, gate: Tensor, up: Tensor, *, needs: tuple[bool, bool], **given: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        wide, total = gate.float(), grad.float()
        dgate = dup = None
        if needs[0]:
            dgate = (total * up.float() * slope(wide, **given)).to(gate.dtype)
        if needs[1]:
            dup = (total * value(wide, **given)).to(up.dtype)
        return dgate, dup

    return forward, backward


def _gated(
    name: str, value: Callable[..., Tensor], slope: Callable[..., Tensor], *,
    flops: tuple[int, int], check: Callable[..., None] = lambda gate: None, attrs: str = "",
    forms: Sequence[Mapping[str, Any]] = ({},), **rest: Any,
) -> OperatorSpec:  # fmt: skip
    """An activation times what it lets through; ``flops`` of an element, forward and backward."""
    forward, backward = _gated_directions(value, slope)

    def check_both(gate: Tensor, up: Tensor, **given: Any) -> None:
        check(gate, **given)
        if gate.shape != up.shape:
            shapes = f"{tuple(gate.shape)} and {tuple(up.shape)}"
            raise ValueError(f"gate and up must have the same shape, got {shapes}")

    return OperatorSpec(
        name=name, signature=f"(Tensor gate, Tensor up{attrs}) -> Tensor",
        source="Shazeer 2020, arXiv:2002.05202, equation 6", forward=forward, backward=backward,
        fake=lambda gate, up, **_: empty_like(gate), saved=("gate", "up"),
        differentiable=("gate", "up"), check=check_both,
        sizes=lambda gate, up, **_: {"numel": gate.numel()}, autocast="promote",
        sharding=Sharding(
            lambda gate, up, *_: _any_dim(1, 2, gate),
            lambda grad, gate, up, *_: _any_dim(2, 3, gate),
        ),
        cost=lambda gate, up, **_: Cost(3 * nbytes(gate), flops[0] * gate.numel()),
        backward_cost=lambda gate, up, **_: Cost(5 * nbytes(gate), flops[1] * gate.numel()),
        samples=lambda maker: _samples(maker, lambda shape: shape, forms=forms),
        **rest,
    )  # fmt: skip


swiglu = _gated(
    "swiglu", lambda gate: gate * torch.sigmoid(gate), _silu_slope,
    equation="y = gate * sigmoid(gate) * up", flops=(6, 12), bound=_bound(6, 10),
)  # fmt: skip
geglu = _gated(
    "geglu", _gelu, _gelu_slope, attrs=', *, str approximate="none"', forms=_FORMS,
    check=_gelu_check, equation="y = gelu(gate) * up", flops=(11, 32), bound=_bound(9, 18),
)  # fmt: skip
