"""How do shards become a prepared directory? Read once, filtered, made into tokens, hashed.

``pipeline`` reads and writes, in order, and goes on where it was ended; ``work`` is what is done
with documents, which ``workers`` have done in processes; ``filters`` say which documents stay, of
which ``scoring`` has those that ask a model. ``growing`` reads a directory while a process beside
prepares it, and ``cache`` knows which one: for a training that waits for it, or does not.
"""

from anychip.train.preparing.cache import cached, streamed
from anychip.train.preparing.filters import Filter, FilterError
from anychip.train.preparing.growing import Growing, Show, say_nothing
from anychip.train.preparing.pipeline import Progress, prepare
from anychip.train.preparing.work import Request, open_tokenizer
from anychip.train.preparing.workers import WorkerError

__all__ = [
    "Filter", "FilterError", "Growing", "Progress", "Request", "Show", "WorkerError", "cached",
    "open_tokenizer", "prepare", "say_nothing", "streamed",
]  # fmt: skip
