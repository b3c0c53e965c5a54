"""Does a function compute what operators would? Both are run on the same small inputs.

A module is not run itself: a replica on the host is, with the module's attributes, random float32
parameters and no hooks. Random parameters tell a weight from 1 + weight, which fresh ones do not.
Rows of inputs have sizes from 2^-10 to 2^10, so that eps, clipping and saturation show.

Bound: an operator's result is off by at most c + n roundings u of its row's largest entry, c and n
from its specification (``OperatorSpec.bound``), u half the spacing of the inputs' dtype at 1; so is
the function's, if it computes the same. Their difference is at most twice that.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anychip.dispatch.operator import Operator

HOST = torch.device("cpu")
_SCALES = 2.0 ** torch.arange(-10.0, 11.0, 2.0)
_PLAIN = (bool, int, float, str, type(None))
_BLANK = nn.Module()


class Comparison(NamedTuple):
    """A call of two functions with the same arguments.

    Attributes:
        theirs: gives a tensor, or a tuple of tensors.
        ours: the same by operators, which it calls by :func:`call`; or a text, which says why it
            leaves a call like this to theirs: then that has to fail.
        args: are given by place; those that require a gradient get one,
        parameters: and these.
        whole: an entry of a result or a gradient is a sum over rows: its size is that of all.
        what: is special about it.
    """

    theirs: Callable[..., Any]
    ours: Callable[..., Any]
    args: Mapping[str, Any]
    parameters: Iterable[tuple[str, Tensor]] = ()
    whole: bool = False
    what: str = ""


class _Probe(threading.local):
    """What operators may be off by, in roundings, while one is on."""

    on, forward, backward = False, 0.0, 0.0


_probe = _Probe()


def is_probing() -> bool:
    """Whether calls are compared now, and nothing is counted."""
    return _probe.on


def call(operator: Operator[..., Any], *args: Any, **attrs: Any) -> Any:
    """An operator, as its users call it; in a probe its reference, which torch differentiates."""
    if not _probe.on:
        return operator(*args, **attrs)
    bound, (given, named) = operator.spec.bound, operator.signature.bind(args, attrs)
    length = bound.length(*given, **named)
    _probe.forward += bound.forward + length
    _probe.backward += bound.backward + length
    return operator.outputs(operator.spec.forward(*given, **named))


def refutation(comparisons: Iterable[Comparison]) -> tuple[int, str] | None:
    """How many comparisons two functions stood, and what the next one showed; None: they are equal.

    That is: results and gradients differ by nothing beyond the bound.
    """
    with undisturbed():
        for stood, comparison in enumerate(comparisons):
            if (why := _difference(comparison)) is not None:
                return stood, f"{comparison.what}{why}"
    return None


def _difference(comparison: Comparison) -> str | None:
    theirs, ours, args, parameters, whole, _ = comparison
    leaves, got = {name: t for name, t in args.items() if t.requires_grad}, None
    rows = sum(t.numel() // t.shape[-1] for t in leaves.values())
    leaves.update(parameters)
    _probe.forward = _probe.backward = 0.0
    try:
        got = ours(*args.values())
        want = theirs(*args.values())
        if isinstance(got, str) or not _probe.forward:
            return got if isinstance(got, str) else "it calls nothing that an operator serves"
        wants, gots = (y if isinstance(y, tuple) else (y,) for y in (want, got))
        if [(y.dtype, y.shape) for y in wants] != [(y.dtype, y.shape) for y in gots]:
            return f"it gives {', '.join(f'{y.dtype} {tuple(y.shape)}' for y in wants)}"
        slopes = [torch.randn(y.shape, dtype=y.dtype, device=HOST) for y in wants]
        wanted, grads = (
            torch.autograd.grad(made, [*leaves.values()], slopes, materialize_grads=True)
            for made in (wants, gots)
        )
    except Exception as error:  # it is not known what it is: any error says that it is not this
        name = type(error).__name__
        return None if isinstance(got, str) else f"it cannot be called like this: {name}"
    unit = max(torch.finfo(leaf.dtype).eps for leaf in leaves.values()) / 2
    for mine, other in zip(gots, wants, strict=True):
        limit = (_probe.forward + (rows + 1) * whole) * unit * _top(other, whole)
        if wrong := _outside(mine, other, limit):
            return f"its result differs{wrong}"
    for (name, leaf), mine, other in zip(leaves.items(), grads, wanted, strict=True):
        summed = isinstance(leaf, nn.Parameter)
        top = _top(other, whole or summed)
        if len(wants) == 1 and leaf.dim() == want.dim() and not summed:
            # A gradient may vanish though its terms do not: their size is that of y / x.
            top = torch.maximum(top, 4 * _top(want, whole) / _top(leaf, whole))
        if wrong := _outside(mine, other, (_probe.backward + (rows if summed else 1)) * unit * top):
            return f"its gradient of {name} differs{wrong}"
    return None


def _top(values: Tensor, whole: bool) -> Tensor:
    """Largest entry by size, of each row or of all."""
    size = values.detach().abs()
    return size.amax() if whole else size.amax(-1, keepdim=True)


def _outside(got: Tensor, want: Tensor, limit: Tensor) -> str | None:
    limit = 2.0 * limit + torch.finfo(torch.float32).tiny
    ratio = torch.nan_to_num((got - want).detach().abs() / limit, nan=torch.inf)
    if bool((ratio <= 1.0).all()):
        return None
    mine, other = (float(t.detach().reshape(-1)[int(ratio.argmax())]) for t in (got, want))
    return f" from the operator's: {other:.6g} instead of {mine:.6g}"


@contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing around the call decides what a probe computes, and a probe leaves nothing behind."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.default_generator.manual_seed(7)
        _probe.on = True
        try:
            yield
        finally:
            _probe.on = False


def normal(*shape: int) -> Tensor:
    """float32 on the host."""
    return torch.randn(shape, dtype=torch.float32, device=HOST)


def inputs(*shape: int) -> Tensor:
    """(*shape) float32 with a gradient; the rows, along dim 0, have the sizes of ``_SCALES``."""
    scales = _SCALES.reshape(-1, *[1] * len(shape))
    return (normal(len(_SCALES), *shape) * scales).requires_grad_()


def replica(
    module: nn.Module, children: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]] = {}
) -> nn.Module:
    """The module without hooks on the host, with random parameters and some children as given.

    Attributes are shared, buffers copied; those without data are random as well. ``shapes`` are of
    parameters that need not be as large as the module's.
    """
    twin = type(module).__new__(type(module))
    nn.Module.__init__(twin)
    for name, value in vars(module).items():
        if name not in vars(twin):
            vars(twin)[name] = copy.copy(value) if isinstance(value, (list, dict, set)) else value
    for name, own in module._parameters.items():
        shape = shapes.get(name, () if own is None else tuple(own.shape))
        twin._parameters[name] = None if own is None else nn.Parameter(normal(*shape))
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and buffer.is_floating_point():
            buffer = torch.rand(buffer.shape, dtype=buffer.dtype, device=HOST)
        twin._buffers[name] = None if buffer is None else buffer.detach().to(HOST, copy=True)
    for name, child in module._modules.items():
        twin._modules[name] = children.get(name) or (child and replica(child, {}))
    return twin


def likeness(module: nn.Module) -> Any:
    """What a probe's answer depends on: two modules with equal ones compute the same.

    Attributes that are not numbers or texts have to be the same objects, and buffers too.
    """
    found: list[Any] = []
    for path, each in module.named_modules():
        own = {n: v for n, v in vars(each).items() if n not in vars(_BLANK)}
        found += [path, type(each), *((n, p.shape) for n, p in each.named_parameters("", False))]
        found += [(n, type(v), v if isinstance(v, _PLAIN) else id(v)) for n, v in own.items()]
        found += [(name, id(buffer)) for name, buffer in each.named_buffers("", False)]
    return tuple(found)
