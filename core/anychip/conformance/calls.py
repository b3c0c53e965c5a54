"""With which arguments is an operator called? Made on the host, placed on a device.

A call is made from a seed that its label gives, so that a case is the same on every chip and every
day. What values bring out an operator's mistakes stands with its oracle; this file holds what they
are made with. Every placed tensor lies in a larger buffer whose rest must not change: a guard zone.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from anychip.conformance.case import bits_of, check
from anychip.conformance.formats import FORMATS
from anychip.contract import HOST, SampleMaker

Layout = Literal[
    "contiguous", "offset", "strided", "transposed", "padded", "gapped", "swapped", "expanded",
    "repeated", "packed", "shared", "shared-backwards", "first", "channels last",
]  # fmt: skip
LAYOUTS: tuple[Layout, ...] = ("offset", "strided", "transposed", "padded")
"""Those that are not plain: misaligned, with gaps, in another order than the dims, rows of a wider
tensor."""
INNER_LAYOUTS: tuple[Layout, ...] = ("gapped", "swapped", "channels last")
"""Of three dims and more: one part of (batch, length, 3, heads, dim), where no stride follows from
another one; heads before the positions; and the second dim the innermost."""
READ_ONLY_LAYOUTS: tuple[Layout, ...] = ("expanded", "repeated")
"""A stride of 0 in the first or the last dim, along which all numbers are the same."""
LIST_LAYOUTS: tuple[Layout, ...] = ("shared", "shared-backwards")
"""The tensors of a list are parts of one storage, with gaps between them; in the list's order, or
from its end."""
Layouts = Layout | Mapping[str, Layout]
"""Of every argument, or of some by name."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
GUARD = 64
"""Elements before and after each tensor."""
LISTED = 16
"""Tensors of a list that a call's description names."""
_LARGE, _NAN = 0x7B, 0xFF
"""What lies around tensors, as bytes: in every format a number that no sum passes over, or NaN,
which a weight of 0 does not hide."""


def stream(label: str, seed: int = 0) -> int:
    """The seed of one subject's random numbers: its label's, shifted by the seed of the run."""
    return zlib.crc32(label.encode(), seed & 0xFFFFFFFF)


class Draw(SampleMaker):
    """Makes the tensors of one call, on the host."""

    def __init__(self, dtype: torch.dtype, label: str, seed: int = 0) -> None:
        super().__init__(torch.device(HOST), dtype, seed=stream(label, seed))
        self.format = FORMATS[dtype]

    @property
    def huge(self) -> float:
        """A scale whose square, summed a few thousand times, still fits float32 (and the type)."""
        return 2.0**12 if self.dtype == torch.float16 else 2.0**55

    @property
    def tiny(self) -> float:
        """The other end: its square is a normal number of float32."""
        return 2.0**-12 if self.dtype == torch.float16 else 2.0**-55

    @property
    def large(self) -> float:
        """A scale of numbers that a factor of 8 makes infinite, and most of which are finite."""
        return self.format.largest / 4

    @property
    def subnormal(self) -> float:
        """A scale at which numbers of the type lose digits."""
        return 2.0 ** (self.format.min_exponent - 3)

    def normal(
        self, *shape: int, scale: float | str = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """As of every maker; a scale may be one of those above, by name, or ``root-`` of one."""
        if isinstance(scale, str):
            number: float = getattr(self, scale.removeprefix("root-"))
            scale = math.sqrt(number) if scale.startswith("root-") else number
        return super().normal(*shape, scale=scale, dtype=dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """float32 values between two numbers."""
        return torch.rand(shape, generator=self._generator) * (high - low) + low


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator, not yet made.

    Attributes:
        label: part of the case's id; letters, digits and ``_ . : + -`` only.
        make: gives positional arguments and attributes.
        full: only at level full.
        full_in_16_bits: in 16-bit types only at level full: what it asks is of no type.
        layout: how the float tensors lie in memory; given by name, any tensors.
        telling: a computation one precision class lower must fail.
        statistical: the inputs are random, so that the statistical limits hold.
        gradient: gradients are compared for this call too.
        one_sign: the outputs' gradients are above 0, so that of a long sum what is left out shows.
        leaves_open: what an infinite number reaches may be anything: where with NaN in its place
            NaN is wanted.
    """

    label: str
    make: Callable[[Draw], Arguments]
    _: KW_ONLY
    full: bool = False
    full_in_16_bits: bool = False
    telling: bool = False
    layout: Layouts = "contiguous"
    statistical: bool = True
    gradient: bool = True
    one_sign: bool = False
    leaves_open: bool = False

    def arguments(self, operator: str, dtype: torch.dtype, seed: int = 0) -> Arguments:
        """The call's arguments, on the host: the same numbers whenever and wherever it is made."""
        return self.make(Draw(dtype, f"{operator}/{self.label}", seed))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A tensor on the device, the buffer that it is a view of, and where else that has tensors.

    Attributes:
        taken: of the buffer's elements, on the host, whether some tensor of the call has them;
            None: this one's alone are.
    """

    tensor: Tensor
    buffer: Tensor
    before: Tensor = field(repr=False)
    taken: Tensor | None = field(default=None, repr=False)

    def touched(self, *, written: bool) -> str | None:
        """What changed that must not have; None when all is well.

        Args:
            written: the operator may write the tensor, and only it.
        """
        after = bits_of(self.buffer)
        if torch.equal(after, self.before):
            return None
        changed = after != self.before
        inside = self.taken
        if inside is None:
            t, inside = self.tensor, torch.zeros(self.buffer.numel(), dtype=torch.bool)
            inside.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(True)
        outside = int((changed & ~inside).sum())
        if outside:
            return f"{outside} elements outside of it were overwritten"
        if not written and changed.any():
            return f"{int(changed.sum())} of its elements were overwritten"
        return None


def place(tensor: Tensor, device: torch.device, layout: Layout = "contiguous") -> Placed:
    """Copies a host tensor to a device, into a buffer with guard zones."""
    shape, stride, start = _geometry(size := tensor.shape, layout)
    room = start + GUARD + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    around = _NAN if sum(size) % 2 else _LARGE
    buffer = _filled(max(room, start + GUARD), tensor.dtype, around)
    view = buffer.as_strided(shape, stride, start)
    if 0 in stride:  # what is one place in memory is written once
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
        view, tensor = view[once], tensor[once]
    view.copy_(tensor)
    before, on_device = bits_of(buffer).clone(), buffer.to(device)
    view = on_device.as_strided(shape, stride, start)
    return Placed(tensor=view, buffer=on_device, before=before)


def _filled(numel: int, dtype: torch.dtype, byte: int) -> Tensor:
    byte = 1 if dtype == torch.bool else byte  # which a copy to a device may make of it
    return torch.full((numel * dtype.itemsize,), byte, dtype=torch.uint8).view(dtype)


def place_packed(tensors: Sequence[Tensor], device: torch.device) -> list[Placed]:
    """Places tensors that agree but for the last dim side by side, as parts of one.

    For every other shape the last is the first part; for every third they take turns, as pairs do.
    """
    if sum(tensors[0].shape) % 3 == 1 and len({tensor.shape for tensor in tensors}) == 1:
        whole = place(torch.stack(list(tensors), -1), device)
        return [replace(whole, tensor=part) for part in whole.tensor.unbind(-1)]
    turn = -1 if sum(tensors[0].shape) % 2 else 1
    whole = place(torch.cat(list(tensors)[::turn], -1), device)
    parts = whole.tensor.split([tensor.shape[-1] for tensor in tensors][::turn], -1)[::turn]
    return [replace(whole, tensor=part) for part in parts]


def place_shared(tensors: Sequence[Tensor], device: torch.device, layout: Layout) -> list[Placed]:
    """Places tensors of one dtype one behind the other, with gaps that nobody may write."""
    order = list(range(len(tensors)))
    order = order if layout == "shared" else order[::-1]
    starts, end = [0] * len(tensors), GUARD
    for index in order:
        starts[index], end = end, end + tensors[index].numel() + 1 + index % 3
    buffer = _filled(end + GUARD, tensors[0].dtype, _LARGE)
    taken = torch.zeros(len(buffer), dtype=torch.bool)
    for start, tensor in zip(starts, tensors, strict=True):
        buffer[start : start + tensor.numel()] = tensor.reshape(-1)
        taken[start : start + tensor.numel()] = True
    before, on_device = bits_of(buffer).clone(), buffer.to(device)
    views = tuple(
        on_device[start : start + t.numel()].view(t.shape)
        for start, t in zip(starts, tensors, strict=True)
    )
    return [Placed(tensor=v, buffer=on_device, before=before, taken=taken) for v in views]


@lru_cache(maxsize=1 << 12)
def _geometry(size: torch.Size, layout: Layout) -> tuple[list[int], list[int], int]:
    shape = list(size)
    if layout == "transposed" and len(shape) > 1:
        order = list(reversed(shape))
        return shape, list(reversed(_dense(order))), GUARD
    if layout == "channels last" and len(shape) > 2:
        first, *inner, channel = _dense([shape[0], *shape[2:], shape[1]])
        return shape, [first, channel, *inner], GUARD
    if layout == "swapped":
        outer = _dense([*reversed(shape[:-1]), shape[-1]])[:-1]
        return shape, [*reversed(outer), 1], GUARD
    padding = {"padded": [0] * (len(shape) - 1) + [3], "gapped": [2] * (len(shape) - 1) + [0]}
    room = [n + more for n, more in zip(shape, padding.get(layout, [0] * len(shape)), strict=True)]
    stride = _dense(room)
    if layout in READ_ONLY_LAYOUTS:
        stride[0 if layout == "expanded" else -1] = 0
    if layout == "strided":
        stride = [2 * s for s in stride]
    return shape, stride, {"offset": GUARD + 1, "first": 0}.get(layout, GUARD)


@lru_cache(maxsize=1 << 12)
def is_another_order(size: torch.Size, layout: Layout) -> bool:
    """Whether elements lie otherwise than they would anyway; of dims of one it cannot be told."""
    shape, stride, _ = _geometry(size, layout)
    dims = zip(shape, stride, _dense(shape), strict=True)
    return any(size > 1 and step != dense for size, step, dense in dims)


def _dense(shape: Sequence[int]) -> list[int]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return list(reversed(stride))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedCall:
    """A call's arguments on the device."""

    args: tuple[Any, ...]
    attrs: Mapping[str, Any]
    placed: tuple[tuple[int, str, Placed], ...]

    def touched(self, written: Sequence[int]) -> str | None:
        """What the call changed that its schema does not declare; None when all is well."""
        seen = set[tuple[int, bool]]()
        for index, name, tensor in self.placed:
            once = id(tensor if tensor.taken is None else tensor.taken), index in written
            problem = None if once in seen else tensor.touched(written=once[1])
            if problem is not None:
                return f"{name}: {problem}"
            seen.add(once)
        return None

    def check_apart(self, names: Sequence[str], results: Sequence[Tensor]) -> None:
        """No result shares memory with an argument or with another result: each is its owner's."""
        taken = {p.buffer.untyped_storage().data_ptr(): name for _, name, p in self.placed}
        for name, y in zip(names, results, strict=True):
            other = taken.setdefault(y.untyped_storage().data_ptr(), name) if y.numel() else name
            check(other == name, f"{name} shares memory with {other}")


def with_equal_numbers(
    names: Sequence[str], arguments: Arguments, layout: Layouts
) -> tuple[Any, ...]:
    """The positional arguments, with one number where a layout has one place in memory."""
    known = dict[tuple[int, int], Tensor]()

    def lying(name: str, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [lying(name, tensor) for tensor in arg]
        kind = _fitting(name, arg, layout) if isinstance(arg, Tensor) else "contiguous"
        if kind not in READ_ONLY_LAYOUTS or not arg.numel():
            return arg
        dim = 0 if kind == "expanded" else -1  # and one that is two stays one
        return known.setdefault((id(arg), dim), arg.narrow(dim, 0, 1).expand_as(arg))

    return tuple(map(lying, names, arguments[0]))


def place_call(
    names: Sequence[str], arguments: Arguments, device: torch.device, layout: Layouts = "contiguous"
) -> PlacedCall:
    """Places every tensor of a call; one that stands there twice is one on the device too.

    A layout for all is for float tensors with dims.
    """
    args: list[Any] = []
    found: list[tuple[int, str, Placed]] = []
    known = _pack(names, arguments[0], device, layout)

    def placed(name: str, tensor: Tensor) -> Placed:
        if id(tensor) not in known:
            known[id(tensor)] = place(tensor, device, _fitting(name, tensor, layout))
        return known[id(tensor)]

    for index, (name, arg) in enumerate(zip(names, arguments[0], strict=True)):
        if isinstance(arg, (list, tuple)):
            labels = [f"{name}[{entry}]" for entry in range(len(arg))]
            where = layout if isinstance(layout, str) else layout.get(name, "contiguous")
            shared = where in LIST_LAYOUTS
            entries = place_shared(arg, device, where) if shared else [placed(name, t) for t in arg]
            found += [(index, label, p) for label, p in zip(labels, entries, strict=True)]
            args.append([p.tensor for p in entries])
        elif isinstance(arg, Tensor):
            entry = placed(name, arg)
            found.append((index, name, entry))
            args.append(entry.tensor)
        else:
            args.append(arg)
    return PlacedCall(args=tuple(args), attrs=arguments[1], placed=tuple(found))


def _pack(
    names: Sequence[str], args: Sequence[Any], device: torch.device, layout: Layouts
) -> dict[int, Placed]:
    """The arguments that are parts of one tensor, by the host tensor's id."""
    if isinstance(layout, str):
        return {}
    chosen = [a for n, a in zip(names, args, strict=True) if layout.get(n) == "packed"]
    if not chosen:
        return {}
    places = place_packed(chosen, device)
    return {id(tensor): place for tensor, place in zip(chosen, places, strict=True)}


def _fitting(name: str, tensor: Tensor, layout: Layouts) -> Layout:
    if not isinstance(layout, str):
        return layout.get(name, "contiguous") if tensor.dim() else "contiguous"
    return layout if tensor.is_floating_point() and tensor.dim() else "contiguous"


def tensors_of(args: Sequence[Any]) -> Iterator[Tensor]:
    """Every tensor among arguments, lists flattened, None left out."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from arg


def describe_call(operator: str, arguments: Arguments, layout: Layouts = "contiguous") -> str:
    """The call in one line, for a person: names of types and shapes, values of attributes."""
    shown = [_describe(arg) for arg in arguments[0]]
    shown += [f"{key}={value!r}" for key, value in arguments[1].items()]
    text = f"{operator}({', '.join(shown)})"
    if isinstance(layout, str):
        return text if layout == "contiguous" else f"{text}, {layout} in memory"
    kinds = [f"{name} {kind}" for name, kind in layout.items() if kind != "contiguous"]
    return f"{text}, {', '.join(kinds)} in memory" if kinds else text


def _describe(arg: Any) -> str:
    if isinstance(arg, Tensor):
        if arg.dim() == 0:
            return f"{str(arg.dtype).removeprefix('torch.')} {arg.item():.9g}"
        return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"
    if isinstance(arg, (list, tuple)):
        rest = [f"... {len(arg)} tensors"] if len(arg) > LISTED else []
        return f"[{', '.join([*map(_describe, arg[:LISTED]), *rest])}]"
    return repr(arg)
