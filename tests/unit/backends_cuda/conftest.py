"""Where the kernels' tests run: on the emulator always, and on a CUDA device where there is one."""

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from anychip.contract import OperatorTable
from anychip_cuda import operators
from anychip_cuda.native import Kernels


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In another order of threads than the first, with a sanitizer too, the tests are a grid."""
    if os.environ.get("ANYCHIP_EMULATOR_ORDER", "forward") != "forward":
        for item in items:
            item.add_marker(pytest.mark.grid)


class Chip(NamedTuple):
    """One way to run the kernels.

    Attributes:
        device: where tensors lie.
        kernels: what rows call.
        table: the native rows, bound to ``kernels``.
    """

    device: torch.device
    kernels: Kernels
    table: OperatorTable


@pytest.fixture(params=["emulated", "cuda"], scope="session")
def chip(request: pytest.FixtureRequest) -> Iterator[Chip]:
    """The emulator, then the device."""
    from anychip_cuda.table import make_table

    if request.param == "emulated":
        from tests.cuda_emulated.anychip_cuda_emulated import backend

        try:
            kernels = Kernels(backend.load_emulator(), backend.host_place)
        except ImportError as error:
            if os.environ.get("ANYCHIP_EMULATOR_REQUIRED"):
                raise
            pytest.skip(str(error))
        yield Chip(torch.device("cpu"), kernels, make_table(kernels, mapped=False))
        return
    if operators.kernels is None or not torch.cuda.is_available():
        pytest.skip("no CUDA device, or no kernels for it")
    kernels = operators.kernels
    yield Chip(torch.device("cuda"), kernels, make_table(kernels, mapped=False))
