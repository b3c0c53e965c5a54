"""Two machines in one: network namespaces that a cable joins, and a job with ranks in both.

``PREFIX python -m tests.integration.two_hosts RANKS COMMAND...``, where PREFIX is :func:`prefix`:
this namespace is the first host, and one more is the second. Starts the command once per rank,
RANKS of them on each, with the variables of a launcher; with 0 once, on the first host, with
``$SECOND`` before what is to run on the second one. Ends with 0 when all of them did. SIGUSR1 cuts
the cable.
"""

import ctypes
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration import quiet_network

HOSTS = ("10.78.0.1", "10.78.0.2")
CABLE = "eth0"
"""Each end of it, as pods of Kubernetes have it."""
NOT_HERE = "no two hosts: namespaces joined by a veth pair need root, ip and nsenter"
_NEWNET = 0x40000000


def prefix() -> list[str] | None:
    """A command that runs another one on the first host; None: there are no hosts here."""
    return quiet_network.prefix() if shutil.which("ip") and shutil.which("nsenter") else None


def join(pid: int, addresses: tuple[str, str] = HOSTS) -> None:
    """A cable from this namespace to that of a process, and the addresses of its ends."""
    inside = ["nsenter", "-t", str(pid), "-n", "ip"]
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    peer = ["type", "veth", "peer", "name", CABLE, "netns", str(pid)]
    subprocess.run(["ip", "link", "add", CABLE, *peer], check=True)
    for way, address in zip((["ip"], inside), addresses, strict=True):
        subprocess.run([*way, "link", "set", CABLE, "up"], check=True)
        subprocess.run([*way, "address", "add", f"{address}/24", "dev", CABLE], check=True)


def cut() -> None:
    """Nothing passes any more, and nobody is told."""
    subprocess.run(["ip", "link", "set", CABLE, "down"], check=True)


def enter(pid: int) -> None:
    """Takes this process, and what it starts, to the host of another one."""
    with open(f"/proc/{pid}/ns/net") as place:
        assert ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NEWNET) == 0


@contextmanager
def second_host() -> Iterator[int]:
    """A process in the second host, which the cable joins to this one."""
    quiet = quiet_network.prefix()
    assert quiet is not None
    second = subprocess.Popen([*quiet, "sleep", "1000"])
    try:
        join(second.pid)
        yield second.pid
    finally:
        second.kill()
        second.wait()


def cable_nbytes() -> int:
    """Bytes that this host has received from the other one, and sent there."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line.split(":")[1].split() for line in lines if line.strip().startswith(CABLE))
    return int(counts[0]) + int(counts[8])


def listeners(pid: int, *, own: bool = False) -> list[tuple[str, int]]:
    """Addresses and ports at which anybody listens in the namespace of a process, or it does."""
    found = []
    mine = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()} if own else set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, place, _, state, *_, inode = line.split()[:10]
            words, port = place.split(":")
            if state == "0A" and (not own or f"socket:[{inode}]" in mine):
                raw = b"".join(
                    bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8)
                )
                found.append((str(ipaddress.ip_address(raw)), int(port, 16)))
    return sorted(found)


def main(ranks: int, command: list[str]) -> int:
    signal.signal(signal.SIGUSR1, lambda *_: cut())
    with second_host() as second:
        far = ["nsenter", "-t", str(second), "-n"]
        with socket.create_server((HOSTS[0], 0)) as free:
            port = free.getsockname()[1]
        job = {"MASTER_ADDR": HOSTS[0], "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        if not ranks:
            job["SECOND"] = " ".join(far)
            return abs(subprocess.run(command, env=os.environ | job).returncode)
        job |= {"WORLD_SIZE": str(2 * ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        started = [
            subprocess.Popen(
                [*way, *command],
                env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank % ranks)},
            )
            for rank, way in enumerate(way for way in ([], far) for _ in range(ranks))
        ]
        return max(abs(process.wait()) for process in started)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
