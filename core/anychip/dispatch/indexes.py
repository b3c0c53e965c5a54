"""What do the numbers of an integer argument count? A spec's ``indexes``, taken apart."""

import re
from collections.abc import Collection
from typing import NamedTuple

from anychip.contract import ContractError, OperatorSpec

KINDS = ("each", "ends", "bounds")
_FORM = re.compile(rf"(?:({'|'.join(KINDS)}) of )?(\w+)\[(-?\d+)\]")


class Index(NamedTuple):
    """What numbers count: places of a dim of another argument, or where groups of them end.

    Attributes:
        kind: "" for places, or one of ``KINDS``.
        argument, dim: whose size is their limit.
    """

    kind: str
    argument: str
    dim: int


def indexes_of(spec: OperatorSpec, arguments: Collection[str]) -> dict[str, Index]:
    """By argument.

    Raises:
        ContractError: an argument that there is not, or a text of another form.
    """
    found = {}
    for name, text in spec.indexes.items():
        match = _FORM.fullmatch(text)
        if match is None or not {name, match[2]} <= {*arguments}:
            raise ContractError(
                f"operator {spec.name!r}: indexes[{name!r}] is {text!r}; an argument of "
                f"{', '.join(arguments)} was expected for another one's dim, like 'weight[0]', "
                f"perhaps with {', '.join(f'{kind!r} of' for kind in KINDS)} before it"
            )
        found[name] = Index(match[1] or "", match[2], int(match[3]))
    return found
