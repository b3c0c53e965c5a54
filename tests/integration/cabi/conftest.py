"""The chip that the cases of this folder are about, in a process of its own."""

import os

import pytest

import anychip
from anychip.cabi import Library


@pytest.fixture(scope="module")
def chip() -> Library:
    """The library that ANYCHIP_TEST_CHIP names."""
    found = anychip.use(os.environ["ANYCHIP_TEST_CHIP"])
    assert isinstance(found, Library)
    return found
