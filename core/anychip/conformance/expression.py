"""Which cases does ``-k EXPRESSION`` mean? Words, ``and``, ``or``, ``not``, brackets.

As in pytest, a word holds for a case when it is a part of its id, in lower or upper case. Unlike
there, an expression that is one whole id means this case alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from anychip.conformance.case import Case

Predicate = Callable[[str], bool]
_TOKEN = re.compile(r"\s*(?:([()])|([^\s()]+))")


def select(cases: Iterable[Case], text: str) -> list[Case]:
    """The cases that an expression means; all for an empty one.

    Raises:
        ValueError: it is not an expression.
    """
    listed = list(cases)
    if not text.strip():
        return listed
    exact = [case for case in listed if case.id == text.strip()]
    predicate = parse(text)
    return exact or [case for case in listed if predicate(case.id)]


def parse(text: str) -> Predicate:
    """The predicate on ids that an expression stands for."""
    parser = _Parser(text)
    predicate = parser.either()
    parser.expect_end()
    return predicate


class _Parser:
    """Recursive descent: or binds weakest, then and, then not."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: Sequence[str] = [a or b for a, b in _TOKEN.findall(text.rstrip())]
        self.place = 0

    def peek(self) -> str | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def take(self, token: str) -> bool:
        found = self.peek() == token
        self.place += found
        return found

    def either(self) -> Predicate:
        terms = [self.both()]
        while self.take("or"):
            terms.append(self.both())
        return lambda id: any(term(id) for term in terms)

    def both(self) -> Predicate:
        terms = [self.negated()]
        while self.take("and"):
            terms.append(self.negated())
        return lambda id: all(term(id) for term in terms)

    def negated(self) -> Predicate:
        if self.take("not"):
            inner = self.negated()
            return lambda id: not inner(id)
        if self.take("("):
            inner = self.either()
            if not self.take(")"):
                self.fail("')'")
            return inner
        word = self.peek()
        if word is None or word in ("and", "or", ")"):
            self.fail("a word, 'not' or '('")
        assert word is not None
        self.place += 1
        return lambda id: word.lower() in id.lower()

    def expect_end(self) -> None:
        if self.peek() is not None:
            self.fail("'and', 'or' or the end")

    def fail(self, expected: str) -> None:
        found = self.peek()
        raise ValueError(
            f"-k {self.text!r}: {expected} expected, got "
            f"{'the end' if found is None else repr(found)}"
        )
