"""Which backend serves which device type, under which policy: the process-wide state of dispatch.

The state is one immutable :class:`Selection`. ``use()`` and ``policy()`` replace it whole, so that
a call reads one attribute and never a half-changed state; resolved plans belong to it and go with
it. Its ``label`` is guarded by compiled code: after a change, ``torch.compile`` compiles again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from anychip.contract import Backend, OperatorTable, Row

Fallback = Literal["record", "strict"]


class Provider(NamedTuple):
    """Where rows come from: a backend or a kernel pack, with the distribution that brought it."""

    name: str
    distribution: str | None
    version: str | None
    table: OperatorTable


Observer = Callable[[Row, Provider], Callable[..., Any]]
"""Gives what is called in the place of a row's function, and calls that itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What the user decides about implementations.

    Attributes:
        fallback: ``record``: the reference may serve a call, and it is counted. ``strict``: such a
            call is an error before anything is written.
        pin: operator to the one implementation allowed: a provider's name, a row kind or label, or
            ``reference``.
        forbid: operator to implementations that must not be taken, named in the same way.
    """

    fallback: Fallback = "record"
    pin: Mapping[str, str] = field(default_factory=dict)
    forbid: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fallback not in get_args(Fallback):
            raise ValueError(f"fallback must be 'record' or 'strict', got {self.fallback!r}")

    def over(self, other: Policy, fallback: Fallback | None) -> Policy:
        """This policy added to ``other``; ``fallback`` None keeps the other's."""
        named = {*other.forbid, *self.forbid}
        nothing: frozenset[str] = frozenset()
        return Policy(
            fallback=other.fallback if fallback is None else fallback,
            pin={**other.pin, **self.pin},
            forbid={n: other.forbid.get(n, nothing) | self.forbid.get(n, nothing) for n in named},
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """The state: providers by device type, the policy, and the plans resolved under both."""

    label: str
    providers: Mapping[str, tuple[Provider, ...]]
    policy: Policy
    observer: Observer | None = None
    plans: dict[Any, Any] = field(default_factory=dict)


_lock = threading.RLock()
_epochs = itertools.count(1)
_labels: dict[Any, str] = {}
_layers: list[tuple[Policy, Fallback | None]] = []
_find_owner: Callable[[str], Backend] | None = None
_find_providers: Callable[[Backend], tuple[Provider, ...]] | None = None

current = Selection(label="epoch 0", providers={}, policy=Policy())
"""Read by every call. Only this module assigns it."""


def connect(
    find_owner: Callable[[str], Backend], find_providers: Callable[[Backend], tuple[Provider, ...]]
) -> None:
    """Tells dispatch whom to ask for a device type's backend, and for a backend's tables."""
    global _find_owner, _find_providers
    _find_owner, _find_providers = find_owner, find_providers


def _change(providers: Mapping[str, tuple[Provider, ...]], policy: Policy) -> None:
    """Replaces the state. Under the same providers the same policy has the same label.

    So a block that is entered on every step compiles once, not on every step.
    """
    global current
    if providers is not current.providers:
        _labels.clear()
    pins, forbidden = frozenset(policy.pin.items()), frozenset(policy.forbid.items())
    label = _labels.setdefault((policy.fallback, pins, forbidden), f"epoch {next(_epochs)}")
    current = replace(current, label=label, plans={}, providers=providers, policy=policy)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Context in which calls of rows go by way of an observer, for the whole process.

    The same rows serve the same calls, and are counted as without it.
    """
    global current
    with _lock:
        before, current = current.observer, replace(current, plans={}, observer=observer)
    try:
        yield
    finally:
        with _lock:
            current = replace(current, plans={}, observer=before)


def _layered() -> Policy:
    found = Policy()
    for layer, fallback in _layers:
        found = layer.over(found, fallback)
    return found


def activate(backend: Backend) -> None:
    """Makes a backend serve its device type from now on."""
    assert _find_providers is not None, "anychip.ops connects dispatch to the registry"
    providers = _find_providers(backend)
    with _lock:
        _change({**current.providers, backend.device_type: providers}, current.policy)


def providers_for(device_type: str) -> tuple[Provider, ...]:
    """Who serves a device type; asks for its owner when nobody was chosen yet.

    Tensors without data (``meta``) belong to nobody: the reference gives their shapes.
    """
    if device_type == "meta":
        return ()
    known = current.providers.get(device_type)
    if known is None:
        assert _find_owner is not None, "anychip.ops connects dispatch to the registry"
        activate(_find_owner(device_type))
        known = current.providers[device_type]
    return known


@contextmanager
def policy(
    *,
    fallback: Fallback | None = None,
    pin: Mapping[str, str] | None = None,
    forbid: Mapping[str, Iterable[str]] | None = None,
) -> Iterator[Policy]:
    """Changes the policy within a block, for the whole process; what is not given stays.

    Blocks of several threads may overlap: leaving one takes away what it added, no more.

    Args:
        fallback: see :class:`Policy`.
        pin: added to the pins in force.
        forbid: added to what is forbidden.

    Raises:
        ValueError: an unknown fallback.
    """
    banned = {
        name: frozenset([given] if isinstance(given, str) else given)
        for name, given in (forbid or {}).items()
    }
    own = Policy(fallback="record" if fallback is None else fallback, pin=pin or {}, forbid=banned)
    layer = (own, fallback)
    with _lock:
        _layers.append(layer)
        after = _layered()
        _change(current.providers, after)
    try:
        yield after
    finally:
        with _lock:
            del _layers[next(i for i, other in enumerate(_layers) if other is layer)]
            _change(current.providers, _layered())
