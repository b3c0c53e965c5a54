"""torch's attention kernels for CUDA devices, in float64 on the host, as literal as they can be.

Each takes the arguments of the ATen operator of its name, refuses what that refuses, and leaves NaN
where that leaves memory as it was. What they compute is written down in torch's ``flash_api.cpp``,
``attention.cu``, ``attention_backward.cu`` and ``MHA.cpp``; whether the devices' kernels do so is
for a device to show.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from anychip_cuda import attention

HALVES = (torch.bfloat16, torch.float16)
DEVICES = {"A100": (8, 0), "L40S": (8, 9), "H200": (9, 0), "B200": (10, 0)}


def set_device(monkeypatch: pytest.MonkeyPatch, name: str, cudnn: int = 91900) -> None:
    """Host tensors count as lying on a device of that name."""
    monkeypatch.setattr(attention, "capability", lambda tensor: DEVICES[name])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True, raising=False)


def walked(t: Tensor) -> list[int]:
    """Strides of the dims before the last; one of one number is walked by nobody."""
    strides = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    return [stride for size, stride in strides if size > 1]


class Kernels:
    """A stand-in for ``torch.ops.aten``.

    Attributes:
        calls: names of the operators that were called.
        modes: for each call of a backward, whether torch was told to be deterministic.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.modes: list[bool] = []

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int,
        p: float, causal: bool, debug: bool, *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        self.calls.append("flash")
        self._check_flash((q, k, v), p)
        if cum_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            y, lse = forward(q, k, v, causal, scale)
            # A query that sees no key: 0, and the lse is +inf.
            return y.to(q.dtype), lse.masked_fill(lse == -math.inf, math.inf), None, None, None
        y, lse = torch.full_like(q, math.nan), q.new_full((q.shape[1], q.shape[0]), math.nan)
        lse = lse.float()
        for own, seen in self._sequences(cum_q, cum_k, max_q, max_k):
            given = (q[None, own], k[None, seen], v[None, seen])
            own_y, own_lse = forward(*given, causal, scale)
            y[own] = own_y[0].to(q.dtype)
            lse[:, own] = own_lse[0].masked_fill(own_lse[0] == -math.inf, math.inf)
        return y, lse, None, None, None

    def _flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, cum_q: Any,
        cum_k: Any, max_q: int, max_k: int, p: float, causal: bool, rng: Tensor, unused: Tensor, *,
        scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls.append("flash backward")
        self.modes.append(
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        self._check_flash((grad, q, k, v, y), p)
        assert rng.dtype == torch.uint64
        assert lse.is_contiguous()
        if cum_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            return backward(grad, q, k, v, y, lse, causal, scale)
        found = tuple(torch.full_like(t, math.nan) for t in (q, k, v))
        for own, seen in self._sequences(cum_q, cum_k, max_q, max_k):
            assert not lse[:, own].isneginf().any(), "its queries would be NaN"
            given = (grad[None, own], q[None, own], k[None, seen], v[None, seen], y[None, own])
            parts = backward(*given, lse[None, :, own], causal, scale)
            for whole, rows, part in zip(found, (own, seen, seen), parts, strict=True):
                whole[rows] = part[0]
        return found

    def _scaled_dot_product_cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, compute_lse: bool, p: float,
        causal: bool, debug: bool, *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        self.calls.append("cudnn")
        assert compute_lse
        for t in (q, k, v):
            assert t.dtype in HALVES
            assert t.stride(-1) == 1
            assert all(stride % 8 == 0 for stride in walked(t))
            assert t.shape[-1] % 8 == 0
            assert t.data_ptr() % 16 == 0
        # Its mask is aligned to the first key.
        assert not causal or q.shape[2] == k.shape[2]
        y, lse = forward(*(t.transpose(1, 2) for t in (q, k, v)), causal, scale)
        return y.to(q.dtype).transpose(1, 2), lse[..., None], None, None, 0, 0, None, None, None

    def _efficient_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, cum_q: None, cum_k: None, max_q: None,
        max_k: None, p: float, mask: int, compute_lse: bool, *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        self.calls.append("efficient")
        assert compute_lse
        self._check_efficient(q, k, v)
        y, lse = forward(q, k, v, mask == 2, scale)
        room = torch.full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), math.inf)
        room[..., : lse.shape[2]] = lse
        return y.to(q.dtype), room, None, None, 0, 0

    def _efficient_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, y: Tensor, cum_q: None,
        cum_k: None, max_q: int, max_k: int, lse: Tensor, p: float, seed: Tensor, offset: Tensor,
        mask: int, bias_grad: bool, *, scale: float, num_splits_key: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        self.calls.append("efficient backward")
        self.modes.append(num_splits_key == 1)
        self._check_efficient(q, k, v)
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        assert lse.shape[2] % 32 == 0
        assert torch.isposinf(lse[..., q.shape[1] :]).all()
        return (*backward(grad, q, k, v, y, lse[..., : q.shape[1]], mask == 2, scale), None)

    def _check_flash(self, tensors: Sequence[Tensor], p: float) -> None:
        assert p == 0.0
        for t in tensors:
            assert t.dtype in HALVES
            assert t.stride(-1) == 1
            assert all(stride % 8 == 0 for stride in walked(t))
            assert 0 < t.shape[-1] <= 256
            assert t.shape[-1] % 8 == 0
            assert t.numel() > 0
            assert t.data_ptr() % 16 == 0

    def _check_efficient(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        assert q.shape[2] == k.shape[2] == v.shape[2]
        for t in (q, k, v):
            assert t.dtype == torch.float32
            assert t.stride(-1) == 1
            assert t.shape[-1] % 4 == 0
            assert t.data_ptr() % 16 == 0

    def _sequences(self, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int) -> list[Any]:
        for ends in (cum_q, cum_k):
            assert ends.dtype == torch.int32
            assert ends.is_contiguous()
        # Rows beyond the grid of the longest sequence are not computed.
        assert max_q >= max(1, cum_q.diff().max())
        assert max_k >= max(1, cum_k.diff().max())
        pairs = zip(*(itertools.pairwise(t.tolist()) for t in (cum_q, cum_k)), strict=True)
        return [(slice(*own), slice(*seen)) for own, seen in pairs]


def scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """(B, H, Sq, Sk) float64, -inf where hidden; causal is aligned to the last key."""
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    found = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * scale
    if causal:
        seen = torch.ones(found.shape[-2:], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        found = found.masked_fill(~seen, -math.inf)
    return found


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """y (B, Sq, H, D) float64, and lse (B, H, Sq) float32."""
    found = scores(q, k, causal, scale)
    lse = torch.logsumexp(found, -1)
    weights = torch.exp(found - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    values = v.double().repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values), lse.float()


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients in the dtype of q, from the lse and the output as they were left."""
    groups = q.shape[2] // k.shape[2]
    weights = torch.exp(scores(q, k, causal, scale) - lse.double()[..., None])
    wide, slope = (t.double().repeat_interleave(groups, 2) for t in (k, v)), grad.double()
    keys, values = wide
    delta = (slope * y.double()).sum(-1).transpose(1, 2)[..., None]
    dscores = weights * (torch.einsum("bqhd,bkhd->bhqk", slope, values) - delta) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, keys)
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.double())
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, slope)
    batch, length, heads, dim = k.shape
    shape = (batch, length, heads, groups, dim)
    return dq.to(q.dtype), *(t.view(shape).sum(3).to(q.dtype) for t in (dk, dv))
