"""How does a chip's C library become a backend? ``Library(path)`` is the whole of a plugin's hook.

The interface is ``anychip/abi.h``. ``table`` reads and checks what a library says, without torch;
``bridge`` finds or builds the C++ that makes a torch device of it; ``device_module`` is what torch
then has under the chip's name; ``library`` is the backend.
"""

from anychip.cabi.library import Library
from anychip.cabi.sources import include_directory

__all__ = ["Library", "include_directory"]
