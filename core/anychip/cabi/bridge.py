"""Which build of the bridge fits this torch? One that is there, or one built now and kept.

torch's C++ interface changes with every minor release. So there is a bridge per minor, and a file
says inside for which torch, machine and sources it was made: that is read before it is loaded.
"""

from __future__ import annotations

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
from functools import cache
from pathlib import Path

from anychip.cabi.sources import bridge_directory, header, include_directory
from anychip.contract import HOST, BackendUnavailableError, ContractError

cache_directory: Callable[[], Path] | None = None
"""Says where a bridge that was built is kept; the registry puts it here."""
COMPILERS = ("g++", "c++", "clang++")
_OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-w")


def key() -> str:
    """What a build for this process says inside."""
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    digest = hashlib.sha256()
    for path in (header(), bridge_directory() / "bridge.h", *units()):
        digest.update(path.read_bytes())
    return f"anychip bridge {digest.hexdigest()[:16]} torch {minor} {platform.machine()}"


def units() -> list[Path]:
    """The C++ files; each is compiled by itself."""
    return sorted(bridge_directory().glob("*.cpp"))


def find() -> Path:
    """The bridge for this torch: built beforehand, or earlier, or now.

    Raises:
        BackendUnavailableError: it has to be built, and there is no compiler, or it fails.
    """
    if cache_directory is None:
        raise ContractError("C library: import anychip.registry before, as anychip.use(path) does")
    wanted, cache = key(), cache_directory()
    kept = kept_in(cache)
    for path in (*sorted(bridge_directory().glob("*.so")), kept):
        if path.is_file() and wanted.encode() in path.read_bytes():
            return path
    cache.mkdir(parents=True, exist_ok=True)
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several ranks one builds
        if not kept.is_file():
            build(kept)
    return kept


def kept_in(cache: Path) -> Path:
    """The file of a build for this process in a folder of builds."""
    return cache / f"{'-'.join(key().split())}.so"


def build(target: Path, options: Sequence[str] = ()) -> None:
    """Compiles the bridge for this torch; ``target`` appears whole or not at all.

    Args:
        options: words for the compiler, when it compiles and when it links; a sanitizer, for one.

    Raises:
        BackendUnavailableError: with the compiler's first error.
    """
    import torch

    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise _unbuilt("there is no C++ compiler here", "install g++ (Debian: apt install g++)")
    say = f"anychip: building the bridge to torch {torch.__version__}, once"
    print(f"{say}: about a minute", file=sys.stderr, flush=True)
    started = time.monotonic()
    root = Path(torch.__file__).parent
    includes = (include_directory(), root / "include", root / "include/torch/csrc/api/include")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    compiling = [compiler, *_OPTIONS, *options, abi, *(f"-I{path}" for path in includes)]
    # In one unit alone: a compiler's cache that stands for it finds the others again.
    said = {"library": [f'-DANYCHIP_BRIDGE_KEY="{key()}"']}
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder, f"{unit.stem}.o") for unit in units()]
        commands = [
            [*compiling, *said.get(unit.stem, []), "-c", str(unit), "-o", str(made)]
            for unit, made in zip(units(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            list(workers.map(_run, commands))
        made = Path(folder, target.name)
        libraries = [f"-L{root / 'lib'}", f"-ltorch_{HOST}", "-lc10"]
        _run([compiler, "-shared", *options, "-o", str(made), *map(str, objects), *libraries])
        made.replace(target)
    took = time.monotonic() - started
    print(f"anychip: built the bridge in {took:.0f} s: {target}", file=sys.stderr, flush=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise _unbuilt(f"{Path(command[0]).name} failed: {first}")


def _unbuilt(reason: str, fix: str | None = None) -> BackendUnavailableError:
    what = "the bridge to torch has to be built, and"
    return BackendUnavailableError("C library", "unavailable", f"{what} {reason}", fix)


@cache
def loaded(path: Path) -> ctypes.CDLL:
    """The bridge, in this process."""
    import torch  # noqa: F401 - its libraries are those that the bridge finds

    library = ctypes.CDLL(str(path))
    library.anychip_bridge_error.restype = ctypes.c_char_p
    library.anychip_bridge_calls.restype = ctypes.c_char_p
    library.anychip_bridge_profiled.restype = ctypes.c_char_p
    library.anychip_bridge_current_stream.restype = ctypes.c_uint64
    return library


if __name__ == "__main__":  # CMake calls it, for ANYCHIP_BRIDGE=ON
    build(Path(sys.argv[1]).resolve())
