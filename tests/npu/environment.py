"""Makes a virtual environment with torch_npu, and the CANN emulator that fits it, under build/.

torch_npu must not be where people work: `import torch` loads it, and fails without CANN. Each
release of it demands one release of torch, and the emulator computes with that torch's libraries.
What is made carries a hash of what it stands for; a second call finds it.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.logs import Log

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
EMULATOR = ROOT / "tests" / "native" / "cann_emulator"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
LIBRARIES = ("ascendcl", "opapi", "hccl", "acl_op_compiler", "ge_runner", "graph")
TORCH_AND_ITS_NEEDS = re.compile(r"(torch|setuptools|triton|cuda-\w+|nvidia-.*)==")
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
KEPT = 4
"""How many builds of the emulator the person's cache holds."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One release of torch_npu with its torch, and the emulator built for it."""

    torch_npu: str

    @property
    def is_pinned(self) -> bool:
        """Whether it is the release that every test is run with."""
        return self.torch_npu == pinned()

    @property
    def folder(self) -> Path:
        return BUILD / f"npu_env-{self.torch_npu}"

    @property
    def emulator(self) -> Path:
        return BUILD / ("cann_emulator" if self.is_pinned else f"cann_emulator-{self.torch_npu}")

    def program(self, name: str) -> Path:
        """A program of the environment, such as python or anychip."""
        return self.folder / "bin" / name

    def variables(self) -> dict[str, str]:
        """What its programs need to find the emulator, and nothing of the caller's environment."""
        return {
            "LD_LIBRARY_PATH": str(self.emulator / "lib"),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "",
        }  # fmt: skip

    def make(self, log: Log) -> None:
        """Installs torch_npu with its torch, anychip in place, and what its tests need."""
        pins = [ROOT / "constraints.txt", CONSTRAINTS]
        made = self.folder / f"made-{_hash(self.torch_npu, sys.version, *TOOLS, *pins)}"
        # Python code is installed in place, file by file: of it only the names count.
        modules = sorted(str(p) for f in ("core", "backends") for p in (ROOT / f).rglob("*.py"))
        installed = self.folder / f"installed-{_hash(*modules, ROOT / 'pyproject.toml')}"
        pip = (self.program("python"), "-m", "pip", "--disable-pip-version-check", "install")
        pins_file = self.folder / "constraints.txt"
        quiet = (*pip, "--quiet", "--no-compile", "--constraint", pins_file)
        if not made.exists():
            log.command(sys.executable, "-m", "venv", "--clear", self.folder)
            self._write_constraints()
            log.command(*quiet, "--upgrade", "pip")
            log.command(*quiet, "scikit-build-core", "pybind11", "cmake", "ninja", *TOOLS)
            log.command(*quiet, f"torch_npu=={self.torch_npu}")
            made.touch()
        if not installed.exists():
            # No C++ kernels: what the chip does not map, it leaves to the references.
            options = [f"-Ccmake.define.ANYCHIP_{part}=OFF" for part in ("CPU", "CUDA", "BRIDGE")]
            options.append(f"-Cbuild-dir={self.folder / 'anychip'}")
            log.command(*quiet, "--no-build-isolation", *options, "--editable", ".")
            installed.touch()

    def _write_constraints(self) -> None:
        """The pins of the root; for another release with its own torch, and what that wants."""
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        if not self.is_pinned:
            lines = [line for line in lines if not TORCH_AND_ITS_NEEDS.match(line)]
            # 2.12.0.post3 is for torch 2.12.0.
            lines.append("torch==" + ".".join(self.torch_npu.split(".")[:3]))
        (self.folder / "constraints.txt").write_text("\n".join(lines) + "\n")

    def build(self, log: Log, jobs: int) -> None:
        """Builds the emulator, or takes what an earlier build of the same sources left."""
        sources = [path for path in sorted(EMULATOR.rglob("*")) if path.is_file()]
        compiler = subprocess.run(
            [os.environ.get("CXX", "c++"), "--version"], check=True, capture_output=True, text=True
        ).stdout
        key = _hash(self.torch_npu, compiler, *sources)
        stamp, libraries = self.emulator / "built-from", self.emulator / "lib"
        if stamp.exists() and stamp.read_text() == key and _is_complete(libraries):
            return
        cached = _cache() / key
        if _is_complete(cached):
            shutil.copytree(cached, libraries, dirs_exist_ok=True)
        else:
            python, cmake = self.program("python"), self.program("cmake")
            log.command(
                *(cmake, "-G", "Ninja", "-S", EMULATOR, "-B", self.emulator),
                f"-DPython_EXECUTABLE={python}",
                f"-DCMAKE_MAKE_PROGRAM={self.program('ninja')}",
            )
            log.command(cmake, "--build", self.emulator, "--parallel", str(jobs))
            _keep(libraries, cached)
        stamp.write_text(key)


def pinned() -> str:
    """The release of torch_npu in constraints.txt."""
    found = re.search(r"^torch-npu==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert found, f"{CONSTRAINTS} does not pin torch-npu"
    return found[1]


def _hash(*parts: str | Path) -> str:
    """Of texts, and of files with their names below the root."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            digest.update(str(part.relative_to(ROOT)).encode() + b"\0" + part.read_bytes())
        else:
            digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _is_complete(folder: Path) -> bool:
    return all((folder / f"lib{name}.so").exists() for name in LIBRARIES)


def _cache() -> Path:
    """Where programs keep what can be made again (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "anychip" / "cann_emulator"


def _keep(libraries: Path, cached: Path) -> None:
    """Adds a build to the cache, in one step, and forgets the oldest ones."""
    partial = cached.with_name(f"{cached.name}.{os.getpid()}")
    shutil.copytree(libraries, partial)
    if cached.exists():
        shutil.rmtree(cached)
    partial.rename(cached)
    others: Sequence[Path] = sorted(cached.parent.iterdir(), key=lambda path: path.stat().st_mtime)
    for old in others[:-KEPT]:
        shutil.rmtree(old)
