"""The table of the cuda backend: every module of rows is imported here, in the order of trial."""

from __future__ import annotations

from anychip_cuda import (  # noqa: F401 - all but native declare rows
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
from anychip_cuda.native import Kernels, current_place
from anychip_cuda.table import make_table

kernels = None if native.module is None else Kernels(native.module, current_place)
table = make_table(kernels)
