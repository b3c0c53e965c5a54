"""The contract: what a chip provides. Readable in an hour; imports nothing else of ours.

``backend`` joins ``device``, ``memory``, ``operator`` and ``communicator``; ``hooks`` is how a
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
from anychip.contract.communicator import (
    CALLS,
    DONE,
    REDUCTIONS,
    Capabilities,
    Communicator,
    Reduction,
    Traffic,
    Transfer,
    Work,
)
from anychip.contract.device import HOST, HOST_LIBRARY, DeviceInterface, DeviceProperties, Graph
from anychip.contract.errors import (
    AmbiguousBackendError,
    AnychipError,
    BackendUnavailableError,
    CommunicationError,
    ContractError,
    DeviceError,
    FallbackError,
    OverlapError,
    TransportError,
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
from anychip.contract.transport import CollectiveCall, Job, Membership, Transport

__all__ = [
    "API_VERSION", "CALLS", "DONE", "HOST", "HOST_LIBRARY", "PROJECT", "REDUCTIONS",
    "AmbiguousBackendError", "AnychipError", "Backend", "BackendUnavailableError", "Bound",
    "Candidate", "Capabilities", "CollectiveCall", "CommunicationError", "Communicator",
    "ContractError", "Cost", "Decision", "DeviceError", "DeviceInterface", "DeviceProperties",
    "Direction", "FallbackError", "Finding", "Graph", "Job", "Kind", "Membership", "Memory",
    "MemoryInfo", "MemoryStats", "OperatorSpec", "OperatorTable", "OverlapError", "Pair",
    "Placement", "Placements", "Probe", "Reduction", "Residual", "Row", "Sample", "SampleMaker",
    "Sharding", "Status", "Traffic", "Transfer", "Transport", "TransportError",
    "UnknownBackendError", "UnsupportedError", "Work", "hookimpl",
]  # fmt: skip
