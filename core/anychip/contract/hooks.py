"""The pluggy hooks of a plugin module. They hand over objects; none runs on the step path."""

from collections.abc import Iterable

import pluggy

from anychip.contract.backend import Backend
from anychip.contract.operator import OperatorTable

PROJECT = "anychip"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin module as a hook implementation."""


@hookspec(firstresult=True)
def anychip_backend() -> Backend | None:
    """The plugin's backend. Called once, after the plugin was chosen or for its probe."""


@hookspec
def anychip_operators(backend: Backend) -> OperatorTable | Iterable[OperatorTable] | None:
    """Rows for somebody else's chip, if this plugin has any for ``backend``; tried first."""
