"""Is torch's switch on where a row needs it, and afterwards where it was?"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anychip.contract.settings import SameBits

_C: Any = torch._C


def bits() -> tuple[bool, ...]:
    return (
        _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only(),
        _C._get_deterministic_fill_uninitialized_memory(),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Puts back what a test sets."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize("mode", ["off", "on", "warn only"])
@pytest.mark.parametrize("fills", [True, False], ids=["fills", "leaves"])
def test_same_bits_asks_for_deterministic_kernels_and_puts_it_back(mode: str, fills: bool) -> None:
    torch.use_deterministic_algorithms(mode != "off", warn_only=mode == "warn only")
    torch.utils.deterministic.fill_uninitialized_memory = fills
    before = bits()
    with SameBits():
        assert bits() == (True, False, False)
    assert bits() == before
