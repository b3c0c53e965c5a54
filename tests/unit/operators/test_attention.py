"""attention, attention_dropout, attention_varlen, rope: what their samples do not say."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anychip
from anychip import ops
from anychip.conformance.oracles.reference import InFloat64
from anychip_cpu import native
from tests.unit.dispatch.calls import SPECS, bits
from tests.unit.operators.philox import stream

NAMES = ("attention", "attention_dropout", "attention_varlen", "rope")
CLOSE = dict(rtol=1e-5, atol=2e-6)
"""Some tens of float32 roundings of numbers of size 1 to 10."""


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def pin(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu" and native.kernels is None:
        pytest.skip(str(native.problem))
    with anychip.policy(pin=dict.fromkeys(NAMES, request.param)):
        yield request.param


def qkv(queries: int, keys: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(queries * 100 + keys)
    q = torch.randn(2, queries, heads, 8, requires_grad=True)
    return q, *(torch.randn(2, keys, kv_heads, 8, requires_grad=True) for _ in range(2))


# Queries and keys of different lengths


def test_causal_attention_of_the_last_queries_is_the_end_of_the_square_one() -> None:
    """A query sees the same keys, whether or not the ones before it are asked too."""
    q, k, v = qkv(9, 9)
    whole = ops.attention(q, k, v, causal=True)
    for last in (1, 2, 5, 9):
        got = ops.attention(q[:, 9 - last :], k, v, causal=True)
        torch.testing.assert_close(got, whole[:, 9 - last :], **CLOSE)
        grads = torch.autograd.grad(got.square().sum(), (q, k, v))
        want = torch.autograd.grad(
            whole[:, 9 - last :].square().sum(), (q, k, v), retain_graph=True
        )
        torch.testing.assert_close(grads, want, **CLOSE)


@pytest.mark.parametrize(("queries", "keys"), [(3, 7), (1, 5), (16, 33)])
def test_causal_attention_with_more_keys_equals_torch_with_a_mask(queries: int, keys: int) -> None:
    q, k, v = qkv(queries, keys)
    # torch.tril counts its diagonal from the first key.
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    by_head = [t.transpose(1, 2) for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*by_head, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    got = ops.attention(q, k, v, causal=True)
    torch.testing.assert_close(got, want, **CLOSE)
    grads = [torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (got, want)]
    torch.testing.assert_close(*grads, **CLOSE)


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
    _, lse = torch.ops.anychip.attention_forward(q, k, v, True, None)
    assert lse[..., :2].isneginf().all()
    assert lse[..., 2:].isfinite().all()


def test_value_of_one_key_is_returned_whatever_the_scores() -> None:
    q, k, v = qkv(3, 1)
    y = ops.attention(q * 1e4, k, v)
    want = v.repeat_interleave(2, 2).expand(2, 3, 4, 8)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=0.0)


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
    kept = stream(seed, offset, 2 * 4 * 5 * 7) >= int(p * 2**32)
    mask = torch.from_numpy(kept.reshape(2, 4, 5, 7)).float()
    weights = weights_of(q, k, causal) * mask / (1.0 - p)
    want = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, 2))
    got = ops.attention_dropout(q, k, v, torch.tensor([seed, offset]), p=p, causal=causal)
    torch.testing.assert_close(got, want, **CLOSE)
    assert 0.5 < float(mask.mean()) < 0.7


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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("lengths", "padding"),
    [([5], 0), ([3, 6, 1], 0), ([0, 4, 0, 0, 2, 0], 0), ([3, 4], 3), ([], 2), ([0], 0)],
    ids=str,
)
def test_varlen_equals_attention_of_each_sequence_alone(
    lengths: list[int], padding: int, causal: bool
) -> None:
    *leaves, cu_seqlens = packed(lengths, padding)
    y = ops.attention_varlen(*leaves, cu_seqlens, causal=causal)
    parts = zip(*(t.split([*lengths, padding]) for t in leaves), strict=True)
    alone = [
        ops.attention(*(t[None] for t in part), causal=causal)[0]
        for part in list(parts)[:-1]
        if len(part[0])
    ]
    want = torch.cat([*alone, torch.zeros(padding, 4, 8)])
    torch.testing.assert_close(y, want, **CLOSE)
    grads = torch.autograd.grad(y.square().sum(), leaves)
    expected = torch.autograd.grad(want.square().sum(), leaves) if alone else leaves
    end = sum(lengths)
    for got, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(got[:end], other[:end], **CLOSE)
        assert not got[end:].any()


def test_varlen_of_a_sequence_does_not_depend_on_the_others() -> None:
    """Loud numbers of another sequence, and what is not even a number in the padding."""
    *leaves, cu_seqlens = packed([4, 5, 3], 2)
    found = []
    for loud, unwritten in ((1.0, 0.0), (1e15, math.nan)):
        with torch.no_grad():
            for leaf in leaves:
                leaf[:4] *= loud
                leaf[12:] = unwritten
        y = ops.attention_varlen(*leaves, cu_seqlens, causal=True)
        slope = torch.ones_like(y)
        slope[12:] = unwritten
        grads = torch.autograd.grad(y, leaves, slope)
        assert bits(y[12:]) == bits(torch.zeros(2, 4, 8))
        assert not any(g[12:].any() for g in grads)
        found.append([t[4:12].detach() for t in (y, *grads)])
        _, lse = torch.ops.anychip.attention_varlen_forward(*leaves, cu_seqlens, True, None)
        assert lse[:, 12:].isneginf().all()
    torch.testing.assert_close(*found, **CLOSE)


def test_varlen_with_entries_of_32_bits_gives_the_bits_of_64() -> None:
    *leaves, cu_seqlens = packed([3, 0, 6, 1], 2)
    found = []
    for entries in (cu_seqlens, cu_seqlens.int()):
        y = ops.attention_varlen(*leaves, entries, causal=True)
        found.append(bits([y, torch.autograd.grad(y.square().sum(), leaves)]))
    assert found[0] == found[1]


@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("entries", "message"), [
    ([0, 3, 2, 5], r"sorted, from 0 to the 5 rows; got \[0, 3, 2, 5\]"),
    ([0, 6], r"from 0 to the 5 rows; got \[0, 6\]"),
    ([-1, 5], r"got \[-1, 5\]"), ([1, 5], r"must start with 0, got \[1, 5\]"),
], ids=str)  # fmt: skip
def test_varlen_refuses_entries_that_are_no_packing(
    entries: list[int], message: str, width: torch.dtype
) -> None:
    *leaves, _ = packed([5])
    with pytest.raises(ValueError, match=f"attention_varlen: cu_seqlens.*{message}"):
        ops.attention_varlen(*leaves, torch.tensor(entries, dtype=width))


# The references in float64: their backward is the derivative of their forward, twice


def _leaves(name: str) -> tuple[list[Tensor], list[Any], dict[str, Any]]:
    torch.manual_seed(3)

    def wide(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    if name == "rope":
        angles = torch.randn(3, 2, dtype=torch.float64)
        given: list[Any] = [angles.cos(), angles.sin()]
        return [wide(1, 3, 2, 6), wide(1, 3, 1, 6)], given, {"interleaved": True}
    attrs: dict[str, Any] = {"causal": True, "scale": None}
    if name == "attention_varlen":
        cu_seqlens = torch.tensor([0, 2, 2, 5])
        return [wide(6, 2, 3), wide(6, 1, 3), wide(6, 1, 3)], [cu_seqlens], attrs
    leaves = [wide(1, 4, 2, 3), wide(1, 3, 1, 3), wide(1, 3, 1, 3)]
    if name == "attention_dropout":
        return leaves, [torch.tensor([4, 5])], {"p": 0.3, **attrs}
    return leaves, [], attrs


@pytest.mark.parametrize("name", NAMES)
def test_reference_backward_is_the_derivative_of_the_forward_and_so_is_its_own(name: str) -> None:
    spec, (leaves, rest, attrs) = SPECS[name], _leaves(name)
    count = 2 if name == "rope" else 1

    def outputs(*args: Tensor) -> tuple[Tensor, ...]:
        with InFloat64():
            return spec.forward(*args, *rest, **attrs)[:count]

    def gradients(*args: Tensor) -> tuple[Tensor, ...]:
        with InFloat64():
            results = spec.forward(*args, *rest, **attrs)
            grads = [torch.cos(torch.arange(y.numel()).double()).view(y.shape) for y in results]
            saved = [*args, *results, *rest] if count == 1 else rest
            found = spec.backward(*grads[:count], *saved, **attrs, needs=(True,) * len(args))
        return tuple(found)

    weights = [torch.cos(torch.arange(y.numel()).double()).view(y.shape) for y in outputs(*leaves)]
    want = torch.autograd.grad(outputs(*leaves), leaves, weights)
    torch.testing.assert_close(gradients(*leaves), want, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(gradients, leaves)


# rope


def test_rope_with_fewer_angles_turns_the_first_dims_only() -> None:
    q, k = torch.randn(2, 5, 3, 12, requires_grad=True), torch.randn(2, 5, 1, 12)
    angles = torch.randn(5, 4)
    for interleaved in (True, False):
        y, z = ops.rope(q, k, angles.cos(), angles.sin(), interleaved=interleaved)
        part = ops.rope(q[..., :8], k[..., :8], angles.cos(), angles.sin(), interleaved=interleaved)
        assert bits(y) == bits(torch.cat((part[0], q[..., 8:]), -1))
        assert bits(z) == bits(torch.cat((part[1], k[..., 8:]), -1))
        (dq,) = torch.autograd.grad(y.square().sum(), q)
        # A rotation keeps lengths: the gradient of a sum of squares is twice the argument.
        torch.testing.assert_close(dq, 2 * q, **CLOSE)


def test_rope_of_sliced_angles_is_rope_at_later_positions() -> None:
    q, k = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    angles = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    cos, sin = angles.cos(), angles.sin()
    whole = ops.rope(q, k, cos, sin)
    later = ops.rope(q[:, 4:], k[:, 4:], cos[4:], sin[4:])
    assert bits([t[:, 4:] for t in whole]) == bits(later)


def test_rope_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 8).expand(1, 9, 1, 8), torch.randn(1, 1, 1, 8).expand(1, 9, 1, 8)
    angles = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01])
    for interleaved in (True, False):
        y, z = ops.rope(q, k, angles.cos(), angles.sin(), interleaved=interleaved)
        scores = y[0, :, 0] @ z[0, :, 0].t()
        for distance in (0, 1, 5):
            line = scores.diagonal(-distance)
            torch.testing.assert_close(line, line[:1].expand(line.shape), rtol=1e-4, atol=1e-5)
