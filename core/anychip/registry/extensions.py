"""What if torch does not start, because an extension that it loads by itself does not?

torch imports the packages of the entry point group ``torch.backends`` while it is imported, and
fails with them: a chip's adapter without its driver keeps every other chip from being used. A
process cannot import torch a second time, so that it starts again, with the extensions off. A
plugin imports its own adapter when it is used.

Source: PyTorch, "Autoloading Out-of-Tree Extension",
https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""torch's: with "0" no extension is loaded unasked."""
_WERE_OFF = os.environ.get(VARIABLE) == "0"  # at the start: an extension may set it for itself
_SAYS = "Failed to load the backend extension"


def failure(error: BaseException | str) -> str:
    """What torch said of the extension that kept it from starting; "" when that is not the error.

    Args:
        error: as it came, with torch's among its causes or in its text.
    """
    if _WERE_OFF:
        return ""
    found = error if isinstance(error, BaseException) else None
    text = str(error)
    while found is not None and not (isinstance(found, RuntimeError) and _SAYS in str(found)):
        found = found.__cause__ or found.__context__
    cause = None
    if found is not None:
        text, cause = str(found), found.__cause__
    if _SAYS not in text:
        return ""
    said = text[text.index(_SAYS) :].partition(". ")[0]
    return f"{said} ({type(cause).__name__}: {cause})" if cause else said


def restart_without(arguments: Sequence[str]) -> NoReturn:
    """Becomes Python with ``arguments``, the extensions off."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, VARIABLE: "0"})
