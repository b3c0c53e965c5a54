"""The host's attention beyond one tile of its kernel, next to float64 of each sequence by itself.

How small ones and their edges are computed is asked by the conformance suite.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from anychip.operators.attention import _factor
from anychip_cpu import attention, tiled_attention
from anychip_cpu.backend import CpuBackend
from tests.unit.dispatch.calls import bits
from tests.unit.operators.exactness import assert_close

pytestmark = pytest.mark.skipif(not tiled_attention._FUSED, reason="torch's kernel is quicker")

ENDS = ([0, 100, 100, 297, 300], [0, 90, 100, 297, 310])


def _wide(q: Tensor, k: Tensor, v: Tensor, causal: bool, factor: Tensor | float = 1.0) -> Tensor:
    """(Sq, H, D) and (Sk, Hk, D) in float64; rows that see nothing are 0."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1) if causal else scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights.nan_to_num(0.0) * factor, v)


def _made(shape: tuple[int, ...], dtype: torch.dtype, spread: int) -> Tensor:
    """Heads that lie between others."""
    rows, heads, dim = shape[-3:]
    whole = torch.randn(*shape[:-3], rows, heads + spread, dim + spread).to(dtype)
    return whole[..., :heads, :dim].detach().requires_grad_()


def assert_gradients_close(leaves: Sequence[Tensor], wide: Sequence[Tensor], count: float) -> None:
    for leaf, exact in zip(leaves, wide, strict=True):
        assert leaf.grad is not None
        assert exact.grad is not None
        assert_close(leaf.grad, exact.grad, count, ulps=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "dim", "packed"),
    [(193, 193, 4, 4, 64, False), (97, 250, 6, 2, 32, False), (250, 97, 2, 2, 33, False),
     (33, 33, 5, 1, 128, False), (310, 320, 4, 2, 16, True)],
)  # fmt: skip
def test_values_and_gradients_are_those_of_float64_in_every_layout(
    queries: int, keys: int, heads: int, kv_heads: int, dim: int, packed: bool, causal: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    front = () if packed else (2,)
    q = _made((*front, queries, heads, dim), dtype, 1)
    k, v = (_made((*front, keys, kv_heads, dim), dtype, spread) for spread in (0, 3))
    ends = [torch.tensor(e, dtype=torch.int32) for e in ENDS] if packed else []
    with anychip.policy(fallback="strict"):
        call = ops.attention_varlen if packed else ops.attention
        y = call(q, k, v, *ends, causal=causal, out_dtype=torch.float32)
        slope = torch.randn(y.shape[:-1])[..., None].expand(y.shape)
        y.backward(slope)
    assert {row.kind for row in anychip.provenance().rows()} == {"native"}
    want = torch.zeros(y.shape, dtype=torch.float64)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    places = list(zip(*map(itertools.pairwise, ENDS), strict=True))
    parts = places if packed else [(b, b) for b in range(2)]
    for own, seen in parts:
        mine = slice(*own) if packed else own
        other = slice(*seen) if packed else seen
        want[mine] = _wide(wide[0][mine], wide[1][other], wide[2][other], causal)
    want.backward(slope.double())
    # A chain of fused products, of which the errors add up like the root of their number.
    assert_close(y.detach(), want.detach(), 4 * math.sqrt(keys))
    assert_gradients_close((q, k, v), wide, 16 * math.sqrt(max(queries, keys) * heads))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "is_part"),
    [(193, 193, 4, 2, False), (100, 250, 3, 3, True), (130, 7, 2, 2, False), (9, 230, 6, 1, True),
     (61, 61, 4, 2, False)],
)  # fmt: skip
def test_weights_are_dropped_as_the_reference_does(
    queries: int, keys: int, heads: int, kv_heads: int, is_part: bool, causal: bool
) -> None:
    torch.manual_seed(0)
    q = _made((2, queries, heads, 32), torch.float32, 1)
    k, v = (_made((2, keys, kv_heads, 32), torch.float32, 0) for _ in range(2))
    rng, index, sizes = torch.tensor([5, -9]), list[Tensor](), dict[str, int]()
    if is_part:  # of 7 batches, a row of positions from two places, and keys in no order
        positions = [torch.arange(n) + 400 * (torch.arange(n) > n // 3) for n in (queries, keys)]
        positions[1][:20] = positions[1][:20].flip(0)
        index = [torch.tensor([6, 2]), torch.arange(heads) * 2, *positions]
        sizes = {"heads": 12, "queries": 1000, "keys": 1000}
    with anychip.policy(fallback="strict"):
        y = ops.attention_dropout(q, k, v, rng, *index, p=0.3, causal=causal, **sizes)
        y.backward(slope := torch.randn(y.shape))
    assert {row.kind for row in anychip.provenance().rows()} == {"native"}
    factor = _factor(q, k, rng, *(index or [None] * 4), p=0.3, **sizes).double()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = torch.stack([_wide(*(t[b] for t in wide), causal, factor[b]) for b in range(2)])
    want.backward(slope.double())
    assert_close(y.detach(), want.detach(), 6 * math.sqrt(keys))
    assert_gradients_close((q, k, v), wide, 24 * math.sqrt(max(queries, keys) * heads))


def test_weights_of_one_tile_that_are_all_minus_infinity_leave_the_others() -> None:
    """The first 96 keys of 200 have the score -inf, and query 3 is NaN; the rest is exact."""
    q, k, v = (torch.zeros(1, 200, 1, 8) for _ in range(3))
    q[..., 0], q[0, 3], k[0, :96, :, 0] = 1.0, math.nan, -math.inf
    v[0, :, 0] = torch.arange(200.0)[:, None] - 148.0
    y, lse = tiled_attention.forward(q, k, v, causal=False, scale=None, out_dtype=None)
    want = torch.full((200,), -0.5)
    want[3] = 7.0
    assert torch.equal(y.nan_to_num(7.0), want[None, :, None, None].expand_as(y))
    assert_close(lse[0, 0, 4:].double(), torch.full((196,), math.log(104.0)).double(), 4)


@pytest.mark.parametrize(
    ("queries", "dtype", "tiles", "native"),
    [(3, torch.float32, (), False), (100, torch.float32, (torch.bfloat16,), True),
     (100, torch.bfloat16, (), True), (100, torch.bfloat16, (torch.bfloat16,), False)],
)  # fmt: skip
def test_rows_that_torch_computes_quicker_are_left_to_it(
    queries: int, dtype: torch.dtype, tiles: tuple[Any, ...], native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those of few queries, and where the processor has tiles for 16 bits, of these."""
    monkeypatch.setattr(attention, "IN_TILES", tiles)
    q, k = torch.randn(1, queries, 4, 16).to(dtype), torch.randn(1, 100, 4, 16).to(dtype)
    rows = CpuBackend.operators.rows("attention", "forward")
    taken = [row.accepts is None or row.accepts(q, k, k, causal=True, scale=None) for row in rows]
    assert list(zip((row.kind for row in rows), taken, strict=True)) == [
        ("native", native), ("mapped", True),
    ]  # fmt: skip


def test_packed_sequences_have_the_bits_of_each_by_itself() -> None:
    q, k = torch.randn(310, 4, 32), torch.randn(320, 2, 32)
    packed = ops.attention_varlen(q, k, k, *[torch.tensor(e) for e in ENDS], causal=True)
    own = slice(100, 297)
    alone = ops.attention(q[None, own], k[None, own], k[None, own], causal=True)
    assert bits(packed[own]) == bits(alone[0])
