"""C libraries, compiled when a test needs them; each source once per run."""

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from anychip.cabi import include_directory

Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Makes a shared library of C text; ``flags`` may name another folder for the header."""
    folder = tmp_path_factory.mktemp("chips")

    def compiled(source: str, *flags: str) -> Path:
        name = hashlib.sha256("\0".join([source, *flags]).encode()).hexdigest()[:16]
        target = folder / f"lib{name}.so"
        if not target.exists():
            code = folder / f"{name}.c"
            code.write_text(source)
            command = ["gcc", "-std=c11", "-shared", "-fPIC", *flags, f"-I{include_directory()}"]
            subprocess.run([*command, str(code), "-o", str(target)], check=True)
        return target

    return compiled
