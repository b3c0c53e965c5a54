"""Which environment variables decide something, and what each of them means. All are read here.

=======================  ==========================================================================
ANYCHIP_BACKEND          name of the backend to use, unless one is passed as an argument
ANYCHIP_CACHE_DIR        where answers of probes are kept (default: ``$XDG_CACHE_HOME/anychip``)
ANYCHIP_PROBE_TIMEOUT    seconds that a plugin's probe may take (default 20)
WORLD_SIZE, LOCAL_RANK   set by a launcher such as torchrun: this process is a worker
=======================  ==========================================================================
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from anychip.contract import AmbiguousBackendError, ContractError

DEFAULT_PROBE_TIMEOUT_S = 20.0
INSIDE_PROBE = "ANYCHIP_INSIDE_PROBE"
"""Set in the child process of a probe, so that a plugin cannot start probes from its own probe."""


def backend_name() -> str | None:
    """The name in ANYCHIP_BACKEND; None when it is unset or empty."""
    return os.environ.get("ANYCHIP_BACKEND", "").strip() or None


def cache_directory() -> Path:
    """Where answers of probes are kept. The directory need not exist."""
    if named := os.environ.get("ANYCHIP_CACHE_DIR"):
        return Path(named)
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(user_cache) / "anychip"


def probe_timeout_s() -> float:
    """Seconds that a probe may take.

    Raises:
        ValueError: ANYCHIP_PROBE_TIMEOUT is not a positive number.
    """
    text = os.environ.get("ANYCHIP_PROBE_TIMEOUT", "").strip()
    if not text:
        return DEFAULT_PROBE_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"ANYCHIP_PROBE_TIMEOUT must be a positive number of seconds, got {text!r}"
        )
    return seconds


def is_worker() -> bool:
    """Whether a launcher started this process as one of several workers."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    return "LOCAL_RANK" in os.environ and world_size.isdigit() and int(world_size) > 1


def local_rank() -> int | None:
    """This worker's number on its machine, from 0; None when no launcher started it.

    Raises:
        ValueError: LOCAL_RANK is not a number of at least 0.
    """
    text = os.environ.get("LOCAL_RANK", "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise ValueError(f"LOCAL_RANK must be a number of at least 0, got {text!r}")
    return int(text)


def require_probing_allowed() -> None:
    """Checks that this process may start probes.

    Raises:
        AmbiguousBackendError: it is one of several workers. Were each of them to probe, they could
            come to different answers; the launcher probes once and tells them.
        ContractError: it is itself a probe: a plugin asks for other plugins.
    """
    if INSIDE_PROBE in os.environ:
        raise ContractError(
            "a plugin asked for the other backends while it was being probed; import and probe() "
            "may only look at the plugin's own chip"
        )
    if is_worker():
        raise AmbiguousBackendError(
            f"no backend is named, and a worker (WORLD_SIZE={os.environ['WORLD_SIZE']}) does not "
            "look for one by itself: set ANYCHIP_BACKEND=<name> for all workers, or pass the name; "
            "`anychip backends` on one machine lists the names"
        )
