"""Is the random stream the same as on every other chip, bit for bit?

Masks of dropout stand for the stream: kept or not is one comparison of one Philox word. Scaled
values belong to the operators chapter. Generators of torch are each chip's own; they have to repeat
themselves.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anychip import ops
from anychip.conformance import shards
from anychip.conformance.case import Case, Context, check, check_equal_bits, expect_error
from anychip.conformance.formats import FORMATS
from anychip.conformance.oracles import philox
from anychip.conformance.surroundings import again, in_thread
from anychip.contract import HOST

COUNT = 4099
"""Elements of a mask: beside every vector width, and no multiple of the 4 words of a block."""

# seed, offset. Carries from the low to the high word of the counter, within a mask too; keys of two
# words; negative numbers, which are the upper half of the unsigned range; the wrap at 2^64.
STREAMS: dict[str, tuple[int, int]] = {
    "zero": (0, 0),
    "small": (1234, 5),
    "offset:2p32": (1, 2**32),
    "carry": (7, 2**32 - 512),
    "offset:2p40": (3, 2**40 + 17),
    "offset:2p63": (9, 2**63 - 3),
    "wrap": (11, -300),
    "seed:2p32": (2**32, 0),
    "seed:2p63": (2**63 - 1, 1),
    "seed:-1": (-1, 0),
    "seed:-2p63": (-(2**63), 123456789),
}
ENDS = (-1, 2**32 - 1, -(2**63), 2**63 - 1)
PROBABILITIES = (0.0, 2.0**-32, 2.0**-33, 0.1, 0.25, 1 / 3, 0.5, 0.999, 1.0 - 2.0**-32, 1.0)


def cases(context: Context) -> Iterator[Case]:
    """Known answers, masks in every dtype, arithmetic of offsets, generators."""
    for number in range(len(philox.KNOWN_ANSWERS)):
        run = partial(check_known_answer, number=number)
        yield Case(id=f"random/philox/known-answer:{number}", run=run)
    for dtype in context.dtypes:
        where = f"random/dropout/{FORMATS[dtype].name}"
        for name, (seed, offset) in STREAMS.items():
            run = partial(check_mask, dtype=dtype, seed=seed, offset=offset, p=0.5)
            yield Case(id=f"{where}/{name}", run=run)
        for p in PROBABILITIES:
            run = partial(check_mask, dtype=dtype, seed=42, offset=77, p=p)
            yield Case(id=f"{where}/p:{p:.12g}", run=run)
        for name, check_rule in RULES.items():
            yield Case(id=f"{where}/rule:{name}", run=partial(check_rule, dtype=dtype))
        for name, drawn in shards.RANDOM.items():
            run = partial(check_shards, name=name, drawn=drawn, dtype=dtype)
            yield Case(id=f"random/{name}/{FORMATS[dtype].name}/rule:shards", run=run)
    asked = [Case(id=f"random/generator/{name}", run=run) for name, run in GENERATORS.items()]
    yield from asked
    yield from again("random", asked, ())


def check_known_answer(context: Context, *, number: int) -> None:
    """The oracle itself, against the vectors that come with Random123."""
    counter, key, want = philox.KNOWN_ANSWERS[number]
    got = philox.block(np.array(counter, dtype=np.uint64)[:, None], key)[:, 0]
    check(
        tuple(int(w) for w in got) == want,
        f"Philox of counter {counter}, key {key}: {want} expected, got {tuple(got)}",
    )


def check_mask(context: Context, *, dtype: torch.dtype, seed: int, offset: int, p: float) -> None:
    """Forward and backward keep what the oracle keeps, and nothing else."""
    x = torch.ones(COUNT, dtype=dtype, device=context.device, requires_grad=True)
    context.call = f"dropout(ones({COUNT}, {dtype}), rng=({seed}, {offset}), p={p})"
    y = ops.dropout(x, rng(context, seed, offset), p=p)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    want = philox.kept(seed, offset, COUNT, p)
    compare_mask("forward", y, want)
    compare_mask("backward", dx, want)


def compare_mask(
    name: str, got: Tensor, want: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> None:
    """Compares what is not zero with what must be kept."""
    kept = (got.detach().cpu().float() != 0).numpy().reshape(-1)
    wrong = np.flatnonzero(kept != want.reshape(-1))
    if wrong.size:
        first = int(wrong[0])
        check(
            False,
            f"{name}: {wrong.size} of {want.size} elements are kept or dropped against the stream, "
            f"first element {first}, which is word {first % 4} of block {first // 4}: "
            f"{'dropped' if want.reshape(-1)[first] else 'kept'}, but the word says otherwise",
        )


def check_shards(context: Context, *, name: str, drawn: shards.Drawn, dtype: torch.dtype) -> None:
    """Parts that are drawn alone, each told where it lies, have the mask of the whole."""
    seed, offset = 77, 2**32 - 3
    want = philox.kept(seed, offset, math.prod(drawn.shape), shards.P)
    for cut in drawn.cuts:
        context.call = f"{name} of {drawn.shape}, cut along {cut}, rng=({seed}, {offset})"
        found = shards.put_together(drawn, cut, rng(context, seed, offset), dtype)
        for direction, mask in zip(("forward", "backward"), found, strict=True):
            compare_mask(f"{direction} of parts along {cut}" if cut else direction, mask, want)


def rng(context: Context, seed: int, offset: int) -> Tensor:
    """(seed, offset) on the device."""
    return torch.tensor([seed, offset], dtype=torch.int64, device=context.device)


def mask(context: Context, dtype: torch.dtype, seed: int, offset: int, p: float = 0.5) -> Tensor:
    """Dropout of ones."""
    x = torch.ones(COUNT, dtype=dtype, device=context.device)
    return ops.dropout(x, rng(context, seed, offset), p=p)


def rule_threshold(context: Context, *, dtype: torch.dtype) -> None:
    """The comparison is exact: a word is kept at p = word / 2^32, and dropped at the next p.

    A threshold that went through float32, or ``>`` for ``>=``, is off just there.
    """
    words = philox.words(21, 4, COUNT)
    for index in (0, 1, 2, 3, 1000, 4097, COUNT - 1):
        word = int(words[index])
        for p, keep in ((word / 2**32, True), ((word + 1) / 2**32, False)):
            y = mask(context, dtype, 21, 4, p)
            kept = float(y[index]) != 0.0
            check(kept == keep, f"element {index} has the word {word}; kept is {kept} at p = {p!r}")
            compare_mask(f"p = {p!r}", y, philox.kept(21, 4, COUNT, p))


def rule_joins(context: Context, *, dtype: torch.dtype) -> None:
    """Consecutive offsets are one stream: n blocks at o, then the rest at o + n."""
    for offset in (0, 1000, 2**32 - 3):
        x = torch.ones(COUNT, dtype=dtype, device=context.device)
        whole = ops.dropout(x, rng(context, 5, offset), p=0.4)
        for blocks in (1, 3, 64, 513):
            first = ops.dropout(x[: 4 * blocks], rng(context, 5, offset), p=0.4)
            rest = ops.dropout(x[4 * blocks :], rng(context, 5, offset + blocks), p=0.4)
            joined = torch.cat((first, rest))
            check_equal_bits(f"{blocks} blocks at {offset}, then the rest", joined, whole)


def rule_logical_order(context: Context, *, dtype: torch.dtype) -> None:
    """An element's word depends on its logical index, not on shape or place in memory."""
    flat = torch.ones(11 * 13 * 5, dtype=dtype, device=context.device)
    want = ops.dropout(flat, rng(context, 8, 3), p=0.5)
    square = flat.reshape(11, 13, 5)
    views = {
        "shape (11, 13, 5)": square,
        "transposed in memory": square.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "every second element": torch.stack((flat, flat), -1)[:, 0].reshape(11, 13, 5),
        "expanded": flat[:1].expand(11 * 13 * 5),
    }
    for name, view in views.items():
        got = ops.dropout(view, rng(context, 8, 3), p=0.5)
        check_equal_bits(f"mask for {name}", got.reshape(-1), want)


def rule_calls_differ(context: Context, *, dtype: torch.dtype) -> None:
    """Another seed or offset is another mask; the same pair is the same mask again."""
    first = mask(context, dtype, 1, 1)
    check_equal_bits("the same seed and offset again", mask(context, dtype, 1, 1), first)
    for name, pair in {"seed": (2, 1), "offset": (1, 2)}.items():
        other = mask(context, dtype, *pair)
        check(not torch.equal(other, first), f"another {name} gave the same mask")


def rule_drawn(context: Context, *, dtype: torch.dtype) -> None:
    """Seeds and offsets of all 64 bits, the ends of each with those of the other; probabilities."""
    order = random.Random(context.seed)
    drawn = [[order.getrandbits(64) - 2**63 for _ in range(2)] for _ in range(6)]
    for seed, offset in (*itertools.product(ENDS, ENDS), *drawn):
        check_mask(context, dtype=dtype, seed=seed, offset=offset, p=order.random())


def rule_sizes(context: Context, *, dtype: torch.dtype) -> None:
    """Masks of every size: some elements, next to powers of two, more than a grid holds at once."""
    order = random.Random(context.seed)
    for size in (
        *range(1, 18),
        *(2**k + step for k in (6, 10, 16, 20) for step in (-1, 0, 1, 1000)),
    ):
        seed, offset = (order.getrandbits(64) - 2**63 for _ in range(2))
        y = ops.dropout(
            torch.ones(size, dtype=dtype, device=context.device), rng(context, seed, offset), p=0.5
        )
        compare_mask(f"{size} elements", y, philox.kept(seed, offset, size, 0.5))


def rule_global_state(context: Context, *, dtype: torch.dtype) -> None:
    """torch's global generators neither decide the mask nor move with it."""
    torch.manual_seed(1)
    first = mask(context, dtype, 6, 6)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = mask(context, dtype, 6, 6)
    check(torch.equal(torch.get_rng_state(), before), "the global generator moved")
    check_equal_bits("mask after another torch.manual_seed", second, first)


def generator_repeats(context: Context) -> None:
    """A seed gives one stream, and another seed another one; whoever else was made, and where."""
    streams: dict[int, Tensor] = {}
    for seed in SEEDS:
        generator = context.backend.generator(seed)
        for index in (None, *range(context.backend.device_count())):
            one = generator if index is None else context.backend.generator(seed, index)
            found, of = one.initial_seed(), "" if index is None else f", {index}"
            check(found % 2**64 == seed % 2**64, f"generator({seed}{of}).initial_seed() is {found}")
        stream = draw(context, generator)
        elsewhere = in_thread(partial(context.backend.generator, seed))
        for other in (context.backend.generator(seed), elsewhere):
            check_equal_bits(f"the same seed, {seed}", draw(context, other), stream)
        for number, before in streams.items():
            # torch's generator of the host draws by the lower 32 bits of its seed.
            right = number % 2**32 == seed % 2**32 or not torch.equal(before, stream)
            check(right, f"seeds {number} and {seed} give one stream")
        streams[seed] = stream


def generator_is_independent(context: Context) -> None:
    """Neither torch.manual_seed nor another generator moves it, nor it them."""
    make = context.backend.generator
    for where in ((), (context.backend.current_device(),)):  # also of a device by its index
        first = draw(context, make(17, *where))
        generator, other, twin = (make(seed, *where) for seed in (17, 99, 17))
        torch.manual_seed(5)
        draw(context, other)
        torch.randn(10, device=context.device)
        check_equal_bits("after other generators were used", draw(context, generator), first)
        draw(context, generator)
        check_equal_bits("of a twin, which the first has left behind", draw(context, twin), first)
    alive = [make(seed) for seed in range(70)]  # more than any pool has
    context.backend.set_random_state(context.backend.random_state())
    for seed, one in enumerate(alive):
        text = f"seed {seed} of 70 generators alive at once, after set_random_state()"
        check_equal_bits(text, draw(context, one), draw(context, make(seed)))
    for act in (partial(make, 23), lambda: draw(context, make(23)), context.backend.random_state,
                generator.get_state, partial(generator.set_state, other.get_state())):  # fmt: skip
        torch.manual_seed(5)
        want = torch.randn(10, device=context.device)
        torch.manual_seed(5)
        act()
        found = torch.randn(10, device=context.device)
        check_equal_bits("torch's own stream, after a generator was made or asked", found, want)


class Source(NamedTuple):
    """Something that draws numbers and has a state."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], Any]
    generator: torch.Generator | None


def check_state(context: Context, source: Source, other: Source) -> None:
    """A state is a picture, whole, that changes nothing: set again, the same numbers follow.

    After any number of draws of any kind, twice, and in another source, which was seeded otherwise.
    """
    for (name, drawn), (before, after) in itertools.product(DRAWS.items(), AROUND):
        numbers = partial(drawn, generator=source.generator, device=context.device)
        for count in before:
            numbers(count)
        state = source.get()
        check(state.device.type == HOST, f"bytes on the host expected, got {state.device}")
        check(state.dtype == torch.uint8, f"bytes expected, got {state.dtype}")
        kept = state.clone()
        check_equal_bits("the state, asked again", source.get(), kept)
        first, second = map(numbers, after)
        check(not torch.equal(source.get(), kept), f"{name} leaves the state as it was")
        # Amid other bytes, as a checkpoint may hold it; torch's own generators refuse that.
        given = state if source.generator else torch.cat((state.new_zeros(64), state))[64:]
        for where in (source, other, source):
            where.set(given)
            check_equal_bits("a state that was set", where.get(), kept)
            numbers = partial(drawn, generator=where.generator, device=context.device)
            check_equal_bits(f"{name} after the state was set", numbers(after[0]), first)
            check_equal_bits(f"{name}, the draw after it", numbers(after[1]), second)
            check_equal_bits("the state that was taken, after draws", state, kept)
        check(len(second) < 5 or not torch.equal(first[:5], second), f"two draws of {name} are one")
        refused = (RuntimeError, TypeError, ValueError)
        for wrong in (state[:3], torch.cat((state, state[:1]))):
            text = f"a state of {len(wrong)} bytes for {len(state)}"
            expect_error(refused, text, source.set, wrong)
        source.set(kept)
        check_equal_bits(f"{name} after states that were refused", numbers(after[0]), first)


def generator_state_returns(context: Context) -> None:
    """States of generators, and of one in another."""
    made = [context.backend.generator(seed) for seed in (3, 4)]
    source, other = (Source(g.get_state, g.set_state, g) for g in made)
    check_state(context, source, other)


def device_state_returns(context: Context) -> None:
    """The same of the generator that torch's own operators draw from on the device."""
    backend = context.backend
    source = Source(backend.random_state, backend.set_random_state, None)
    index = backend.current_device()
    other = Source(
        partial(backend.random_state, index),
        partial(backend.set_random_state, index=index), None,
    )  # fmt: skip
    check_state(context, source, other)


def generator_is_on_device(context: Context) -> None:
    """It belongs to the device that was asked for, and gives on each what it gives on the first."""
    first = draw(context, context.backend.generator(1, 0)).cpu()
    for index in range(context.backend.device_count()):
        generator = context.backend.generator(1, index)
        text = f"torch.Generator expected, got {generator!r}"
        check(isinstance(generator, torch.Generator), text)
        device, found = context.backend.device(index), generator.device
        same = found.type == device.type and found.index in (device.index, None)
        check(same, f"on {device} expected, got {found}")
        check_equal_bits(f"seed 1 on device {index}", draw(context, generator).cpu(), first)


def draw(context: Context, generator: torch.Generator) -> Tensor:
    """Some numbers of a generator."""
    return torch.randn(257, generator=generator, device=generator.device)


SEEDS = (0, 1, 17, 18, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 18, 2**53 + 1, 2**63 - 1, -1,
         -17, -(2**63))  # fmt: skip
"""Ends of the widths that a seed may be cut to, and seeds that a cut would make one."""
AROUND = (((1, 3, 257), (COUNT, 5)), ((257, 1), (3, 2)), ((2,), (3, 1)))
"""Draws before a state is taken and after; an odd normal keeps the other of its pair, and a state
that was left by a few draws only is another all the same."""
DRAWS: dict[str, Callable[..., Tensor]] = {
    "randn": torch.randn,
    "rand": torch.rand,
    "randint": lambda count, **where: torch.randint(1 << 30, (count,), **where),
    "randperm": torch.randperm,
}
RULES = {
    "threshold": rule_threshold,
    "joins": rule_joins,
    "logical-order": rule_logical_order,
    "calls-differ": rule_calls_differ,
    "global-state": rule_global_state,
    "drawn": rule_drawn,
    "sizes": rule_sizes,
}
GENERATORS = {
    "repeats": generator_repeats,
    "independent": generator_is_independent,
    "state": generator_state_returns,
    "device-state": device_state_returns,
    "device": generator_is_on_device,
}
