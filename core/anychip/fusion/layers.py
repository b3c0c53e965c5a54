"""Layers of one tensor by operators: norms over the last dim, GELU, gated MLPs, linear layers.

A result in 16 bits is rounded once, at its end; transformers rounds before a norm's weight as well.
Under autocast the result of an activation keeps its argument's dtype.
"""

import itertools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.fusion.probe import HOST, Comparison, call, inputs, replica
from anychip.fusion.stand_ins import FLOATS, Forward, StandIn, autocast_is_on, label_of, own_code

_WIDTH = 8
"""Of the probe, where the module does not say."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Layer(StandIn):
    """A module of one tensor whose whole result operators compute."""

    def unfit(self, module: nn.Module) -> str | None:
        for child in self.idle(module):
            if any(getattr(child, name) for name in _HOOKS):
                return f"hooks of its {type(child).__name__} would no longer be called"
        wrong = {str(p.dtype) for p in module.parameters() if p.dtype not in FLOATS}
        return f"operators take no {', '.join(wrong)}" if wrong else super().unfit(module)

    def samples(self, module: Any) -> list[Tensor]:
        """Arguments that the probe calls it with."""
        return [inputs(2, _WIDTH)]

    def small(self) -> dict[str, nn.Module]:
        """Children that the probe puts in the place of the module's."""
        return {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of parameters that the probe makes smaller than the module's."""
        return {}

    def comparisons(self, module: Any) -> Iterator[Comparison]:
        for training, x in itertools.product((False, True), self.samples(module)):
            twin = replica(module, self.small(), self.shapes()).train(training)
            theirs, ours = (partial(f, twin) for f in (type(twin).forward, self.served))
            yield Comparison(theirs, ours, {"x": x}, twin.named_parameters())

    @abstractmethod
    def compute(self, module: Any, x: Any) -> Tensor | str:
        """The result, by operators; or why they cannot serve such a call."""

    def served(self, module: nn.Module, *args: Any) -> Tensor | str:
        """The same for any arguments."""
        if len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dtype not in FLOATS:
            got = ", ".join(str(getattr(x, "dtype", type(x).__name__)) for x in args)
            return f"a float32, bfloat16 or float16 tensor expected, got {got}"
        return self.compute(module, args[0])

    def around(self, forward: Forward) -> Forward:
        label = label_of(forward)

        def serve(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            made = self.served(module, *args, *kwargs.values())
            if not isinstance(made, str):
                return made
            own_code(self.operator, label, made, id(module))
            return forward(module, *args, **kwargs)

        return serve


@dataclass(frozen=True)
class Norm(Layer):
    """rms_norm, or layer_norm.

    Attributes:
        operator: of these two.
        eps, weight, bias: names of the module's attributes.
        promotes: x of 16 bits with a float32 weight gives float32, as multiplication does.
    """

    operator: str
    eps: str
    promotes: bool
    weight: str
    bias: str | None = None

    kind, unless = "norm", "other dtypes, or dtypes that torch mixes"

    def samples(self, module: Any) -> list[Tensor]:
        width = getattr(module, self.weight).shape[0]
        mixed = [inputs(width).bfloat16()] if self.promotes else []
        return [inputs(width), inputs(2, 3, width), *mixed]

    def compute(self, module: Any, x: Tensor) -> Tensor | str:
        weight, eps = getattr(module, self.weight), getattr(module, self.eps)
        bias = None if self.bias is None else getattr(module, self.bias)
        if weight.dtype not in FLOATS or (bias is not None and bias.dtype != weight.dtype):
            return f"parameters of one such dtype expected, got {weight.dtype}"
        if self.promotes:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        elif x.dtype != weight.dtype:
            return f"x is {x.dtype} and the weight {weight.dtype}"
        elif x.dtype != torch.float32 and (autocast_is_on(x) or eps is None):
            return f"x is {x.dtype}, and the result's dtype or eps depends on torch's device"
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        rest = () if self.operator == "rms_norm" else (bias,)
        made: Tensor = call(getattr(ops, self.operator), x, weight, *rest, eps=eps)
        return made


def norms(module: nn.Module) -> Iterator[Norm]:
    """What a norm may compute, by its vectors and by its attributes that may be eps."""
    names = [name for name, p in module._parameters.items() if p is not None and p.dim() == 1]
    if not 1 <= len(names) == len(list(module.parameters())) <= 2 or list(module.buffers()):
        return
    epses = [name for name, value in vars(module).items() if isinstance(value, float)]
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        epses.append("eps")
    # torch's own rule for mixed dtypes is that of a kernel, another one on every device.
    mixed = (False,) if type(module).__module__.startswith("torch.nn.") else (True, False)
    for eps, promotes in itertools.product(sorted(epses, key=lambda n: "eps" not in n), mixed):
        if len(names) == 1:
            yield Norm("rms_norm", eps, promotes, *names)
        for vectors in itertools.permutations(names):
            yield Norm("layer_norm", eps, promotes, *vectors)


@dataclass(frozen=True)
class Gelu(Layer):
    """GELU, ``approximate`` as in torch: none or tanh."""

    approximate: str

    kind, operator, unless = "activation", "gelu", "other dtypes"

    def compute(self, module: nn.Module, x: Tensor) -> Tensor | str:
        made: Tensor = call(ops.gelu, x, approximate=self.approximate)
        return made


@dataclass(frozen=True)
class GatedMLP(Layer):
    """``down(silu(gate(x)) * up(x))``; the three are names of the module's linear layers."""

    gate: str
    up: str
    down: str

    kind, operator, unless = "activation", "swiglu", "other dtypes"

    def small(self) -> dict[str, nn.Module]:
        # What follows the product is the module's own layer in both, and no size matters.
        narrow = [nn.Linear(_WIDTH, _WIDTH, device=HOST, dtype=torch.float32) for _ in range(2)]
        return {self.gate: narrow[0], self.up: narrow[1], self.down: nn.Identity()}

    def idle(self, module: nn.Module) -> list[nn.Module]:
        used = (self.gate, self.up, self.down)
        return [m for name, m in module._modules.items() if name not in used and m is not None]

    def compute(self, module: Any, x: Tensor) -> Tensor | str:
        gate, up, down = (getattr(module, name) for name in (self.gate, self.up, self.down))
        made: Tensor = down(call(ops.swiglu, gate(x), up(x)))
        return made


@dataclass(frozen=True)
class Linear(Layer):
    """``x weight^T + bias``, with the class's own parameters."""

    kind, operator, unless = "linear", "linear", "other dtypes, or several"

    def samples(self, module: Any) -> list[Tensor]:
        return [inputs(_WIDTH), inputs(2, 3, _WIDTH)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (_WIDTH + 3, _WIDTH), "bias": (_WIDTH + 3,)}

    def compute(self, module: Any, x: Tensor) -> Tensor | str:
        given = (x, module.weight) if module.bias is None else (x, module.weight, module.bias)
        dtypes = {str(t.dtype) for t in given}
        if x.dim() == 0 or (len(dtypes) > 1 and not autocast_is_on(x)):
            return f"one dtype and at least one dim expected, got {', '.join(sorted(dtypes))}"
        made: Tensor = call(ops.linear, *given)
        return made
