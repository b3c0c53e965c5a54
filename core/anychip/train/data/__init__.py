"""From files to batches: which tokens does step N see, on which rank?

``sources`` reads documents, a tokenizer (``text``: bytes; ``bpe``: trained) makes tokens of them,
``packing`` joins them (``messages`` those of conversations), in memory, or ``prepared`` has them in
a directory; ``rows`` reads them there, ``order`` says which window is whose, ``loader`` hands out
batches, ``prefetch`` makes them ahead, and ``held_out`` has windows that are not trained on.
docs/data.md has the guarantees.
"""

from anychip.train.data.bpe import BPETokenizer, train_bpe
from anychip.train.data.extra import MissingExtraError
from anychip.train.data.held_out import HeldOut
from anychip.train.data.loader import Batch, Loader
from anychip.train.data.messages import describe_template, tokenize_messages
from anychip.train.data.packing import (
    IGNORED_TARGET,
    cu_seqlens,
    dtype_of,
    mask_targets,
    positions,
    tokenize,
)
from anychip.train.data.prepared import Prepared, PreparedError, is_prepared
from anychip.train.data.rows import InMemory, Mixture, TokenRow, Tokens, join
from anychip.train.data.sources import (
    find_files,
    read_documents,
    read_file,
    read_messages,
    read_texts,
)
from anychip.train.data.text import (
    VOCAB_SIZE,
    ByteTokenizer,
    Tokenizer,
    decode,
    encode,
    python_documentation,
)

__all__ = [
    "IGNORED_TARGET", "VOCAB_SIZE", "BPETokenizer", "Batch", "ByteTokenizer", "HeldOut",
    "InMemory", "Loader", "MissingExtraError", "Mixture", "Prepared", "PreparedError", "TokenRow",
    "Tokenizer", "Tokens", "cu_seqlens", "decode", "describe_template", "dtype_of", "encode",
    "find_files", "is_prepared", "join", "mask_targets", "positions", "python_documentation",
    "read_documents", "read_file", "read_messages", "read_texts", "tokenize", "tokenize_messages",
    "train_bpe",
]  # fmt: skip
