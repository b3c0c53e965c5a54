"""Attention with dropout on the host: the native kernel draws which weights it drops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from anychip.operators.attention import weight_rows
from anychip_cpu import tiled_attention
from anychip_cpu.table import FLOATS, Needs, declared
from anychip_cpu.tiled_attention import Drop


def _drop(
    q: Tensor, k: Tensor, rng: Tensor, index: Sequence[Tensor | None], p: float, keys: int,
    sizes: dict[str, int],
) -> Drop:  # fmt: skip
    *of_rows, of_keys = index
    rows = weight_rows(q, of_rows, **sizes).contiguous()
    key_index = None if of_keys is None else of_keys.contiguous()
    return Drop(rng.contiguous(), p, rows, keys or k.shape[1], key_index)


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
    grad, q, k, v, y, lse, rng, *index = saved
    drop = _drop(q, k, rng, index, p, keys, sizes)
    return tiled_attention.backward(
        grad, q, k, v, y, lse, causal=causal, scale=scale, needs=needs, drop=drop
    )
