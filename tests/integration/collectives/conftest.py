"""The servers that fork ranks: one as it is, one in a network of its own."""

from collections.abc import Iterator

import pytest

from tests.integration import quiet_network as network
from tests.integration.collectives.processes import Server


@pytest.fixture(
    scope="session",
    params=["shared_memory", pytest.param("sockets", marks=pytest.mark.grid)],
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
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
