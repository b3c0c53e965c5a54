"""Cases of update rules, norms over lists, and of what gradients are compressed with.

torch's own way: its fused kernel where there is one, else its list operations (``_foreach``), else
the few lines that a user would write.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anychip.bench.case import Case
from anychip.contract import SampleMaker
from anychip.operators.adamw_8bit import SIGNED, UNSIGNED

_SHAPE, _COUNT = (1024, 1024), 8
_NUMEL = 1 << 22


def cases() -> dict[str, Callable[[SampleMaker], Case]]:
    """By operator."""
    return {
        "adamw_8bit": _adamw_8bit, "sgd": _sgd, "lion": _lion, "lamb": _lamb,
        "sums_of_squares": lambda m: Case(
            args=([m.normal(*_SHAPE) for _ in range(_COUNT)],), attrs={}, eager=_squared_norms
        ),
        "lamb_sums_of_squares": _lamb_sums_of_squares, "clip": _clip,
        "unscale_and_check": _unscale_and_check,
        "quantize": lambda m: Case(
            args=(m.normal(_NUMEL), None), attrs={"format": "int8", "block": 256}, eager=_quantize
        ),
        "dequantize": _dequantize, "hadamard": _hadamard, "top_k": _top_k,
    }  # fmt: skip


def _rows(x: Tensor, length: int) -> Tensor:
    return x.float().view(-1, length)


def _squared_norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square()


def _state(m: SampleMaker, num_states: int) -> tuple[list[Tensor], ...]:
    """Parameters, gradients and states; all float32, since torch's kernels take one dtype."""
    lists = [
        [m.normal(*_SHAPE, dtype=torch.float32).square() for _ in range(_COUNT)]
        for _ in range(2 + num_states)
    ]
    lists[1] = [g * 1e-3 for g in lists[1]]
    return tuple(lists)


_FUSED_ADAMW: dict[str, Any] = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False,
    "maximize": False,
}  # fmt: skip


def _scalars(m: SampleMaker) -> tuple[Any, ...]:
    """Of AdamW. torch's kernel is told the number of this step, ours of those before it."""
    return m.scalar(1e-3), m.scalar(0.0), None, None, None, None


def adamw(m: SampleMaker) -> Case:
    """torch's fused AdamW."""
    params, moments, squares = (
        [m.normal(*_SHAPE, dtype=torch.float32).square() for _ in range(_COUNT)] for _ in range(3)
    )
    grads, steps = [p * 1e-3 for p in params], [m.scalar(1.0) for _ in params]

    def eager(p: Any, g: Any, first: Any, second: Any, *_: Any) -> None:
        torch._fused_adamw_(p, g, first, second, [], steps, **_FUSED_ADAMW)

    return Case(args=(params, grads, moments, squares, *_scalars(m)), attrs={}, eager=eager)


def _adamw_8bit(m: SampleMaker) -> Case:
    """torch's fused AdamW between decoding and encoding, which torch has no kernels for."""
    params, grads, moments = _state(m, 1)
    squares = [moment.square() for moment in moments]
    states: list[list[Tensor]] = []
    for form, tensors in ((SIGNED, moments), (UNSIGNED, squares)):
        states += map(list, zip(*map(form.encode, tensors), strict=True))
    steps = [m.scalar(1.0) for _ in params]

    def eager(p: Any, g: Any, m8: Any, ms: Any, v8: Any, vs: Any, *_: Any) -> None:
        firsts, seconds = (
            [form.decode(*pair) for pair in zip(codes, scales, strict=True)]
            for form, codes, scales in ((SIGNED, m8, ms), (UNSIGNED, v8, vs))
        )
        torch._fused_adamw_(p, g, firsts, seconds, [], steps, **_FUSED_ADAMW)
        for form, averages, codes, scales in (
            (SIGNED, firsts, m8, ms),
            (UNSIGNED, seconds, v8, vs),
        ):
            for index, average in enumerate(averages):
                for state, made in zip((codes, scales), form.encode(average), strict=True):
                    state[index].copy_(made)

    return Case(args=(params, grads, *states, *_scalars(m)), attrs={}, eager=eager)


def _sgd(m: SampleMaker) -> Case:
    def eager(params: Any, grads: Any, buffers: Any, *_: Any, **__: Any) -> None:
        torch._fused_sgd_(
            params, grads, buffers, weight_decay=0.01, momentum=0.9, lr=1e-3, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip

    attrs = {"momentum": 0.9, "weight_decay": 0.01}
    return Case(args=(*_state(m, 1), m.scalar(1e-3), m.scalar(3.0)), attrs=attrs, eager=eager)


def _lion(m: SampleMaker) -> Case:
    def eager(params: Any, grads: Any, moments: Any, *_: Any, **__: Any) -> None:
        steps = torch._foreach_mul(moments, 0.9)
        torch._foreach_add_(steps, grads, alpha=0.1)
        torch._foreach_sign_(steps)
        torch._foreach_mul_(params, 1.0 - 1e-3 * 0.1)
        torch._foreach_add_(params, steps, alpha=-1e-3)
        torch._foreach_mul_(moments, 0.99)
        torch._foreach_add_(moments, grads, alpha=0.01)

    attrs = {"weight_decay": 0.1}
    return Case(args=(*_state(m, 1), m.scalar(1e-3), m.scalar(3.0)), attrs=attrs, eager=eager)


def _lamb_steps(params: Any, firsts: Any, seconds: Any) -> Any:
    """LAMB's step before the trust ratio, from moments after three updates and one more."""
    roots = torch._foreach_div(seconds, 1.0 - 0.999**4)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, 1e-6)
    steps = torch._foreach_div(firsts, 1.0 - 0.9**4)
    torch._foreach_div_(steps, roots)
    torch._foreach_add_(steps, params, alpha=0.01)
    return steps


def _lamb(m: SampleMaker) -> Case:
    def eager(params: Any, grads: Any, firsts: Any, seconds: Any, *_: Any, **__: Any) -> None:
        torch._foreach_lerp_(firsts, grads, 0.1)
        torch._foreach_mul_(seconds, 0.999)
        torch._foreach_addcmul_(seconds, grads, grads, 0.001)
        steps = _lamb_steps(params, firsts, seconds)
        norms = zip(torch._foreach_norm(params), torch._foreach_norm(steps), strict=True)
        torch._foreach_mul_(steps, [weight / step for weight, step in norms])
        torch._foreach_add_(params, steps, alpha=-1e-3)

    return Case(args=(*_state(m, 2), m.scalar(1e-3), m.scalar(3.0)), attrs={}, eager=eager)


def _lamb_sums_of_squares(m: SampleMaker) -> Case:
    def eager(params: Any, grads: Any, firsts: Any, seconds: Any, step: Tensor) -> Tensor:
        firsts = torch._foreach_lerp(firsts, grads, 0.1)
        seconds = torch._foreach_mul(seconds, 0.999)
        torch._foreach_addcmul_(seconds, grads, grads, 0.001)
        steps = _lamb_steps(params, firsts, seconds)
        return torch.stack([_squared_norms(params), _squared_norms(steps)])

    return Case(args=(*_state(m, 2), m.scalar(3.0)), attrs={}, eager=eager)


def _clip(m: SampleMaker) -> Case:
    """A factor of 0.999: values stay ordinary numbers however often it is called."""

    def eager(tensors: Any, norm: Tensor, *, max_norm: float) -> None:
        torch._foreach_mul_(tensors, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    tensors = [m.normal(*_SHAPE) for _ in range(_COUNT)]
    return Case(args=(tensors, m.scalar(1.0)), attrs={"max_norm": 0.999}, eager=eager)


def _unscale_and_check(m: SampleMaker) -> Case:
    def eager(grads: Any, scale: Tensor, found_inf: Tensor) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, scale.reciprocal())

    # As torch takes them. A scale that call after call leaves the numbers what they are.
    grads = [m.normal(*_SHAPE, dtype=torch.float32) for _ in range(_COUNT)]
    return Case(args=(grads, m.scalar(1.0), m.scalar(0.0)), attrs={}, eager=eager)


def _quantize(x: Tensor, rng: Tensor | None, *, format: str, block: int) -> tuple[Tensor, Tensor]:
    rows = _rows(x, block)
    scales = rows.abs().amax(1) / 127
    return (rows / scales[:, None]).round().to(torch.int8).flatten(), scales


def _dequantize(m: SampleMaker) -> Case:
    def eager(codes: Tensor, scales: Tensor, *, block: int, **_: Any) -> Tensor:
        return (_rows(codes, block) * scales[:, None]).flatten()

    codes, scales = _quantize(m.normal(_NUMEL), None, format="int8", block=256)
    attrs = {"shape": [_NUMEL], "format": "int8", "block": 256}
    return Case(args=(codes, scales), attrs=attrs, eager=eager)


def _hadamard(m: SampleMaker) -> Case:
    """Blocks of 256, for which torch has the product with the whole matrix."""
    block = 256
    matrix = torch.ones(1, 1, device=m.device, dtype=m.dtype)
    for _ in range(int(math.log2(block))):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix / math.sqrt(block)

    def eager(x: Tensor, *, block: int) -> Tensor:
        return (x.view(-1, block) @ matrix).view(x.shape)

    return Case(args=(m.normal(_NUMEL // 1024, 1024),), attrs={"block": block}, eager=eager)


def _top_k(m: SampleMaker) -> Case:
    """Magnitudes that all differ: of equal ones torch takes any."""

    def eager(x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
        indices = torch.topk(x.abs(), k).indices
        return x.gather(-1, indices), indices

    count = _NUMEL // 4
    order = torch.argsort(m.normal(count, dtype=torch.float32))
    x = (order + 1) * (1 - 2 * (order % 2))
    return Case(args=(x.to(m.dtype),), attrs={"k": count // 100}, eager=eager)
