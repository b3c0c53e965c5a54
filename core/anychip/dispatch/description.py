"""What must the author of a row know of an operator? Names in their order, sizes, a stub."""

import textwrap
from collections.abc import Iterable
from typing import Any

from anychip.contract import OperatorSpec
from anychip.dispatch.signature import Signature
from anychip.dispatch.tables import size_names

_HEAD = """\
import torch

from anychip.contract import OperatorTable
{source}

table = OperatorTable()
FLOATS = {{{floats}}}"""


def describe(spec: OperatorSpec) -> dict[str, Any]:
    """The facts of one operator as plain JSON values; docs/cli.md has the schema."""
    signature = Signature.parse(spec)
    count = signature.num_outputs
    backward = None
    if spec.backward is not None:
        backward = {
            "arguments": [*_numbered("grad", count), *spec.saved],
            "gradients": list(spec.differentiable),
            "deferrable": list(spec.deferrable),
        }
    dtypes: dict[str, list[str]] = {}
    for name in signature.positional:
        dtypes.setdefault(" or ".join(spec.dtypes_of(name)), []).append(name)
    return {
        "name": spec.name, "namespace": spec.namespace, "signature": spec.signature,
        "equation": spec.equation, "source": spec.source, "outputs": _numbered("y", count),
        "residuals": [f"{r.name} ({r.dtype}, {r.shape})" for r in spec.residuals],
        "writes": [signature.positional[i] for i in signature.written], "backward": backward,
        "sizes": sorted(size_names(spec)), "dtypes": dtypes, "autocast": spec.autocast,
        "determinism": spec.determinism,
        "bound": {"forward": spec.bound.forward, "backward": spec.bound.backward},
        "stub": stub(spec),
    }  # fmt: skip


def stub(spec: OperatorSpec) -> str:
    """Source of a table with a row for each direction, which runs as it stands.

    The reference stands where a kernel shall be.
    """
    signature = Signature.parse(spec)
    attrs = list(signature.attr_names)
    source = f"from anychip.operators import {spec.name} as spec"
    if spec.namespace != "anychip":
        source = (
            "from anychip.dispatch.operator import registered\n\n"
            f'spec = registered()["{spec.name}"].spec'
        )
    gives = [*_numbered("y", signature.num_outputs), *(r.name for r in spec.residuals)]
    said = f"gives {', '.join(gives)}"
    if signature.written:
        said = f"writes {', '.join(signature.positional[i] for i in signature.written)}"
    rows = [_row(spec.name, "forward", signature.positional, attrs, said)]
    if spec.backward is not None:
        given = [*_numbered("grad", signature.num_outputs), *spec.saved]
        said = f"gives the gradients of {', '.join(spec.differentiable)}; None where needs says no"
        rows.append(_row(spec.name, "backward", given, [*attrs, "needs"], said))
    floats = ", ".join(f"torch.{name}" for name in spec.free_dtypes)
    return "\n\n\n".join([_HEAD.format(source=source, floats=floats), *rows])


def _row(name: str, direction: str, given: Iterable[str], attrs: Iterable[str], said: str) -> str:
    keywords = [f"{attr}={attr}" for attr in attrs]
    heads = [*given, *(["*", *attrs] if keywords else [])]
    function = name if direction == "forward" else f"{name}_backward"
    lines = (
        f"def {function}({', '.join(heads)}):",
        f"    return spec.{direction}({', '.join([*given, *keywords])})",
    )
    head, body = (textwrap.fill(line, 100, subsequent_indent=" " * 8) for line in lines)
    return f'@table.{direction}("{name}", dtypes=FLOATS)\n{head}\n    # {said}\n{body}'


def _numbered(name: str, count: int) -> list[str]:
    """The names that rows go by: one has no number."""
    return [name] if count == 1 else [f"{name}{i}" for i in range(count)]
