"""Where is the header for chips? In a checkout, or in the wheel."""

from pathlib import Path

from anychip.torch_extension import sources


def include_directory() -> Path:
    """What a compiler searches for ``#include <anychip/abi.h>``."""
    return sources("include")


def cmake_directory() -> Path:
    """Where CMake's find_package(anychip) finds the header as the target anychip::abi."""
    return sources("cmake")


def header() -> Path:
    """The specification."""
    return include_directory() / "anychip" / "abi.h"
