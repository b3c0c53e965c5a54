"""Every wrong backend; docs/wrong-backends.md says how its table is written."""

from collections.abc import Iterator
from importlib import import_module

from tests.meta.wrong import Wrong

FAMILIES = (
    "device memory random operators gradients sizes kernels numbers states attention products"
    " permutation dropout_norm updates compression streams graphs collectives groups training"
    " errors combinations places"
).split()


def entries(family: str) -> Iterator[Wrong]:
    """A module's ``CATALOGUE``; of one without it, its tables of wrong backends, and each alone."""
    found = vars(import_module(f"tests.meta.wrong_{family}"))
    for value in found.get("CATALOGUE", found.values()):
        table = value if isinstance(value, (list, tuple)) else [value]
        yield from (entry for entry in table if isinstance(entry, Wrong))


CATALOGUE: tuple[Wrong, ...] = tuple(wrong for family in FAMILIES for wrong in entries(family))

HEAD = """\
# Wrong backends

Each of these has one small, plausible bug. The conformance suite has to find it in the chapter
named here, and has to leave the correct twin alone: `pytest tests/meta`. This table is written by
`python -m tests.meta.catalogue > docs/wrong-backends.md`.

| chapter | name | class of bug |
|---|---|---|
"""


def table() -> str:
    """The catalogue in Markdown."""
    rows = [f"| {wrong.chapter} | {wrong.name} | {wrong.bug} |" for wrong in CATALOGUE]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
