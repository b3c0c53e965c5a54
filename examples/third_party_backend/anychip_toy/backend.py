"""The toy chip: the host's processor, driven by numpy. Joins device, memory and operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy

from anychip.contract import Backend, Finding, Memory, Probe
from anychip_toy.device import ToyDevice
from anychip_toy.memory import ToyMemory
from anychip_toy.operators import table


class ToyBackend(ToyDevice, Backend):
    """What a vendor fills in: five attributes, a probe, and what differs from the defaults."""

    name = "toy"
    device_type = "cpu"  # a chip with a torch adapter names its own type here
    c10d_backend = "gloo"  # and its collective library's name for torch.distributed here
    api = (2, 0)  # the version of the contract that this was written for
    operators = table
    # The defaults for streams and statistics need a device module in torch, which numpy has not.
    capabilities: Mapping[str, int] = {}

    def probe(self) -> Probe:
        """A real chip looks for its driver and device files, and says what is missing."""
        found = Probe.ready(1, kind="host", reason=f"numpy {numpy.__version__} on the host")
        return found.depending_on()  # the variables and files that it may change with: none

    def diagnose(self) -> Sequence[Finding]:
        """Lines for ``anychip doctor toy``."""
        return [Finding(True, f"{len(table)} rows, all of them numpy")]

    @cached_property
    def memory(self) -> Memory:
        return ToyMemory(self)
