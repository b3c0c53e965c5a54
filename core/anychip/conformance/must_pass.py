"""Which cases has a backend to pass, for the statement that it passed a level of the suite?

All of the level, but those of a capability that it does not declare. A case that every backend has
is never excused: neither as unsupported nor as an expected failure. Operators of third parties are
in the suite, and not in the list. The list follows from what the backend declares, so that it can
be made again without the chip: :class:`Declared` stands in for the backend.

After the must-pass lists of the Vulkan CTS (Khronos, external/vulkancts, "mustpass").
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import anychip
from anychip.conformance.case import Case, Context, Level
from anychip.conformance.chapters import all_cases
from anychip.conformance.formats import FORMATS
from anychip.conformance.hashes import digest, suite_hash
from anychip.contract import Backend, DeviceProperties, OperatorTable, Probe
from anychip.dispatch.operator import registered


class MustPass(NamedTuple):
    """A list and its hash.

    Attributes:
        ids: of the cases, sorted.
        capabilities: of the level's other cases, by id: what they need, and is not declared.
        hash: of the suite's version and files, the level, and the ids.
    """

    ids: tuple[str, ...]
    capabilities: Mapping[str, str]
    hash: str


def must_pass(cases: Iterable[Case], backend: Backend, level: Level) -> MustPass:
    """The list among all cases of a backend.

    Args:
        cases: of all chapters and both levels.
    """
    asked = [c for c in cases if (level == "full" or not c.full) and not _is_foreign(c)]
    other = {
        case.id: case.capability
        for case in asked
        if case.capability is not None and case.capability not in backend.capabilities
    }
    ids = tuple(sorted(case.id for case in asked if case.id not in other))
    return MustPass(ids, other, digest([anychip.__version__, suite_hash(), level, *ids]))


def declared_list(
    device_type: str, capabilities: Mapping[str, int], formats: Iterable[str], level: Level
) -> MustPass:
    """The list of a backend that is not here.

    Args:
        capabilities: those that it declares, with their versions.
        formats: names of the float types that it computes in: fp32, bf16, fp16.
    """
    declared = tuple(sorted(capabilities.items()))
    return _declared_list(device_type, declared, tuple(sorted(formats)), level)


@cache
def _declared_list(
    device_type: str,
    capabilities: tuple[tuple[str, int], ...],
    formats: tuple[str, ...],
    level: Level,
) -> MustPass:
    backend = Declared(device_type, dict(capabilities), formats)
    return must_pass(all_cases(Context(backend, level)), backend, level)


def _is_foreign(case: Case) -> bool:
    """Whether the case is about an operator of a third party."""
    operator = registered().get(case.id.split("/")[1])
    return operator is not None and operator.spec.namespace != "anychip"


class Declared(Backend):
    """What a backend declared, and nothing that could run."""

    name = "declared"
    api = (2, 0)
    operators = OperatorTable()

    def __init__(
        self, device_type: str, capabilities: Mapping[str, int], formats: Iterable[str]
    ) -> None:
        named = set(formats)
        self.device_type = device_type
        self.capabilities = dict(capabilities)
        self.dtypes = frozenset(d for d, format in FORMATS.items() if format.name in named)

    def probe(self) -> Probe:
        return Probe.unavailable("a declaration is no device")

    def properties(self, index: int | None = None) -> DeviceProperties:
        return DeviceProperties(name="declared", total_memory=1, dtypes=self.dtypes)
