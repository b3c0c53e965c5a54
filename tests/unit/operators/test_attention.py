"""attention, attention_dropout, attention_varlen: what no oracle says."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from anychip import ops
from tests.unit.dispatch.calls import bits

NAMES = ("attention", "attention_dropout", "attention_varlen")
CLOSE = dict(rtol=1e-5, atol=2e-6)
"""Some tens of float32 roundings of numbers of size 1 to 10."""


pytestmark = pytest.mark.usefixtures("pin")


def qkv(queries: int, keys: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(queries * 100 + keys)
    q = torch.randn(2, queries, heads, 8, requires_grad=True)
    return q, *(torch.randn(2, keys, kv_heads, 8, requires_grad=True) for _ in range(2))


# Queries and keys of different lengths


def test_query_that_sees_no_key_is_zero_and_has_no_gradient() -> None:
    q, k, v = qkv(6, 4)
    y = ops.attention(q, k, v, causal=True)
    assert bits(y[:, :2]) == bits(torch.zeros(2, 2, 4, 8))
    dq, dk, dv = torch.autograd.grad(y.square().sum(), (q, k, v), create_graph=True)
    assert not dq[:, :2].any()
    # The last four queries are a square of their own.
    alone = ops.attention(q[:, 2:], k, v, causal=True)
    torch.testing.assert_close(y[:, 2:], alone, **CLOSE)
    want = torch.autograd.grad(alone.square().sum(), (k, v))
    torch.testing.assert_close((dk, dv), want, **CLOSE)
    # Nothing over nothing is not in the second derivative either.
    second = torch.autograd.grad(sum(g.square().sum() for g in (dq, dk, dv)), (q, k, v))  # type: ignore[arg-type]
    assert all(g.isfinite().all() for g in second)
    assert not second[0][:, :2].any()
    _, lse = ops.attention.forward(q, k, v, causal=True)
    assert lse[..., :2].isneginf().all()
    assert lse[..., 2:].isfinite().all()


# Dropout


def test_dropout_leaves_rng_and_the_global_generator_alone() -> None:
    q, k, v = qkv(4, 4)
    rng, state = torch.tensor([1, 2]), torch.get_rng_state()
    ops.attention_dropout(q, k, v, rng, p=0.5).sum().backward()
    assert rng.tolist() == [1, 2]
    assert torch.equal(torch.get_rng_state(), state)


# Packed sequences


def packed(lengths: list[int], padding: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(sum(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tokens = sum(lengths) + padding
    q = torch.randn(tokens, 4, 8, requires_grad=True)
    return q, *(torch.randn(tokens, 2, 8, requires_grad=True) for _ in range(2)), cu_seqlens


def test_varlen_of_a_sequence_does_not_depend_on_the_others() -> None:
    """Loud numbers of another sequence, and what is not even a number in the padding."""
    *leaves, cu_seqlens = packed([4, 5, 3], 2)
    found = []
    for loud, unwritten in ((1.0, 0.0), (1e15, math.nan)):
        with torch.no_grad():
            for leaf in leaves:
                leaf[:4] *= loud
                leaf[12:] = unwritten
        y = ops.attention_varlen(*leaves, cu_seqlens, cu_seqlens, causal=True)
        slope = torch.ones_like(y)
        slope[12:] = unwritten
        grads = torch.autograd.grad(y, leaves, slope)
        assert bits(y[12:]) == bits(torch.zeros(2, 4, 8))
        assert not any(g[12:].any() for g in grads)
        found.append([t[4:12].detach() for t in (y, *grads)])
        _, lse = ops.attention_varlen.forward(*leaves, cu_seqlens, cu_seqlens, causal=True)
        assert lse[:, 12:].isneginf().all()
    torch.testing.assert_close(*found, **CLOSE)


# Results of float32
