"""The table of the npu backend: every module of rows is imported here, in the order of trial."""

from __future__ import annotations

from anychip_npu import (  # noqa: F401 - all declare rows, or why there are none
    activation,
    attention,
    dropout,
    embedding,
    lists,
    loss,
    norm,
    permutation,
    products,
    quantization,
    rope,
    softmax,
    updates,
    varlen,
)
from anychip_npu.table import declared, served

table = declared.remade(served)
