"""The bridge: C++ that makes a torch device of a library with the C interface."""

import ctypes
import sys
from functools import cache
from pathlib import Path

from anychip.cabi.sources import header
from anychip.contract import BackendUnavailableError
from anychip.torch_extension import BuildError, TorchExtension


def extension() -> TorchExtension:
    """Its sources, and how they are built."""
    return TorchExtension(
        name="bridge", title="the bridge to torch", takes="about a minute", says="library",
        headers=(header(),),
    )  # fmt: skip


@cache
def loaded() -> ctypes.CDLL:
    """The bridge, in this process.

    Raises:
        BackendUnavailableError: it has to be built, and there is no compiler, or it fails.
    """
    try:
        library = extension().load()
    except BuildError as error:
        raise BackendUnavailableError(
            "C library", "unavailable", error.reason, error.fix
        ) from error
    library.anychip_bridge_error.restype = ctypes.c_char_p
    library.anychip_bridge_calls.restype = ctypes.c_char_p
    library.anychip_bridge_profiled.restype = ctypes.c_char_p
    library.anychip_bridge_current_stream.restype = ctypes.c_uint64
    return library


if __name__ == "__main__":  # CMake calls it, for ANYCHIP_BRIDGE=ON
    extension().build(Path(sys.argv[1]).resolve())
