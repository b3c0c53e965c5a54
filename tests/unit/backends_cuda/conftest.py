"""Where the kernels' tests run: on the emulator always, and on a CUDA device where there is one."""

import functools
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from anychip.contract import Direction, OperatorTable
from anychip_cuda import attention, operators, varlen
from anychip_cuda.native import Kernels
from tests.unit.backends_cuda import attention_kernels


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """In another order of threads than the first, with a sanitizer too, the tests are a grid.

    Where a chip is not, the first test of each file says so for all that need it.
    """
    if os.environ.get("ANYCHIP_EMULATOR_ORDER", "forward") != "forward":
        for item in items:
            item.add_marker(pytest.mark.grid)
    yield
    said: set[tuple[Path, str]] = set()
    left_out = set()
    for item in items:
        chip = item.callspec.params.get("chip") if hasattr(item, "callspec") else None
        if chip is not None and isinstance(_find(chip), str):
            if (item.path, chip) in said:
                left_out.add(item)
            said.add((item.path, chip))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def drawn(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> Tensor:
    """Seeded normal numbers on the host."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (scale * numbers).to(dtype)


def copied(value: Any) -> Any:
    """Copies of the tensors in a value, at aligned addresses; lists and tuples looked into."""
    return tree_map_only(Tensor, torch.clone, value)


def same(one: Any, other: Any) -> bool:
    """Whether the tensors of two values have the same bits, whichever NaN they are."""
    kinds = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
    sides = [[t.cpu().view(kinds[t.element_size()]) for t in tree_leaves(side)]
             for side in (one, other)]  # fmt: skip
    return all(map(torch.equal, *sides))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> attention_kernels.Kernels:
    """torch's attention kernels, in float64, for a device of compute capability 8.0."""
    made = attention_kernels.Kernels()
    for module in (attention, varlen):
        monkeypatch.setattr(module, "_aten", made)
    attention_kernels.set_device(monkeypatch, "A100")
    return made


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

    def call(self, operator: str, direction: Direction, *args: Any, **attrs: Any) -> Any:
        """What the operator's first row gives of tensors of the host, there again."""
        row = self.table.rows(operator, direction)[0]
        placed = [a.to(self.device) if isinstance(a, Tensor) else a for a in args]
        return tree_map(lambda t: None if t is None else t.cpu(), row.function(*placed, **attrs))

    def at(self, values: Tensor, shift: int) -> Tensor:
        """The values, on the chip, ``shift`` elements behind a 16-byte boundary."""
        room = torch.full((values.numel() + shift + 16,), 5, dtype=values.dtype, device=self.device)
        return room[shift : shift + values.numel()].copy_(values)


@functools.cache
def _find(chip: str) -> Kernels | str:
    """The kernels of a chip, or why they cannot be run here."""
    if chip == "cuda":
        if operators.kernels is None or not torch.cuda.is_available():
            return "no CUDA device, or no kernels for it"
        return operators.kernels
    from tests.cuda_emulated.anychip_cuda_emulated import backend

    try:
        return Kernels(backend.load_emulator(), backend.host_place)
    except ImportError as error:
        if os.environ.get("ANYCHIP_EMULATOR_REQUIRED"):
            raise
        return str(error)


@pytest.fixture(params=["emulated", "cuda"], scope="session")
def chip(request: pytest.FixtureRequest) -> Chip:
    """The emulator, then the device."""
    from anychip_cuda.table import make_table

    kernels = _find(request.param)
    if isinstance(kernels, str):
        pytest.skip(kernels)
    device = torch.device("cuda" if request.param == "cuda" else "cpu")
    return Chip(device, kernels, make_table(kernels, mapped=False))
