"""Where did the time go, next to what each stage may take?

    python tests/budgets.py STAGE=SECONDS ...

The budgets stand in ``.ci/budgets.txt``. Needs nothing but Python: ``.ci/run`` asks before anything
is installed.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

TABLE = Path(__file__).parents[1] / ".ci" / "budgets.txt"


def read() -> dict[str, tuple[int, str]]:
    """Budget in seconds and description of each stage and part."""
    rows = [line.split(maxsplit=2) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return {row[0]: (int(row[1]), row[2]) for row in rows if row and row[0] != "#"}


def table(took: Mapping[str, float]) -> str:
    """A row for each stage, and their sum if it is not given; what is over its budget says so."""
    budgets = read()
    whole = sum(budgets[name][0] for name in took if name in budgets)
    rows = [(name, seconds, budgets.get(name, (None,))[0]) for name, seconds in took.items()]
    if len(took) > 1 and "all" not in took:
        rows.append(("all", sum(took.values()), whole))
    width = max(map(len, ["stage", *(row[0] for row in rows)]))
    lines = [f"{'stage':{width}}  took   budget"]
    for name, seconds, budget in rows:
        over = budget is not None and seconds > budget
        allowed = "-" if budget is None else f"{budget} s"
        warning = "  warning: over its budget" if over else ""
        lines.append(f"{name:{width}} {seconds:5.0f} s {allowed:>7}{warning}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table({name: float(took) for name, _, took in (a.partition("=") for a in sys.argv[1:])}))
