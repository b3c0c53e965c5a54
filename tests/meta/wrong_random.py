"""Wrong backends that the random chapter has to find."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Backend
from tests.meta.honest import HonestBackend, Row
from tests.meta.wrong import Wrong, wrong_arguments, wrong_gradients, wrong_row


def _rng(rng: Tensor, seed: int | None = None, offset: int | None = None) -> Tensor:
    old_seed, old_offset = rng.tolist()
    seed, offset = (old_seed if seed is None else seed), (old_offset if offset is None else offset)
    return torch.tensor([seed, offset])


def _without_rows(wrong: Row) -> Row:
    """A mistake that is made in calls without rows alone."""

    def function(row: Row, x: Tensor, rng: Tensor, rows: Any, *, p: float, **place: int) -> Any:
        return wrong(row, x, rng, p=p) if rows is None else row(x, rng, rows, p=p, **place)

    return function


@wrong_row("carry-missing", "wrong counter", chapter="random", operator="dropout")
@_without_rows
def no_carry(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    low = int(rng[1]) & 0xFFFFFFFF
    room = min(4 * (2**32 - low), x.numel())
    flat = x.reshape(-1)
    after = _rng(rng, offset=(int(rng[1]) >> 32) << 32)
    return torch.cat((row(flat[:room], rng, p=p), row(flat[room:], after, p=p))).reshape(x.shape)


@wrong_row("mask-one-word-off", "off by one", chapter="random", operator="dropout")
@_without_rows
def next_word(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    longer = torch.cat((x.new_zeros(1), x.reshape(-1)))
    return row(longer, rng, p=p)[1:].reshape(x.shape)


@wrong_row(
    "mask-in-memory-order", "physical for logical index", chapter="random", operator="dropout"
)
def memory_order(row: Row, x: Tensor, rng: Tensor, *rows: Any, p: float, **place: int) -> Any:
    if x.dim() < 2 or x.is_contiguous() or rows[0] is not None:
        return row(x, rng, *rows, p=p, **place)
    order = sorted(range(x.dim()), key=lambda dim: x.stride()[dim], reverse=True)
    back = [order.index(d) for d in range(x.dim())]
    return row(x.permute(order), rng, *rows, p=p, **place).permute(back).contiguous()


@wrong_row("mask-made-once", "mask reused between calls", chapter="random", operator="dropout")
@_without_rows
def cached_mask(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    mask = _masks.setdefault((x.numel(), p), row(torch.ones(x.numel()), rng, p=p))
    return x * mask.reshape(x.shape)


_masks: dict[tuple[int, float], Tensor] = {}
_POOL = cycle([torch.Generator() for _ in range(16)])


class _DeviceStateStays(HonestBackend):
    """Takes the state of torch's own generator for that of one of its own."""

    def set_random_state(self, state: torch.Tensor, index: int | None = None) -> None:
        torch.Generator().set_state(state)


def _made_by(make: Callable[[int], torch.Generator]) -> type[Backend]:
    """Generators are made of the seed in another way."""

    def generator(self: HonestBackend, seed: int, index: int | None = None) -> torch.Generator:
        self.check_index(index)
        return make(seed)

    return type("MadeBy", (HonestBackend,), {"generator": generator})


def _seeded(change: Callable[[int], int]) -> type[Backend]:
    """Makes another number of the seed."""
    return _made_by(lambda seed: torch.Generator().manual_seed(change(seed)))


class _OneOfAnIndex(HonestBackend):
    """Of a seed and an index there is one, which is seeded again."""

    def generator(self, seed: int, index: int | None = None) -> torch.Generator:
        if index is None:
            return super().generator(seed)
        known = vars(self).setdefault("known", {})
        made: torch.Generator = known.setdefault((seed, index), torch.Generator())
        return made.manual_seed(seed)


def _seeds_the_process(seed: int) -> torch.Generator:
    """And hands out one of its own in the same state."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def _stateful(**methods: Any) -> type[Backend]:
    """Generators with other methods, and the state of torch's own by one of them."""
    kind: Any = type("Generator", (torch.Generator,), methods)

    def make(seed: int) -> torch.Generator:
        made: torch.Generator = kind()
        return made.manual_seed(seed)

    return _made_by(make)


def _accepts_any(self: torch.Generator, state: Tensor) -> Any:
    with suppress(RuntimeError):
        torch.Generator.set_state(self, state)
    return self


def _accepts_any_of_the_device(self: HonestBackend, state: Tensor, index: Any = None) -> None:
    with suppress(RuntimeError):
        torch.set_rng_state(state)


def _draws_and_tells(self: torch.Generator) -> Tensor:
    torch.rand(1, generator=self)
    return torch.Generator.get_state(self)


def _in_another_thread(seed: int) -> int:
    return seed + (threading.current_thread() is not threading.main_thread())


def _on_the_second(self: HonestBackend, seed: int, index: int | None = None) -> torch.Generator:
    return torch.Generator().manual_seed(seed + self.check_index(index))


class _Untold(torch.Generator):
    def initial_seed(self) -> int:
        return 0


def _told_of_the_first(self: HonestBackend, seed: int, index: Any = None) -> torch.Generator:
    return (_Untold() if self.check_index(index) else torch.Generator()).manual_seed(seed)


@wrong_row("mask-by-threads", "bits that depend on the cut", chapter="random", operator="dropout")
@_without_rows
def mask_by_threads(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    # Two threads, each with counters of its own from its first element on.
    flat, half = x.reshape(-1), (x.numel() // 2 + 15) // 16 * 16
    second = _rng(rng, offset=int(rng[1]) + half // 4 + 1)
    return torch.cat((row(flat[:half], rng, p=p), row(flat[half:], second, p=p))).reshape(x.shape)


@wrong_row("mask-begins-anew", "overflow of an index", chapter="random", operator="dropout")
@_without_rows
def begins_anew(row: Row, x: Tensor, rng: Tensor, *, p: float) -> Any:
    flat = x.reshape(-1)
    return torch.cat([row(part, rng, p=p) for part in flat.split(2**20)]).reshape(x.shape)


@wrong_row("offset-moves-on", "write to an argument", chapter="random", operator="dropout")
def moves_offset(row: Row, x: Tensor, rng: Tensor, *rows: Any, **attrs: Any) -> Any:
    y = row(x, rng, *rows, **attrs)
    rng.data[1] += x.numel() // 4
    return y


def _generator(name: str, bug: str, make: type[Backend]) -> Wrong:
    return Wrong(name=name, bug=bug, chapter="random", make=make, select="generator")


ARGUMENTS = (
    wrong_arguments("rows-counted-in-the-shard", "an index of the shard", "dropout",
        chapter="random", rows=lambda rows:
        None if rows is None else torch.arange(rows.numel()).reshape(rows.shape)),
    wrong_arguments("keys-counted-in-the-block", "an index of the shard", "attention_dropout",
        chapter="random", key_index=lambda key_index, k:
        None if key_index is None else torch.arange(k.shape[1])),
    wrong_arguments("global-generator", "hidden state", "dropout", chapter="random",
        y=lambda x, p: torch.nn.functional.dropout(x, p)),
    wrong_arguments("high-counter-word-missing", "wrong counter", "dropout", chapter="random",
        rng=lambda rng: _rng(rng, offset=int(rng[1]) & 0xFFFFFFFF)),
    wrong_arguments("key-of-32-bits", "truncated seed", "dropout", chapter="random",
        rng=lambda rng: _rng(rng, seed=int(rng[0]) & 0xFFFFFFFF)),
    wrong_arguments("high-words-of-both", "two options at once", "dropout", chapter="random",
        rng=lambda rng: _rng(rng, seed=int(rng[0]) & 0xFFFFFFFF) if (rng >> 40).all() else rng),
    wrong_arguments("mask-one-block-off", "off by one", "dropout", chapter="random",
        rng=lambda rng: _rng(rng, offset=int(rng[1]) + 1)),
    wrong_arguments("threshold-in-float32", "integer comparison in floating point", "dropout",
        chapter="random", p=lambda p: float(torch.tensor(p, dtype=torch.float32))),
    wrong_gradients("backward-draws-again", "mask reused wrongly", "dropout", chapter="random",
        rng=lambda rng, grad: _rng(rng, offset=int(rng[1]) + grad.numel() // 4)),
    wrong_arguments("kept-at-most-p", "comparison the wrong way round", "dropout", chapter="random",
        p=lambda p: min(p + 2.0**-32, 1.0) if p else p),
    wrong_gradients("column-forgotten-in-the-backward", "an index of the shard", "bias_dropout_add",
        chapter="random", column=0),
)  # fmt: skip
CATALOGUE: tuple[Wrong, ...] = (
    *ARGUMENTS,
    no_carry, next_word, memory_order,
    cached_mask, mask_by_threads, begins_anew, moves_offset,
    _generator("generator-seeds-the-process", "hidden state", _made_by(_seeds_the_process)),
    _generator("one-generator-per-seed", "output that is not fresh",
               _made_by(cache(lambda seed: torch.Generator().manual_seed(seed)))),
    _generator("one-generator-per-seed-and-index", "output that is not fresh", _OneOfAnIndex),
    _generator("state-does-not-return", "a quiet no-op",
               _stateful(set_state=lambda self, state: self)),
    _generator("state-is-the-seed", "state that is not kept",
               _stateful(set_state=lambda self, state: self.manual_seed(self.initial_seed()))),
    _generator("asked-for-its-state-it-draws", "a query with a side effect",
               _stateful(get_state=_draws_and_tells)),
    _generator("any-state-will-do", "missing check of an argument",
               _stateful(set_state=_accepts_any)),
    _generator("any-state-of-the-device", "missing check of an argument",
               type("Any", (HonestBackend,), {"set_random_state": _accepts_any_of_the_device})),
    _generator("seed-of-32-bits", "truncated seed", _seeded(lambda seed: seed % 2**32)),
    _generator("seed-of-53-bits", "truncated seed", _seeded(lambda seed: int(float(seed)) % 2**64)),
    _generator("seed-without-sign", "sign lost", _seeded(abs)),
    _generator("seed-of-a-thread", "per-thread state", _seeded(_in_another_thread)),
    _generator("seed-of-a-device", "state of one device",
               type("OnTheSecond", (HonestBackend,), {"generator": _on_the_second})),
    _generator("seed-told-of-the-first-device", "state of one device",
               type("ToldOfTheFirst", (HonestBackend,), {"generator": _told_of_the_first})),
    _generator("seventeenth-generator-is-the-first", "output that is not fresh",
               _made_by(lambda seed: next(_POOL).manual_seed(seed))),
    _generator("device-state-stays", "a quiet no-op", _DeviceStateStays),
    _generator("one-generator-for-all", "hidden state",
               _made_by(lambda seed: torch.default_generator)),
    _generator("seed-ignored", "an argument without effect",
               _made_by(lambda seed: torch.Generator())),
)  # fmt: skip
