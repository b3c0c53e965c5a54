"""The mapped rows of attention, with torch's kernels replaced by float64 ones of the same calls.

What is tested is what stands around them: masks, heads, padding, the lse, which kernel is asked.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anychip
from anychip_cuda import attention, varlen
from anychip_cuda.table import make_table
from tests.unit.backends_cuda.attention_kernels import Kernels
from tests.unit.dispatch.calls import every_sample
from tests.unit.dispatch.tables import installation
from tests.unit.operators.exactness import check_against_float64

DEVICES = {"A100": (8, 0), "L40S": (8, 9), "H200": (9, 0), "B200": (10, 0)}
TYPES = [torch.float32, torch.bfloat16, torch.float16]
# Backward the rounded output is multiplied by its gradient, and a gradient's parts are rounded.
INNER = (0.0, 2.0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """The rows in place of the cpu backend's, for a device of compute capability 8.0."""
    made = Kernels()
    for module in (attention, varlen):
        monkeypatch.setattr(module, "_aten", made)
    set_device(monkeypatch, "A100")
    with installation() as install:
        install(make_table(None), alone=True)
        with anychip.policy(fallback="strict"):
            yield made


def set_device(monkeypatch: pytest.MonkeyPatch, name: str, cudnn: int = 91900) -> None:
    """Host tensors count as lying on a device of that name."""
    for module in (attention, varlen):
        monkeypatch.setattr(module, "capability", lambda tensor: DEVICES[name])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setattr(attention.torch.backends.cudnn, "enabled", True, raising=False)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("name", "index"), every_sample(["attention", "attention_varlen"]))
def test_attention_with_gradients_equals_float64(
    name: str, index: int, dtype: torch.dtype, kernels: Kernels
) -> None:
    check_against_float64(name, index, dtype, inner=INNER)
    if not kernels.calls:
        assert name == "attention_varlen", "only packed sequences may be all padding"
        return
    kind = "efficient" if dtype == torch.float32 else "flash"
    assert set(kernels.calls) == {kind, f"{kind} backward"}
    assert all(kernels.modes), "a backward that adds up in any order"
    assert not torch.are_deterministic_algorithms_enabled()


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    queries: int, keys: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    return (
        drawn(2, queries, heads, dim, dtype=dtype),
        *(drawn(2, keys, kv_heads, dim, dtype=dtype, seed=s) for s in (1, 2)),
    )


# Head dims on and off the kernels' steps; more and fewer queries than keys; one key head for all.
SHAPES = [
    (5, 5, 4, 4, 12), (33, 33, 2, 1, 8), (3, 7, 4, 2, 17), (7, 3, 2, 2, 16), (1, 9, 6, 2, 64),
    (1, 1, 1, 1, 1), (40, 2, 2, 1, 5), (6, 6, 2, 2, 200),
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES[:2], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_attention_agree_with_the_reference(
    shape: tuple[int, ...], causal: bool, dtype: torch.dtype, kernels: Kernels
) -> None:
    """y, lse and gradients, bit for bit in shape and within two roundings in value."""
    q, k, v = qkv(*shape, dtype)  # type: ignore[arg-type]
    grad = drawn(*q.shape, dtype=dtype, seed=3)
    attrs = {"causal": causal, "scale": 0.3}
    y, lse = chosen("forward", dtype)(q, k, v, **attrs)
    wide = [t.double() for t in (q, k, v)]
    want, want_lse = plain(*wide, **attrs)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), want, rtol=eps, atol=eps)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
    assert y.is_contiguous()
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    leaves = [t.requires_grad_() for t in wide]
    wanted = torch.autograd.grad(plain(*leaves, **attrs)[0], leaves, grad.double())
    found = chosen("backward", dtype)(grad, q, k, v, y, lse, **attrs, needs=(True,) * 3)
    for got, expected in zip(found, wanted, strict=True):
        assert got.is_contiguous()
        size = float(expected.abs().max())
        torch.testing.assert_close(got.double(), expected, rtol=2 * eps, atol=4 * eps * size)


def chosen(direction: Any, dtype: torch.dtype) -> Any:
    """The row of flash attention, or of the memory-efficient kernel."""
    kind = "efficient" if dtype == torch.float32 else "flash"
    rows = make_table(None).rows("attention", direction)
    return next(row.function for row in rows if row.function.__name__.endswith(f"by_{kind}"))


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """By loops over queries, each with the keys that it sees."""
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    outputs, lses = [], []
    for query in range(q.shape[1]):
        seen = query + 1 + k.shape[1] - q.shape[1] if causal else k.shape[1]
        if seen <= 0:
            outputs.append(0.0 * q[:, query])
            lses.append(torch.full_like(q[:, query, :, 0], -math.inf))
            continue
        scores = torch.einsum("bhd,bkhd->bhk", q[:, query], k[:, :seen]) * scale
        lses.append(torch.logsumexp(scores, -1).detach())
        weights = torch.softmax(scores, -1)
        outputs.append(torch.einsum("bhk,bkhd->bhd", weights, v[:, :seen]))
    return torch.stack(outputs, 1), torch.stack(lses, 2)


@pytest.mark.parametrize("device", ["A100", "H200"])
@pytest.mark.parametrize("dtype", TYPES[:2], ids=["float32", "bfloat16"])
def test_attention_of_views_from_odd_addresses_is_that_of_their_copies(
    dtype: torch.dtype, device: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_device(monkeypatch, device)
    given = qkv(4, 4, 2, 1, 8, dtype)
    shifted = [torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) for t in given]
    results = []
    for args in (given, shifted):
        leaves = [t.detach().requires_grad_() for t in args]
        y = anychip.ops.attention(*leaves, causal=True)
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


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
    device: str,
    shape: tuple[int, ...],
    causal: bool,
    cudnn: int,
    kernel: str,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_device(monkeypatch, device, cudnn)
    q, k, v = qkv(*shape, torch.bfloat16)  # type: ignore[arg-type]
    with torch.no_grad():
        y = anychip.ops.attention(q, k, v, causal=causal)
    assert kernels.calls == [kernel]
    want, _ = plain(*(t.double() for t in (q, k, v)), causal=causal, scale=shape[-1] ** -0.5)
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=2**-8)


def test_cudnns_lse_serves_flash_attentions_backward(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_device(monkeypatch, "H200")
    q, k, v = (t.requires_grad_() for t in qkv(6, 6, 4, 2, 64, torch.bfloat16))
    anychip.ops.attention(q, k, v, causal=True).sum().backward()
    assert kernels.calls == ["cudnn", "flash backward"]
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    plain(*wide, causal=True, scale=0.125)[0].sum().backward()
    for got, want in zip((q, k, v), wide, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=2**-7, atol=2**-7)


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
        *((why, dtype) for dtype in TYPES[:2] for why in REFUSED),
        ("wide head", torch.bfloat16),  # the memory-efficient kernel takes any width
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


def test_host_tensors_are_taken_by_no_kernel() -> None:
    q, k, v = qkv(4, 4, 2, 2, 8, torch.bfloat16)
    for row in make_table(None).rows("attention", "forward"):
        assert row.accepts is not None
        assert not row.accepts(q, k, v, causal=True, scale=None)
