"""The table of docs/npu.md, made of the rows themselves.

    python -m tests.npu.documented_rows

writes it between the two marks of the page. Needs no torch_npu: nothing is called.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from anychip.contract import Row
from anychip.operators import all_specs
from anychip_npu import operators  # noqa: F401 - declares the rows
from anychip_npu.table import Unmapped, declared, reference_only

PAGE = Path(__file__).parents[2] / "docs" / "npu.md"
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"
ADDRESS = re.compile(r"https://\S+")
HEAD = "| operator | direction | torch | CANN | status |\n|---|---|---|---|---|\n"

NOT_RUN: frozenset[tuple[str, str]] = frozenset()
"""(operator, direction) of rows that the emulator cannot run: mapped, not run."""


def pages(row: Row) -> list[str]:
    """Addresses of the vendor's pages that the row cites."""
    return ADDRESS.findall(row.function.__doc__ or "")


def lines() -> Iterator[str]:
    """Operators in the order of the documentation; what is left to the reference comes last."""
    for spec in all_specs():
        for row in declared:
            if row.operator == spec.name:
                yield _of_row(row)
        for entry in reference_only:
            if entry.operator == spec.name:
                yield _of_reference(entry)


def _of_row(row: Row) -> str:
    run = not any((row.operator, direction) in NOT_RUN for direction in row.directions)
    status = "mapped and run on the emulator" if run else "mapped, not run"
    cited = " ".join(f"[{i}]({page})" for i, page in enumerate(pages(row), 1))
    torch_names = ", ".join(f"`{name}`" for name in row.calls)
    functions = dict.fromkeys(f for names in row.calls.values() for f in names.split(", ") if f)
    dtypes = sorted(str(d).removeprefix("torch.") for d in row.dtypes or ())
    kinds = "" if len(dtypes) in (0, 3) else f", {' and '.join(dtypes)} only"
    cells = (
        row.operator, " and ".join(row.directions), torch_names,
        ", ".join(f"`{name}`" for name in functions), f"{status}{kinds} {cited}".rstrip(),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _of_reference(entry: Unmapped) -> str:
    direction = "forward and backward" if entry.direction == "both" else entry.direction
    part = f" ({entry.part})" if entry.part else ""
    cited = f" [page]({entry.page})" if entry.page else ""
    cells = (entry.operator + part, direction, "", "", f"reference: {entry.reason}{cited}")
    return f"| {' | '.join(cells)} |"


def rendered() -> str:
    """The table, with its marks."""
    return f"{BEGIN}\n{HEAD}" + "\n".join(lines()) + f"\n{END}"


def placed(page: str) -> str:
    """The page with the table of now in it."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE} must have the lines {BEGIN} and {END}")
    return before + rendered() + after


if __name__ == "__main__":
    PAGE.write_text(placed(PAGE.read_text()))
