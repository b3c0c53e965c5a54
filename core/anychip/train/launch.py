"""Several ranks on this machine: started together, ended together, by torch's elastic launcher.

What ``anychip train --nproc N`` does before it is N processes; ``torchrun --standalone`` does the
same from outside. Rank 0 writes to this terminal, the others to files. There is no restart: a run
goes on from its checkpoint. Signals go to every rank once, since the ranks are in sessions of their
own, where the terminal does not send them a second one.
"""

import logging
import re
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from anychip.comm.joining import LOOPBACK, loopback_store, one_machine
from anychip.contract import AnychipError
from anychip.train.interruption import Interrupted

_LOGGER = "torch.distributed.elastic"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TAIL_LINES = 20
_AS_RANK = """
if [ "$RANK" -gt 0 ]; then exec >"$0/rank$RANK.out" 2>"$0/rank$RANK.err"; fi
exec "$@"
"""
_MISSED_ANOTHER = re.compile(r"rank \d+ of \d+: ")
"""How the place of a CommunicationError reads."""


class RankFailedError(AnychipError, RuntimeError):
    """A rank ended with an error, and all others were ended.

    Attributes:
        rank: the first that failed, or that was killed.
        exit_code: its own; 128 plus the number of the signal that ended it.
        exit_codes: of all ranks that failed or were ended, by rank.
    """

    def __init__(self, rank: int, exit_codes: Mapping[int, int], told: str) -> None:
        self.rank, self.exit_codes = rank, exit_codes
        self.exit_code = exit_code = exit_codes[rank]
        name = _signal_name(exit_code)
        how = f"was ended by {name}" if name else f"ended with exit code {exit_code}"
        super().__init__(f"rank {rank} {how}, and the other ranks with it{told}")


def launch(
    nproc: int, command: Sequence[str], logs: Path, *, environment: Mapping[str, str] | None = None
) -> None:
    """Runs a command ``nproc`` times as ranks of one job; returns when all have ended well.

    Each process finds its rank where torchrun puts it, so that ``Backend.communicator()`` joins
    them, and a secret that only they know. Call it in the main thread. The command names the
    backend: only the launcher probes.

    Args:
        nproc: ranks, at least 1.
        command: program and arguments, like ``[sys.executable, "-m", "anychip", "train", ...]``.
        logs: directory for ``rank<r>.out`` and ``rank<r>.err`` of ranks from 1 on; made if needed.
        environment: variables that the ranks get besides those of this process.

    Raises:
        RankFailedError: a rank failed; the others are ended, within 30 s if they do not answer.
        Interrupted: this process, or a rank, got SIGTERM or SIGINT, and the others have ended in
            good order too. Without a message when rank 0 has had its say.
    """
    if nproc < 1:
        raise ValueError(f"nproc: at least 1 expected, got {nproc}")
    logs.mkdir(parents=True, exist_ok=True)
    # Not among the arguments, which everybody on the machine can read.
    config = _config(nproc, {**one_machine(), **(environment or {})})
    sys.stdout.flush()
    with _undisturbed():
        try:
            elastic_launch(config, "sh")("-c", _AS_RANK, str(logs), *command)
        except ChildFailedError as error:
            raise_if_interrupted(error.failures)
            rank = first_failure(error.failures, logs).local_rank
            codes = {other: _exit_code(found) for other, found in error.failures.items()}
            # Rank 0 has written to the terminal, and may have failed because it missed another.
            shown = [rank] if rank else range(1, nproc)
            told = "".join(_tail(_err(logs, other)) for other in shown)
            raise RankFailedError(rank, codes, told) from None
        except SignalException as stop:
            raise Interrupted("", int(stop.sigval)) from None


def raise_if_interrupted(failures: Mapping[int, ProcessFailure]) -> None:
    """Tells ranks that were asked to end from those that failed.

    The launcher ends ranks too, but none before another one has ended with something else.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    asked = {code: number for number in numbers for code in (128 + number, -number)}
    codes = {found.exitcode for found in failures.values()}
    if codes <= asked.keys():
        number = asked[max(codes)]  # what a rank has ended with by itself, if one has
        has_spoken = 0 in failures and failures[0].exitcode > 0
        said = "" if has_spoken else f"a rank got {number.name} before the first step"
        raise Interrupted(said, number) from None


def _config(nproc: int, variables: Mapping[str, str]) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=uuid.uuid4().hex, role="rank",
        rdzv_backend=_Loopback.NAME, local_addr=LOOPBACK, max_restarts=0,
        logs_specs=_Terminal(variables),
    )  # fmt: skip


class _Loopback(StaticTCPRendezvous):
    """The one agent of a job meets itself in its own memory, where nothing is unpickled.

    The ranks meet at a store of the agent's to which only this machine has access.
    """

    NAME = "anychip"

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._ranks = loopback_store()
        super().__init__(LOOPBACK, self._ranks.port, 0, 1, parameters.run_id, timeout=60)

    def get_backend(self) -> str:
        return self.NAME

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(HashStore(), self.rank, self.world_size, place)


rendezvous_handler_registry.register(_Loopback.NAME, _Loopback)


def first_failure(failures: Mapping[int, ProcessFailure], logs: Path) -> ProcessFailure:
    """The failure that the others follow from, as far as one can tell from outside.

    First a rank that was killed, then one that ended by something else than having missed
    another, then rank 0, which wrote to the terminal; those that the launcher ended are last. Of
    several the earliest.

    Args:
        failures: of the launcher, by rank.
        logs: with the ranks' files.
    """
    ended_by_us = {-signal.SIGTERM, -signal.SIGINT}

    def order(failure: ProcessFailure) -> tuple[int, int, int]:
        rank, code = failure.local_rank, failure.exitcode
        if code in ended_by_us:
            kind = 4
        elif code < 0:
            kind = 0
        elif rank == 0:
            kind = 2
        else:
            kind = 3 if _MISSED_ANOTHER.search(_tail(_err(logs, rank))) else 1
        return (kind, failure.timestamp, rank)

    return min(failures.values(), key=order)


class _Terminal(LogsSpecs):
    """Nothing is redirected by the launcher, which leaves the files open.

    Args:
        variables: that the ranks get besides those of this process.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for variables in envs.values():
            variables |= {**self._variables, "TORCHELASTIC_ERROR_FILE": ""}
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(nowhere, nowhere, {}, {}, nowhere, "", "")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Puts back the signal handlers that the launcher sets, and says what it logs but once."""
    # Some of its loggers have a level of their own.
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGER)]
    levels = {name: logging.getLogger(name).level for name in [_LOGGER, *names]}
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _SIGNALS}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(failure: ProcessFailure) -> int:
    """As a shell counts."""
    code = failure.exitcode
    return code if code >= 0 else 128 - code


def _signal_name(exit_code: int) -> str:
    try:
        return signal.Signals(exit_code - 128).name if exit_code > 128 else ""
    except ValueError:
        return ""


def _err(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.err"


def _tail(path: Path) -> str:
    """The end of what a rank wrote, under the file's name; nothing when it wrote nothing."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    text = "".join(f"\n  {line}" for line in lines[-_TAIL_LINES:])
    return f"\n{path}:{text}" if text else ""
