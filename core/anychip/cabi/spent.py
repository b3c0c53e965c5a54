"""Where did the time of a device go? And which names in the library would change that?

The bridge times by the name that torch called, in-place and ``.out`` forms apart; a library lists
functional operators, which serve those forms too.
"""

from functools import cache
from typing import Any, NamedTuple

COPY = "copy"


class Spent(NamedTuple):
    """What one operator took within ``Library.profiling()``.

    Attributes:
        who: ``native`` (the library), ``host``, or ``copy`` of bytes, between the two or on the
            device.
        name: torch's, ``aten::add.out``; of copies whereto.
        seconds: all of it. copied_s: of those, copies to the host and back.
        nbytes: that were copied for it.
    """

    who: str
    name: str
    calls: int
    seconds: float
    copied_s: float
    nbytes: int


def parsed(text: str) -> list[Spent]:
    """What the bridge has timed."""
    found = []
    for line in text.splitlines():
        who, rest = line.split(" ", 1)
        name, calls, ns, copied_ns, nbytes = rest.rsplit(" ", 4)
        times = (int(ns) / 1e9, int(copied_ns) / 1e9)
        found.append(Spent(who, name, int(calls), *times, int(nbytes)))
    return found


@cache
def listed_as(name: str) -> str | None:
    """The name by which a library would list an operator that torch called, or None.

    None: it draws random numbers, returns lists, or is no functional operator's form.
    """
    import torch

    if name == "aten::_copy_from":
        return COPY
    if not name.startswith("aten::"):
        return None
    base, _, overload = name.removeprefix("aten::").partition(".")
    packet: Any = getattr(torch.ops.aten, base)
    wanted = _inputs(getattr(packet, overload or "default")._schema)
    for candidate in (base, base.removesuffix("_")):
        of: Any = getattr(torch.ops.aten, candidate, None)
        for form in of.overloads() if of is not None else ():
            schema = getattr(of, form)._schema
            if _inputs(schema) == wanted and _is_functional(schema):
                return candidate if form == "default" else f"{candidate}.{form}"
    return None


def _inputs(schema: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]


def _is_functional(schema: Any) -> bool:
    values = [*schema.arguments, *schema.returns]
    return (
        bool(schema.arguments)
        and not any(value.alias_info for value in values)
        and not any("Generator" in str(argument.type) for argument in schema.arguments)
        and bool(schema.returns)
        and all(str(value.type) == "Tensor" for value in schema.returns)
    )
