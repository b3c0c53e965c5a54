"""Every operator with the samples of its specification, and all that a call leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip import operators, ops
from anychip.contract import Backend, OperatorSpec, Sample, SampleMaker

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """One operator with its arguments, on the device.

    Attributes:
        name: operator, dtype and sizes, for people.
    """

    name: str
    spec: OperatorSpec
    sample: Sample

    def fresh(self) -> tuple[list[Any], list[Tensor]]:
        """Arguments of its own, and those among them that are leaves of a graph."""
        schema = torch._C.parse_schema(f"x::y{self.spec.signature}")
        names = [argument.name for argument in schema.arguments]
        args, leaves = [], []
        for name, value in zip(names, self.sample.args, strict=False):
            own = _cloned(value)
            if name in self.spec.differentiable and isinstance(own, Tensor):
                leaves.append(own.requires_grad_())
            args.append(own)
        return args, leaves

    def __call__(self) -> list[Tensor]:
        """Outputs, what was written in place, and gradients."""
        args, leaves = self.fresh()
        return self.on(args, leaves)

    def on(self, args: Sequence[Any], leaves: Sequence[Tensor]) -> list[Tensor]:
        """The same on given arguments."""
        result = getattr(ops, self.spec.name)(*args, **self.sample.attrs)
        outputs = _flat(result)
        grads: Sequence[Tensor | None] = ()
        slopes = [y for y in outputs if y.requires_grad]
        if leaves and slopes:
            # Not ones: with these the gradients of what adds up to one are noise.
            given = [torch.linspace(-1, 1, y.numel(), device=y.device) for y in slopes]
            given = [g.view(y.shape).to(y.dtype) for g, y in zip(given, slopes, strict=True)]
            grads = torch.autograd.grad(slopes, leaves, given, allow_unused=True)
        written = [] if outputs else _flat(args)
        return [t.detach() for t in (*outputs, *written, *(g for g in grads if g is not None))]


def every_call(
    chip: Backend, *, tiny: bool = False, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Call]:
    """All operators; with ``tiny`` one sample of each, in float32."""
    for dtype in dtypes[:1] if tiny else dtypes:
        maker = SampleMaker(chip.device(), dtype)
        for spec in operators.all_specs():
            samples = list(spec.samples(maker))
            for sample in samples[:1] if tiny else samples:
                label = f"{spec.name}/{str(dtype).removeprefix('torch.')}/{sample.label}"
                yield Call(label, spec, sample)


def _cloned(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cloned(part) for part in value]
    return value.clone() if isinstance(value, Tensor) else value


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _flat(part)]
    return [value] if isinstance(value, Tensor) else []


def different(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Where two results have different bits; "" when they have the same."""
    if len(got) != len(want):
        return f"{len(got)} tensors, expected {len(want)}"
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"tensor {place}: {one.dtype} {tuple(one.shape)}, expected {other.dtype}"
        wrong = int((_bits(one) != _bits(other)).sum())
        if wrong:
            return f"tensor {place}: {wrong} of {one.numel()} elements have other bits"
    return ""


def _bits(x: Tensor) -> Tensor:
    kinds = {4: torch.int32, 2: torch.int16, 8: torch.int64, 1: torch.uint8}
    return x.contiguous().view(kinds[x.element_size()])


def apart(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Where two results differ by more than the order of their sums can do; "" when they do not.

    Allowed are two units in the last place of the dtype, and 2^-17 of the largest element, which
    is the rounding of some thousand terms in float32. What is 0 or not finite must be so in both,
    as masks and indices are.
    """
    if len(got) != len(want):
        return f"{len(got)} tensors, expected {len(want)}"
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"tensor {place}: {one.dtype} {tuple(one.shape)}, expected {other.dtype}"
        if not one.is_floating_point():
            wrong = one != other
        else:
            a, b = one.double(), other.double()
            size = b.nan_to_num(0.0, 0.0, 0.0).abs()
            allowed = 2 * torch.finfo(one.dtype).eps * size
            allowed = allowed + (2.0**-17 * size.max() if size.numel() else 0.0)
            wrong = (a.isfinite() != b.isfinite()) | (
                (a - b).nan_to_num(0.0, 0.0, 0.0).abs() > allowed
            )
        if bool(wrong.any()):
            return f"tensor {place}: {int(wrong.sum())} of {one.numel()} elements are apart"
    return ""
