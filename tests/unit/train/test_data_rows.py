"""Tokens in files, in pieces and in mixtures: each window once, whatever ranks and resumes."""

from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anychip.train import data
from anychip.train.data.order import Order, Turns
from anychip.train.data.packing import BEGINS, NO_TARGET
from anychip.train.data.rows import Piece
from anychip.train.preparing import Request, prepare


@settings(max_examples=80, deadline=None)
@given(st.integers(20, 900), st.integers(1, 4), st.integers(0, 2**40), st.sampled_from([1, 3, 8]))
def test_order_of_buffers_has_every_window_of_an_epoch_once(
    num_windows: int, context: int, seed: int, run: int
) -> None:
    order = Order(num_windows * context + context, context=context, seed=seed, buffer=24, run=run)
    assert order.num_windows == num_windows
    epochs = [order.starts(range(e * num_windows, (e + 1) * num_windows)) for e in range(3)]
    for starts in epochs:
        assert sorted((starts // context).tolist()) == list(range(num_windows))
    again = Order(num_windows * context + context, context=context, seed=seed, buffer=24, run=run)
    number = 2 * num_windows - 5
    across = np.concatenate(epochs)[number : number + 11]
    assert again.starts(range(number, number + 11)).tolist() == across.tolist()


def test_order_of_buffers_mixes_the_corpus_and_differs_by_epoch_and_seed() -> None:
    """A buffer has runs from everywhere, and no window stays beside its neighbour."""

    def epoch(number: int, seed: int = 1) -> Any:
        order = Order(8001, context=1, seed=seed, buffer=800, run=10)
        return order.starts(range(number * 8000, (number + 1) * 8000))

    starts = epoch(0)
    assert np.unique(starts[:800] // 10).size == 80
    thirds = np.bincount(starts[:800] * 3 // 8000)
    assert thirds.min() > 160  # of 267 in the mean; 6 of its standard deviations are below 90
    assert (np.abs(np.diff(starts)) == 1).mean() < 0.1
    assert (starts == epoch(0)).all()
    for other in (epoch(1), epoch(0, seed=2)):
        assert (starts == other).mean() < 0.01


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5), st.integers(0, 9),
    st.integers(0, 50_000), st.integers(1, 40_000),
)  # fmt: skip
def test_each_row_of_a_mixture_has_its_weight_and_its_windows_in_their_order(
    weights: list[float], seed: int, first: int, count: int
) -> None:
    weights = [weight / sum(weights) for weight in weights]
    orders = [Order(100 + 50 * n, context=1, seed=n) for n in range(len(weights))]
    found = Turns(orders, weights, seed=seed).places(range(first, first + count))
    places = np.concatenate([places for places, _ in found])
    assert sorted(places.tolist()) == list(range(count))
    begun = Turns(orders, weights, seed=seed).places(range(first))
    for (_, starts), (_, before), order, weight in zip(found, begun, orders, weights, strict=True):
        own = range(len(before), len(before) + len(starts))
        assert starts.tolist() == order.starts(own).tolist()
        # Stratified: each end of the range is off by less than a turn, and rounding of the weight.
        assert abs(len(starts) - weight * count) <= 2 + count / (1 << 14)


@pytest.mark.parametrize(("weights", "answer"), [
    ([1.0], "a weight for each row of tokens expected, got 1 weights and 2 rows"),
    ([1.0, 0.0], "weights greater than 0 expected"), ([1.0, float("nan")], "weights greater than"),
    ([1.0, 1e-6], "a weight is at least 1/16384 of all, got 1e-06"),
], ids=["few", "zero", "nan", "small"])  # fmt: skip
def test_mixture_with_wrong_weights_is_refused(weights: list[float], answer: str) -> None:
    row = data.join([data.InMemory(torch.arange(100))], None)
    with pytest.raises(ValueError, match=answer):
        data.Loader(data.Mixture([row, row], weights), context=8, batch_size=1)


def stored(folder: Path, name: str, count: int) -> data.Prepared:
    """Documents of 5 to 11 letters, in a directory."""
    generator = np.random.default_rng(count)
    letters = "".join(chr(97 + i) for i in generator.integers(26, size=count))
    ends = [0, *accumulate(generator.integers(5, 12, size=count // 11).tolist())]
    file = folder / f"{name}.jsonl"
    file.write_text("".join(f'{{"text": "{letters[a:b]}"}}\n' for a, b in pairwise(ends)))
    prepare(Request(sources=(str(file),)), folder / name)
    return data.Prepared(folder / name)


def trained(
    tokens: Any, num_steps: int, world_size: int, state: Any, batch_size: int = 2
) -> tuple[list[tuple[int, ...]], Any]:
    """What all ranks are given, rank after rank in each step, and a state after."""
    ranks = [
        data.Loader(tokens, context=7, batch_size=batch_size, rank=rank, world_size=world_size,
                    seed=5, prefetch=rank % 2)
        for rank in range(world_size)
    ]  # fmt: skip
    for rank in ranks if state else []:
        rank.load_state_dict(state)
    found = []
    for _ in range(num_steps):
        batches = [torch.cat((x, y[:, -1:]), dim=1) for x, y in (r.next_batch() for r in ranks)]
        found += [tuple(window) for window in torch.cat(batches).tolist()]
    states = [rank.state_dict() for rank in ranks]
    for rank in ranks:
        rank.close()
    assert states == [states[0]] * world_size
    return found, states[0]


@pytest.mark.parametrize("is_mixture", [False, True])
def test_prepared_windows_come_once_over_resumes_at_2_3_and_1_ranks(
    tmp_path: Path, is_mixture: bool
) -> None:
    """Counted, over four epochs: of a row, and of each row of a mixture by its weight."""
    parts = [stored(tmp_path, name, count) for name, count in (("a", 900), ("b", 500))]
    rows = [data.join([part], 0) for part in parts]
    tokens: Any = data.Mixture(rows, [0.25, 0.75]) if is_mixture else data.join(parts, 0)
    seen: list[tuple[int, ...]] = []
    state = None
    for num_steps, world_size in ((23, 2), (17, 3), (20, 1), (11, 3), (30, 2)):
        more, state = trained(tokens, num_steps, world_size, state)
        seen += more
    straight, _ = trained(tokens, len(seen), 1, None, batch_size=1)
    assert seen == straight
    orders = [Order(len(row), context=7, seed=5 + n) for n, row in enumerate(rows)]
    if not is_mixture:
        rows, orders = [tokens], [Order(len(tokens), context=7, seed=5)]
    told, want = Counter(seen), Counter[tuple[int, ...]]()
    places = Turns(orders, [0.25, 0.75][: len(rows)], seed=5).places(range(len(seen)))
    for row, order, (own, starts) in zip(rows, orders, places, strict=True):
        assert len(own) >= 2 * order.num_windows or is_mixture
        for number in range(0, len(own) - order.num_windows + 1, order.num_windows):
            epoch = starts[number : number + order.num_windows]
            assert np.unique(epoch).size == order.num_windows
        want.update(map(tuple, row.read(starts, 8).tolist()))
    assert told == want


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5), st.booleans(),
    st.integers(0, 40), st.integers(0, 40), st.integers(1, 20),
)  # fmt: skip
def test_row_of_pieces_is_what_torch_joins(
    sizes: list[int], has_ends: bool, low: int, high: int, length: int
) -> None:
    tensors = [torch.arange(size) + 100 * n for n, size in enumerate(sizes, 1)]
    row = data.join([data.InMemory(tensor) for tensor in tensors], 0 if has_ends else None)
    apart = [part for t in tensors for part in ((torch.zeros(1).long(), t) if has_ends else (t,))]
    whole = torch.cat(apart[has_ends:])
    low, high = sorted((min(low, len(whole)), min(high, len(whole))))
    part = row.part(low, high)
    assert len(row) == len(whole)
    assert len(part) == high - low
    length = min(length, len(part))
    starts = np.arange(len(part) - length + 1)
    want = whole[low:high].unfold(0, length, 1) if length else torch.empty(len(starts), 0).long()
    assert torch.equal(torch.from_numpy(part.read(starts, length)), want)
    assert part.count_untold(starts, length, 0) == int((want == 0).sum())


def test_targets_are_counted_in_pieces_of_every_kind(tmp_path: Path) -> None:
    prepared = stored(tmp_path, "a", 900)
    letters = torch.from_numpy(prepared.read(0, 300).copy())
    text = data.join([prepared, data.InMemory(letters), prepared], 0).part(37, 1500)
    marks = torch.rand(500, generator=torch.Generator().manual_seed(3))
    tokens = torch.arange(500, dtype=torch.int32) | (marks < 0.6).int() * NO_TARGET
    tokens[::50] |= BEGINS | NO_TARGET
    told = data.join([data.InMemory(tokens[:200]), data.InMemory(tokens[200:])], 0)
    for row in (text, told):
        mine = data.Loader(row, context=9, batch_size=3, seed=2, cross_document_targets=False)
        for _ in range(60):
            assert mine.num_targets() == int((mine.next_batch()[1] != data.IGNORED_TARGET).sum())
    with pytest.raises(ValueError, match="text and messages are not trained on together"):
        data.TokenRow([Piece(data.InMemory(tokens), 0, 9), Piece(data.InMemory(letters), 0, 9)])
