"""Jobs of real processes, for tests: one server has imported torch, and forks the ranks of each.

``server.run("name", world_size, ...)`` calls ``cases.name(comm, ...)`` on every rank, or that of
another module here ("module.name"), and says what became of each: a value, an error, or the signal
that ended it.
"""

import atexit
import json
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

HERE, LOOPBACK = Path(__file__).parent, "127.0.0.1"
PACKAGE = "tests.integration.collectives"


@dataclass
class Outcome:
    """What became of one rank; times are seconds of the machine's monotonic clock."""

    status: int
    value: Any = None
    error: str = ""
    kind: str = ""
    ranks: tuple[int, ...] = ()
    failed_at: float = 0.0
    ended_at: float = 0.0


class Server:
    """The process that forks ranks.

    ``prefix`` is a command that runs it, like unshare; ``transport`` connects the ranks' hosts, or
    is ``two_hosts``, of which the second one has half of the ranks, or less.
    """

    def __init__(self, transport: str, prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / "processes.py"), transport], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        )  # fmt: skip

    def run(self, case: str, world_size: int, **arguments: Any) -> list[Outcome]:
        """Runs a case on all ranks.

        Among the arguments, ``job`` are settings of the job, with ``delays_s``, after which the
        ranks start, or None for one that never does; ``to_the_end`` lets the ranks end like any
        interpreter, errors not caught. With ``launched`` the case gets its number and what a
        launcher gives in place of a communicator: variables of a world of so many ranks, and a
        store that outlives them.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([case, world_size, arguments]) + "\n")
        self.process.stdin.flush()
        outcomes = json.loads(self.process.stdout.readline())
        return [Outcome(**{**o, "ranks": tuple(o.get("ranks", ()))}) for o in outcomes]

    def close(self) -> None:
        """Ends the server."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=20)


def serve(transport: str, second: int = 0) -> None:
    """Forks the ranks of each job that a line of stdin describes.

    ``second`` is a process on the second host, where there is one.
    """
    import anychip.comm.library
    import anychip.comm.shared_memory  # noqa: F401 - what every rank needs

    for line in sys.stdin:
        case, world_size, arguments = json.loads(line)
        found = pkgutil.resolve_name(f"{PACKAGE}.{case if '.' in case else f'cases.{case}'}")
        # Not a context: a child that leaves it would remove what the others write to.
        folder = tempfile.mkdtemp()
        files = [Path(folder) / str(rank) for rank in range(world_size)]
        port, children, launched = free_port(), [], arguments.pop("launched", 0)
        keeper = keep_store(port) if launched else None
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                sys.stdin.close()
                sys.stdout = sys.stderr
                place = Place(rank, launched or world_size, LOOPBACK, LOOPBACK, port, transport)
                if second:
                    place = on_two_hosts(place, second)
                if launched:
                    run_launched(found, place, arguments, files[rank])
                run_rank(found, place, arguments, files[rank])
                return  # to the ordinary end of an interpreter
            children.append(child)
        outcomes = wait_for(children, files)
        if keeper is not None:
            os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)
        print(json.dumps(outcomes), flush=True)
        shutil.rmtree(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def keep_store(port: int) -> int:
    """A process that has a store, as a launcher has that does not end ranks when one is lost."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        import torch.distributed as dist

        kept = dist.TCPStore(LOOPBACK, port, None, True, wait_for_workers=False)
        os.write(told, b"x")
        signal.pause()
        del kept
    os.read(ready, 1)
    os.close(ready)
    os.close(told)
    return child


class Place(NamedTuple):
    """Of a rank: its address, that of the store, and how hosts are connected, if one says so."""

    rank: int
    world_size: int
    address: str
    store: str
    port: int
    transport: str | None


def on_two_hosts(place: Place, second: int) -> Place:
    """The place of the same rank where the second host has half of the ranks; goes there."""
    from tests.integration import two_hosts

    is_second = 2 * (place.rank % place.world_size) >= place.world_size
    if is_second:
        two_hosts.enter(second)
    os.environ["GLOO_SOCKET_IFNAME"] = two_hosts.CABLE  # of torch's own gloo
    address, store = two_hosts.HOSTS[is_second], two_hosts.HOSTS[0]
    return place._replace(address=address, store=store, transport=None)


def run_launched(
    case: Callable[..., Any], place: Place, arguments: dict[str, Any], file: Path
) -> NoReturn:
    size, is_one_machine = place.world_size, place.address == LOOPBACK
    told = {"RANK": place.rank % size, "WORLD_SIZE": size, "MASTER_PORT": place.port}
    told |= {"LOCAL_WORLD_SIZE": size if is_one_machine else 1, "MASTER_ADDR": place.store}
    os.environ |= {name: str(value) for name, value in told.items()}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "ANYCHIP_SECRET": "of the launcher" * 2}
    os.environ["ANYCHIP_TRANSPORT"] = place.transport or ""
    outcome: dict[str, Any] = {}
    try:
        outcome["value"] = case(place.rank, **arguments)
    except Exception as error:
        outcome |= {"error": str(error), "kind": type(error).__name__}
    file.write_text(json.dumps(outcome))
    atexit._run_exitfuncs()
    os._exit(0)


def run_rank(case: Callable[..., Any], at: Place, arguments: dict[str, Any], file: Path) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    import anychip.registry  # noqa: F401 - backends made by hand find their job
    from anychip.comm.group import Group
    from anychip.comm.job import Rendezvous, join
    from anychip.comm.liveness import Liveness
    from anychip.contract import CommunicationError

    settings = {"timeout_s": 20.0, "heartbeat_s": 20.0, "check": "step"}
    settings |= arguments.pop("job", {})
    to_the_end = arguments.pop("to_the_end", False)
    delay_s = settings.pop("delays_s", [0.0] * at.world_size)[at.rank]
    if delay_s is None:
        file.write_text(json.dumps({"kind": "never started"}))
        return
    time.sleep(delay_s)
    place = (at.store, at.port, None, at.rank == 0, timedelta(seconds=20))
    try:
        store = dist.TCPStore(*place, wait_for_workers=False)
        channel = partial(Liveness, address=at.address, secret=b"of this job")
        way: Any = at.transport
        seat = Rendezvous(store, at.rank, at.world_size, at.address, channel, host_transport=way)
        job = join(seat, **settings)
        comm = Group(job.world, job.host(job.world), job)
        outcome: dict[str, Any] = {"value": case(comm, **arguments)}
    except CommunicationError as error:
        outcome = {"error": str(error), "ranks": error.ranks, "failed_at": time.monotonic()}
        outcome["kind"] = "CommunicationError"
    except Exception as error:
        outcome = {"error": str(error), "failed_at": time.monotonic(), "kind": type(error).__name__}
        if to_the_end:
            file.write_text(json.dumps(outcome))
            raise
    file.write_text(json.dumps(outcome))
    if not to_the_end:
        # What is above closes all by itself; half a second of taking torch down is saved.
        atexit._run_exitfuncs()
        os._exit(0)


def wait_for(children: list[int], files: list[Path], limit_s: float = 40.0) -> list[dict[str, Any]]:
    """What became of each rank; who is stopped when all others have ended is killed."""
    statuses: dict[int, tuple[int, float]] = {}
    deadline, quiet_since = time.monotonic() + limit_s, time.monotonic()
    while len(statuses) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            exit_code = os.waitstatus_to_exitcode(status)
            statuses[child], quiet_since = (exit_code, time.monotonic()), time.monotonic()
            continue
        left = [child for child in children if child not in statuses]
        alone = len(left) == 1 and time.monotonic() > quiet_since + 1 and is_stopped(left[0])
        if alone or time.monotonic() > deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
            deadline = time.monotonic() + limit_s
        time.sleep(0.002)
    return [
        {**(json.loads(file.read_text()) if file.exists() else {}), "status": statuses[child][0],
         "ended_at": statuses[child][1]}
        for child, file in zip(children, files, strict=True)
    ]  # fmt: skip


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    if sys.argv[1] == "two_hosts":
        from tests.integration.two_hosts import second_host

        with second_host() as process:
            serve(sys.argv[1], process)
    else:
        serve(sys.argv[1])
