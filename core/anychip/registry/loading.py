"""Does a plugin keep to the contract? Imports it, asks its hook, checks what comes back.

Whoever calls this runs the plugin's code in his own process. For a plugin that nobody named the
caller is the child process of :mod:`.probing`.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import cast, get_args

import pluggy

from anychip.cabi import Library
from anychip.contract import (
    API_VERSION,
    PROJECT,
    Backend,
    BackendUnavailableError,
    Kind,
    OperatorTable,
    Probe,
    Status,
)
from anychip.contract import hooks as hook_specifications
from anychip.registry.changes import REPLACED, sentences
from anychip.registry.discovery import Plugin

MAX_REASON = 300


class LoadError(Exception):
    """A plugin cannot be used; ``probe`` is the answer to give in its place."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        super().__init__(probe.reason)


def load(plugin: Plugin) -> Backend:
    """Imports a plugin and returns its backend.

    Raises:
        LoadError: with ``broken`` or ``incompatible`` and the reason in one line.
    """
    if plugin.is_library:
        return _opened(lambda: Library(plugin.module))
    manager = load_hooks(plugin)
    try:
        backend = _opened(manager.hook.anychip_backend)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(_broken(f"anychip_backend() raised {describe(error)}")) from error
    if backend is None:
        check_hook_names(manager)  # the usual reason for None is a misspelt name
    if not isinstance(backend, Backend):
        raise LoadError(_broken(_not_a_backend(plugin, manager, backend)))
    _check_version(backend)
    check_hook_names(manager)  # after the version: a later one may have hooks of its own
    _check_attributes(plugin, backend)
    return backend


def _opened(make: Callable[[], Backend]) -> Backend:
    """What ``make`` returns; a library that does not fit says so itself."""
    try:
        return make()
    except BackendUnavailableError as error:
        fix, reason = error.fix, one_line(error.reason)
        raise LoadError(Probe(status=cast(Status, error.status), reason=reason, fix=fix)) from error


def load_hooks(plugin: Plugin) -> pluggy.PluginManager:
    """Imports a plugin's module and lets pluggy check the signatures of its hooks.

    Raises:
        LoadError: with ``broken`` and the reason in one line.
    """
    if plugin.problem:
        raise LoadError(_broken(plugin.problem))
    try:
        module = EntryPoint(plugin.name, plugin.module, plugin.group).load()
    except (Exception, SystemExit) as error:
        raise LoadError(_broken(f"importing {plugin.module!r} raised {describe(error)}")) from error
    # A manager for each plugin: one with a bad hook says nothing about the next one.
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hook_specifications)
    try:
        manager.register(module, name=plugin.name)
    except (Exception, SystemExit) as error:
        raise LoadError(_broken(f"a hook does not fit: {describe(error)}")) from error
    return manager


def check_hook_names(manager: pluggy.PluginManager) -> None:
    """Refuses hook implementations of names that the contract does not have.

    Raises:
        LoadError: with ``broken`` and the name.
    """
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise LoadError(_broken(f"a hook does not fit: {describe(error)}")) from error


def ask(backend: Backend) -> Probe:
    """The backend's answer to ``probe()``, checked, with its device type filled in.

    An exception is an answer too: ``broken``.
    """
    try:
        answer = backend.probe()
    except (Exception, SystemExit) as error:
        return replace(
            _broken(f"probe() raised {describe(error)}"), device_type=backend.device_type
        )
    if not isinstance(answer, Probe):
        answer = _broken(f"probe() must return an anychip.Probe, got {type(answer).__name__}")
    elif answer.status not in get_args(Status) or answer.kind not in get_args(Kind):
        answer = _broken(f"probe() returned status {answer.status!r}, kind {answer.kind!r}")
    elif answer.status == "ready" and answer.device_count < 1:
        answer = _broken(f"probe() says ready with {answer.device_count} devices")
    return replace(answer, reason=one_line(str(answer.reason)), device_type=backend.device_type)


def describe(error: BaseException) -> str:
    """Type and message of an exception in one line."""
    return one_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def one_line(text: str) -> str:
    """``text`` without line breaks and control characters, at most MAX_REASON characters."""
    clean = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return clean if len(clean) <= MAX_REASON else f"{clean[: MAX_REASON - 4]} ..."


def _broken(reason: str) -> Probe:
    return Probe.broken(one_line(reason))


def _not_a_backend(plugin: Plugin, manager: pluggy.PluginManager, got: object) -> str:
    if manager.hook.anychip_backend.get_hookimpls():
        made = f"the class {got.__name__}" if isinstance(got, type) else f"a {type(got).__name__}"
        made = "None" if got is None else made
        return f"anychip_backend() must return an instance of anychip.Backend, got {made}"
    if hasattr(sys.modules[plugin.module.partition(":")[0]], "anychip_backend"):
        return f"{plugin.module}.anychip_backend is not marked with @anychip.hookimpl"
    return f"{plugin.module!r} has no hook anychip_backend()"


def _check_version(backend: Backend) -> None:
    wanted = getattr(backend, "api", None)
    if not (isinstance(wanted, tuple) and [type(part) for part in wanted] == [int, int]):
        raise LoadError(_broken(f"its api must be (major, minor), got {wanted!r}"))
    if wanted[0] == API_VERSION[0] and wanted[1] <= API_VERSION[1]:
        return
    mine, its = ("{}.{}".format(*version) for version in (API_VERSION, wanted))
    older = "the plugin" if wanted < API_VERSION else "anychip"
    fix = f"install a newer version of {older}"
    if wanted[0] == API_VERSION[0] - 1:
        fix = f"{fix}, or change this one: {' '.join(sentences(backend))}"
    reason = f"it was made for version {its} of the contract, and this anychip has {mine}"
    raise LoadError(Probe.incompatible(reason, fix=fix))


def _check_attributes(plugin: Plugin, backend: Backend) -> None:
    name = getattr(backend, "name", None)
    if name != plugin.name:
        raise LoadError(
            _broken(f"its entry point is named {plugin.name!r}, but the backend's name is {name!r}")
        )
    for old, new in REPLACED.items():
        if hasattr(backend, old):
            raise LoadError(
                Probe.incompatible(
                    f"it has {old}(), which this anychip does not call",
                    fix=f"write {new} in its place: docs/writing-a-backend.md",
                )
            )
    for attribute, kind in (("device_type", str), ("operators", OperatorTable)):
        value = getattr(backend, attribute, None)
        if not isinstance(value, kind):
            raise LoadError(
                _broken(f"its {attribute} must be of type {kind.__name__}, got {value!r}")
            )
