"""Which mutants does a file have? Each is a change of one node in one function that rows call.

Not changed are what no run of an operator shows: messages of errors, annotations, docstrings, our
own assertions (``strict`` of a zip among them), and the label ``kind`` of a row.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from tests.mutants.changes import CONDITION, DIM_FUNCTIONS, OPERATORS, Kind, Operator, Place

Identity = tuple[str, str, str, str, str, int]
"""File, function, line, operator, change, occurrence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One change.

    Attributes:
        file: from the root of the repository.
        function: the function at the top of the file, or the constant, that is changed.
        line: the text of the line where the changed node starts, without its indentation.
        number: of that line, from 1.
        operator: name of the mutation operator.
        kind: class of mistake.
        change: ``old -> new``.
        occurrence: among those that agree in all of file, function, line, operator and change.
        start, end: which bytes of the file are replaced.
        new: by what.
    """

    file: str
    function: str
    line: str
    number: int
    operator: str
    kind: Kind
    change: str
    occurrence: int
    start: int
    end: int
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} {self.change}"

    @property
    def identity(self) -> Identity:
        """What says which mutant it is, as long as its line is not edited."""
        return (
            self.file, self.function, self.line, self.operator, self.change, self.occurrence
        )  # fmt: skip

    @property
    def id(self) -> str:
        """A short name of the identity, the same in every run."""
        return hashlib.sha256(repr(self.identity).encode()).hexdigest()[:10]

    def apply(self, text: str) -> str:
        """The file with the change."""
        source = text.encode()
        return (source[: self.start] + self.new.encode() + source[self.end :]).decode()

    def to_json(self) -> dict[str, Any]:
        """For a file of results."""
        return {"id": self.id, **asdict(self)}


def mutants_of(file: str, text: str, functions: Collection[str]) -> Iterator[Mutant]:
    """Every mutant of some functions and constants at the top of a file, in the file's order."""
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    spans = wrapper.resolve(ByteSpanPositionProvider)
    source = text.encode()
    for name, statement in _subjects(wrapper.module):
        if name not in functions:
            continue
        span = spans[statement]
        start, end = span.start, span.start + span.length
        seen = {_form(source[start:end])}
        occurrences: Counter[tuple[str, ...]] = Counter()
        for node, operator, kind, new_node in _changes(statement):
            at = spans[node]
            first, last = at.start, at.start + at.length
            new = wrapper.module.code_for_node(new_node)
            # The place of an operator begins with its space, that of an expression does not.
            new = new if source[first : first + 1].isspace() else new.strip()
            form = _form(source[start:first] + new.encode() + source[last:end])
            if form is None or form in seen:
                continue
            seen.add(form)
            number = source.count(b"\n", 0, first)
            line = text.splitlines()[number].strip()
            change = f"{_flat(source[first:last].decode())} -> {_flat(new)}"
            occurrence = occurrences[line, operator.name, change]
            occurrences[line, operator.name, change] += 1
            yield Mutant(
                file=file, function=name, line=line, number=number + 1, operator=operator.name,
                kind=kind, change=change, occurrence=occurrence, start=first, end=last, new=new,
            )  # fmt: skip


def _subjects(module: cst.Module) -> Iterator[tuple[str, cst.CSTNode]]:
    """What stands at the top of a file, and the methods of classes there, by name."""
    for statement in module.body:
        if isinstance(statement, cst.ClassDef):
            for part in statement.body.body:
                if isinstance(part, cst.FunctionDef):
                    yield f"{statement.name.value}.{part.name.value}", part
        else:
            yield _name(statement), statement


def _name(statement: cst.CSTNode) -> str:
    if isinstance(statement, cst.FunctionDef):
        return statement.name.value
    if isinstance(statement, cst.SimpleStatementLine):
        (first, *_) = statement.body
        if isinstance(first, cst.Assign) and isinstance(first.targets[0].target, cst.Name):
            return first.targets[0].target.value
        if isinstance(first, cst.AnnAssign) and isinstance(first.target, cst.Name):
            return first.target.value
    return ""


def _form(segment: bytes) -> str | None:
    """What Python makes of a statement; None where it is none."""
    try:
        # After its decorators a method is indented.
        is_method = segment.startswith(b"@") and b"\ndef " not in segment
        text = b"if True:\n    " + segment if is_method else segment
        return hashlib.sha256(ast.dump(ast.parse(text)).encode()).hexdigest()
    except SyntaxError:
        return None


def _flat(code: str) -> str:
    return " ".join(code.split())


Changed = tuple[cst.CSTNode, Operator, Kind, cst.CSTNode]


def _changes(node: cst.CSTNode, place: Place = "constant") -> Iterator[Changed]:
    """Every change of a node and of what is in it."""
    if isinstance(node, (cst.Raise, cst.Annotation, cst.Assert)):
        return
    for operator in OPERATORS:
        if isinstance(node, operator.nodes):
            for new in operator.change(node):
                if _computes_more(node, new):
                    continue
                kind = operator.kind or place
                yield node, operator, "dim" if _is_keepdim(node, place) else kind, new
    if isinstance(node, (cst.If, cst.While)):
        for new in CONDITION.change(node.test):
            if not (_asks_for_needs(node.test) and m.matches(new, m.Name("True"))):
                yield node.test, CONDITION, "logic", new
    for child in node.children:
        if not _says_nothing(node, child):
            yield from _changes(child, _place(node, child, place))


def _computes_more(node: cst.CSTNode, new: cst.CSTNode) -> bool:
    """Whether it only computes a gradient that nobody needs, which the contract lets a row do."""
    if not isinstance(node, cst.IfExp) or not _asks_for_needs(node.test):
        return False
    return m.matches(new, m.IfExp(test=m.BooleanOperation(right=m.Name("True"))))


def _asks_for_needs(test: cst.BaseExpression) -> bool:
    return bool(m.findall(test, m.Subscript(value=m.Name("needs"))))


def _is_keepdim(node: cst.CSTNode, place: Place) -> bool:
    return place == "dim" and isinstance(node, cst.Name)


def _place(parent: cst.CSTNode, child: cst.CSTNode, place: Place) -> Place:
    if isinstance(parent, cst.Subscript) and child is not parent.value:
        return "index"
    if isinstance(parent, cst.Call):
        called = parent.func
        name = called.attr.value if isinstance(called, cst.Attribute) else ""
        return "dim" if child is not called and name in DIM_FUNCTIONS else "constant"
    if isinstance(parent, cst.BinaryOperation):
        return "index" if place == "index" else "constant"
    return place


def _says_nothing(parent: cst.CSTNode, child: cst.CSTNode) -> bool:
    """Docstrings; labels of rows; names before a dot, of keywords and of parameters."""
    if isinstance(parent, cst.Expr) and isinstance(child, cst.SimpleString):
        return True
    if isinstance(parent, cst.Call) and m.matches(child, m.Arg(value=m.SimpleString())):
        # Words of the message of what refuses.
        return m.matches(parent.func, m.Name(m.MatchRegex("(refuse|check)_.*")))
    if isinstance(parent, cst.Arg) and parent.keyword is not None:
        return child is parent.keyword or parent.keyword.value in ("kind", "strict")
    return isinstance(parent, cst.Attribute) and child is parent.attr
