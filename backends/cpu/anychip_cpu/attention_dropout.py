"""Attention with dropout on the host: the native kernel draws which weights it drops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anychip.operators.attention import weight_rows
from anychip_cpu import tiled_attention
from anychip_cpu.table import FLOATS, Needs, declared
from anychip_cpu.tiled_attention import Drop


def _drop(
    q: Tensor, k: Tensor, rng: Tensor, index: tuple[Tensor | None, ...], p: float, keys: int,
    sizes: dict[str, int],
) -> Drop:  # fmt: skip
    return Drop(rng, p, weight_rows(q, index[:3], **sizes), keys or k.shape[1], index[3])


@declared.forward(
    "attention_dropout",
    accepts=lambda q, k, v, *_, **__: tiled_attention.takes(q, k, v, queries=q.shape[1]),
)
def attention_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rng: Tensor,
    *index: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    keys: int = 0,
    **sizes: int,
) -> tuple[Tensor, Tensor]:
    drop = _drop(q, k, rng, index, p, keys, sizes)
    return tiled_attention.forward(q, k, v, causal=causal, scale=scale, drop=drop)


@declared.backward(
    "attention_dropout",
    dtypes=FLOATS,
    accepts=lambda grad, q, k, v, y, *_, **__: tiled_attention.takes_backward(
        grad, q, k, v, y, queries=q.shape[1]
    ),
)
def attention_dropout_backward(
    *saved: Any, p: float, keys: int = 0, needs: Needs, causal: bool, scale: float | None,
    **sizes: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    *read, rng = saved[:7]
    drop = _drop(saved[1], saved[2], rng, saved[7:], p, keys, sizes)
    return tiled_attention.backward(*read, causal=causal, scale=scale, needs=needs, drop=drop)
