"""Which plugins are installed? Answered from the metadata of distributions; imports none of them.

A plugin is an entry point of the group ``anychip.backends`` (name: the backend's; value: a module),
a kernel pack one of ``anychip.kernels`` (name: ``<device>.<pack>``). pluggy's own loader is not
used: one broken plugin would stop it, and it drops the second of two plugins of one name silently.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import anychip
from anychip.contract import Backend

BACKENDS = "anychip.backends"
KERNEL_PACKS = "anychip.kernels"
TORCH_BACKEND = "torch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """An entry point and the distribution that brings it.

    Attributes:
        group: BACKENDS or KERNEL_PACKS.
        name: the entry point's name.
        module: its value: the module with the hooks.
        distribution, version: who brings it.
        problem: why its metadata cannot be used, or None.
    """

    group: str
    name: str
    module: str
    distribution: str
    version: str
    problem: str | None = None

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    @property
    def is_library(self) -> bool:
        """It is a chip's C library that was named by its path; ``module`` is that."""
        return "/" in self.module


TORCH_DEFAULT = Plugin(
    group=BACKENDS, name=TORCH_BACKEND, module="anychip.registry.torch_default",
    distribution="anychip", version=anychip.__version__,
)  # fmt: skip
"""Serves a device that torch knows and no plugin does; found like everybody else."""


def backend_plugins() -> dict[str, list[Plugin]]:
    """Every backend's name, sorted, and who claims it; more than one claim is a conflict."""
    claims: dict[str, list[Plugin]] = {}
    found = [plugin for plugin in installed() if plugin.group == BACKENDS]
    for plugin in sorted([*found, TORCH_DEFAULT], key=lambda plugin: plugin.name):
        claims.setdefault(plugin.name, []).append(plugin)
    return claims


def library(path: str) -> Plugin:
    """The plugin that a C library is without any packaging; its version is a hash of the file."""
    whole = Path(path).resolve()
    version = hashlib.sha256(whole.read_bytes()).hexdigest()[:12] if whole.is_file() else "missing"
    return Plugin(
        group=BACKENDS, name=str(whole), module=str(whole), distribution=whole.name, version=version
    )


def kernel_pack_plugins(backend: Backend) -> list[Plugin]:
    """The kernel packs for a backend, then those for its type of device, by their names.

    So the order does not depend on the installation. Packs for others are not looked at.
    """
    ranks = {backend.device_type: 1, backend.name: 0}
    packs = [(p.name.partition(".")[0], p) for p in installed() if p.group == KERNEL_PACKS]
    found = [(ranks[of], pack.name, str(pack), pack) for of, pack in packs if of in ranks]
    return [pack for *_, pack in sorted(found, key=lambda entry: entry[:3])]


@cache
def installed() -> tuple[Plugin, ...]:
    """The entry points of all distributions, read once per process."""
    distributions: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        if "[anychip." in (distribution.read_text("entry_points.txt") or ""):
            # As in importlib: what comes first on sys.path hides a second copy of the same name.
            normalised = re.sub(r"[-_.]+", "-", _name(distribution)).lower()
            distributions.setdefault(normalised, distribution)
    return tuple(p for distribution in distributions.values() for p in _plugins(distribution))


def _plugins(distribution: metadata.Distribution) -> Iterator[Plugin]:
    name = _name(distribution)
    version = _of_metadata(distribution, "Version")
    made = partial(Plugin, distribution=name, version=version)
    try:
        entries = [e for e in distribution.entry_points if e.group in (BACKENDS, KERNEL_PACKS)]
    except Exception as error:  # one unreadable file must not hide the other distributions
        problem = f"the entry_points.txt of {name} {version} cannot be read ({error})"
        yield made(group=BACKENDS, name=name, module="", problem=" ".join(problem.split()))
        return
    for entry in entries:
        yield made(group=entry.group, name=entry.name, module=entry.value)


def _name(distribution: metadata.Distribution) -> str:
    return _of_metadata(distribution, "Name")


def _of_metadata(distribution: metadata.Distribution, key: str) -> str:
    about = distribution.metadata  # to ask it for what it lacks is deprecated
    return str((about[key] if key in about else "") or "unknown")
