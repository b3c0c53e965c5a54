"""Which plugins bring operators for somebody else's chip?

A kernel pack is an entry point ``<device>.<pack>`` of the group ``anychip.kernels``: a type of
device as torch names it, whoever's plugin drives it, or one backend. So packs for other chips are
never imported. What else a pack needs, its hook finds out from the backend that it is given.
"""

from typing import Any

from anychip.contract import Backend, ContractError, OperatorTable, settings
from anychip.registry.discovery import KERNEL_PACKS, Plugin, kernel_pack_plugins
from anychip.registry.loading import LoadError, check_hook_names, describe, load_hooks


def kernel_packs(backend: Backend) -> list[tuple[OperatorTable, str, str]]:
    """The tables of all packs for a backend, each with its distribution and version.

    Raises:
        ContractError: a pack cannot be loaded, does not hand over tables, or changes a setting of
            torch's. It is never left out silently: its rows are faster or more exact, and nobody
            would see that they are missing.
    """
    return [
        (table, pack.distribution, pack.version)
        for pack in kernel_pack_plugins(backend)
        for table in pack_tables(pack, backend)
    ]


def pack_tables(pack: Plugin, backend: Backend) -> list[OperatorTable]:
    """The tables of one pack.

    Raises:
        ContractError: as :func:`kernel_packs`.
    """
    with settings.unchanged(f"the kernel pack {pack.name!r} of {pack}"):
        return _tables(pack, backend)


def _tables(pack: Plugin, backend: Backend) -> list[OperatorTable]:
    if not pack.name.partition(".")[2]:
        raise _wrong(pack, f"its entry point must be named {pack.name}.<pack>")
    try:
        manager = load_hooks(pack)
        check_hook_names(manager)
    except LoadError as error:
        raise _wrong(pack, str(error)) from error.__cause__
    hook = manager.hook.anychip_operators
    if not hook.get_hookimpls():
        raise _wrong(pack, f"{pack.module!r} has no hook anychip_operators(backend)")
    try:
        return [table for result in hook(backend=backend) for table in _as_tables(pack, result)]
    except ContractError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _wrong(pack, f"anychip_operators() raised {describe(error)}") from error


def _as_tables(pack: Plugin, result: Any) -> list[OperatorTable]:
    tables = [result] if isinstance(result, OperatorTable) else list(result)
    for table in tables:
        if not isinstance(table, OperatorTable):
            wrong = f"anychip_operators() must return OperatorTables, got {type(table).__name__}"
            raise _wrong(pack, wrong)
    return tables


def _wrong(pack: Plugin, what: str) -> ContractError:
    return ContractError(
        f"the kernel pack {pack.name!r} of {pack} (entry point in {KERNEL_PACKS}) cannot be used: "
        f"{what}; fix it, or uninstall {pack.distribution}"
    )
