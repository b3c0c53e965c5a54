"""References computed otherwise, for tests: one precision class lower, or with the simplest sums.

float32: factors are rounded to 10 bits after the leading one, as a TF32 matrix unit takes them.
bfloat16, float16: intermediate results and partial sums are of that type, as a kernel without a
wide accumulator has them. Fast functions: exp, tanh, the error function and roots have 11 bits, as
approximate instructions do (PTX: tanh.approx.f32, 2^-11).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NARROW = (torch.bfloat16, torch.float16)


def tf32(tensor: Tensor) -> Tensor:
    """Rounded to nearest with 10 explicit significand bits; Inf and NaN as they are."""
    bits = tensor.detach().clone().view(torch.int32)
    rounded = (bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(torch.isfinite(tensor), rounded.view(torch.float32), tensor)


def lower_inputs(args: Sequence[Any], dtype: torch.dtype, written: Sequence[int] = ()) -> list[Any]:
    """The arguments of a call as the lower precision sees them; what is written keeps its type."""
    kept = written if dtype in NARROW else ()
    return [arg if i in kept else _lowered(arg, dtype) for i, arg in enumerate(args)]


def _lowered(arg: Any, dtype: torch.dtype) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_lowered(entry, dtype) for entry in arg]
    if not isinstance(arg, Tensor) or arg.dtype != torch.float32:
        return arg
    if dtype in NARROW:
        return arg.to(dtype)
    return tf32(arg) if dtype == torch.float32 and arg.dim() else arg


def lower_arithmetic(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Within it a reference of a narrow type has intermediates and accumulators of that type."""
    return InNarrow(dtype) if dtype in NARROW else nullcontext()


class Recursive(TorchFunctionMode):
    """Sums go term by term through one float32 accumulator: slow, simple, and right."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        floats = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        if func not in SUMS or not floats:
            return func(*args, **(kwargs or {}))
        wide = [a.float() if any(a is f for f in floats) else a for a in args]
        return SUMS[func](*wide, **(kwargs or {})).to(floats[0].dtype)


class InNarrow(TorchFunctionMode):
    """Casts to float32 are left out, and sums go term by term through a narrow accumulator."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {k: self.dtype if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].to(self.dtype)
        if func is torch.Tensor.view and args[1] is torch.int32:  # the bits of what is a float32
            return args[0].to(torch.float32).view(torch.int32)
        if func in SUMS and any(isinstance(a, Tensor) and a.dtype == self.dtype for a in args):
            return SUMS[func](*args, **named)
        return func(*args, **named)


class FastFunctions(TorchFunctionMode):
    """Functions of float32 numbers give 11 bits."""

    NAMES = frozenset(
        ("exp", "tanh", "erf", "log", "sqrt", "rsqrt", "sigmoid", "silu", "gelu", "softmax", "pow",
         "logsumexp", "log_softmax")
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_fast = getattr(func, "__name__", "") in self.NAMES
        return tf32(result) if is_fast and result.dtype == torch.float32 else result


def accumulate(terms: Tensor, dim: int) -> Tensor:
    """Sum over a dim, one term after the other."""
    total = torch.zeros_like(terms.select(dim, 0)) if terms.shape[dim] else terms.sum(dim)
    for index in range(terms.shape[dim]):
        total = total + terms.select(dim, index)
    return total


def _sum(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim is None:
        return accumulate(x.reshape(-1), 0)
    total = accumulate(x, dim)
    return total.unsqueeze(dim) if keepdim else total


def _mean(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return _sum(x, dim, keepdim) / x.shape[dim]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    for index in range(x.shape[-1]):
        total = total + x[..., index, None] * weight[:, index]
    return total if bias is None else total + bias


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return _linear(a, b.transpose(-1, -2))


def _einsum(equation: str, *operands: Tensor) -> Tensor:
    """One contracted letter, which is walked through."""
    inputs, output = equation.split("->")
    names = inputs.split(",")
    (contracted,) = set("".join(names)) - set(output)
    places = [name.index(contracted) for name in names]
    if not operands[0].shape[places[0]]:
        return torch.einsum(equation, *operands)
    reduced = ",".join(name.replace(contracted, "") for name in names) + "->" + output
    total: Tensor | None = None
    for index in range(operands[0].shape[places[0]]):
        slices = [x.select(p, index) for x, p in zip(operands, places, strict=True)]
        term = torch.einsum(reduced, *slices)
        total = term if total is None else total + term
    assert total is not None
    return total


def _index_add(total: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    total = total.clone()
    for place, row in zip(index.tolist(), rows, strict=True):
        total[place] = total[place] + row
    return total


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    if not x.shape[dim]:
        return x.sum(dim).log()
    top = x.amax(dim, keepdim=True)
    return accumulate((x - top).exp(), dim).log() + top.squeeze(dim)


SUMS: dict[Any, Callable[..., Tensor]] = {
    torch.Tensor.sum: _sum, torch.Tensor.mean: _mean, torch.nn.functional.linear: _linear,
    torch.Tensor.matmul: _matmul, torch.Tensor.__matmul__: _matmul, torch.einsum: _einsum,
    torch.Tensor.index_add: _index_add, torch.logsumexp: _logsumexp,
}  # fmt: skip
