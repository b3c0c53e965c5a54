"""Layers of one tensor by operators: norms over the last dim, GELU, gated MLPs; and torch's loss.

A result in 16 bits is rounded once, at its end; transformers rounds before a norm's weight as well.
Under autocast the result of an activation keeps its argument's dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.fusion.fused import FLOATS, Computed, autocast_is_on
from anychip.fusion.probe import HOST, call, inputs, normal

_WIDTH = 8
"""Of the probe, where the module does not say."""


@dataclass(frozen=True)
class Norm(Computed):
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
    promotes: bool

    kind = "norm"
    unless = "other dtypes, or dtypes that torch mixes"

    def samples(self, module: Any) -> Iterator[dict[str, Tensor]]:
        width = getattr(module, self.weight).shape[0]
        yield {"x": inputs(width)}
        yield {"x": inputs(2, 3, width)}
        if self.promotes:
            yield {"x": inputs(width).bfloat16()}

    def compute(self, module: Any, x: Any) -> Tensor | str:
        weight, eps = getattr(module, self.weight), getattr(module, self.eps)
        bias = () if self.bias is None else (getattr(module, self.bias),)
        if (why := _unfit(x)) is not None:
            return why
        if any(p.dtype not in FLOATS or p.dtype != weight.dtype for p in (weight, *bias)):
            return f"parameters of one such dtype expected, got {weight.dtype}"
        if self.promotes:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        elif x.dtype != weight.dtype:
            return f"x is {x.dtype} and the weight {weight.dtype}"
        elif x.dtype != torch.float32 and (autocast_is_on(x) or eps is None):
            return f"x is {x.dtype}, and the result's dtype or eps depends on torch's device"
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        rest = () if self.operator == "rms_norm" else bias or (None,)
        made: Tensor = call(getattr(ops, self.operator), x, weight, *rest, eps=eps)
        return made


def norms(module: nn.Module) -> Iterator[Norm]:
    """What a norm may compute, by its vectors and by its attributes that may be eps."""
    names = [name for name, p in module._parameters.items() if p is not None and p.dim() == 1]
    if len(names) != len(list(module.parameters())) or list(module.buffers()):
        return
    epses = [name for name, value in vars(module).items() if isinstance(value, float)]
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        epses.append("eps")
    # torch's own rule for mixed dtypes is that of a kernel, another one on every device.
    mixed = (False,) if type(module).__module__.startswith("torch.nn.") else (True, False)
    for eps, promotes in itertools.product(sorted(epses, key=lambda n: "eps" not in n), mixed):
        if len(names) == 1:
            yield Norm("rms_norm", names[0], None, eps, promotes)
            yield Norm("layer_norm", names[0], None, eps, promotes)
        elif len(names) == 2:
            for weight, bias in itertools.permutations(names):
                yield Norm("layer_norm", weight, bias, eps, promotes)


@dataclass(frozen=True)
class Gelu(Computed):
    """GELU, ``approximate`` as in torch: none or tanh."""

    approximate: str

    kind, operator, unless = "activation", "gelu", "other dtypes"

    def samples(self, module: nn.Module) -> Iterator[dict[str, Tensor]]:
        yield {"x": inputs(2, _WIDTH)}

    def compute(self, module: nn.Module, x: Any) -> Tensor | str:
        return _unfit(x) or call(ops.gelu, x, approximate=self.approximate)


def gelus(module: nn.Module) -> Iterator[Gelu]:
    """Both forms of GELU."""
    if not (module._parameters or module._buffers or module._modules):
        yield from (Gelu("none"), Gelu("tanh"))


@dataclass(frozen=True)
class GatedMLP(Computed):
    """``down(silu(gate(x)) * up(x))``; the three are names of the module's linear layers."""

    gate: str
    up: str
    down: str

    kind, operator, unless = "activation", "swiglu", "other dtypes"
    samples = Gelu.samples

    def stand_ins(self) -> dict[str, nn.Module]:
        # What follows the product is the module's own layer in both, and no size matters.
        narrow = [nn.Linear(_WIDTH, _WIDTH, device=HOST, dtype=torch.float32) for _ in range(2)]
        return {self.gate: narrow[0], self.up: narrow[1], self.down: nn.Identity()}

    def bystanders(self, module: nn.Module) -> list[nn.Module]:
        used = (self.gate, self.up, self.down)
        return [m for name, m in module._modules.items() if name not in used and m is not None]

    def compute(self, module: Any, x: Any) -> Tensor | str:
        if (why := _unfit(x)) is not None:
            return why
        made = call(ops.swiglu, getattr(module, self.gate)(x), getattr(module, self.up)(x))
        result: Tensor = getattr(module, self.down)(made)
        return result


def gated(*names: str) -> Callable[[nn.Module], Iterator[GatedMLP]]:
    """A gated MLP whose linear layers gate, up and down have these names."""

    def candidates(module: nn.Module) -> Iterator[GatedMLP]:
        linear = all(isinstance(module._modules.get(name), nn.Linear) for name in names)
        if linear and len(module._modules) <= 4 and not (module._parameters or module._buffers):
            yield GatedMLP(*names)

    return candidates


@dataclass(frozen=True)
class CrossEntropy(Computed):
    """``nn.CrossEntropyLoss`` with class indices; the classes are dim 1, as torch has it."""

    kind, operator, takes, whole = "loss", "cross_entropy", 2, True
    unless = "class weights, class probabilities, other dtypes"

    def samples(self, module: Any) -> Iterator[dict[str, Tensor]]:
        logits, labels = example(module.ignore_index)
        yield {"logits": logits.flatten(0, 1), "labels": labels.flatten()}

    def compute(self, module: Any, logits: Any, target: Any) -> Tensor | str:
        if module.weight is not None:
            return "classes have weights"
        if logits.dtype not in FLOATS:
            return f"logits are {logits.dtype}"
        if target.dtype != torch.int64:
            return f"targets are {target.dtype}"
        rest = () if logits.dim() == 1 else (*logits.shape[:1], *logits.shape[2:])
        if not logits.dim() or tuple(target.shape) != rest:
            return f"logits are {tuple(logits.shape)} and targets {tuple(target.shape)}"
        rows = logits.movedim(1, -1) if logits.dim() > 2 else logits
        names = ("ignore_index", "label_smoothing", "reduction")
        attrs = {name: getattr(module, name) for name in names}
        loss: Tensor = call(ops.cross_entropy, rows, target, **attrs)
        return loss if autocast_is_on(logits) else loss.to(logits.dtype)


def cross_entropies(module: Any) -> Iterator[CrossEntropy]:
    """The one candidate for torch's loss."""
    if module.weight is None:
        yield CrossEntropy()


def example(ignored: int) -> tuple[Tensor, Tensor]:
    """Logits (2, 7, 13) and labels, of which some do not count."""
    logits = normal(2, 7, 13) * 4
    labels = torch.randint(13, (2, 7), device=HOST)
    labels[0, 3] = labels[1, 0] = ignored
    return logits.requires_grad_(), labels


def _unfit(x: Any) -> str | None:
    if isinstance(x, Tensor) and x.dtype in FLOATS:
        return None
    got = x.dtype if isinstance(x, Tensor) else type(x).__name__
    return f"a float32, bfloat16 or float16 tensor expected, got {got}"
