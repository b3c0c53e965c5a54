"""Norms over the last dim: any module that computes rms_norm or layer_norm of its parameters.

A result in 16 bits is rounded once, at its end; transformers rounds before the weight as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.fusion.fused import FLOATS, Call, Unary, autocast_is_on

UNFUSABLE = (
    nn.modules.batchnorm._NormBase,  # batch and instance norms
    nn.GroupNorm,
    nn.LocalResponseNorm,
)
"""torch's norms that are not over the last dim, though one shape or another may look like it."""


@dataclass(frozen=True)
class Norm(Unary):
    """rms_norm, or layer_norm.

    Attributes:
        operator: of these two.
        weight, bias: names of the module's parameters.
        eps: name of the attribute that holds eps.
        promotes: x of 16 bits with a float32 weight gives float32, as multiplication does.
    """

    operator: str
    weight: str
    bias: str | None
    eps: str
    promotes: bool = False

    kind = "norm"
    unless = "other dtypes, or dtypes that torch mixes"

    def refusal(self, module: nn.Module, x: Any) -> str | None:
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            return f"a float32, bfloat16 or float16 tensor expected, got {_dtype(x)}"
        names = (self.weight,) if self.bias is None else (self.weight, self.bias)
        dtypes = [_parameter(module, name).dtype for name in names]
        if any(dtype not in FLOATS or dtype != dtypes[0] for dtype in dtypes):
            return f"parameters of one such dtype expected, got {', '.join(map(str, dtypes))}"
        if self.promotes:
            return None
        if x.dtype != dtypes[0]:
            return f"x is {x.dtype} and the weight {dtypes[0]}"
        if x.dtype != torch.float32 and (autocast_is_on(x) or getattr(module, self.eps) is None):
            return f"x is {x.dtype}, and the result's dtype or eps depends on torch's device"
        return None

    def compute(self, module: nn.Module, x: Tensor, call: Call) -> Tensor:
        weight, eps = _parameter(module, self.weight), getattr(module, self.eps)
        if self.promotes:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        attrs = {"eps": torch.finfo(x.dtype).eps if eps is None else eps}
        if self.operator == "rms_norm":
            result: Tensor = call(ops.rms_norm, (x, weight), attrs)
            return result
        bias = None if self.bias is None else _parameter(module, self.bias)
        result = call(ops.layer_norm, (x, weight, bias), attrs)
        return result


def _parameter(module: nn.Module, name: str) -> Tensor:
    found: Tensor = getattr(module, name)
    return found


def _dtype(x: Any) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def vectors(module: nn.Module) -> Mapping[str, Tensor]:
    """The parameters of a module that may be a norm; none when it cannot be one."""
    found = {name: p for name, p in module._parameters.items() if p is not None}
    buffers = [b for b in module._buffers.values() if b is not None]
    if module._modules or buffers or isinstance(module, UNFUSABLE) or not 1 <= len(found) <= 2:
        return {}
    shapes = {tuple(p.shape) for p in found.values()}
    return found if len(shapes) == 1 and len(next(iter(shapes))) == 1 else {}


def candidates(module: nn.Module) -> Iterator[Norm]:
    """What a module may compute, by its parameters and attributes; the likeliest first."""
    names, epses = list(vectors(module)), eps_names(module)
    for eps in epses if names else ():
        if len(names) == 1:
            yield Norm("rms_norm", names[0], None, eps)
            yield Norm("layer_norm", names[0], None, eps)
        else:
            for weight, bias in itertools.permutations(names):
                yield Norm("layer_norm", weight, bias, eps)


def eps_names(module: nn.Module) -> list[str]:
    """Attributes that may hold eps; those whose name says so first."""
    found = [name for name, value in vars(module).items() if isinstance(value, float)]
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        found.append("eps")
    return sorted(found, key=lambda name: "eps" not in name)
