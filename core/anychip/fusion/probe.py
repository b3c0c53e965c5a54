"""Does a module compute what an operator would? Both are run on the same small inputs.

The module is not run itself: a replica on the host is, with the module's attributes, random
float32 parameters and no hooks. Random parameters tell a weight from 1 + weight, which fresh ones
do not. Rows of inputs have sizes from 2^-10 to 2^10, so that eps, clipping and saturation show.

Bound: an operator's result is off by at most c + n roundings u = 2^-24 of its row's largest entry,
c and n from its specification (``OperatorSpec.bound``); so is the module's, if it computes the
same. Their difference is at most twice that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anychip.fusion.activation import GatedMLP
from anychip.fusion.fused import HOST, AnyOperator, Unary, call_reference

UNIT = 2.0**-24
_SCALES = 2.0 ** torch.arange(-10.0, 11.0, 2.0)


@dataclass
class Roundings:
    """What the operators of one computation may be off by, in roundings."""

    forward: float = 0.0
    backward: float = 0.0

    def call(self, operator: AnyOperator, args: tuple[Any, ...], attrs: Any) -> Any:
        """Runs the reference and adds what its specification allows."""
        bound, (given, named) = operator.spec.bound, operator.signature.bind(args, attrs)
        length = bound.length(*given, **named)
        self.forward += bound.forward + length
        self.backward += bound.backward + length
        return call_reference(operator, args, attrs)


def difference(module: nn.Module, fusion: Unary) -> str | None:
    """What tells a module from its fusion; None when they agree within the bound."""
    forward = type(module).forward
    with undisturbed():
        for training in (False, True):
            for shape in _shapes(module, fusion):
                twin = replica(module, torch.Generator(HOST).manual_seed(11))
                twin.train(training)
                if isinstance(fusion, GatedMLP):
                    # What follows the product is the module's own layer in both.
                    twin._modules[fusion.down] = nn.Identity()
                found = _compare(twin, forward, fusion, inputs(shape))
                if found is not None:
                    return found
    return None


def promotes(module: nn.Module) -> bool:
    """Whether a norm with float32 parameters makes float32 of bfloat16, as multiplication does."""
    if type(module).__module__.startswith("torch.nn."):
        return False  # its rule is that of a kernel, another one on every device
    with undisturbed(), torch.no_grad():
        twin = replica(module, torch.Generator(HOST).manual_seed(11))
        try:
            y = type(module).forward(twin, inputs((_width(module),)).bfloat16())
        except RuntimeError:
            return False
    return isinstance(y, Tensor) and y.dtype == torch.float32


def likeness(module: nn.Module) -> Any:
    """What a probe's answer depends on: two modules with equal ones compute the same.

    Attributes that are not numbers or texts have to be the same objects.
    """
    plain = (bool, int, float, str, type(None))
    own = set(vars(nn.Module()))
    attributes = tuple(
        (name, type(value), value if isinstance(value, plain) else id(value))
        for name, value in vars(module).items()
        if name not in own
    )
    tensors = [*module._parameters.items(), *module._buffers.items()]
    shapes = tuple((name, None if t is None else tuple(t.shape)) for name, t in tensors)
    values = tuple(id(buffer) for buffer in module._buffers.values() if buffer is not None)
    children = tuple(
        (name, None if child is None else likeness(child))
        for name, child in module._modules.items()
    )
    return type(module), attributes, shapes, values, children


@contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing around the call decides what a probe computes, and a probe leaves nothing behind."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _compare(twin: nn.Module, forward: Callable[..., Any], fusion: Unary, x: Tensor) -> str | None:
    roundings = Roundings()
    try:
        want, wanted = _run(twin, lambda leaf: forward(twin, leaf), x)
    except Exception as error:  # it is not known what it is: any error says that it is not this
        return f"it cannot be called with a tensor {tuple(x.shape)}: {type(error).__name__}"
    got, gradients = _run(twin, lambda leaf: fusion.compute(twin, leaf, roundings.call), x)
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"it gives {want.dtype} {tuple(want.shape)} for {tuple(x.shape)}"
    wrong = _outside(got, want, roundings.forward, _top(want))
    if wrong is not None:
        return f"its result differs{wrong}"
    # A gradient may vanish though its terms do not: their size is that of y / x.
    floor = _top(want) / _top(x) if want.dim() == x.dim() else torch.zeros(())
    rows = x.numel() // x.shape[-1]
    for name, grad in wanted.items():
        limit = roundings.backward + (0 if name == "x" else rows)
        top = torch.maximum(_top(grad), 4 * floor) if name == "x" else grad.abs().max()
        wrong = _outside(gradients[name], grad, limit, top)
        if wrong is not None:
            return f"its gradient of {name} differs{wrong}"
    return None


def _run(
    twin: nn.Module, function: Callable[[Tensor], Any], x: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    if not isinstance(y, Tensor):
        raise TypeError("a tensor expected")
    named = {"x": leaf, **dict(twin.named_parameters())}
    generator = torch.Generator(HOST).manual_seed(13)
    cotangent = torch.randn(y.shape, generator=generator, dtype=torch.float32, device=HOST)
    found = torch.autograd.grad(y, list(named.values()), cotangent, allow_unused=True)
    zero = {name: torch.zeros_like(leaf) for name, leaf in named.items()}
    pairs = zip(named, found, strict=True)
    return y.detach(), {n: zero[n] if grad is None else grad for n, grad in pairs}


def _top(values: Tensor) -> Tensor:
    """Largest entry of each row, by size."""
    return values.detach().abs().amax(-1, keepdim=True)


def _outside(got: Tensor, want: Tensor, roundings: float, top: Tensor) -> str | None:
    limit = 2.0 * roundings * UNIT * top + torch.finfo(torch.float32).tiny
    ratio = torch.nan_to_num((got - want).abs() / limit, nan=torch.inf)
    if bool((ratio <= 1.0).all()):
        return None
    at = int(ratio.argmax())
    return (
        f" from the operator's: {float(want.reshape(-1)[at]):.6g} instead of "
        f"{float(got.reshape(-1)[at]):.6g}"
    )


def inputs(shape: tuple[int, ...]) -> Tensor:
    """(*shape) float32; the rows, along dim 0, have the sizes of ``_SCALES``."""
    generator = torch.Generator(HOST).manual_seed(7)
    options: Any = {"dtype": torch.float32, "device": HOST, "generator": generator}
    scales = _SCALES.reshape(-1, *[1] * len(shape))
    return torch.randn((len(_SCALES), *shape), **options) * scales


def _width(module: nn.Module) -> int:
    for child in (module, *module.children()):
        if isinstance(child, nn.Linear):
            return child.in_features
        for parameter in child._parameters.values():
            if parameter is not None:
                return parameter.shape[-1]
    return 64


def _shapes(module: nn.Module, fusion: Unary) -> tuple[tuple[int, ...], ...]:
    """Shapes behind the rows: a module may treat two dims and four in different ways."""
    width = _width(module)
    return ((width,), (2, 3, width)) if fusion.kind == "norm" else ((2, width),)


def replica(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """The module without hooks on the host, with random parameters; attributes are shared.

    Buffers are copied; those without data are random as well.
    """
    original = type(module)
    twin = original.__new__(original)
    nn.Module.__init__(twin)
    kept = set(vars(twin))
    for name, value in vars(module).items():
        if name not in kept:
            vars(twin)[name] = copy.copy(value) if isinstance(value, (list, dict, set)) else value
    for name, parameter in module._parameters.items():
        shape = None if parameter is None else parameter.shape
        twin._parameters[name] = None if shape is None else _random(tuple(shape), generator)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and buffer.is_floating_point():
            buffer = torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype, device=HOST)
        twin._buffers[name] = None if buffer is None else buffer.detach().to(HOST, copy=True)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else replica(child, generator)
    return twin


def _random(shape: tuple[int, ...], generator: torch.Generator) -> nn.Parameter:
    options: Any = {"dtype": torch.float32, "device": HOST, "generator": generator}
    return nn.Parameter(torch.randn(shape, **options))
