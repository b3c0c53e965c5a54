"""What is mutated: the functions that rows call, and which operators each of them serves.

Told from the code of the functions, by the names that it reads. Run in a process of its own, since
it imports what is to be mutated elsewhere.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
Backend = Literal["reference", "cpu", "asynchronous", "ranks"]
FOLDERS: dict[Backend, str] = {
    "reference": "core/anychip/operators",
    "cpu": "backends/cpu/anychip_cpu",
}
LEFT_OUT = frozenset({
    # Whether a compiler traces, which no call of a case does.
    "core/anychip/operators/values.py",
    # Loading: whether the kernels are there, and why not.
    "backends/cpu/anychip_cpu/native.py",
})  # fmt: skip

Subjects = dict[str, dict[str, list[str]]]
"""File to the functions and constants at its top to the operators that they serve."""


def subjects(backend: Backend) -> Subjects:
    """The functions and constants in a backend's folder that its rows use."""
    found: dict[tuple[str, str], set[str]] = {}
    for operator, function in rows(backend):
        _Walk(FOLDERS[backend], operator, found).follow(function)
    result: Subjects = {}
    for (file, name), operators in sorted(found.items()):
        if file not in LEFT_OUT:
            result.setdefault(file, {})[name] = sorted(operators)
    return result


def rows(backend: Backend) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Operators and the functions that serve them."""
    import anychip.ops  # noqa: F401 - defines our operators
    from anychip.operators import all_specs

    if backend == "reference":
        for spec in all_specs():
            yield spec.name, spec.forward
            if spec.backward is not None:
                yield spec.name, spec.backward
    else:
        from anychip_cpu.backend import CpuBackend

        for row in CpuBackend.operators:
            yield row.operator, row.function
            if row.paired is not None:
                yield row.operator, row.paired.backward


class _Walk:
    """From one row to everything of the folder that it may call."""

    def __init__(self, folder: str, operator: str, found: dict[tuple[str, str], set[str]]) -> None:
        self.folder, self.operator, self.found = folder, operator, found

    def follow(self, value: Any) -> None:
        """Goes on with a function, or with what is known to hold functions."""
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.follow(part)
        elif isinstance(value, (classmethod, staticmethod)):
            self.follow(value.__func__)
        elif isinstance(value, MethodType):
            self.follow(value.__func__)
            for name in _names(value.__func__.__code__):
                self.follow(getattr(value.__self__, name, None))
        elif isinstance(value, FunctionType):
            function = inspect.unwrap(value)
            file = _relative(function.__code__.co_filename)
            if file.startswith(self.folder) and self._add(file, _top(function)):
                self._names(function, file)

    def _add(self, file: str, name: str) -> bool:
        operators = self.found.setdefault((file, name), set())
        new = self.operator not in operators
        operators.add(self.operator)
        return new

    def _names(self, function: FunctionType, file: str) -> None:
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, (ModuleType, type)):
                # `philox.words`: any function of the module or class whose name the code has.
                for attribute in _names(function.__code__) & set(vars(value)):
                    self.follow(vars(value)[attribute])
            else:
                self.follow(value)
            place = _constant(file, name)
            if place is not None and place[0].startswith(self.folder):
                self._add(*place)
        for cell in function.__closure__ or ():
            self.follow(cell.cell_contents)


def _names(code: CodeType) -> set[str]:
    """Names that a function reads, also in functions inside of it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def _top(function: FunctionType) -> str:
    """The function at the top of the file, or of a class there, that a function stands in."""
    return function.__qualname__.partition(".<locals>")[0]


def _relative(path: str) -> str:
    try:
        return Path(path).resolve().relative_to(ROOT).as_posix()
    except ValueError:
        return ""


def _constant(file: str, name: str) -> tuple[str, str] | None:
    """Where a name that a file reads was given a number or text, followed over one import."""
    constants, imports = _top_level(file)
    if name in constants:
        return file, name
    if name in imports:
        source, original = imports[name]
        if original in _top_level(source)[0]:
            return source, original
    return None


@functools.cache
def _top_level(file: str) -> tuple[frozenset[str], dict[str, tuple[str, str]]]:
    """The constants of a file, and its names from other files of ours."""
    constants: set[str] = set()
    imports: dict[str, tuple[str, str]] = {}
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for root in ("core", "backends/cpu"):
                source = f"{root}/{node.module.replace('.', '/')}.py"
                if (ROOT / source).is_file():
                    for alias in node.names:
                        imports[alias.asname or alias.name] = (source, alias.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_value(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                constants.add(target.id)
    return frozenset(constants), imports


def _is_value(node: ast.expr | None) -> bool:
    """Whether it computes a number, text, or a tuple or set of such: no spec, type or table."""
    kinds = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.Set, ast.Dict)
    is_call = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("math.")
    return isinstance(node, kinds) or is_call
