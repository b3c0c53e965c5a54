"""What was being called when a case failed that calls the contract's methods one after the other?

A case about an operator says so itself. One about memory, streams or generators is a history of
calls, and the line that raised says which was the last: the traceback leads to the case's source,
and there the last call of a method of the contract at or before that line is the one, with the
values that its names had.
"""

import ast
import inspect
import linecache
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch

from anychip.contract import Backend, Communicator, Graph, Memory

CHAPTERS = Path(__file__).parent / "chapters"
SHORT = 60
"""Characters of a value that is shown."""
PLAIN = (bool, int, float, str, bytes, torch.device, torch.dtype, type(None))
PARTS = (Backend, Memory, Graph, Communicator, torch.Stream, torch.Event, torch.Generator)
METHODS = frozenset(
    name
    for part in PARTS
    for name, _ in inspect.getmembers(part, callable)
    if not name.startswith("_")
)
WAITS = ("synchronize",)
"""Nearly every case ends with one, which says nothing unless it made no other call."""


class Site(NamedTuple):
    """A line of a case that was running."""

    frame: FrameType
    line: int


def call_of(error: BaseException) -> str | None:
    """The last call of the contract before an error, in one line; None if the cases made none."""
    causes = [error]  # what was asked from elsewhere is the cause of what says so
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    sites = [site for each in causes for site in _sites(each.__traceback__)][::-1]
    found = [call for site in sites if (call := _last_call(site)) is not None]
    telling = [call for call in found if call.method not in WAITS]
    return next((call.text for call in (*telling, *found)), None)


def _sites(traceback: TracebackType | None) -> Iterator[Site]:
    while traceback is not None:
        frame = traceback.tb_frame
        if Path(frame.f_code.co_filename).parent == CHAPTERS:
            yield Site(frame, traceback.tb_lineno)
        traceback = traceback.tb_next


class _Call(NamedTuple):
    """A call as it is written, and the values that its names had."""

    method: str
    text: str


def _last_call(site: Site) -> _Call | None:
    code = site.frame.f_code
    calls = _calls(code.co_filename, code.co_firstlineno)
    # In a loop the last one may be of the round before, and below.
    before = [call for call in calls if call[0].lineno <= site.line] or calls
    telling = [call for call in before if call[1] not in WAITS] or before
    if not telling:
        return None
    node, method, text = max(telling, key=lambda call: (call[0].end_lineno, call[0].lineno))
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    known = site.frame.f_locals
    values = [
        f"{name} = {known[name]!r}"[:SHORT]
        for name in sorted(names)
        if name in known and isinstance(known[name], PLAIN)
    ]
    where = f"{Path(code.co_filename).name}:{site.line} in {code.co_name}"
    return _Call(method, f"{', '.join([text, *values])} ({where})")


@cache
def _calls(file: str, first: int) -> tuple[tuple[ast.Call, str, str], ...]:
    """(node, method, text) of the contract's calls in the function that begins at a line."""
    tree = ast.parse("".join(linecache.getlines(file)))
    functions = (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda)))
    body = next((n for n in functions if _begins(n) == first), None)
    nodes = ast.walk(body) if body is not None else ()
    calls = ((node, _call(node)) for node in nodes if isinstance(node, ast.Call))
    return tuple((node, call[0], call[1]) for node, call in calls if call is not None)


def _begins(function: ast.FunctionDef | ast.Lambda) -> int:
    """The line that the interpreter names: of the first decorator, if there is one."""
    decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
    return min([function.lineno, *(d.lineno for d in decorators)])


def _call(call: ast.Call) -> _Call | None:
    """One of the contract's, or one that should raise, or a chapter's own that is handed all."""
    function, args = call.func, call.args
    named = [each for each in call.keywords if each.arg != "mentions"]  # expect_error's own
    if isinstance(function, ast.Name) and function.id == "expect_error" and len(args) > 2:
        function, args = args[2], args[3:]
    text = ast.unparse(function).removeprefix("context.").removeprefix("self.")
    of_chapter = bool(args) and ast.unparse(args[0]) == "context"
    if isinstance(function, ast.Attribute):
        method = function.attr
        known = method in METHODS or text.startswith("ops.")
    else:
        method, known = text, False
    if not known and not of_chapter:
        return None
    listed = [ast.unparse(arg) for arg in (*(args if known else args[1:]), *named)]
    return _Call(method, f"{text}({', '.join(listed)})")
