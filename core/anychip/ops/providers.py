"""Whose rows may serve an operator: those of a backend, and of the kernel packs for it."""

from collections.abc import Iterable

from anychip import registry
from anychip.contract import Backend, ContractError
from anychip.dispatch.library import cover_autocast
from anychip.dispatch.operator import check_names
from anychip.dispatch.selection import Provider


def providers(chosen: Backend) -> tuple[Provider, ...]:
    """The packs' rows, then the backend's own.

    Raises:
        ContractError: a pack has a row for an operator that does not exist.
    """
    cover_autocast(chosen.device_type)
    packs = [
        Provider(distribution, distribution, version, table)
        for table, distribution, version in registry.kernel_packs(chosen)
    ]
    if any(len(pack.table) for pack in packs):
        _refuse_unknown(packs)
    distribution, version = registry.provenance_of(chosen)
    return (*packs, Provider(chosen.name, distribution, version, chosen.operators))


def _refuse_unknown(packs: Iterable[Provider]) -> None:
    """A row for an operator that does not exist would never be called, and nobody would know."""
    for pack in packs:
        for row in pack.table:
            try:
                check_names([row.operator])
            except ValueError as error:
                raise ContractError(
                    f"the kernel pack {pack.distribution} {pack.version} has the row {row.label}, "
                    f"and {error}; fix it, or uninstall {pack.distribution}"
                ) from None
