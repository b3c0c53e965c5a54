"""A process that forks ranks, for the tests of all files here."""

from collections.abc import Iterator

import pytest

from tests.integration.train.forked import Server


@pytest.fixture(scope="session")
def ranks() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()
