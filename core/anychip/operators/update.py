"""Update rules over lists of tensors: adamw, sgd, lion.

Element by element: a shard is updated like the whole. The rule that also needs norms of whole
tensors is in :mod:`.lamb`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Bound
from anychip.operators.rule import Move, UpdateCall, UpdateFormula, operator_of

_ELEMENTWISE: dict[str, Any] = {"backward": 0, "length": lambda *_, **__: 1}

# adamw


def bias_corrections(count: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """1 - beta^count of both averages: 0-dim float32."""
    return 1.0 - torch.pow(beta1, count), 1.0 - torch.pow(beta2, count)


def adam_update(
    count: Tensor, beta1: float, beta2: float, eps: float
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Gives Adam's update, from a gradient and both averages, and the averages after it."""
    correction1, correction2 = bias_corrections(count, beta1, beta2)

    def update(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = beta1 * exp_avg + (1.0 - beta1) * grad
        second = beta2 * exp_avg_sq + (1.0 - beta2) * grad.square()
        return (first / correction1) / ((second / correction2).sqrt() + eps), first, second

    return update


def adamw_move(
    count: Tensor, *, beta1: float, beta2: float, eps: float, weight_decay: float
) -> Move:
    """How AdamW moves one tensor in step ``count``, 0-dim."""
    adam = adam_update(count, beta1, beta2, eps)

    def move(rate: Tensor, param: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        update, first, second = adam(*given)
        return param * (1.0 - rate * weight_decay) - rate * update, first, second

    return move


adamw = operator_of(
    "adamw",
    UpdateFormula(
        states=("exp_avgs", "exp_avg_sqs"),
        attrs="float beta1=0.9, float beta2=0.999, float eps=1e-08, float weight_decay=0.01",
        prepare=adamw_move,
        flops=15,
        sampled_attrs=lambda _: {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1},
    ),
    equation=(
        "unless found_inf: t = step = step + 1; g = g / scale * clip; p = p (1 - lr wd); "
        "m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; "
        "p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps); low_precision = cast(p)"
    ),
    source="Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2",
    bound=Bound(forward=14, **_ELEMENTWISE),
)


# sgd


def _sgd(
    count: Tensor, *, momentum: float, nesterov: bool, weight_decay: float, decoupled: bool
) -> Move:
    def move(rate: Tensor, param: Tensor, grad: Tensor, *buffers: Tensor) -> list[Tensor]:
        if decoupled:
            param = param * (1.0 - rate * weight_decay)
        else:
            grad = grad + weight_decay * param
        moved = [momentum * buffer + grad for buffer in buffers]
        for buffer in moved:
            grad = grad + momentum * buffer if nesterov else buffer
        return [param - rate * grad, *moved]

    return move


def _check_sgd(call: UpdateCall, *, momentum: float, nesterov: bool, **_: Any) -> None:
    (buffers,) = call.states
    if buffers and not momentum:
        raise ValueError(f"momentum_buffers must be empty when momentum is 0, got {len(buffers)}")
    if nesterov and not momentum:
        raise ValueError("nesterov needs a momentum greater than 0, got 0.0")


sgd = operator_of(
    "sgd",
    UpdateFormula(
        states=("momentum_buffers",),
        attrs=(
            "float momentum=0.0, bool nesterov=False, float weight_decay=0.0, bool decoupled=False"
        ),
        prepare=_sgd,
        refuse=_check_sgd,
        has_states=lambda momentum, **_: momentum != 0.0,
        flops=6,
        sampled_attrs=lambda label: {
            "momentum": 0.9 if label != "found_inf" else 0.0,
            "nesterov": label == "scale,clip",
            "weight_decay": 0.1,
            "decoupled": label == "plain",
        },
    ),
    equation=(
        "unless found_inf: step = step + 1; g = g / scale * clip; decoupled: p = p (1 - lr wd), "
        "else g = g + wd p; b = momentum b + g; u = g + momentum b if nesterov else b; "
        "p = p - lr u; low_precision = cast(p)"
    ),
    source="Sutskever et al. 2013, PMLR 28(3):1139, section 2; torch.optim.SGD, dampening 0",
    bound=Bound(forward=9, **_ELEMENTWISE),
)


# lion


def _lion(count: Tensor, *, beta1: float, beta2: float, weight_decay: float) -> Move:
    def move(rate: Tensor, param: Tensor, grad: Tensor, exp_avg: Tensor) -> tuple[Tensor, Tensor]:
        direction = torch.sign(beta1 * exp_avg + (1.0 - beta1) * grad)
        moved = beta2 * exp_avg + (1.0 - beta2) * grad
        return param * (1.0 - rate * weight_decay) - rate * direction, moved

    return move


lion = operator_of(
    "lion",
    UpdateFormula(
        states=("exp_avgs",),
        attrs="float beta1=0.9, float beta2=0.99, float weight_decay=0.0",
        prepare=_lion,
        flops=10,
        sampled_attrs=lambda _: {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
    ),
    equation=(
        "unless found_inf: step = step + 1; g = g / scale * clip; "
        "u = sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g; "
        "p = p (1 - lr wd) - lr u; low_precision = cast(p)"
    ),
    source="Chen et al. 2023, arXiv:2302.06675, algorithm 2",
    bound=Bound(forward=8, **_ELEMENTWISE),
)
