"""attention, attention_dropout, attention_varlen: what no oracle says."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anychip import ops
from anychip.conformance.oracles import philox
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


def weights_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """(B, H, Sq, Sk), from attention itself: values that are one-hot give the weights."""
    batch, keys, kv_heads, dim = k.shape
    width = max(keys, dim)
    one_hot = torch.eye(keys, width)[None, :, None].expand(batch, keys, kv_heads, width)
    wide = (F.pad(t, (0, width - dim)) for t in (q, k))
    y = ops.attention(*wide, one_hot.contiguous(), causal=causal, scale=dim**-0.5)
    return y[..., :keys].transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seed", "offset"), [(3, 0), (-1, 2**32 - 5), (2**40, -7)])
def test_dropout_mask_is_the_stream_over_all_weights(seed: int, offset: int, causal: bool) -> None:
    q, k, v = (t.detach() for t in qkv(5, 7))
    p = 0.4
    kept = philox.words(seed, offset, 2 * 4 * 5 * 7) >= int(p * 2**32)
    mask = torch.from_numpy(kept.reshape(2, 4, 5, 7)).float()
    weights = weights_of(q, k, causal) * mask / (1.0 - p)
    want = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, 2))
    got = ops.attention_dropout(q, k, v, torch.tensor([seed, offset]), p=p, causal=causal)
    torch.testing.assert_close(got, want, **CLOSE)
    assert 0.5 < float(mask.mean()) < 0.7


def test_dropout_of_a_part_has_the_mask_of_the_whole() -> None:
    sizes, p = (5, 6, 9, 11), 0.4
    kept = philox.words(3, 2**32 - 5, math.prod(sizes)) >= int(p * 2**32)
    places = [torch.randperm(n)[:count] for n, count in zip(sizes, (2, 4, 5, 7), strict=True)]
    mask = torch.from_numpy(kept.reshape(sizes))[torch.meshgrid(*places, indexing="ij")]
    q, k, v = (t.detach() for t in qkv(5, 7))
    weights = weights_of(q, k, False) * mask / (1.0 - p)
    want = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, 2))
    rng = torch.tensor([3, 2**32 - 5])
    got = ops.attention_dropout(q, k, v, rng, *places, p=p, heads=6, queries=9, keys=11)
    torch.testing.assert_close(got, want, **CLOSE)


def test_dropout_of_nothing_is_attention_and_of_everything_zero() -> None:
    q, k, v = qkv(5, 7)
    rng = torch.tensor([1, 2])
    for causal in (True, False):
        got = ops.attention_dropout(q, k, v, rng, p=0.0, causal=causal)
        want = ops.attention(q, k, v, causal=causal)
        torch.testing.assert_close(got, want, **CLOSE)
        grads = [torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (got, want)]
        torch.testing.assert_close(*grads, **CLOSE)
    gone = ops.attention_dropout(q, k, v, rng, p=1.0)
    assert not gone.any()
    assert not any(g.any() for g in torch.autograd.grad(gone.sum(), (q, k, v)))


def test_dropout_has_the_mask_of_the_dropout_operator() -> None:
    q, k, _ = qkv(6, 6, heads=2, kv_heads=2)
    rng = torch.tensor([8, 9])
    with torch.no_grad():
        want = ops.dropout(weights_of(q, k, False).contiguous(), rng, p=0.3)
        one_hot = torch.eye(6, 8)[None, :, None].expand(2, 6, 2, 8).contiguous()
        got = ops.attention_dropout(q, k, one_hot, rng, p=0.3)[..., :6].transpose(1, 2)
    torch.testing.assert_close(got, want, **CLOSE)
    assert torch.equal(got != 0, want != 0)


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


@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("entries", "message"), [
    ([0, 3, 2, 5], r"sorted, from 0 to the 5 rows; got \[0, 3, 2, 5\]"),
    ([0, 6], r"from 0 to the 5 rows; got \[0, 6\]"),
    ([-1, 5], r"got \[-1, 5\]"), ([1, 5], r"must start with 0, got \[1, 5\]"),
], ids=str)  # fmt: skip
def test_varlen_refuses_entries_that_are_no_packing(
    entries: list[int], message: str, width: torch.dtype
) -> None:
    *leaves, right = packed([2, 1, 2])
    wrong, right = torch.tensor(entries, dtype=width), right[: len(entries)]
    for name, ends in (("q", (wrong, right)), ("k", (right, wrong))):
        match = f"attention_varlen: cu_seqlens_{name}.*{message}"
        with pytest.raises(ValueError, match=match):
            ops.attention_varlen(*leaves, *ends)


# Results of float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["attention", "attention_varlen"])
def test_float32_of_16_bits_is_that_of_the_same_numbers_in_float32(
    name: str, dtype: torch.dtype
) -> None:
    *leaves, cu_seqlens = packed([4, 5, 3])
    ends = [cu_seqlens] * 2 if name == "attention_varlen" else []
    found = []
    for given in (dtype, torch.float32):
        low = [t.detach().to(dtype).to(given).requires_grad_() for t in leaves]
        batch = low if ends else [t[None] for t in low]
        y = getattr(ops, name)(*batch, *ends, causal=True, out_dtype=torch.float32)
        found.append([y, *(g.to(dtype) for g in torch.autograd.grad(y.square().sum(), low))])
    assert [t.dtype for t in found[0]] == [torch.float32, dtype, dtype, dtype]
    assert bits(found[0]) == bits(found[1])
