"""The cpu backend, with the rows of a test in front of its own where a test wants that."""

from collections.abc import Iterator

import pytest

import anychip
from anychip_cpu import native
from tests.unit.dispatch.tables import cpu, install

__all__ = ["cpu", "install"]


@pytest.fixture(params=["cpu", "reference"])
def pin(request: pytest.FixtureRequest) -> Iterator[str]:
    """What serves the operators that a file has in ``NAMES``."""
    if request.param == "cpu" and native.kernels is None:
        pytest.skip(str(native.problem))
    with anychip.policy(pin=dict.fromkeys(request.module.NAMES, request.param)):
        yield request.param
