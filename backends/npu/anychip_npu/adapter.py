"""Is torch_npu here, does it fit this torch, and does it load? It is imported here and only here.

torch loads torch_npu by itself when it is imported (its entry point group ``torch.backends``),
unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set. Where CANN's libraries are missing, torch's own
import fails then. So this package looks before it imports: at the metadata of both distributions,
and at the libraries that torch_npu is linked with.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from anychip_npu import cann

ADAPTER = "torch_npu"


class Versions(NamedTuple):
    """Distributions by their metadata, nothing imported.

    Attributes:
        torch, adapter: versions; None where it is not installed.
        wanted: the versions of torch that the adapter is made for, like "==2.13.0.*".
        fits: this torch is one of them.
    """

    torch: str | None
    adapter: str | None
    wanted: str
    fits: bool


def versions() -> Versions:
    """Which torch and torch_npu are installed, and whether they belong together."""
    torch, adapter = _version("torch"), _version(ADAPTER)
    if adapter is None:
        return Versions(torch, None, "", False)
    requirements = [Requirement(line) for line in metadata.requires(ADAPTER) or ()]
    wanted = next((r.specifier for r in requirements if r.name == "torch"), None)
    fits = torch is not None and (wanted is None or wanted.contains(torch, prereleases=True))
    return Versions(torch, adapter, str(wanted or ""), fits)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def obstacle() -> str:
    """Why torch_npu cannot be imported in this process; "" when it is, or was.

    The first call imports torch and torch_npu, unless it is clear beforehand that this would fail:
    a torch whose import has failed cannot be imported again.
    """
    if ADAPTER in sys.modules and hasattr(sys.modules[ADAPTER], "npu"):
        return ""
    known = versions()
    if known.adapter is None or not known.fits:
        return f"{ADAPTER} {known.adapter or 'is not installed'}, torch {known.torch}"
    if missing := cann.missing_library():
        return missing
    try:
        module()
    except (ImportError, OSError, RuntimeError) as error:
        return _root(error)
    return ""


@cache
def module() -> Any:
    """The imported torch_npu, whether or not torch has loaded it by itself."""
    import torch  # noqa: F401 - with autoload this imports torch_npu too
    import torch_npu  # type: ignore[import-not-found,unused-ignore]

    return torch_npu


def what_import_does() -> tuple[bool, str]:
    """Whether ``import torch`` works in this environment, and what happens. Imports torch.

    Only for a process that ends soon: torch is of no use to it when this fails.
    """
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        return False, f"import torch fails: it loads {ADAPTER} by itself: {_root(error)}"
    if torch._is_device_backend_autoload_enabled():
        return True, f"import torch works, and loads {ADAPTER} by itself"
    return True, f"import torch works, and leaves {ADAPTER} out (TORCH_DEVICE_BACKEND_AUTOLOAD=0)"


def _root(error: BaseException) -> str:
    """Type and message of the exception that came first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
