"""What pages quote of the sources is there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.integration.docs.pages import ROOT

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
