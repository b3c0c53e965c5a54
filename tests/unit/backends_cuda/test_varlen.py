"""Packed sequences: padding, empty sequences, and the longest one."""

import math

import pytest
import torch

from anychip_cuda import products, varlen
from anychip_cuda.table import make_table
from tests.unit.backends_cuda.attention_kernels import Kernels
from tests.unit.backends_cuda.conftest import drawn
from tests.unit.dispatch.calls import bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_padding_that_nobody_wrote_shows_nowhere(dtype: torch.dtype, kernels: Kernels) -> None:
    ends, found = [torch.tensor([0, 0, 3, 7, 7]), torch.tensor([0, 1, 2, 6, 6])], []
    rows = [
        next(row.function for row in make_table(None).rows("attention_varlen", direction)
             if row.function.__name__.endswith("flash" if dtype.itemsize == 2 else "sequence"))
        for direction in ("forward", "backward")
    ]  # fmt: skip
    for unwritten in (0.0, math.nan):
        q, k, v, grad = (drawn(9, heads, 12, dtype=dtype) for heads in (4, 2, 2, 4))
        q[7:], grad[7:], k[6:], v[6:] = (unwritten,) * 4
        y, lse = rows[0](q, k, v, *ends, causal=True, scale=None, out_dtype=None)
        given = (grad, q, k, v, y, lse, *ends)
        dq, dk, dv = gradients = rows[1](
            *given, causal=True, scale=None, out_dtype=None, needs=(True,) * 3
        )
        # Of the second sequence's three queries the last one sees its only key.
        blind = torch.tensor([0, 1, 7, 8])
        assert not any(
            t[rows].any()
            for t, rows in ((y, blind), (dq, blind), (dk, [0, 6, 7, 8]), (dv, [0, 6, 7, 8]))
        )
        assert lse.isneginf().nonzero()[:, 1].unique().equal(blind)
        found.append(bits([y, lse, *gradients]))
    assert found[0] == found[1]


def test_longest_of_empty_sequences_is_a_grid_that_can_be_launched() -> None:
    q, ends = torch.zeros(3, 1, 8), torch.tensor([0, 0, 0])
    assert varlen.longest(q, q, ends, torch.tensor([0, 0, 2])) == (2, 2)


def test_longest_while_a_graph_is_recorded_is_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay may find other numbers in the same tensor."""
    ends = torch.tensor([0, 2, 9, 12]), torch.tensor([0, 2, 4, 4])
    q, k = torch.zeros(12, 1, 8), torch.zeros(5, 1, 8)
    assert varlen.longest(q, k, *ends) == (7, 2)
    monkeypatch.setattr(varlen, "_recording", lambda x: True)
    assert varlen.longest(q, k, *ends) == (12, 5)
    assert varlen.longest(q[:1], k, *ends) == (2, 5), "1 means something else to torch"
    assert not varlen._takes_each(q, q, q, causal=True, scale=None, out_dtype=None), (
        "it reads every number"
    )


def test_grouped_product_by_group_is_refused_while_a_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnDevice:
        device, dtype = torch.device("cuda", 0), torch.bfloat16

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not products._by_group(OnDevice(), None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert products._by_group(OnDevice(), None)  # type: ignore[arg-type]
    assert not products._by_group(OnDevice(), torch.float32)  # type: ignore[arg-type]
