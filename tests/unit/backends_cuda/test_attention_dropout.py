"""Attention with dropout in blocks of heads: the mask of the operator, whatever the block."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anychip import operators as specs
from anychip_cuda import attention_blocks
from anychip_cuda import attention_dropout as rows
from tests.unit.dispatch.calls import samples

SCORES = {"one head": 1, "a few": 60, "whole batches": 150, "all": 1 << 27}
"""At a time. The samples have 5 x 5 and 3 x 7 scores per head, 6 x 4, 3 x 3 and 3 x 5."""


def at(address: int, numel: int, kind: Any, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((kind * numel).from_address(address), dtype=dtype)


class Kernels:
    """The dropout kernel on host memory, by the operator's reference."""

    def __init__(self) -> None:
        self.calls = 0
        self.codes = {torch.float32: 0}
        self.native = SimpleNamespace(dropout_rows=self.dropout_rows)

    def place(self, x: Tensor) -> tuple[int, int]:
        return 0, 0

    def dropout_rows(
        self, x: int, rng: int, y: int, rows: int, count: int, columns: int, width: int,
        column: int, p: float, code: int, device: int, stream: int,
    ) -> None:  # fmt: skip
        self.calls += 1
        stream_of = at(rng, 2, ctypes.c_int64, torch.int64)
        source = at(x, count * columns, ctypes.c_float, torch.float32).view(count, columns)
        numbers = at(rows, count, ctypes.c_int64, torch.int64)
        found = specs.dropout.forward(
            source.clone(), stream_of, numbers, p=p, width=width, column=column
        )
        at(y, count * columns, ctypes.c_float, torch.float32).copy_(found.view(-1))


@pytest.mark.parametrize("block", list(SCORES))
@pytest.mark.parametrize("index", range(5))
def test_rows_of_attention_dropout_agree_with_the_reference(
    index: int, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_blocks, "BLOCK", SCORES[block])
    sample = samples("attention_dropout", torch.float32)[index]
    attrs: dict[str, Any] = dict(sample.attrs)
    q, k, v, *drop = sample.args
    kernels: Any = Kernels()
    y, lse = rows.attention_dropout(kernels, q, k, v, *drop, **attrs)
    want, want_lse = specs.attention_dropout.forward(q, k, v, *drop, **attrs)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)
    grad = torch.cos(torch.arange(y.numel(), dtype=torch.float32)).view(y.shape)
    saved = (grad, q, k, v, want, want_lse, *drop)
    found = rows.attention_dropout_backward(kernels, *saved, **attrs, needs=(True,) * 3)
    assert specs.attention_dropout.backward is not None
    wanted = specs.attention_dropout.backward(*saved, **attrs, needs=(True,) * 3)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    batches, kv_heads = q.shape[0], k.shape[2]
    most, least = 2 * batches * kv_heads, 2
    assert kernels.calls == (most if block == "one head" else kernels.calls)
    assert least <= kernels.calls <= most
    if block == "all":
        assert kernels.calls == least
