"""Two machines in one: network namespaces that a cable joins, and a job with ranks in both.

``QUIET python -m tests.integration.two_hosts RANKS COMMAND...``, where QUIET is
:func:`tests.integration.quiet_network.prefix`: this namespace is the first host, and one more is
the second. Starts the command once per rank, RANKS of them on each, with the variables of a
launcher. Ends with 0 when all of them did.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.integration import quiet_network

HOSTS = ("10.78.0.1", "10.78.0.2")
CABLE = "cable"
"""The first host's end of it."""


def join(pid: int, addresses: tuple[str, str] = HOSTS) -> None:
    """A cable from this namespace to that of a process, and the addresses of its ends."""
    inside = ["nsenter", "-t", str(pid), "-n", "ip"]
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    here, there = CABLE, "far"
    for words in (
        ["ip", "link", "add", here, "type", "veth", "peer", "name", there],
        ["ip", "link", "set", there, "netns", str(pid)],
        ["ip", "address", "add", f"{addresses[0]}/24", "dev", here],
        ["ip", "link", "set", here, "up"],
        [*inside, "link", "set", there, "up"],
        [*inside, "address", "add", f"{addresses[1]}/24", "dev", there],
    ):
        subprocess.run(words, check=True)


def cable_nbytes() -> int:
    """Bytes that this host has received from the other one, and sent there."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line.split(":")[1].split() for line in lines if line.strip().startswith(CABLE))
    return int(counts[0]) + int(counts[8])


def main(ranks: int, command: list[str]) -> int:
    prefix = quiet_network.prefix()
    assert prefix is not None
    second = subprocess.Popen([*prefix, "sleep", "1000"])
    try:
        join(second.pid)
        with socket.create_server((HOSTS[0], 0)) as free:
            port = free.getsockname()[1]
        job = {
            "MASTER_ADDR": HOSTS[0], "MASTER_PORT": str(port), "WORLD_SIZE": str(2 * ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ways = ([], ["nsenter", "-t", str(second.pid), "-n"])
        started = [
            subprocess.Popen(
                [*way, *command],
                env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank % ranks)},
            )
            for rank, way in enumerate(way for way in ways for _ in range(ranks))
        ]
        return max(abs(process.wait()) for process in started)
    finally:
        second.kill()
        second.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
