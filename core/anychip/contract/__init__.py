"""The contract: what a chip provides. Readable in an hour; imports nothing else of ours.

``backend`` joins ``device``, ``memory``, ``operator`` and ``collectives``; ``hooks`` is how a
plugin hands them over; ``errors`` is what can go wrong. Importing this does not import torch.
"""

from anychip.contract.backend import (
    API_VERSION,
    Backend,
    Candidate,
    Decision,
    Finding,
    Kind,
    Probe,
    Status,
)
from anychip.contract.collectives import (
    Capabilities,
    Communicator,
    Reduction,
    SoloCommunicator,
    Traffic,
    Transfer,
    Work,
)
from anychip.contract.device import DeviceInterface, DeviceProperties, Graph
from anychip.contract.errors import (
    AmbiguousBackendError,
    AnychipError,
    BackendUnavailableError,
    CommunicationError,
    ContractError,
    DeviceError,
    FallbackError,
    OverlapError,
    UnknownBackendError,
    UnsupportedError,
)
from anychip.contract.hooks import PROJECT, hookimpl
from anychip.contract.memory import Memory, MemoryInfo, MemoryStats
from anychip.contract.operator import (
    Bound,
    Cost,
    Direction,
    OperatorSpec,
    OperatorTable,
    Pair,
    Placement,
    Placements,
    Residual,
    Row,
    Sample,
    SampleMaker,
    Sharding,
)

__all__ = [
    "API_VERSION",
    "PROJECT",
    "AmbiguousBackendError",
    "AnychipError",
    "Backend",
    "BackendUnavailableError",
    "Bound",
    "Candidate",
    "Capabilities",
    "CommunicationError",
    "Communicator",
    "ContractError",
    "Cost",
    "Decision",
    "DeviceError",
    "DeviceInterface",
    "DeviceProperties",
    "Direction",
    "FallbackError",
    "Finding",
    "Graph",
    "Kind",
    "Memory",
    "MemoryInfo",
    "MemoryStats",
    "OperatorSpec",
    "OperatorTable",
    "OverlapError",
    "Pair",
    "Placement",
    "Placements",
    "Probe",
    "Reduction",
    "Residual",
    "Row",
    "Sample",
    "SampleMaker",
    "Sharding",
    "SoloCommunicator",
    "Status",
    "Traffic",
    "Transfer",
    "UnknownBackendError",
    "UnsupportedError",
    "Work",
    "hookimpl",
]
