"""Communication between ranks: the interface, and the transports that come with the contract."""

from anychip.contract.collectives.agreement import agree
from anychip.contract.collectives.communicator import (
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
from anychip.contract.collectives.objects import gather_objects
from anychip.contract.collectives.solo import SoloCommunicator
from anychip.contract.collectives.wire import wire_nbytes

__all__ = [
    "CALLS",
    "DONE",
    "REDUCTIONS",
    "Capabilities",
    "Communicator",
    "Reduction",
    "SoloCommunicator",
    "Traffic",
    "Transfer",
    "Work",
    "agree",
    "gather_objects",
    "wire_nbytes",
]
