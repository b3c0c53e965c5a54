"""Wrong backends that the random chapter has to find."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip.contract import Backend
from tests.meta.honest import HonestBackend, Row
from tests.meta.wrong import Wrong, wrong_row


def _rng(rng: Tensor, seed: int | None = None, offset: int | None = None) -> Tensor:
    old_seed, old_offset = rng.tolist()
    seed, offset = (old_seed if seed is None else seed), (old_offset if offset is None else offset)
    return torch.tensor([seed, offset])


@wrong_row("high-counter-word-missing", "wrong counter", chapter="random", operator="dropout")
def counter_of_32_bits(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    return row(x, _rng(rng, offset=int(rng[1]) & 0xFFFFFFFF), p=p)


@wrong_row("carry-missing", "wrong counter", chapter="random", operator="dropout")
def no_carry(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    low = int(rng[1]) & 0xFFFFFFFF
    room = min(4 * (2**32 - low), x.numel())
    flat = x.reshape(-1)
    after = _rng(rng, offset=(int(rng[1]) >> 32) << 32)
    return torch.cat((row(flat[:room], rng, p=p), row(flat[room:], after, p=p))).reshape(x.shape)


@wrong_row("key-of-32-bits", "truncated seed", chapter="random", operator="dropout")
def short_key(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    return row(x, _rng(rng, seed=int(rng[0]) & 0xFFFFFFFF), p=p)


@wrong_row("mask-one-word-off", "off by one", chapter="random", operator="dropout")
def next_word(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    longer = torch.cat((x.new_zeros(1), x.reshape(-1)))
    return row(longer, rng, p=p)[1:].reshape(x.shape)


@wrong_row("mask-one-block-off", "off by one", chapter="random", operator="dropout")
def next_block(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    return row(x, _rng(rng, offset=int(rng[1]) + 1), p=p)


@wrong_row(
    "threshold-in-float32",
    "integer comparison in floating point",
    chapter="random",
    operator="dropout",
)
def rounded_threshold(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    return row(x, rng, p=float(torch.tensor(p, dtype=torch.float32)))


@wrong_row(
    "mask-in-memory-order", "physical for logical index", chapter="random", operator="dropout"
)
def memory_order(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    if x.dim() < 2 or x.is_contiguous():
        return row(x, rng, p=p)
    order = sorted(range(x.dim()), key=lambda dim: x.stride()[dim], reverse=True)
    back = [order.index(d) for d in range(x.dim())]
    return row(x.permute(order), rng, p=p).permute(back).contiguous()


@wrong_row(
    "backward-draws-again", "mask reused wrongly", chapter="random", operator="dropout",
    direction="backward",
)  # fmt: skip
def fresh_mask(row: Row, grad: Tensor, rng: Tensor, *, p: float, needs: tuple[bool]) -> Any:
    return row(grad, _rng(rng, offset=int(rng[1]) + grad.numel() // 4), p=p, needs=needs)


@wrong_row("global-generator", "hidden state", chapter="random", operator="dropout")
def torch_dropout(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    return torch.nn.functional.dropout(x, p)


@wrong_row("mask-made-once", "mask reused between calls", chapter="random", operator="dropout")
def cached_mask(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    mask = _masks.setdefault((x.numel(), p), row(torch.ones(x.numel()), rng, p=p))
    return x * mask.reshape(x.shape)


_masks: dict[tuple[int, float], Tensor] = {}


class _OneGenerator(HonestBackend):
    """Hands out the process's generator for every seed."""

    def generator(self, seed: int, index: int | None = None) -> torch.Generator:
        self.check_index(index)
        return torch.default_generator


class _UnseededGenerator(HonestBackend):
    """Leaves the seed out."""

    def generator(self, seed: int, index: int | None = None) -> torch.Generator:
        self.check_index(index)
        return torch.Generator()


def _generator(name: str, bug: str, make: type[Backend]) -> Wrong:
    return Wrong(name=name, bug=bug, chapter="random", make=make, select="generator")


CATALOGUE: tuple[Wrong, ...] = (
    counter_of_32_bits, no_carry, short_key, next_word, next_block, rounded_threshold, memory_order,
    fresh_mask, torch_dropout, cached_mask,
    _generator("one-generator-for-all", "hidden state", _OneGenerator),
    _generator("seed-ignored", "an argument without effect", _UnseededGenerator),
)  # fmt: skip
