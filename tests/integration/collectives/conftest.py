"""The servers that fork ranks: one as it is, one in a network of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.collectives.processes import Server

ALONE = ["sh", "-c", 'ip link set lo up && exec "$0" "$@"']


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def quiet_network() -> Iterator[Server]:
    """A server whose loopback interface nobody else uses."""
    for options in (["-n"], ["-rn"]):
        prefix = ["unshare", *options, *ALONE]
        if (
            shutil.which("unshare")
            and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
        ):
            server = Server(prefix)
            yield server
            server.close()
            return
    pytest.skip("this system does not let us make a network namespace")
