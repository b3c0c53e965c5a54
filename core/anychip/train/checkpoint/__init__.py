"""What survives the process: a checkpoint that is complete or not there, and resume bit for bit.

``DIRECTORY/checkpoint`` holds files of tensors in the safetensors format, one per rank that wrote,
a file with the other values (``progress``: generators, position in the data, settings of the
optimizer), and a manifest that says of each tensor in which file its boxes are, with hashes. Files
are named by their content. A save writes new files beside the old ones and then replaces the
manifest by one atomic rename: whenever a process or the machine stops, the manifest names one
complete checkpoint. One job saves at a time. Loading verifies the hashes and the form of everything
that it reads, runs no code from the files, and changes something only when all of it fits.

No tensor is gathered to be saved: each rank writes what it owns, and of what several have alike its
share. At any other arrangement (stage of ZeRO, ranks, stages of a pipeline) each rank reads the
boxes that meet its own. With a :class:`Saver` a thread writes, while training goes on.
"""

from anychip.train.checkpoint.background import Saver
from anychip.train.checkpoint.folder import CheckpointError
from anychip.train.checkpoint.holders import Stateful
from anychip.train.checkpoint.loading import State, resume, saved_step
from anychip.train.checkpoint.manifest import FORMAT, PARTS, VERSION, WHOLE_TENSORS
from anychip.train.checkpoint.names import Names, names_of
from anychip.train.checkpoint.saving import save

__all__ = [
    "FORMAT", "PARTS", "VERSION", "WHOLE_TENSORS", "CheckpointError", "Names", "Saver", "State",
    "Stateful", "names_of", "resume", "save", "saved_step",
]  # fmt: skip
