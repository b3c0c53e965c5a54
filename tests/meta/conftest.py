"""The wrong backends are checked with our own operators, whatever other tests have registered."""

import pytest

from anychip import ops
from anychip.dispatch import operator


@pytest.fixture(autouse=True)
def operators_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {name: getattr(ops, name) for name in ops.__all__}
    monkeypatch.setattr(operator, "_operators", ours)
