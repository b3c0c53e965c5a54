"""Rows of a test in front of the cpu backend's own, and off again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import anychip
from anychip import OperatorTable, ops, registry
from anychip.dispatch import selection
from anychip.dispatch.selection import Provider
from anychip.ops.providers import providers

Install = Callable[..., None]
Function = Callable[..., Tensor]


def own_providers() -> tuple[Provider, ...]:
    """The cpu backend as everybody gets it."""
    anychip.use("cpu")
    return selection.providers_for("cpu")


def uninstall() -> None:
    """What :func:`installation` put in front is gone, for who asks anew."""
    selection.connect(registry.owner, providers)


@contextmanager
def installation() -> Iterator[Install]:
    """Gives a function that installs tables, each as a kernel pack, in front of the cpu's rows."""
    own = own_providers()
    assert ops.rms_norm

    def install(*tables: OperatorTable, alone: bool = False) -> None:
        packs = tuple(
            Provider(f"pack{i}", f"anychip-pack{i}", "4.2", table) for i, table in enumerate(tables)
        )
        selection.connect(
            lambda _: anychip.use("cpu"), lambda _: packs if alone else (*packs, *own)
        )
        selection.activate(anychip.backend())

    try:
        yield install
    finally:
        uninstall()
        anychip.use("cpu")


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


@pytest.fixture(params=["short cut", "library"])
def rms_norm(request: pytest.FixtureRequest) -> Function:
    """The operator, by each of its doors."""
    return ops.rms_norm if request.param == "short cut" else torch.ops.anychip.rms_norm


@contextmanager
def deterministic() -> Iterator[None]:
    """torch's deterministic mode; of memory, what is read before it is written is NaN, not zero."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
