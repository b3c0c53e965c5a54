"""The cpu backend, with the rows of a test in front of its own where a test wants that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import anychip
from tests.unit.dispatch.tables import Install, installation


@pytest.fixture(autouse=True)
def cpu() -> None:
    """Every test starts with the cpu backend, its default policy, and counts of zero."""
    anychip.use("cpu")
    anychip.provenance(reset=True)


@pytest.fixture
def install() -> Iterator[Install]:
    """``install(table, ...)`` puts tables in front of the cpu backend's own."""
    with installation() as function:
        yield function
