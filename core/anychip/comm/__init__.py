"""How ranks communicate: find each other, move tensors, know who is still there.

The registry puts it into backends. Importing this does not import torch.
"""

from anychip.comm.agreement import agree
from anychip.comm.generations import Meeting
from anychip.comm.group import alone
from anychip.comm.objects import gather_objects
from anychip.comm.wire import wire_nbytes
from anychip.comm.world import meet_again, num_waiting

__all__ = [
    "Meeting", "agree", "alone", "gather_objects", "meet_again", "num_waiting", "wire_nbytes",
]  # fmt: skip
