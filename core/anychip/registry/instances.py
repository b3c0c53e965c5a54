"""The backends of this process: one object for each plugin, made when it is first asked for.

Here plugins are imported into the user's own process, and only here.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from anychip import torch_extension
from anychip.cabi import Library
from anychip.contract import Backend, BackendUnavailableError, Communicator, Probe, settings
from anychip.registry import environment, table
from anychip.registry.discovery import TORCH_BACKEND, TORCH_DEFAULT, Plugin
from anychip.registry.loading import LoadError, ask, load

if TYPE_CHECKING:
    from anychip.comm.job import Rendezvous

_UNNAMED_SLOT = "privateuseone"
_lock = threading.RLock()
_backends: dict[Plugin, Backend] = {}
_torch_defaults: dict[str, Backend] = {}


def ready_instance(plugin: Plugin) -> tuple[Backend, Probe]:
    """The plugin's backend, and its answer, given just now in this process.

    Raises:
        BackendUnavailableError: it cannot be loaded, or it answers that it cannot run.
        ContractError: it changes a setting of torch's.
    """
    with settings.unchanged(f"the backend {plugin.name!r} of {plugin}"):
        with _lock:
            if plugin not in _backends:
                _require_safe_library(plugin)
                _require_private_use_slot(plugin)
                try:
                    _backends[plugin] = load(plugin)
                except LoadError as error:
                    raise unavailable(plugin.name, error.probe) from error.__cause__
            backend = _backends[plugin]
        answer = ask(backend)
    if answer.status != "ready":
        raise unavailable(plugin.name, answer)
    if isinstance(backend, Library):
        backend.attach()
    if not backend.is_host and backend.c10d_backend is None:
        from torch import distributed

        if distributed.is_available():  # a build of torch may be without
            from anychip.comm import process_group

            process_group.register(backend)
    return backend, answer


def _find_job(timeout_s: float, *, given: Any = None) -> Rendezvous | None:
    from anychip.comm import joining

    return joining.rendezvous(
        environment.launched, timeout_s=timeout_s, is_one_machine=environment.is_one_machine(),
        interface=environment.interface(), secret=environment.secret(),
        flight_record=environment.flight_record(), host_transport=environment.host_transport(),
        given=given,
    )  # fmt: skip


def _join(backend: Backend, *, given: Any = None, **settings: Any) -> Communicator:
    from anychip.comm.world import world

    return world(backend, partial(_find_job, given=given), **settings)


# Communicators of any backend, made by hand or not.
Backend.join = _join
torch_extension.cache_directory = environment.cache_directory


def torch_default(device_type: str) -> Backend:
    """The contract's defaults for a device type that no plugin serves."""
    from anychip.registry.torch_default import torch_backend

    with _lock:
        chosen = _backends.get(TORCH_DEFAULT)
        if chosen is not None and chosen.device_type == device_type:
            return chosen
        if device_type not in _torch_defaults:
            _torch_defaults[device_type] = torch_backend(device_type)
        return _torch_defaults[device_type]


def provenance_of(backend: Backend) -> tuple[str, str]:
    """Distribution and version of the plugin that a backend came from.

    A backend that was made by hand and not by the registry has its module in place of the
    distribution, and the version "not installed".
    """
    for plugin, instance in list(_backends.items()):
        if instance is backend:
            return plugin.distribution, plugin.version
    if any(instance is backend for instance in list(_torch_defaults.values())):
        return TORCH_DEFAULT.distribution, TORCH_DEFAULT.version
    return type(backend).__module__, "not installed"


def name_of(backend: Backend) -> str:
    """By which another process finds a backend: its name, or an unpackaged library's path."""
    found = (plugin.name for plugin, instance in _backends.items() if instance is backend)
    return next(found, backend.name)


def unavailable(name: str, answer: Probe) -> BackendUnavailableError:
    """The error for an answer that is not ``ready``."""
    return BackendUnavailableError(name, answer.status, answer.reason, answer.fix)


def _require_safe_library(plugin: Plugin) -> None:
    """Lets a child process open a library first: a file that is none may crash who opens it."""
    if not plugin.is_library or environment.is_worker() or environment.is_probe():
        return
    answer = table.answer_of(plugin)
    if answer.status != "ready":
        raise unavailable(plugin.name, answer)


def _require_private_use_slot(plugin: Plugin) -> None:
    """Refuses a plugin that needs torch's one private-use device type when another has it.

    torch would raise in the middle of the plugin's import, which cannot be undone. A worker starts
    no probe and leaves it to torch.
    """
    torch = sys.modules.get("torch")
    taken = torch._C._get_privateuse1_backend_name() if torch else _UNNAMED_SLOT
    if taken in (_UNNAMED_SLOT, plugin.name) or plugin.name == TORCH_BACKEND:
        return
    if environment.is_worker():
        return
    device_type = table.answer_of(plugin).device_type
    if device_type is None or device_type == taken or _is_torch_type(device_type):
        return
    raise BackendUnavailableError(
        plugin.name,
        "unavailable",
        f"it needs torch's private-use device type for {device_type!r}, and in this process "
        f"{taken!r} has it already; torch has one per process",
        fix=f"start a new process and ask for {plugin.name} there",
    )


def _is_torch_type(device_type: str) -> bool:
    import torch

    try:
        torch.device(device_type)
    except RuntimeError:
        return False
    return True
