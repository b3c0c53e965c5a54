"""Where is the native code of ranks (csrc/comm)? Libraries beside this module, loaded by ctypes."""

import ctypes
import importlib.util
from typing import Any


def load(name: str, version: str, abi: int) -> tuple[Any, str]:
    """A library, or None and why there is none.

    Args:
        name: of its file, without what follows the point.
        version: the function that says which version of itself it is.
        abi: the one that is expected.
    """
    place = f"anychip.comm.{name}"
    try:
        spec = importlib.util.find_spec(place)
    except ValueError:
        spec = None
    if spec is None or spec.origin is None:
        return None, f"{place} was not built; pip install . builds it where g++ is"
    try:
        library = ctypes.CDLL(spec.origin)
        found = int(library[version]())
    except (OSError, AttributeError) as error:
        return None, f"{spec.origin} cannot be loaded: {error}"
    if found != abi:
        return None, f"{spec.origin} has ABI {found}, and {abi} is expected: build it again"
    return library, ""
