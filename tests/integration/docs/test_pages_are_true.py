"""What pages quote of the sources is there, and pages in two languages have the same commands."""

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from benchmarks.vendor_afternoon import SECTION
from tests.integration.docs.pages import ROOT, blocks

QUOTES = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "faq.md").read_text("utf-8"), re.MULTILINE)


def texts(node: ast.AST) -> Iterator[str]:
    """Strings of a file, of those with values the constant parts as one."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif isinstance(child, ast.JoinedStr):
            parts = [p.value for p in child.values if isinstance(p, ast.Constant)]
            yield "\0".join(map(str, parts))


@functools.cache
def sources() -> list[str]:
    files = [path for name in ("core", "backends") for path in (ROOT / name).rglob("*.py")]
    return [" ".join(text.split()) for f in files for text in texts(ast.parse(f.read_text()))]


def is_in(text: str, parts: list[str]) -> bool:
    """Whether all parts are in a text, in their order."""
    for part in parts:
        _, found, text = text.partition(part)
        if not found:
            return False
    return True


@pytest.mark.parametrize("quote", QUOTES)
def test_message_of_the_faq_is_in_the_sources(quote: str) -> None:
    assert any(is_in(text, quote.split(" ... ")) for text in sources())


def test_message_that_is_nowhere_is_not_found() -> None:
    assert len(QUOTES) >= 25
    assert not any(is_in(text, ["cannot run here (", "no such words"]) for text in sources())


@pytest.mark.parametrize(("page", "chinese", "section"), [
    ("tutorials/train.md", "zh/quick-start.md", ""),
    ("writing-a-backend.md", "zh/vendor-afternoon.md", SECTION),
])  # fmt: skip
def test_page_in_chinese_has_the_commands_of_the_english_one(
    page: str, chinese: str, section: str
) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8").partition(section or "# ")[2]
    text = text.partition("\n## 1. ")[0] if section else text
    found = [part for part in blocks(text) if part[0] in ("bash", "text")]
    assert found == blocks((ROOT / "docs" / chinese).read_text("utf-8"))
    assert len(found) >= 5
