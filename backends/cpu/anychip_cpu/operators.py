"""The table of the cpu backend: every module of rows is imported here, in the order of trial.

Native rows hand addresses to ``csrc/cpu``. Without the native module only the mapped rows are
there, and the reference serves the rest.
"""

from __future__ import annotations

from anychip_cpu import (  # noqa: F401 - all but native declare rows
    activation,
    attention,
    attention_dropout,
    compression,
    convolution,
    dropout,
    embedding,
    linear_loss,
    lists,
    loss,
    native,
    norm,
    permutation,
    products,
    quantization,
    rope,
    softmax,
    updates,
    varlen,
)
from anychip_cpu.table import declared

table = declared.remade(
    lambda row: None if row.kind == "native" and native.kernels is None else row
)
