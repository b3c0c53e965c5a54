"""Which backends are there, which can run, which one serves? Plugins are imported when chosen.

``discovery`` reads metadata, ``probing`` asks in child processes, ``probe_cache`` remembers,
``table`` joins the answers, ``choice`` decides, ``instances`` holds what this process uses.
"""

from anychip.registry.choice import backends, choose, forecast, owner, require, take_device
from anychip.registry.diagnosis import Diagnosis, diagnose
from anychip.registry.instances import name_of, provenance_of
from anychip.registry.kernel_packs import kernel_packs
from anychip.registry.table import BackendRecord

__all__ = [
    "BackendRecord", "Diagnosis", "backends", "choose", "diagnose", "forecast", "kernel_packs",
    "name_of", "owner", "provenance_of", "require", "take_device",
]  # fmt: skip
