"""The answer for an operator that we have no oracle of: its own reference, run in float64.

Weaker than an oracle, and reports say so: a mistake of the reference is not found, and the bound is
taken over the whole tensor, since nothing is known about the terms of single elements. The number
of roundings is what the operator's author declares in ``OperatorSpec.bound``.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import Arguments, Call, Draw
from anychip.conformance.choices import Choices
from anychip.conformance.formats import FORMATS, Array
from anychip.conformance.oracles.oracle import Oracle
from anychip.contract import OperatorSpec
from anychip.dispatch.signature import Signature

_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class InFloat64(TorchFunctionMode):
    """Within this mode whatever asks for a float type gets float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _CASTS:
            return args[0].double()
        named = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in FORMATS else value


def reference_oracle(spec: OperatorSpec) -> Oracle:
    """An oracle that runs ``spec.forward`` in float64, and differentiates it for gradients."""
    calls = samples_of(spec)
    return Oracle(
        forward=partial(_forward, spec),
        backward=partial(_backward, spec) if spec.differentiable else None,
        calls=calls,
        plain=calls,
        independent=False,
    )


def samples_of(spec: OperatorSpec) -> tuple[Call, ...]:
    """The calls that a specification gives as samples, whose options nothing else may have."""
    labels = [sample.label for sample in spec.samples(Draw(torch.float32, spec.name))]
    return tuple(
        Call(f"{index}.{safe(label)}", partial(_sample, spec, index=index), statistical=False)
        for index, label in enumerate(labels)
    )


def _forward(spec: OperatorSpec, *args: Any, **attrs: Any) -> list[Rounded]:
    signature = Signature.parse(spec)
    wide = [_tensor(arg) for arg in args]
    with InFloat64(), torch.no_grad():
        results = signature.results(spec.forward(*wide, **attrs))
    if signature.written:
        results = [t for i in signature.written for t in _listed(wide[i])]
    roundings = spec.bound.forward + spec.bound.length(*wide, **attrs)
    return [_bounded(result.numpy(), roundings) for result in results]


def _backward(
    spec: OperatorSpec, grads: Sequence[Rounded], *args: Any, **attrs: Any
) -> list[Rounded | None]:
    signature = Signature.parse(spec)
    wide = [_tensor(arg) for arg in args]
    places = [signature.positional.index(name) for name in spec.differentiable]
    leaves = [wide[i].requires_grad_() for i in places if wide[i] is not None]
    with InFloat64(), torch.enable_grad():
        outputs = signature.results(spec.forward(*wide, **attrs))[: signature.num_outputs]
        given = [torch.from_numpy(grad.value) for grad in grads]
        found = iter(torch.autograd.grad(outputs, leaves, given))
    roundings = spec.bound.backward + spec.bound.length(*wide, **attrs)
    return [None if wide[i] is None else _bounded(next(found).numpy(), roundings) for i in places]


def _bounded(value: Array, roundings: float) -> Rounded:
    """Norm-wise: every element may be off by as much as the largest one."""
    value = np.asarray(value, dtype=np.float64)
    top = float(np.max(np.abs(value), initial=0.0, where=np.isfinite(value)))
    return Rounded(
        value, np.full(value.shape, roundings * top), np.full(value.shape, roundings * top)
    )


def drawn(spec: OperatorSpec, choose: Choices, draw: Draw) -> Arguments:
    """One of the samples, for a design."""
    samples = list(spec.samples(draw))
    labels = [f"{index}.{safe(sample.label)}" for index, sample in enumerate(samples)]
    sample = samples[labels.index(choose.of("sample", *labels))]
    return sample.args, dict(sample.attrs)


def _sample(spec: OperatorSpec, draw: Draw, index: int) -> Arguments:
    sample = list(spec.samples(draw))[index]
    return sample.args, dict(sample.attrs)


def safe(label: str) -> str:
    """A label with the characters that an id may have."""
    return re.sub(r"[^\w.:+-]+", "-", label.replace("=", ":")).strip("-")


def _tensor(arg: Any) -> Any:
    if isinstance(arg, Rounded):
        return torch.from_numpy(np.array(arg.value))
    if isinstance(arg, list):
        return [_tensor(entry) for entry in arg]
    return torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg


def _listed(arg: Any) -> list[Tensor]:
    return [] if arg is None else list(arg) if isinstance(arg, (list, tuple)) else [arg]
