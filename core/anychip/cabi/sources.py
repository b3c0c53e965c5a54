"""Where are the header for chips, and the sources of the bridge? In a checkout, or in the wheel."""

from __future__ import annotations

from pathlib import Path

import anychip

_PACKAGE = Path(anychip.__file__).parent
_CHECKOUT = _PACKAGE.parents[1] / "csrc"
_HEADER = Path("include", "anychip", "abi.h")


def _root() -> Path:
    """The folder with ``include`` and ``bridge``."""
    for root in (_CHECKOUT, *map(Path, anychip.__path__)):
        if (root / _HEADER).is_file():
            return root
    raise FileNotFoundError(f"this anychip is not whole: {_HEADER} is in none of its folders")


def include_directory() -> Path:
    """What a compiler searches for ``#include <anychip/abi.h>``."""
    return _root() / "include"


def cmake_directory() -> Path:
    """Where CMake's find_package(anychip) finds the header as the target anychip::abi."""
    return _root() / "cmake"


def header() -> Path:
    """The specification."""
    return _root() / _HEADER


def bridge_directory() -> Path:
    """The bridge's sources, and what was built of them beforehand."""
    return _root() / "bridge"
