"""Does it work on the other Pythons and releases of torch that pyproject.toml allows?

    python3 -m tests.versions [--turn COMMITS|all] [PYTHON TORCH]

Every second commit asks one of the pairs, by turn: every module is imported, a model is trained,
and it answers this commit's slice (tests/slices.py) of the conformance suite and of the files of
tests/unit. With ``--turn all`` each pair, or one that is named, like ``3.11 2.15.0``, answers the
whole suite, and every file of unit and integration tests. Three pairs and thirty-seven slices: 222
commits ask every file on each pair.

A Python that is not here is reported as not run, and nothing fails. What PyPI has of torch for
Linux x86-64 is linked to gigabytes of CUDA's libraries; without a GPU nothing calls them, and
stand-ins take their place, which say that there is no device. Needs nothing but Python.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests import slices

ROOT = slices.ROOT
PAIRS = (("3.10", "2.11.0"), ("3.12", "2.12.1"), ("3.13", "2.13.0"))
"""Python and torch. 3.11 and 2.13.0 are what every other stage runs."""

OF_CUDA = re.compile(r"^Requires-Dist: (?:cuda|nvidia|triton)\b.*\n", re.MULTILINE)
IMPORT_EVERYTHING = """
import importlib, pkgutil
for package in ("anychip", "anychip_cpu", "anychip_cuda", "anychip_npu"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        source = module.module_finder.find_spec(module.name).origin
        if source.endswith(".py") and not source.endswith("__main__.py"):
            importlib.import_module(module.name)
"""


def interpreter(version: str) -> Path | None:
    """A Python of this version that can make virtual environments: of PATH, of pyenv, or of uv."""
    return next((path for path in _candidates(version) if _is_python(path, version)), None)


def _candidates(version: str) -> Iterator[Path]:
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    if root := _said("pyenv", "root"):
        yield from sorted(Path(root, "versions").glob(f"{version}*/bin/python"), reverse=True)
    if found := _said("uv", "python", "find", "--no-python-downloads", version):
        yield Path(found)


def _is_python(path: Path, version: str) -> bool:
    """A shim of pyenv has the name, and ends with an error where its version is not active."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    return _said(str(path), "-c", code) == version


def _said(*words: str) -> str:
    """What a command prints; nothing if it is not here, or fails."""
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def constraints(torch: str) -> str:
    """constraints.txt for another torch, whose own needs are its own."""
    text = (ROOT / "constraints.txt").read_text().partition("# what torch's default wheel")[0]
    text = re.sub("^setuptools==.*\n", "", text, flags=re.MULTILINE)
    return re.sub("^torch==.*", f"torch=={torch}", text, flags=re.MULTILINE)


def leave_out_cuda(site_packages: Path) -> None:
    """Of an installed torch: takes back what it requires for CUDA, and stands in for it."""
    (metadata,) = site_packages.glob("torch-*.dist-info/METADATA")
    metadata.write_text(OF_CUDA.sub("", metadata.read_text()))
    folder = site_packages / "torch" / "lib"
    for library, versions in missing_libraries(folder).items():
        source = "".join(map(_function, sorted(set().union(*versions.values()))))
        script = "".join(f"{version} {{ *; }};\n" for version in versions if version)
        with tempfile.NamedTemporaryFile("w", suffix=".map") as file:
            file.write(script)
            file.flush()
            words = [f"-Wl,--version-script={file.name}"] if script else []
            words += ["-shared", "-nostdlib", f"-Wl,-soname,{library}", "-x", "c", "-"]
            command = [os.environ.get("CC", "cc"), *words, "-o", folder / library]
            subprocess.run(command, check=True, input=source, text=True)


def _function(symbol: str) -> str:
    """It returns cudaErrorNoDevice, or where a text is expected, one."""
    if re.search("String|Name", symbol):
        return f'const char* {symbol}(void) {{ return "a stand-in"; }}\n'
    return f"int {symbol}(void) {{ return 100; }}\n"


def missing_libraries(folder: Path) -> Mapping[str, Mapping[str, set[str]]]:
    """What torch's libraries need of libraries that are not here: by library, symbols by version.

    Symbols without a version may be of any library that has none.
    """
    text = "".join(_said("objdump", "-pT", str(path)) + "\n" for path in folder.glob("*.so*"))
    symbols: defaultdict[str, set[str]] = defaultdict(set)
    for version, name in re.findall(r"\*UND\*\s+\S+\s+\(?(\S+?)\)?\s+(\S+)$", text, re.MULTILINE):
        symbols[version].add(name)
    here = _said("/sbin/ldconfig", "-p").split() + [path.name for path in folder.iterdir()]
    # The driver is asked for by name, and only by what a device would run.
    needed = set(re.findall(r"NEEDED\s+(\S+)", text)) - {*here, "libcuda.so.1"}
    versions: defaultdict[str, set[str]] = defaultdict(set)
    for library, lines in re.findall(r"required from (\S+):\n((?:    0x.*\n)+)", text):
        versions[library].update(line.split()[-1] for line in lines.splitlines())
    unversioned = {"": {name for name in symbols["Base"] if re.match("cu|nccl", name)}}
    return {
        library: {version: symbols[version] for version in versions[library]} or unversioned
        for library in sorted(needed)
    }


class Environment:
    """A virtual environment of one pair, with anychip in place and what its tests need."""

    def __init__(self, folder: Path, python: Path, torch: str) -> None:
        self.folder, self.torch = folder, torch
        self.bin = folder / "bin"
        self.run(python, "-m", "venv", "--clear", folder)
        (folder / "constraints.txt").write_text(constraints(torch))
        self.install("--upgrade", "pip")
        self.install("scikit-build-core", "pybind11", "cmake", "ninja", "cffi")
        self.install("--no-deps", f"torch=={torch}")
        leave_out_cuda(next(folder.glob("lib/python*/site-packages")))
        options = ("--no-build-isolation", "-Ccmake.define.ANYCHIP_CUDA=OFF")
        # In the checkout, as its own build: ccache compares paths from there.
        self.install(*options, f"-Cbuild-dir=build/versions-{folder.name}", "--editable", ".[test]")

    def install(self, *words: str | Path) -> None:
        pip = (self.bin / "python", "-m", "pip", "--disable-pip-version-check", "install")
        self.run(
            *(*pip, "--quiet", "--no-compile", "--constraint", self.folder / "constraints.txt"),
            *words,
        )

    def run(self, *words: str | Path) -> None:
        """Runs a command at the root, one thread in each process.

        Raises:
            subprocess.CalledProcessError: it did not end with 0.
        """
        print("--", *(str(word).partition("\n")[0] for word in words), flush=True)
        environment = {"OMP_NUM_THREADS": "1", slices.VARIABLE: str(one_slice().number)}
        subprocess.run(words, check=True, cwd=ROOT, env={**os.environ, **environment})

    def ask(self, *, is_whole: bool) -> None:
        """Everything that a pair is asked; of grids always one slice."""
        asked = one_slice()
        versions = "import sys, torch; print('Python', sys.version, 'torch', torch.__version__)"
        self.run(self.bin / "python", "-c", versions)
        self.run(self.bin / "python", "-c", IMPORT_EVERYTHING)
        anychip = self.bin / "anychip"
        self.run(anychip, "train", "--steps", "20", "--out", self.folder / "run")
        words = [] if is_whole else self.suite_words()
        self.run(anychip, "conformance", "--backend", "cpu", "--jobs", "2", *words)
        files = ["tests/unit", "tests/integration"] if is_whole else test_files(asked)
        pytest = ("-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "--slice", *files)
        self.run(self.bin / "python", *pytest)

    def suite_words(self) -> list[str]:
        """Arguments of ``anychip conformance`` for this commit's slice, which anychip knows."""
        code = (
            "import pathlib, sys\nfrom tests import slices\nreport = pathlib.Path(sys.argv[1])\n"
            "print(*slices.suite_words(slices.chosen(), 'versions', report), sep='\\n')"
        )
        command = [self.bin / "python", "-c", code, self.folder / "conformance.json"]
        chosen = {**os.environ, slices.VARIABLE: str(one_slice().number)}
        done = subprocess.run(
            command, check=True, cwd=ROOT, env=chosen, stdout=subprocess.PIPE, text=True
        )
        return done.stdout.splitlines()


def one_slice() -> slices.Slice:
    """That of the commit, where every slice is asked as well: three pairs times all take a day."""
    is_all = os.environ.get(slices.VARIABLE) == "all"
    return slices.chosen({} if is_all else os.environ)


def test_files(asked: slices.Slice) -> list[str]:
    """The files of tests/unit that this slice asks."""
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/unit").rglob("test_*.py"))
    return [file for file in files if asked.takes(file)]


def of_turn(turn: str) -> Sequence[tuple[str, str]]:
    """The pairs that a commit of this number asks."""
    return PAIRS if turn == "all" else [PAIRS[int(turn) % len(PAIRS)]]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.versions")
    parser.add_argument("--turn", default="all", metavar="COMMITS|all")
    parser.add_argument("--into", metavar="DIR", help="keep the environments there")
    parser.add_argument("pair", nargs="*", metavar="PYTHON TORCH")
    given = parser.parse_args()
    pairs = [tuple(given.pair)] if given.pair else of_turn(given.turn)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for version, torch in pairs:
            start, python = time.monotonic(), interpreter(version)
            outcome = "passed"
            if python is None:
                outcome = f"NOT RUN: no Python {version} here: not on PATH, of pyenv, or of uv"
            else:
                folder = Path(given.into or temporary, f"{version}-{torch}").resolve()
                try:
                    Environment(folder, python, torch).ask(is_whole=given.turn == "all")
                except subprocess.CalledProcessError as error:
                    failed, outcome = True, f"FAILED: {error}"
                if not given.into:
                    shutil.rmtree(folder)
            took = time.monotonic() - start
            print(f"== Python {version}, torch {torch}: {outcome} ({took:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
