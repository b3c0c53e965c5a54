"""Rows of a test in front of the cpu backend's own, and off again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import anychip
from anychip import OperatorTable, ops, registry
from anychip.dispatch import selection
from anychip.dispatch.selection import Provider
from anychip.ops.providers import providers

Install = Callable[..., None]


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
