"""Are CONTRIBUTING.md's rules about source code kept: layers, names of chips, sizes, file names?

Each rule is a function from a syntax tree to a list of offences. It is applied to every file, and
to a small offender, so that a rule that finds nothing any more is noticed.
"""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import anychip
from anychip import contract

ROOT = Path(__file__).parents[3]
CORE = ROOT / "core" / "anychip"

LAYERS = {
    "contract": set[str](), "operators": {"contract"}, "dispatch": {"contract"},
    "comm": {"contract"}, "torch_extension": {"contract"}, "pages": set(), "children": set(),
    "host_memory": {"contract", "torch_extension"},
    "cabi": {"contract", "operators", "torch_extension"},
    "registry": {"contract", "comm", "cabi", "torch_extension", "children"},
    "runtime": {"contract", "operators", "dispatch", "registry", "cabi", "ops", "host_memory"},
    "ops": {"contract", "operators", "dispatch", "registry", "runtime"},
}  # fmt: skip
"""What a package or module of anychip may import, besides itself. runtime and ops join the rest."""
FLOOR = set(LAYERS)
LAYERS |= {name: FLOOR for name in ("train", "fusion")}
# The first two try and time the training stack on a backend; the third brings it into other loops.
LAYERS |= {name: FLOOR | {"train"} for name in ("conformance", "bench", "integrations")}
LAYERS |= {"templates": set()}
LAYERS |= {"cli": set(LAYERS), "__main__": {"cli"}}
BACKENDS_MAY_IMPORT = {"contract", "operators", "host_memory"}

CHIPS = set(
    "ascend cann cublas cuda cudnn gcu gpu gpus habana hccl hip hpu mlu mps musa nccl npu npus"
    " nvidia rccl rocm tpu xccl xpu".split()
)
HOST_NAMES = {"cpu", "gloo"}
NAMING_THE_HOST = {"contract/device.py", "comm/gloo.py", "comm/joining.py"}
"""Where the names are said to the rest, where gloo is called, and where a variable has its name."""
NO_MODULE = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}
MAX_FUNCTION_LINES, MAX_MODULE_LINES, MAX_CONTRACT_LINES = 50, 600, 1700


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def offences(paths: list[Path], rule: Callable[[Path], Iterable[str]]) -> list[str]:
    """What a rule finds in files, with the file's name in front."""
    return [f"{path.relative_to(ROOT)}: {found}" for path in paths for found in rule(path)]


def imported_parts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, part of anychip) for every use of one, inside functions and type checks too.

    ``import anychip`` alone uses nothing yet: ``anychip.policy`` does. Dunder names are free.
    """
    for line, name in imported_names(tree):
        top, _, rest = name.partition(".")
        if top == "anychip" and rest and not rest.startswith("__"):
            yield line, home(name).split(".")[1]


@functools.cache
def imported_names(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, dotted name) of what is imported, anywhere in a file, and of ``module.attribute``."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.append((node.lineno, f"{node.value.id}.{node.attr}"))
    return found


def home(name: str) -> str:
    """Where a name of the root module is; any other name is where it says."""
    exported = name.removeprefix("anychip.")
    is_exported = exported in anychip.__all__
    return anychip._HOME.get(exported, "anychip.contract") if is_exported else name


def module_name(path: Path) -> str:
    """As it is imported; the folders of ``core`` and of each backend are import roots."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    roots = {"core": 1, "backends": 2}
    return ".".join(parts[roots.get(parts[0], 0) :]).removesuffix(".__init__")


def circle(trees: Mapping[str, ast.Module]) -> list[str]:
    """Modules of which each imports the one before it, and the first the last; empty if none do.

    An import inside a function, or for type checks, is one as well: who needs the other to be
    there belongs above it, whenever it asks. Two are not: of a package by its own modules, since
    Python does that, and what the root module, which imports nothing by itself, only hands over.
    """
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for name in trees.keys() - {"anychip"}:
        for _, used in imported_names(trees[name]):
            found = home(used)
            while found and found not in trees:
                found, _, last = found.rpartition(".")
                if last.startswith("_"):  # a compiled module, or a dunder name
                    found = ""
            graph[name] |= {found} & trees.keys() - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def layer_offences(tree: ast.Module, part: str, allowed: set[str]) -> list[str]:
    return [
        f"line {line}: {part} uses anychip.{used}" for line, used in imported_parts(tree)
        if used != part and used not in allowed
    ]  # fmt: skip


def chip_names(tree: ast.Module) -> list[str]:
    """Identifiers, attributes and strings with a chip's name in them; docstrings do not count."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        f"line {getattr(node, 'lineno', '?')}: {text[:60]!r}" for node in ast.walk(tree)
        if id(node) not in prose for text in texts(node) if CHIPS & set(words(text))
    ]  # fmt: skip


def texts(node: ast.AST) -> Iterator[str]:
    for field, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and field not in ("type_comment", "kind"):
                yield item


def words(text: str) -> Iterator[str]:
    """Lower-case words of ``is_cuda``, ``CudaGraph``, ``NCCLError`` or a sentence."""
    for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text):
        yield word.lower()


def host_names(tree: ast.Module) -> list[str]:
    """Strings with the name of the host, or of its library; docstrings do not count."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        f"line {node.lineno}: {node.value[:60]!r}; it is contract.HOST, or a property of a backend"
        for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in prose and HOST_NAMES & set(words(node.value))
    ]  # fmt: skip


def long_functions(tree: ast.Module) -> list[str]:
    return [
        f"line {node.lineno}: {node.name} has {length} lines, {MAX_FUNCTION_LINES} are allowed"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def imported_private(tree: ast.Module, part: str) -> Iterator[str]:
    """Names with an underscore in front that belong to another part of anychip, or another package.

    By import, or as an attribute of what was imported.
    """
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anychip"):
            package, *inner = (node.module or "").split(".")
            if part not in (package, *inner[:1]):
                foreign |= {alias.asname or alias.name for alias in node.names}
                yield from (a.name for a in node.names if re.match("_[^_]", a.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            if isinstance(node.value, ast.Name) and node.value.id in foreign:
                yield f"line {node.lineno}: {node.value.id}.{node.attr}"


def inherited_private(trees: list[ast.Module]) -> set[str]:
    """Attributes like ``self._x`` that are read in some files of a package and defined in none."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    defined |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own = [n for n in nodes if isinstance(n, ast.Attribute) and re.match("_[^_]", n.attr)
           and isinstance(n.value, ast.Name) and n.value.id == "self"]  # fmt: skip
    defined |= {n.attr for n in own if isinstance(n.ctx, ast.Store)}
    return {n.attr for n in own} - defined


EVERYWHERE = python_files("core", "backends", "examples", "benchmarks", "tests")
OF_CORE = [path for path in python_files("core") if path != CORE / "__init__.py"]


def test_core_files_import_only_lower_layers() -> None:
    def rule(path: Path) -> Iterable[str]:
        part = path.relative_to(CORE).parts[0].removesuffix(".py")
        if part not in LAYERS:
            return [f"{part} is new: give it a row in LAYERS, with a reason in DESIGN"]
        return layer_offences(parse(path), part, LAYERS[part])

    assert offences(OF_CORE, rule) == []


def test_modules_import_each_other_in_no_circle() -> None:
    paths = python_files("core", "backends", "benchmarks")
    assert " <- ".join(circle({module_name(path): parse(path) for path in paths})) == ""


@pytest.mark.parametrize(("back", "is_circle"), [
    ("import anychip.a", True), ("from anychip import a", True), ("from anychip.a import f", True),
    ("def g():\n    from anychip.a import f", True),
    ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from anychip.a import f", True),
    ("import anychip.b", False), ("from anychip.a import _native", False),
])  # fmt: skip
def test_circle_of_two_modules_is_found_wherever_they_import(back: str, is_circle: bool) -> None:
    texts = {"anychip.a": "from anychip.b import x", "anychip.b": back}
    found = circle({name: ast.parse(text) for name, text in texts.items()})
    assert set(found) == (set(texts) if is_circle else set())


def test_backend_files_import_contract_and_operators_only_and_never_each_other() -> None:
    def rule(path: Path) -> Iterator[str]:
        tree, own = parse(path), path.relative_to(ROOT / "backends").parts[1]
        yield from layer_offences(tree, "backends", BACKENDS_MAY_IMPORT)
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in names:
                if top.startswith("anychip_") and top.split(".")[0] != own:
                    yield f"imports {top}: backends never import each other"

    assert offences(python_files("backends"), rule) == []


def test_no_file_reaches_into_private_parts_of_another_package() -> None:
    def rule(path: Path) -> Iterable[str]:
        inside = path.relative_to(CORE).parts if CORE in path.parents else path.parts[-2:]
        return imported_private(parse(path), inside[0].removesuffix(".py"))

    assert offences([*OF_CORE, *python_files("backends", "examples")], rule) == []
    for package in sorted((ROOT / "backends").glob("*/anychip_*")):
        assert inherited_private([parse(path) for path in package.rglob("*.py")]) == set(), package


def class_names(tree: ast.Module) -> Iterator[str]:
    """Classes of a module and names for types, but for a class made from one of its name."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            if not any(ast.unparse(base).endswith(node.name) for base in node.bases):
                yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id


def test_class_of_the_contract_has_its_name_alone() -> None:
    inside = python_files("core/anychip/contract")
    taken = {name for path in inside for name in class_names(parse(path))} & {*contract.__all__}
    paths = [path for path in OF_CORE if path not in inside]
    assert offences(paths, lambda path: taken & set(class_names(parse(path)))) == []


def test_contract_is_read_in_an_hour() -> None:
    lines = [len(path.read_text().splitlines()) for path in (CORE / "contract").rglob("*.py")]
    assert sum(lines) <= MAX_CONTRACT_LINES


def test_core_files_name_no_chip() -> None:
    def rule(path: Path) -> Iterable[str]:
        yield from chip_names(parse(path))
        yield from sorted(CHIPS & set(words(str(path.relative_to(CORE)))))

    assert offences(python_files("core"), rule) == []


def test_core_files_leave_the_host_to_its_backend() -> None:
    paths = [
        path for path in OF_CORE
        if str(path.relative_to(CORE)) not in NAMING_THE_HOST and "fusion" not in path.parts
    ]  # fmt: skip
    assert offences(paths, lambda path: host_names(parse(path))) == []


def test_python_files_keep_to_their_sizes_and_names() -> None:
    def rule(path: Path) -> Iterator[str]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_MODULE_LINES:
            yield f"it has {lines} lines, {MAX_MODULE_LINES} are allowed"
        yield from long_functions(parse(path))
        yield from sorted({path.stem, path.parent.name} & NO_MODULE)

    assert offences(EVERYWHERE, rule) == []


def test_modules_open_with_what_they_answer() -> None:
    def rule(path: Path) -> list[str]:
        found = ast.get_docstring(parse(path))
        return [] if found else ["a module begins with the question that it answers"]

    paths = [path for path in python_files("core", "backends") if "templates" not in path.parts]
    assert offences(paths, rule) == []


def test_root_module_exports_no_function_named_like_a_submodule() -> None:
    parts = {path.stem for path in CORE.iterdir() if path.suffix == ".py" or path.is_dir()}
    functions = {
        name for name in anychip.__all__ if not isinstance(getattr(anychip, name), type(sys))
    }
    assert functions & parts == set(), "`import anychip.x` would replace the function anychip.x"


@pytest.mark.parametrize(("rule", "offender"), [
    (lambda tree: layer_offences(tree, "contract", set()), "from anychip.train import zero"),
    (lambda tree: layer_offences(tree, "dispatch", {"contract"}),
     "def f():\n    import anychip.ops"),
    (lambda tree: layer_offences(tree, "registry", {"contract"}), "from anychip import use"),
    (lambda tree: layer_offences(tree, "registry", {"contract"}), "anychip.provenance()"),
    (lambda tree: layer_offences(tree, "backends", {"contract"}), "import anychip.registry"),
    (chip_names, "torch.cuda.synchronize()"), (chip_names, "def f(use_npu): pass"),
    (chip_names, "kind = f'{x}:nccl'"), (chip_names, "class NCCLError: pass"),
    (chip_names, "import torch_npu"), (host_names, "x = device.type == 'cpu'"),
    (long_functions, "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (lambda tree: list(imported_private(tree, "train")), "from anychip.comm.job import _jobs"),
    (lambda tree: list(imported_private(tree, "train")), "from anychip.comm import job\njob._jobs"),
    (lambda tree: list(imported_private(tree, "anychip_x")),
     "from anychip import contract\ncontract._x"),
    (lambda tree: inherited_private([tree]), "class X(Y):\n    def f(self): return self._ledger"),
], ids=lambda value: repr(value)[:40] if isinstance(value, str) else "")  # fmt: skip
def test_rule_with_an_offender_finds_it(
    rule: Callable[[ast.Module], list[str]], offender: str
) -> None:
    assert len(rule(ast.parse(offender))) == 1


@pytest.mark.parametrize(("rule", "neighbour"), [
    (lambda tree: layer_offences(tree, "dispatch", {"contract"}), "from anychip import Backend"),
    (lambda tree: layer_offences(tree, "train", FLOOR), "import anychip\nfrom anychip import ops"),
    (chip_names, "def f():\n    'like cudaStreamCreate and CUDA streams'"),
    (lambda tree: layer_offences(tree, "registry", set()), "import anychip; anychip.__file__"),
    (chip_names, "scan = chips = normal = metallic = 1"),
    (host_names, "def f(x):\n    'to the CPU'\n    return x.cpu()"),
    (lambda tree: list(imported_private(tree, "comm")), "from anychip.comm import job\njob._jobs"),
    (lambda tree: list(inherited_private([tree])), "class X:\n _a = 1\n def f(self): self._a"),
    (long_functions, "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
], ids=lambda value: repr(value)[:40] if isinstance(value, str) else "")  # fmt: skip
def test_rule_with_what_is_allowed_finds_nothing(
    rule: Callable[[ast.Module], list[str]], neighbour: str
) -> None:
    assert rule(ast.parse(neighbour)) == []
