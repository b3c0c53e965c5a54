"""The servers that fork ranks: one as it is, one in a network of its own."""

from collections.abc import Iterator

import pytest

from tests.integration import quiet_network as network
from tests.integration import two_hosts
from tests.integration.collectives.processes import Server


@pytest.fixture(scope="session", params=[
    "shared_memory",
    *(pytest.param(way, marks=pytest.mark.grid) for way in ("sockets", "two_hosts")),
])  # fmt: skip
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    prefix: list[str] | None = []
    if request.param == "two_hosts" and not (prefix := two_hosts.prefix()):
        pytest.skip(two_hosts.NOT_HERE)
    server = Server(request.param, prefix)
    yield server
    server.close()


@pytest.fixture(scope="session")
def quiet_network() -> Iterator[Server]:
    """A server whose loopback interface nobody else uses."""
    prefix = network.prefix()
    if prefix is None:
        pytest.skip("this system does not let us make a network namespace")
    server = Server("sockets", prefix)
    yield server
    server.close()
