"""Which environment variables decide something, and what each of them means. All are read here.

=======================  ==========================================================================
ANYCHIP_BACKEND          name of the backend to use, unless one is passed as an argument
ANYCHIP_CACHE_DIR        where answers of probes, and libraries built for one release of torch, are
                         kept (default: ``$XDG_CACHE_HOME/anychip``)
ANYCHIP_HOST_MEMORY      kept: torch's tensors of the host in blocks that are used again, see
                         :mod:`anychip.host_memory`; torch (the default): as torch does it
ANYCHIP_PROBE_TIMEOUT    seconds that a plugin's probe may take (default 20)
ANYCHIP_INTERFACE        name or address of the interface at which ranks listen (default: loopback
                         for one machine, else the one by which it reaches MASTER_ADDR)
ANYCHIP_FLIGHT_RECORD    directory into which each rank writes its last calls when its job fails
ANYCHIP_TRANSPORT        between the ranks' hosts: shared_memory or sockets (default: memory where
                         all ranks are on one host, else sockets)
ANYCHIP_SECRET           what the ranks of a job have in common, and nobody else knows
ANYCHIP_SECRET_FILE      a file with it, in its place
WORLD_SIZE, RANK, ...    set by a launcher such as torchrun: see :func:`launched`
=======================  ==========================================================================
"""

import math
import os
from pathlib import Path

from anychip.comm.hosts import HOST_TRANSPORTS, HostTransport
from anychip.comm.joining import Launched
from anychip.contract import AmbiguousBackendError, ContractError

DEFAULT_PROBE_TIMEOUT_S = 20.0
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SECRET_LENGTH = 16
INSIDE_PROBE = "ANYCHIP_INSIDE_PROBE"
"""Set in the child process of a probe, so that a plugin cannot start probes from its own probe."""


def backend_name() -> str | None:
    """The name in ANYCHIP_BACKEND; None when it is unset or empty."""
    return os.environ.get("ANYCHIP_BACKEND", "").strip() or None


def cache_directory() -> Path:
    """Where answers of probes are kept. The directory need not exist."""
    if named := os.environ.get("ANYCHIP_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "anychip"


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


def interface() -> str | None:
    """What ANYCHIP_INTERFACE names; None when it is unset or empty."""
    return os.environ.get("ANYCHIP_INTERFACE", "").strip() or None


def flight_record() -> Path | None:
    """The directory that ANYCHIP_FLIGHT_RECORD names; None when it is unset or empty."""
    named = os.environ.get("ANYCHIP_FLIGHT_RECORD", "").strip()
    return Path(named) if named else None


def host_transport() -> HostTransport | None:
    """What ANYCHIP_TRANSPORT asks for; None when it is unset or empty.

    Raises:
        ValueError: there is no such transport.
    """
    named = os.environ.get("ANYCHIP_TRANSPORT", "").strip()
    for known in HOST_TRANSPORTS:
        if named == known:
            return known
    if named:
        expected = " or ".join(HOST_TRANSPORTS)
        raise ValueError(f"ANYCHIP_TRANSPORT: {expected} expected, got {named!r}")
    return None


def keeps_host_memory() -> bool:
    """Whether ANYCHIP_HOST_MEMORY asks for blocks that are used again.

    Raises:
        ValueError: it asks for something else.
    """
    named = os.environ.get("ANYCHIP_HOST_MEMORY", "").strip()
    if named not in ("", "torch", "kept"):
        raise ValueError(f"ANYCHIP_HOST_MEMORY: kept or torch expected, got {named!r}")
    return named == "kept"


def secret() -> bytes:
    """What is in ANYCHIP_SECRET, or in the file of ANYCHIP_SECRET_FILE; empty when unset.

    Raises:
        ValueError: it can be guessed.
        OSError: the file cannot be read.
    """
    text, where = os.environ.get("ANYCHIP_SECRET", "").strip(), "ANYCHIP_SECRET"
    file = os.environ.get("ANYCHIP_SECRET_FILE", "").strip()
    if not text and file:
        text, where = Path(file).read_text(encoding="utf-8").strip(), file
    if (text or file) and len(text) < _SECRET_LENGTH:
        raise ValueError(
            f"{where}: a secret of at least {_SECRET_LENGTH} "
            f"characters expected, got {len(text)}; `openssl rand -hex 32` makes one"
        )
    return text.encode()


def launched() -> Launched | None:
    """This process's place among several, as torchrun or Kubernetes say it; None: it is alone.

    Raises:
        ValueError: the variables say neither that it is alone nor where it stands.
    """
    told = {name: os.environ.get(name, "").strip() for name in _PLACE}
    rank, world_size, host, port = told.values()
    if (rank, world_size) in (("", ""), ("", "1"), ("0", "1")):
        return None
    numbers = all(text.isdigit() for text in (rank, world_size, port))
    if not (numbers and host and int(rank) < int(world_size)):
        found = ", ".join(f"{name}={text or '(not set)'}" for name, text in told.items())
        raise ValueError(
            f"this process is neither alone nor a rank of a job: {found}; set all four as a "
            "launcher does, with RANK below WORLD_SIZE, or none"
        )
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launched(int(rank), int(world_size), host, int(port), has_store)


def is_one_machine() -> bool:
    """Whether the launcher has started all workers of the job on this machine."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return here != "" and here == os.environ.get("WORLD_SIZE")


def is_worker() -> bool:
    """Whether a launcher started this process as one of several workers."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    is_told = "LOCAL_RANK" in os.environ or "RANK" in os.environ
    return is_told and world_size.isdigit() and int(world_size) > 1


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


def is_probe() -> bool:
    """Whether this process was started to ask one plugin."""
    return INSIDE_PROBE in os.environ


def require_probing_allowed() -> None:
    """Checks that this process may start probes.

    Raises:
        AmbiguousBackendError: it is one of several workers. Were each of them to probe, they could
            come to different answers; the launcher probes once and tells them.
        ContractError: it is itself a probe: a plugin asks for other plugins.
    """
    if is_probe():
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
