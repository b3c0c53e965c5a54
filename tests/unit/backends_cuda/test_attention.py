"""Attention by torch's kernels: addresses, which kernel is asked, and what is left to others.

Their values are asked in test_mapped.py.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anychip
from anychip import operators as specs
from anychip_cuda import attention
from anychip_cuda.table import make_table
from tests.unit.backends_cuda.attention_kernels import Kernels, set_device
from tests.unit.backends_cuda.conftest import drawn
from tests.unit.dispatch.tables import installation

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def qkv(
    queries: int, keys: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    return (
        drawn(2, queries, heads, dim, dtype=dtype),
        *(drawn(2, keys, kv_heads, dim, dtype=dtype, seed=s) for s in (1, 2)),
    )


@pytest.fixture(autouse=True)
def alone(kernels: Kernels) -> Iterator[None]:
    """The rows in place of the cpu backend's."""
    with installation() as install:
        install(make_table(None), alone=True)
        with anychip.policy(fallback="strict"):
            yield


@pytest.mark.parametrize("device", ["A100", "H200"])
@pytest.mark.parametrize("dtype", TYPES[:2], ids=["float32", "bfloat16"])
def test_attention_of_views_is_that_of_their_copies(
    dtype: torch.dtype, device: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_device(monkeypatch, device)
    given = qkv(4, 4, 2, 1, 8, dtype)
    shifted = [torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) for t in given]
    packed = torch.cat(given, 2).split([2, 1, 1], 2)
    assert all(attention.readable(t) is t for t in packed)
    results = []
    for args in (given, shifted, packed):
        leaves = [t.detach().requires_grad_() for t in args]
        y = anychip.ops.attention(*leaves, causal=True)
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    assert all(torch.equal(a, t) for a, *others in zip(*results, strict=True) for t in others)


@pytest.mark.parametrize("dim", [6, 8])
def test_attention_of_channels_last_tensors_is_that_of_their_copies(
    dim: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_device(monkeypatch, "A100")
    given = qkv(4, 4, 2, 1, dim, torch.bfloat16)
    apart = (t.to(memory_format=torch.channels_last) for t in given)
    y, want = (anychip.ops.attention(*args, causal=True) for args in (apart, given))
    assert torch.equal(y, want)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=["float32", "bfloat16"])
def test_lse_of_queries_that_see_no_key_is_that_of_the_reference(dtype: torch.dtype) -> None:
    given = qkv(7, 3, 4, 2, 16, dtype)
    _, lse = torch.ops.anychip.attention_forward(*given, True, None, None)
    _, want = specs.attention.forward(*given, causal=True, scale=None, out_dtype=None)
    assert want[..., :4].isneginf().all()
    torch.testing.assert_close(lse, want, rtol=1e-5, atol=1e-5)


# Which kernel is asked


@pytest.mark.parametrize(
    ("device", "shape", "causal", "cudnn", "kernel"),
    [
        ("H200", (6, 6, 4, 2, 64), True, 91900, "cudnn"),
        ("B200", (6, 9, 4, 2, 128), False, 91900, "cudnn"),
        ("H200", (6, 9, 4, 2, 64), True, 91900, "flash"),  # its mask begins at the first key
        ("H200", (6, 6, 4, 2, 63), True, 91900, "flash"),
        ("H200", (6, 6, 4, 2, 136), True, 91900, "flash"),
        ("H200", (1, 1, 4, 2, 64), True, 91900, "flash"),
        ("H200", (6, 6, 4, 2, 64), True, 91500, "flash"),
        ("L40S", (6, 6, 4, 2, 64), True, 91900, "flash"),
    ],
)
def test_16_bit_attention_goes_to_the_kernel_that_takes_it(
    device: str, shape: tuple[int, ...], causal: bool, cudnn: int, kernel: str, kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    set_device(monkeypatch, device, cudnn)
    q, k, v = qkv(*shape, torch.bfloat16)  # type: ignore[arg-type]
    with torch.no_grad():
        y = anychip.ops.attention(q, k, v, causal=causal)
    assert kernels.calls == [kernel]
    want, _ = specs.attention.forward(
        q.float(), k.float(), v.float(), causal=causal, scale=None, out_dtype=None
    )
    torch.testing.assert_close(y.float(), want, rtol=2**-8, atol=2**-8)


def test_cudnns_lse_serves_flash_attentions_backward(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_device(monkeypatch, "H200")
    leaves = [t.requires_grad_() for t in qkv(6, 6, 4, 2, 64, torch.bfloat16)]
    found = torch.autograd.grad(anychip.ops.attention(*leaves, causal=True).sum(), leaves)
    assert kernels.calls == ["cudnn", "flash backward"]
    wide = [t.detach().float().requires_grad_() for t in leaves]
    y, _ = specs.attention.forward(*wide, causal=True, scale=None, out_dtype=None)
    for got, want in zip(found, torch.autograd.grad(y.sum(), wide), strict=True):
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("device", "dim", "goes"),
    [
        ("L40S", 192, True), ("L40S", 193, False), ("L40S", 224, False), ("L40S", 225, True),
        ("A100", 200, True), ("H200", 224, True),
    ],
)  # fmt: skip
def test_wide_heads_go_back_where_the_device_has_room(
    device: str, dim: int, goes: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_device(monkeypatch, device)
    assert attention.flash_goes_back(torch.zeros(1, 1, 1, dim)) is goes


REFUSED = ["another dtype", "no queries", "no keys", "scale 0", "negative scale"]


@pytest.mark.parametrize(
    ("why", "dtype"),
    [
        *((why, torch.bfloat16) for why in (*REFUSED, "wide head")),
        ("another dtype", torch.float32),  # products take any sizes
    ],
    ids=str,
)
def test_attention_that_no_kernel_takes_is_left_to_the_reference(
    why: str, dtype: torch.dtype, kernels: Kernels
) -> None:
    q, k, v = qkv(4, 4, 2, 2, 260 if why == "wide head" else 8, dtype)
    scale = {"scale 0": 0.0, "negative scale": -1.0}.get(why)
    if why == "another dtype":
        k, v = k.half(), v.half()
    if why == "no queries":
        q = q[:, :0]
    if why == "no keys":
        k, v = k[:, :0], v[:, :0]
    with pytest.raises(anychip.FallbackError):
        anychip.ops.attention(q, k, v, causal=False, scale=scale)
    assert kernels.calls == []


def test_host_tensors_are_taken_by_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, k, v = qkv(4, 4, 2, 2, 8, torch.bfloat16)
    rows = make_table(None).rows("attention", "forward")
    asked = [row.accepts for row in rows if row.dtypes != {torch.float32}]
    assert len(asked) == 3
    assert not any(a and a(q, k, v, causal=True, scale=None, out_dtype=None) for a in asked)
