"""Activations: modules that compute GELU, and gated MLPs whose product is SwiGLU.

Under autocast a result keeps its argument's dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anychip import ops
from anychip.fusion.fused import FLOATS, Call, Unary


def _refusal(x: Any) -> str | None:
    if isinstance(x, Tensor) and x.dtype in FLOATS:
        return None
    got = x.dtype if isinstance(x, Tensor) else type(x).__name__
    return f"a float32, bfloat16 or float16 tensor expected, got {got}"


@dataclass(frozen=True)
class Gelu(Unary):
    """GELU, ``approximate`` as in torch: none or tanh."""

    approximate: str

    kind, operator, unless = "activation", "gelu", "other dtypes"

    def refusal(self, module: nn.Module, x: Any) -> str | None:
        return _refusal(x)

    def compute(self, module: nn.Module, x: Tensor, call: Call) -> Tensor:
        result: Tensor = call(ops.gelu, (x,), {"approximate": self.approximate})
        return result


@dataclass(frozen=True)
class GatedMLP(Unary):
    """``down(silu(gate(x)) * up(x))``; the three are names of the module's linear layers."""

    gate: str
    up: str
    down: str

    kind, operator, unless = "activation", "swiglu", "other dtypes"

    def refusal(self, module: nn.Module, x: Any) -> str | None:
        return _refusal(x)

    def compute(self, module: nn.Module, x: Tensor, call: Call) -> Tensor:
        gate, up = getattr(module, self.gate)(x), getattr(module, self.up)(x)
        result: Tensor = getattr(module, self.down)(call(ops.swiglu, (gate, up), {}))
        return result


def gelu_candidates(module: nn.Module) -> Iterator[Gelu]:
    """Both forms of GELU for a module without parameters that claims to be one."""
    empty = not (module._parameters or module._buffers or module._modules)
    if empty and "gelu" in type(module).__name__.lower():
        yield Gelu("none")
        yield Gelu("tanh")


def mlp_candidates(module: nn.Module) -> Iterator[GatedMLP]:
    """The ways in which three linear layers may form a gated MLP."""
    if module._parameters or module._buffers:
        return
    linears = {n: m for n, m in module._modules.items() if isinstance(m, nn.Linear)}
    if len(linears) != 3 or len(module._modules) > 4:
        return
    for gate, up, down in itertools.permutations(linears):
        sizes = [(linears[n].in_features, linears[n].out_features) for n in (gate, up, down)]
        if sizes[0] == sizes[1] == sizes[2][::-1]:
            yield GatedMLP(gate, up, down)


def bystanders(module: nn.Module, fusion: GatedMLP) -> list[nn.Module]:
    """The children whose work the operator does: the activation between the linear layers."""
    used = (fusion.gate, fusion.up, fusion.down)
    return [m for name, m in module._modules.items() if name not in used and m is not None]
