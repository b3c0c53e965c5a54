"""C++ that torch's headers are needed for: which build fits this torch? One is there, or is made.

torch's C++ interface changes with every minor release. So there is a library per minor, which says
inside for which torch, machine and sources it was made: that is read before it is loaded.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import anychip
from anychip.contract import HOST, AnychipError, ContractError

COMPILERS = ("g++", "c++", "clang++")
_OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-w")
_PACKAGE = Path(anychip.__file__).parent

cache_directory: Callable[[], Path] | None = None
"""Says where a library that was built is kept; the registry puts it here."""


class BuildError(AnychipError, RuntimeError):
    """A library cannot be built: one sentence, and what fixes it if that is known."""

    def __init__(self, reason: str, fix: str | None = None) -> None:
        super().__init__(reason + (f"\n  to fix it: {fix}" if fix else ""))
        self.reason, self.fix = reason, fix


def sources(name: str) -> Path:
    """A folder of ``csrc``: in a checkout, or in the wheel.

    Raises:
        FileNotFoundError: it is in neither.
    """
    for root in (_PACKAGE.parents[1] / "csrc", *map(Path, anychip.__path__)):
        if (root / name).is_dir():
            return root / name
    raise FileNotFoundError(f"this anychip is not whole: {name} is in none of its folders")


@dataclass(frozen=True, kw_only=True)
class TorchExtension:
    """A library of C++ files, each compiled by itself, linked to torch's.

    Attributes:
        name: of the folder in ``csrc`` with its files, of which all are compiled; and of itself.
        title: what it is, for people; ``build`` says it together with how long it takes.
        takes: about how long a build takes.
        says: the file in which the macro ANYCHIP_EXTENSION_KEY stands, without its suffix. In one
            alone: a compiler's cache that stands for the compiler finds the others again.
        headers: of other folders, which belong to its sources.
    """

    name: str
    title: str
    takes: str
    says: str
    headers: tuple[Path, ...] = ()

    def units(self) -> list[Path]:
        """The C++ files."""
        return sorted(sources(self.name).glob("*.cpp"))

    def key(self) -> str:
        """What a build for this process says inside."""
        import torch

        minor = ".".join(torch.__version__.split(".")[:2])
        digest = hashlib.sha256()
        for path in (*self.headers, *sorted(sources(self.name).glob("*.h")), *self.units()):
            digest.update(path.read_bytes())
        described = f"{digest.hexdigest()[:16]} torch {minor} {platform.machine()}"
        return f"anychip {self.name} {described}"

    def kept_in(self, cache: Path) -> Path:
        """The file of a build for this process in a folder of builds."""
        return cache / f"{'-'.join(self.key().split())}.so"

    def find(self) -> Path:
        """The library for this torch: built beforehand, or earlier, or now.

        Raises:
            BuildError: it has to be built, and there is no compiler, or it fails.
        """
        if cache_directory is None:
            raise ContractError(
                f"{self.title}: import anychip.registry before, as anychip.use does"
            )
        wanted, cache = self.key(), cache_directory()
        kept = self.kept_in(cache)
        for path in (*sorted(sources(self.name).glob("*.so")), kept):
            if path.is_file() and wanted.encode() in path.read_bytes():
                return path
        cache.mkdir(parents=True, exist_ok=True)
        with open(kept.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several ranks one builds
            if not kept.is_file():
                self.build(kept)
        return kept

    def build(self, target: Path, options: Sequence[str] = ()) -> None:
        """Compiles it for this torch; ``target`` appears whole or not at all.

        Args:
            options: words for the compiler, when it compiles and when it links; a sanitizer, say.

        Raises:
            BuildError: with the compiler's first error.
        """
        import torch

        compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None:
            fix = "install g++ (Debian: apt install g++)"
            raise self._error("there is no C++ compiler here", fix)
        self._say(f"building {self.title} {torch.__version__}, once: {self.takes}")
        started = time.monotonic()
        root = Path(torch.__file__).parent
        includes = [*(path.parents[1] for path in self.headers), root / "include"]
        includes += [root / "include/torch/csrc/api/include"]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        compiling = [compiler, *_OPTIONS, *options, abi, *(f"-I{path}" for path in includes)]
        said = {self.says: [f'-DANYCHIP_EXTENSION_KEY="{self.key()}"']}
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            objects = [Path(folder, f"{unit.stem}.o") for unit in self.units()]
            commands = [
                [*compiling, *said.get(unit.stem, []), "-c", str(unit), "-o", str(made)]
                for unit, made in zip(self.units(), objects, strict=True)
            ]
            with ThreadPoolExecutor(os.cpu_count()) as workers:
                list(workers.map(self._run, commands))
            made = Path(folder, target.name)
            libraries = [f"-L{root / 'lib'}", f"-ltorch_{HOST}", "-lc10"]
            self._run([compiler, "-shared", *options, "-o", str(made), *map(str, objects),
                       *libraries])  # fmt: skip
            made.replace(target)
        self._say(f"built it in {time.monotonic() - started:.0f} s: {target}")

    def load(self) -> ctypes.CDLL:
        """The library for this torch, in this process.

        Raises:
            BuildError: as :meth:`find`.
        """
        import torch  # noqa: F401 - its libraries are those that this one finds

        return ctypes.CDLL(str(self.find()))

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            first = next((line for line in lines if "error" in line), lines[-1])
            raise self._error(f"{Path(command[0]).name} failed: {first}")

    def _error(self, reason: str, fix: str | None = None) -> BuildError:
        return BuildError(f"{self.title} has to be built, and {reason}", fix)

    def _say(self, text: str) -> None:
        print(f"anychip: {text}", file=sys.stderr, flush=True)
