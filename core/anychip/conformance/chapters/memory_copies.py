"""Do copies arrive: bytes, numbers of any type, conversions, and layouts of both sides?

``copy_async`` is ``target[...] = source``: the oracle is torch's own copy on the host, bit for bit.
Not asked is what torch leaves open: numbers out of the range of an integer, subnormal float32.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from anychip.conformance.case import Context, check, check_equal_bits

MIB = 1 << 20
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)

View = Callable[[Tensor], Tensor]


def held(context: Context) -> list[torch.dtype]:
    """Integers, what the backend claims, and what else torch can have on its device."""
    found = [*INTEGERS, *sorted(context.backend.properties().dtypes, key=str)]
    for dtype in (*FLOATS, *COMPLEX):
        try:
            if dtype not in found:
                torch.zeros(1, dtype=torch.uint8, device=context.device).to(dtype).cpu()
                found.append(dtype)
        except (RuntimeError, TypeError):  # as torch refuses what a device does not have
            context.note = f"not asked of {dtype} and the like, which the device does not hold"
    return found


def copy(context: Context, target: Tensor, source: Tensor, *stream: Any) -> None:
    """A copy that is waited for; on a stream of its own, it waits for what is there."""
    if stream:
        context.backend.synchronize()
    context.backend.memory.copy_async(target, source, *stream)
    context.backend.synchronize()


def same(x: Tensor) -> Tensor:
    """A view of all of it."""
    return x


def reverse(x: Tensor) -> Tensor:
    """A view with the dims in reverse order."""
    return x.permute(*range(x.dim())[::-1])


def check_assigned(
    context: Context, what: str, room: Tensor, base: Tensor,
    at: View = same, of: View = same, *stream: Any,
) -> None:  # fmt: skip
    """``at(room)[...] = of(base)`` to the device, on it and back: that, and nothing beside it."""
    want = room.clone()
    at(want).copy_(of(base))
    ways = {"to the device": (True, False), "on it": (True, True), "from it": (False, True)}
    for way, (target_there, source_there) in ways.items():
        there = room.to(context.device, copy=True) if target_there else room.clone()
        given = base.to(context.device, copy=True) if source_there else base
        copy(context, at(there), of(given), *stream)
        sides = [there.cpu(), want]
        if want.dtype == torch.bool:  # of whose bytes torch makes 0 or 1 at other copies
            sides = [side.view(torch.uint8) for side in sides]
        elif want.dtype in FLOATS and want.dtype != base.dtype:  # a NaN of which bits is open
            sides = [side.masked_fill(side.isnan(), torch.nan) for side in sides]
        check_equal_bits(f"{what}, copied {way}", *sides)


def unlike(value: Tensor) -> Tensor:
    """A tensor none of whose bytes is that of another one: what a copy has to write over."""
    if value.dtype == torch.bool:
        return value.logical_not()
    return value.contiguous().view(-1).view(torch.uint8).bitwise_not().view(value.dtype)


def check_copied(context: Context, what: str, base: Tensor, start: int = 0, first: int = 0) -> None:
    """What is in a flat tensor from ``start`` on arrives at ``first``, between guards."""
    value = base[start:]
    room = unlike(torch.cat((value[:1].expand(first), value, value[:1].expand(5))))
    check_assigned(context, what, room, base, lambda x: x[first:-5], lambda x: x[start:])


def of_bytes(context: Context) -> None:
    """Any number of bytes from and to any place: next to powers of two, off every alignment."""
    generator = torch.Generator().manual_seed(context.seed)
    source = torch.randint(256, ((1 << 22) + 16,), generator=generator).to(torch.uint8)
    powers = [2**k + step for k in (3, 4, 6, 9, 12, 16, 20, 22) for step in (-1, 0, 1)]
    for place, count in enumerate((1, 2, 3, 5, 7, *powers)):
        first, target = place % 9, place * 5 % 16
        check_copied(context, f"{count} bytes", source[: first + count], first, target)
    many = torch.arange(2050 * 2050, dtype=torch.int32).view(2050, 2050)
    check_assigned(context, "more than 2**22 numbers", many.bitwise_not(), many, of=reverse)
    nothing = (torch.empty(0, device=context.device), torch.empty(0))
    result: Any = context.backend.memory.copy_async(*nothing)  # type: ignore[func-returns-value]
    check(result is None, f"copy_async returns None, got {result!r}")


def of_values(context: Context) -> None:
    """Every number of every type arrives as it is: NaN by its bits, zeros by their signs, ends."""
    for dtype in held(context):
        bits = dtype.itemsize * 8
        if dtype == torch.bool:
            value = torch.tensor([True, False, True])
        elif bits <= 16:
            unit = torch.uint8 if bits == 8 else torch.int16
            value = torch.arange(2**bits).to(unit).view(dtype)
        else:
            value = rare_bits(min(bits, 64), context.seed)
            value = value[: len(value) // 2 * 2].view(dtype)
        check_copied(context, str(dtype), value, 0, 1)
        check_assigned(context, f"a scalar of {dtype}", value[1].clone(), value[-1].clone())


def rare_bits(bits: int, seed: int) -> Tensor:
    """Integers of 32 or 64 bits: powers of two and what is beside them, also negative; any.

    Read as floats: zeros of both signs, subnormal numbers, infinities, NaN with payloads.
    """
    exact = [sign * 2**k + step for k in range(bits - 1) for sign in (1, -1) for step in (-1, 0, 1)]
    exact += [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, -(2 ** (bits - 1)) + 1]
    for exponent in (0, 1, (1 << (8 if bits == 32 else 11)) - 1):
        high = exponent << (23 if bits == 32 else 52)
        exact += [high + low - side for low in (0, 1, 0x155555) for side in (0, 2 ** (bits - 1))]
    dtype = torch.int32 if bits == 32 else torch.int64
    kept = [number for number in exact if -(2 ** (bits - 1)) <= number < 2 ** (bits - 1)]
    order = torch.Generator().manual_seed(seed)
    any_bytes = torch.randint(256, (bits * 64,), generator=order).to(torch.uint8)
    return torch.cat((torch.tensor(kept, dtype=dtype), any_bytes.view(dtype)))


def numbers(seed: int) -> tuple[Tensor, Tensor]:
    """Integers, and floats: ends, fractions, halves between two numbers of 16 bits, NaN; any."""
    wide = torch.arange(-(2**25), 2**25, 12_345)
    small, steps = torch.arange(-300, 300), torch.arange(64)
    ends = torch.tensor([2**24 + 1, 2**31 - 1, -(2**31), 2**32, 2**40 + 1, 2**53 + 1])
    floats = (
        rare_bits(32, seed).view(torch.float32), wide * 0.37, small / 4, small.double() / 7,
        (0x3F800000 + 0x1000 * steps).int().view(torch.float32), steps * 2.0**-25,
    )  # fmt: skip
    of_all = torch.cat([part.double() for part in floats])
    smallest = torch.finfo(torch.float32).smallest_normal  # below, a device may take it for 0
    return torch.cat((wide, small, ends)), of_all[(of_all == 0) | ~(of_all.abs() < smallest)]


def convertible(ints: Tensor, floats: Tensor, source: torch.dtype, target: torch.dtype) -> Tensor:
    """Those numbers, of one type, whose conversion to another one is defined."""
    value = ints if source in INTEGERS else floats
    if target in FLOATS and target.itemsize == 2:  # reached by way of float32, or at once
        value = value.float().to(value.dtype)
    if {source, target} & {*COMPLEX}:
        value = value[value.abs() < 2.0**100]
    if source == torch.bool or source in COMPLEX:
        return (value % 2 if source == torch.bool else torch.complex(value, value.flip(0))).to(
            source
        )
    value = value[value.to(source) == value].to(source) if source in INTEGERS else value.to(source)
    if target not in INTEGERS or target == torch.bool:
        return value
    if source in INTEGERS:
        return value[value.to(target) == value]
    ends = torch.iinfo(target)
    return value[(value.double() > float(ends.min) - 1) & (value.double() < ends.max)]


def of_types(context: Context) -> None:
    """Another dtype: the number that the host's conversion gives, rounded the same way."""
    ints, floats = numbers(context.seed)
    types = [dtype for dtype in held(context) if dtype in (*INTEGERS, *FLOATS, *COMPLEX)]
    for source, target in product(types, types):
        if source not in COMPLEX or target in COMPLEX:
            value = convertible(ints, floats, source, target)
            room = torch.ones(len(value) + 5, dtype=target)
            check_assigned(context, f"{source} to {target}", room, value, lambda x: x[3:-2])


LAYOUTS: dict[str, tuple[tuple[int, ...], View]] = {
    "contiguous": ((35, 64), same), "transposed": ((64, 35), reverse),
    "every second": ((35, 64, 2), lambda x: x[..., 1]),
    "a part of each row": ((37, 70), lambda x: x[1:36, 3:67]),
}  # fmt: skip
MANY: dict[str, tuple[tuple[int, ...], View]] = {
    "a row for all": ((35, 64), lambda x: x[1]),
    "a column for all": ((35, 64), lambda x: x[:, 1:2]),
    "a row expanded": ((35, 64), lambda x: x[:1].expand(35, 64)),
    "a column expanded": ((35, 64), lambda x: x[:, :1].expand(35, 64)),
    "a number for all": ((35, 64), lambda x: x[1, 1]),
}
TYPES = ((torch.float32, torch.float32), (torch.int32, torch.float32), (torch.uint8, torch.uint8),
         (torch.int64, torch.int64), (torch.int16, torch.int64))  # fmt: skip
LAZY: tuple[tuple[str, View], ...] = (
    ("z", same), ("z.conj()", torch.conj),
    ("z.real", torch.real), ("z.conj().imag", lambda z: z.conj().imag),
)  # fmt: skip


def of_layouts(context: Context) -> None:
    """As ``target[...] = source``: strides of both, one value for many, another dtype."""
    for source, target, (given, wanted) in product({**LAYOUTS, **MANY}, LAYOUTS, TYPES):
        (shape, of), (space, at) = {**LAYOUTS, **MANY}[source], LAYOUTS[target]
        base, room = counted(shape).to(given), torch.full(space, 252).to(wanted)
        what = f"source {source}, of {given}, target {target}, of {wanted}"
        check_assigned(context, what, room, base, at, of)
    for dims in range(1, 8):
        base = counted((2, 3, 4, 5, 2, 3, 2)[:dims]).float()
        what = f"{dims} dims, the second half of the first"  # of size 1, and not at the start
        check_assigned(context, what, -base[1:], base, of=lambda x: x[1:])
        for of in (reverse, lambda x: x.transpose(0, -1)):
            room = -of(base).contiguous()
            check_assigned(context, f"{dims} dims, source turned", room, base, of=of)
            check_assigned(context, f"{dims} dims, target turned", -base, -room, at=of)
    if torch.complex64 in held(context):
        z = torch.complex(counted((35,)).float(), counted((35,)) + 0.5)
        for (target, at), (source, of) in product(LAZY, LAZY):
            if of(z).dtype == at(z).dtype:
                check_assigned(context, f"{target} = {source}", z.flip(0), z, at, of)


def counted(shape: tuple[int, ...]) -> Tensor:
    """Numbers that differ from those nearby, and that every type has."""
    return (torch.arange(torch.Size(shape).numel()) % 251 % 127).view(shape)


def in_order(context: Context) -> None:
    """Work of the same stream behind a copy sees it; nobody has to wait for that."""
    source = torch.arange(MIB, dtype=torch.float32)
    there, back = torch.zeros(MIB, device=context.device), torch.empty(MIB)
    context.backend.memory.copy_async(there, source)
    doubled = there * 2.0
    context.backend.memory.copy_async(back, doubled)
    context.backend.synchronize()
    check_equal_bits("copied, doubled, and copied back", back, source * 2.0)


def on_stream(context: Context) -> None:
    """A copy on a stream of its own, and the tensors live until it is done."""
    base, stream = torch.arange(MIB, dtype=torch.int32), context.backend.stream()
    check_assigned(context, "on a stream", base.bitwise_not(), base, same, same, stream)
