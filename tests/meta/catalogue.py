"""Every wrong backend; ``python -m tests.meta.catalogue > tests/meta/README.md`` writes them up."""

from __future__ import annotations

from tests.meta import (
    wrong_attention,
    wrong_collectives,
    wrong_compression,
    wrong_device,
    wrong_dropout_norm,
    wrong_errors,
    wrong_gradients,
    wrong_graphs,
    wrong_kernels,
    wrong_memory,
    wrong_numbers,
    wrong_operators,
    wrong_permutation,
    wrong_products,
    wrong_random,
    wrong_sizes,
    wrong_states,
    wrong_streams,
    wrong_training,
    wrong_updates,
)
from tests.meta.wrong import Wrong

CATALOGUE: tuple[Wrong, ...] = (
    *wrong_device.CATALOGUE,
    *wrong_memory.CATALOGUE,
    *wrong_random.CATALOGUE,
    *wrong_operators.CATALOGUE,
    *wrong_gradients.CATALOGUE,
    *wrong_sizes.CATALOGUE,
    *wrong_kernels.CATALOGUE,
    *wrong_numbers.CATALOGUE,
    *wrong_states.CATALOGUE,
    *wrong_attention.CATALOGUE,
    *wrong_products.CATALOGUE,
    *wrong_permutation.CATALOGUE,
    *wrong_dropout_norm.CATALOGUE,
    *wrong_updates.CATALOGUE,
    *wrong_compression.CATALOGUE,
    *wrong_streams.CATALOGUE,
    *wrong_graphs.CATALOGUE,
    *wrong_collectives.CATALOGUE,
    *wrong_training.CATALOGUE,
    *wrong_errors.CATALOGUE,
)

HEAD = """\
# Wrong backends

Each of these has one small, plausible bug. The conformance suite has to find it in the chapter
named here, and has to leave the correct twin alone: `pytest tests/meta`. This table is written by
`python -m tests.meta.catalogue > tests/meta/README.md`.

| chapter | name | class of bug |
|---|---|---|
"""


def table() -> str:
    """The catalogue in Markdown."""
    rows = [f"| {wrong.chapter} | {wrong.name} | {wrong.bug} |" for wrong in CATALOGUE]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
