"""Raw calls at random, made of an operator's own samples: other sizes, numbers, layouts, settings.

A size that stands at several places of a sample stays one size. What the operator refuses is drawn
anew, so that the families need no rules of their own here.
"""

import math
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip.contract import OperatorSpec, SampleMaker
from tests.red_team.seam import SIGNATURES

ELEMENTS, FLOPS = 1 << 18, 1 << 22
"""So many a call has at most."""
ATTEMPTS = 6


class Probe(NamedTuple):
    """A call of an operator, and gradients to be passed back through it.

    Attributes:
        args, attrs: of the call.
        needs: names of arguments whose gradients are asked for.
        seed: of the output gradients.
    """

    args: tuple[Any, ...]
    attrs: dict[str, Any]
    needs: tuple[str, ...]
    seed: int


def probe(spec: OperatorSpec, dtype: torch.dtype, seed: int) -> Probe:
    """A call that the operator takes."""
    draw = random.Random(seed)
    samples = list(spec.samples(SampleMaker(torch.device("cpu"), dtype, seed)))
    signature = SIGNATURES[spec.name]
    for attempt in range(ATTEMPTS + 1):
        args, attrs = signature.bind(*_bound(draw.choice(samples)))
        if attempt < ATTEMPTS:
            with suppress(ValueError, RuntimeError, TypeError, IndexError, ZeroDivisionError):
                made = _Drawn(spec, draw).change(args, dict(attrs))
                needs = _needs(spec, draw, made[0])
                if spec.check is not None:
                    spec.check(*made[0], **made[1])
                if spec.cost(*made[0], **made[1]).flops > FLOPS:
                    continue
                copied = [_copied(arg) for arg in made[0]]
                spec.forward(*copied, **made[1])
                return Probe(*made, needs, seed)
    return Probe(args, dict(attrs), _needs(spec, draw, args), seed)


def _bound(sample: Any) -> tuple[Any, Any]:
    return sample.args, sample.attrs


def _copied(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.clone()
    return [t.clone() for t in arg] if isinstance(arg, (list, tuple)) else arg


def _needs(spec: OperatorSpec, draw: random.Random, args: tuple[Any, ...]) -> tuple[str, ...]:
    names = SIGNATURES[spec.name].positional
    given = [n for n, a in zip(names, args, strict=True) if n in spec.differentiable and
             isinstance(a, Tensor) and a.is_floating_point()]  # fmt: skip
    if len(given) > 1 and draw.random() < 0.3:
        return tuple(draw.sample(given, draw.randint(1, len(given))))
    return tuple(given)


class _Drawn:
    """A sample, changed at random."""

    def __init__(self, spec: OperatorSpec, draw: random.Random) -> None:
        self.spec, self.draw = spec, draw
        self.signature = SIGNATURES[spec.name]
        self.generator = torch.Generator().manual_seed(draw.getrandbits(40))

    def change(
        self, args: tuple[Any, ...], attrs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = dict(zip(self.signature.positional, args, strict=True))
        sizes = self._sizes(values)
        attrs = {name: self._attribute(name, value, sizes) for name, value in attrs.items()}
        shapes = {name: self._shape(name, value, sizes) for name, value in values.items()}
        for name, value in values.items():
            if self.signature.optional[self.signature.positional.index(name)]:
                values[name] = None if self.draw.random() < 0.15 else value
        made = {name: self._made(name, value, shapes) for name, value in values.items()}
        self._numbers(made)
        self._layout(made)
        return tuple(made.values()), attrs

    def _sizes(self, values: dict[str, Any]) -> dict[int, int]:
        """Old sizes to new ones."""
        found = sorted({
            size
            for name, value in values.items() if name != "rng"
            for t in _each(value) if isinstance(t, Tensor)
            for size in t.shape if size > 1
        })  # fmt: skip
        chosen = self.draw.sample(found, min(len(found), self.draw.randint(0, 3)))
        made = {}
        for size in chosen:
            high = self.draw.choice((16, 300, 300, 20000))
            new = round(math.exp(self.draw.uniform(0, math.log(high))))
            if self.draw.random() < 0.4:  # as models have them
                new = max(1, round(new / 16) * 16)
            made[size] = size * max(1, new // size) if self.draw.random() < 0.3 else new
        if found and self.draw.random() < 0.04:
            made[self.draw.choice(found)] = 0
        return made

    def _attribute(self, name: str, value: Any, sizes: dict[int, int]) -> Any:
        change = self.draw.random() < 0.3
        if isinstance(value, bool):
            return value != change
        if isinstance(value, int):
            return self.draw.choice((0, 1, value + 1, 2 * value)) if change else sizes.get(
                value, value
            )  # fmt: skip
        if isinstance(value, float) and change:
            return self.draw.choice(
                (0.0, 1.0, *map(_written, (value * 10.0, value / 10.0, value + 0.1)))
            )
        if isinstance(value, list):
            return [sizes.get(size, size) for size in value]
        if name in self.signature.attrs and change:
            return self.signature.attrs[name]
        return value

    def _shape(self, name: str, value: Any, sizes: dict[int, int]) -> Any:
        if not isinstance(value, Tensor) or name == "rng":
            return None
        return [sizes.get(size, size) for size in value.shape]

    def _made(self, name: str, value: Any, shapes: dict[str, Any]) -> Any:
        if isinstance(value, (list, tuple)):
            return self._list(value)
        if not isinstance(value, Tensor):
            return value
        if name == "rng":
            return torch.tensor([self.draw.getrandbits(40), self.draw.getrandbits(20)])
        shape = shapes[name]
        if math.prod(shape) > ELEMENTS:
            raise ValueError("too large")
        index = self.signature.indexes.get(name)
        if index is not None and index.kind:
            limit = shapes[index.argument][index.dim]
            if index.kind == "each":
                return torch.randperm(limit, generator=self.generator).to(value.dtype)
            ends = torch.randint(limit + 1, shape, generator=self.generator).sort().values
            if index.kind == "bounds":
                ends[0] = 0
            return ends.to(value.dtype)
        if index is not None:
            limit = max(shapes[index.argument][index.dim], 1)
            return torch.randint(limit, shape, generator=self.generator).to(value.dtype)
        return self._like(value, shape)

    def _like(self, value: Tensor, shape: list[int]) -> Tensor:
        """Numbers of the same kind."""
        if not value.numel() or list(value.shape) == shape == []:
            return value.new_zeros(shape) if not value.numel() else value.clone()
        if value.is_floating_point():
            spread = value.float().std().nan_to_num(1.0).item() if value.numel() > 1 else 1.0
            made = torch.randn(shape, generator=self.generator) * (spread or 1.0)
            return (made.abs() if value.min() >= 0 else made).to(value.dtype)
        places = torch.randint(value.numel(), shape, generator=self.generator)
        return value.reshape(-1)[places].clone()

    def _list(self, value: Any) -> Any:
        """The same entries, more of them or fewer; every list of a call alike."""
        if not hasattr(self, "entries"):
            count = self.draw.choice((1, 2, len(value), round(math.exp(self.draw.uniform(0, 6)))))
            self.entries = [self.draw.randrange(len(value)) for _ in range(count)] if value else []
            self.scales = [round(math.exp(self.draw.uniform(0, 7))) if self.draw.random() < 0.5
                           else 0 for _ in self.entries[:50]]  # fmt: skip
        made = []
        for place, entry in enumerate(self.entries if value else ()):
            length = self.scales[place] if place < len(self.scales) else 0
            old = value[entry]
            made.append(self._like(old, [length] if length else list(old.shape)))
        return made

    def _numbers(self, made: dict[str, Any]) -> None:
        floats = [t for v in made.values() for t in _each(v)
                  if isinstance(t, Tensor) and t.is_floating_point() and t.numel() > 1]  # fmt: skip
        integers = [t for n, t in made.items() if isinstance(t, Tensor) and n != "rng"
                    and not t.is_floating_point() and t.numel() > 1]  # fmt: skip
        if integers and self.draw.random() < 0.25:
            t = self.draw.choice(integers).view(-1)
            t.copy_(t[:1].expand_as(t) if self.draw.random() < 0.5 else t.sort().values)
        if not floats or self.draw.random() < 0.4:
            return
        t = self.draw.choice(floats).view(-1)
        kind = self.draw.randrange(7)
        if kind == 0:
            t.mul_(10.0 ** self.draw.uniform(-4, 3))
        elif kind == 1:
            t[:: self.draw.randint(1, 5)] = 0.0
        elif kind == 2:
            t.abs_()
        elif kind == 3:
            t.fill_(float(t[0]))
        elif kind == 4:
            t.add_(10.0 ** self.draw.uniform(-1, 3))
        elif kind == 5:
            t[self.draw.randrange(len(t))] = self.draw.choice((math.inf, math.nan, -math.inf))

    def _layout(self, made: dict[str, Any]) -> None:
        written = {self.signature.positional[i] for i in self.signature.written}
        tensors = [n for n, v in made.items() if isinstance(v, Tensor) and v.dim()
                   and v.numel() and n != "rng"]  # fmt: skip
        if not tensors or self.draw.random() < 0.45:
            return
        name = self.draw.choice(tensors)
        t, kind = made[name], self.draw.randrange(5)
        if kind == 0 and t.dim() > 1:
            made[name] = t.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif kind == 1:
            made[name] = torch.stack((t, t), -1)[..., 0]
        elif kind == 2:
            room = torch.empty(t.numel() + 16, dtype=t.dtype)
            start = self.draw.randint(1, 9)
            made[name] = room[start : start + t.numel()].view(t.shape).copy_(t)
        elif kind == 3 and t.dim() > 1 and name not in written:
            made[name] = t[:1].expand(t.shape)
        else:
            same = [n for n in tensors if n != name and made[n].shape == t.shape
                    and made[n].dtype == t.dtype and n not in written]  # fmt: skip
            if same and name not in written:
                made[name] = made[self.draw.choice(same)]


def _written(value: float) -> float:
    """As somebody would write it: 1e-6 and 0.1; not 1e-5 / 10 nor 1e-5 + 0.1, as no kernel has."""
    return float(f"{value:.2g}")


def _each(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, (list, tuple)) else (value,)
