"""Packed sequences: padding, empty sequences, and the longest one."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from anychip_cuda import attention, products, varlen
from anychip_cuda.table import make_table
from tests.unit.backends_cuda.attention_kernels import Kernels, backward, forward

# Ends of sequences, rows in all: empty sequences at both ends and in the middle, and padding.
PACKS = [
    ([0], 3), ([0, 5], 5), ([0, 3, 8, 12], 12), ([0, 0, 4, 4, 9, 9], 9), ([0, 2], 6), ([0, 0], 4),
]  # fmt: skip
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """torch's kernels, for a device of compute capability 8.0."""
    made = Kernels()
    for module in (attention, varlen):
        monkeypatch.setattr(module, "_aten", made)
        monkeypatch.setattr(module, "capability", lambda tensor: (8, 0))
    return made


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=["int64", "int32"])
@pytest.mark.parametrize(("ends", "tokens"), PACKS, ids=str)
def test_rows_of_varlen_attend_within_sequences_and_clear_the_padding(
    ends: list[int], tokens: int, index: torch.dtype, kind: str
) -> None:
    dtype = DTYPES[kind]
    q = drawn(tokens, 4, 12, dtype=dtype, seed=0)
    k, v = (drawn(tokens, 2, 12, dtype=dtype, seed=s) for s in (1, 2))
    grad, cu_seqlens = drawn(tokens, 4, 12, dtype=dtype, seed=3), torch.tensor(ends, dtype=index)
    for t in (q, k, v, grad):
        t[ends[-1] :] = math.nan  # memory that nobody wrote
    attrs: dict[str, Any] = {"causal": True, "scale": None}
    y, lse = row("forward", kind)(q, k, v, cu_seqlens, **attrs)
    found = row("backward", kind)(
        grad, q, k, v, y, lse, cu_seqlens, **attrs, needs=(True, True, True)
    )
    want, want_lse = torch.zeros_like(y), torch.full_like(lse, -math.inf)
    wanted = [torch.zeros_like(t) for t in (q, k, v)]
    for a, b in itertools.pairwise(ends):
        if a < b:
            own = [t[None, a:b] for t in (q, k, v)]
            one, one_lse = forward(*own, True, 12**-0.5)
            want[a:b], want_lse[:, a:b] = one[0].to(dtype), one_lse[0]
            parts = backward(grad[None, a:b], *own, y[None, a:b], lse[None, :, a:b], True, 12**-0.5)
            for whole, part in zip(wanted, parts, strict=True):
                whole[a:b] = part[0]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)
    for got, expected in zip((y, *found), (want, *wanted), strict=True):
        torch.testing.assert_close(got, expected, rtol=eps, atol=eps)
        assert got.is_contiguous()


def row(direction: Any, kind: str) -> Any:
    name = "by_flash" if kind == "bfloat16" else "by_sequence"
    rows = make_table(None).rows("attention_varlen", direction)
    return next(r.function for r in rows if r.function.__name__.endswith(name))


def test_longest_of_empty_sequences_is_a_grid_that_can_be_launched() -> None:
    assert varlen.longest(torch.tensor([0, 0, 0]), 3) == 1


def test_longest_while_a_graph_is_recorded_is_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay may find other numbers in the same tensor."""
    cu_seqlens = torch.tensor([0, 2, 9, 12])
    assert varlen.longest(cu_seqlens, 12) == 7
    monkeypatch.setattr(varlen, "_recording", lambda x: True)
    assert varlen.longest(cu_seqlens, 12) == 12
    q = torch.zeros(12, 1, 8)
    assert not varlen._takes_each(q, q, q, causal=True, scale=None), "it reads every number"


def test_grouped_product_by_group_is_refused_while_a_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnDevice:
        device = torch.device("cuda", 0)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not products._may_wait(OnDevice())  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert products._may_wait(OnDevice())  # type: ignore[arg-type]
