"""Calls of every operator, from its own samples, for tests that go over all of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from anychip import operators, ops
from anychip.contract import OperatorSpec, Sample, SampleMaker

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECS = {spec.name: spec for spec in operators.all_specs()}
DIFFERENTIABLE = [name for name, spec in SPECS.items() if spec.backward]
WRITING = ["clip", "unscale_and_check", "adamw", "sgd", "lion", "lamb"]
# A matrix product picks its kernel by the address of its operands, which is not ours to fix: other
# bits of the same sum when the allocator gives the two calls differently aligned memory.
PRODUCTS = (
    "linear", "grouped_linear", "linear_cross_entropy", "linear_cross_entropy_partials",
    "attention", "attention_dropout", "attention_varlen", "conv1d", "conv2d",
)  # fmt: skip


class Call(NamedTuple):
    """An operator, and fresh arguments for it."""

    spec: OperatorSpec
    args: tuple[Any, ...]
    attrs: dict[str, Any]

    def __call__(self) -> Any:
        """Through the short cut."""
        return getattr(ops, self.spec.name)(*self.args, **self.attrs)

    def door(self, suffix: str = "") -> Any:
        """The operator of torch.library."""
        return getattr(torch.ops.anychip, self.spec.name + suffix).default

    def leaves(self) -> list[Tensor]:
        """The arguments that require gradients."""
        return [a for a in self.args if isinstance(a, Tensor) and a.requires_grad]


def samples(name: str, dtype: torch.dtype) -> list[Sample]:
    """The operator's own samples on the host."""
    return list(SPECS[name].samples(SampleMaker(torch.device("cpu"), dtype)))


def call(name: str, index: int = 0, dtype: torch.dtype = torch.float32, *, grad: bool) -> Call:
    """A sample with tensors of its own; ``grad`` makes the differentiable ones leaves."""
    spec, sample = SPECS[name], samples(name, dtype)[index]
    names = [a.name for a in torch._C.parse_schema(f"x::y{spec.signature}").arguments]
    args = tuple(
        _fresh(arg, grad and label in spec.differentiable)
        for label, arg in zip(names, sample.args, strict=False)
    )
    return Call(spec, args, dict(sample.attrs))


def _fresh(arg: Any, leaf: bool) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_fresh(a, False) for a in arg]
    if not isinstance(arg, Tensor):
        return arg
    return arg.clone().requires_grad_(leaf)


def every_sample(names: Sequence[str] = tuple(SPECS)) -> list[Any]:
    """Parameters (name, index) over all samples, with the samples' labels as ids."""
    return [
        pytest.param(name, index, id=f"{name}-{sample.label}") for name in names
        for index, sample in enumerate(samples(name, torch.float32))
    ]  # fmt: skip


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a value, lists and tuples looked into."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors(v)]
    return []


def flat_arguments(made: Call) -> tuple[Any, ...]:
    """Arguments as the three operators behind a differentiable one take them."""
    schema = torch._C.parse_schema(f"x::y{made.spec.signature}")
    named = [a for a in schema.arguments if a.kwarg_only]
    attrs = [made.attrs.get(a.name, a.default_value) for a in named]
    rest = len(schema.arguments) - len(named) - len(made.args)
    return (*made.args, *[None] * rest, *attrs)


def backward_arguments(made: Call) -> tuple[Any, ...]:
    """Arguments of the backward operator, as the forward one leaves them; all gradients 1/2."""
    spec, flat = made.spec, flat_arguments(made)
    names = [a.name for a in torch._C.parse_schema(f"x::y{spec.signature}").arguments]
    with torch.no_grad():
        results = tensors(made.door("_forward")(*flat))
    count = len(results) - len(spec.residuals)
    outputs = ["y"] if count == 1 else [f"y{i}" for i in range(count)]
    known: dict[str, Any] = dict(zip(names, flat, strict=True))
    known |= dict(zip([*outputs, *(r.name for r in spec.residuals)], results, strict=True))
    saved = [t.detach() if isinstance(t := known[n], Tensor) else t for n in spec.saved]
    grads = [torch.full_like(r, 0.5) for r in results[:count]]
    needs = [known[n] is not None for n in spec.differentiable]
    return (*grads, *saved, *flat[len(names) - len(made.attrs) :], needs)


def floats(value: Any) -> list[Tensor]:
    """Those of a value's tensors that may have a gradient: an index has none."""
    return [t for t in tensors(value) if t.is_floating_point()]


def bits(value: Any) -> list[tuple[torch.dtype, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of all tensors in a value: what "equal in bits" compares."""
    found = []
    for tensor in tensors(value):
        flat = tensor.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        found.append((tensor.dtype, tuple(tensor.shape), raw))
    return found


def run(made: Call, function: Any = None) -> list[Any]:
    """Outputs, what was written, and gradients of a weighted sum of the outputs."""
    function = made if function is None else function
    outputs = function()
    found: list[Any] = [outputs, made.args if made.spec.name in WRITING else None]
    if made.leaves():
        found.append(gradients(outputs, made.leaves()))
    return found


def gradients(outputs: Any, leaves: Sequence[Tensor], **options: Any) -> tuple[Any, ...]:
    """Gradients of a sum of the outputs with weights that differ from element to element."""
    total = torch.zeros(())
    for output in tensors(outputs):
        weights = torch.cos(torch.arange(output.numel(), dtype=torch.float32))
        total = total + (output.float() * weights.reshape(output.shape)).sum()
    return torch.autograd.grad(total, leaves, **options)
