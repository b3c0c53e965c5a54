"""Which cases does ``-k EXPRESSION`` mean? Words, ``and``, ``or``, ``not``, brackets.

As in pytest, a word holds for a case when it is a part of its id, in lower or upper case. Unlike
there, an expression that is one whole id means this case alone. Python has the same grammar: each
word becomes a question about the id, and Python's own parser does the rest.
"""

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from anychip.conformance.case import Case

Predicate = Callable[[str], bool]
_TOKEN = re.compile(r"[()]|[^\s()]+")
_GRAMMAR = ("and", "or", "not", "(", ")")
_NODES = (
    ast.Expression, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.Subscript, ast.Name,
    ast.Constant, ast.Load,
)  # fmt: skip
"""What a parsed expression may consist of: no call, no tuple."""


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
    tokens = _TOKEN.findall(text)
    words = [token.lower() for token in tokens if token not in _GRAMMAR]
    numbers = iter(range(len(words)))
    # Nothing of the text is left in it but the grammar.
    python = " ".join(t if t in _GRAMMAR else f"has[{next(numbers)}]" for t in tokens)
    try:
        tree: ast.Expression | None = ast.parse(python, mode="eval")
    except SyntaxError:
        tree = None
    if tree is None or not all(isinstance(node, _NODES) for node in ast.walk(tree)):
        expected = "words with 'and', 'or' and 'not' between, and brackets, expected"
        raise ValueError(f"-k {text!r}: {expected}, got {' '.join(tokens)!r}")
    body = tree.body
    return lambda id: _holds(body, [word in id.lower() for word in words])


def _holds(node: Any, has: Sequence[bool]) -> bool:
    if isinstance(node, ast.BoolOp):
        join = all if isinstance(node.op, ast.And) else any
        return join(_holds(each, has) for each in node.values)
    if isinstance(node, ast.UnaryOp):
        return not _holds(node.operand, has)
    number: int = node.slice.value
    return has[number]
