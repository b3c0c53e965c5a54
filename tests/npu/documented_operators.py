"""What has the emulated CANN, and within which limits? docs/cann-operators.md, made of the rows.

    python -m tests.npu.documented_operators

reads the C++ of the rows: names, dtypes, what they refuse (EXPECT, HAS_NO) and the comment above
them. Needs no torch_npu: nothing is called.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "native" / "cann_emulator" / "operators"
PAGE = ROOT / "docs" / "cann-operators.md"
DTYPES = {"kAny": "any", "kFloats": "float32, float16, bfloat16", "kHalves": "float16, bfloat16"}
START = re.compile(
    r"(?P<comment>(?:^// [^\n]*\n)*)^(?P<macro>[A-Z_]+)\((?P<name>aclnn\w+), (?P<rest>[^\n]*)", re.M
)
REFUSAL = re.compile(r"(EXPECT|HAS_NO)\((.*?)\);", re.S)
HELPER = re.compile(r"^void (look\w*)\(([^\n]*\}\n|.*?^\}\n)", re.M | re.S)
HEAD = """\
# What the emulated CANN computes

Made by `python -m tests.npu.documented_operators` of the
[rows](../tests/native/cann_emulator/operators) themselves; a test compares. Every row is run
through torch_npu against float64 by `tests/npu`. What is not here answers 561000, "not
implemented", with its name; so does a call of what a row *has not*. A call that CANN documents as
wrong is 161002: one that is not as a row *expects*, or whose first tensor has another dtype than
the second column says. What no line mentions is not checked at the call: what ATen refuses then
ends in 507015, an error of the device, as a kernel that fails. How to use it:
[cann-emulator.md](cann-emulator.md).
"""


class Row(NamedTuple):
    """An operator: its name, dtypes of the first tensor, and what is said of it."""

    name: str
    dtypes: str
    notes: str


def rows_of(source: Path) -> Iterator[Row]:
    """The rows of a file, in its order."""
    text = source.read_text()
    helpers = {m[1]: m[2] for m in HELPER.finditer(text)}
    found = list(START.finditer(text))
    ends = [*(row.start() for row in found[1:]), len(text)]
    for row, end in zip(found, ends, strict=False):
        body = text[row.start("rest") : end].partition("\n}\n")[0]
        types = row["rest"].split(",")[0].strip()
        said = [" ".join(line.removeprefix("// ") for line in row["comment"].splitlines())]
        said += limits(body, helpers)
        dtypes = DTYPES.get(types, "any") if types.startswith("k") else "any"
        yield Row(row["name"], dtypes, " ".join(filter(None, said)))


def limits(body: str, helpers: Mapping[str, str]) -> Iterator[str]:
    """What a body refuses, in words, and what the functions do that look for it."""
    for kind, check in REFUSAL.findall(body):
        said = re.sub(r'== "\w+"', "", check)
        parts = said[said.index('"') :].split('"')[1:]
        texts = [t if i % 2 == 0 else "..." * bool(t.strip()) for i, t in enumerate(parts[:-1])]
        told = "".join(texts).partition(", got")[0].strip()
        yield f"{'Has no' if kind == 'HAS_NO' else 'Expects:'} {told}."
    for name, helper in helpers.items():
        if f" {name}(" in body:
            yield from limits(helper, helpers)


def table() -> Mapping[str, list[Row]]:
    """Rows by the title of their file, which is its first comment."""
    titles = {}
    for source in sorted(SOURCES.glob("*.cpp")):
        first = re.match(r"((?:// [^\n]*\n)+)", source.read_text())
        rows = list(rows_of(source))
        if first and rows:
            said = " ".join(line.removeprefix("// ") for line in first[1].splitlines())
            titles[said] = rows
    return titles


def rendered() -> str:
    """The page."""
    parts = [HEAD]
    for title, rows in table().items():
        lines = [f"| `{r.name}` | {r.dtypes} | {r.notes.replace('|', '/')} |" for r in rows]
        head = (
            f"## {re.split('[.:] ', title)[0].rstrip('.')}\n\n| function | first tensor | notes |"
        )
        parts.append("\n".join((head, "|---|---|---|", *lines)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(rendered())
