"""Every window once in an epoch over all ranks, in an order that is the same for any number."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anychip.train import data

WORLD_SIZES = st.integers(1, 8)
BATCH_SIZES = st.integers(1, 5)


def loader(length: int = 400, **options: Any) -> data.Loader:
    """Of tokens that are their own position, so that the first of a window is where it begins."""
    tokens = torch.arange(length, dtype=torch.int32)
    return data.Loader(tokens, **{"context": 8, "batch_size": 1, **options})


def steps(
    num_steps: int, world_size: int, batch_size: int, state: Any = None, **options: Any
) -> tuple[list[int], Any]:
    """Starts of the windows that all ranks see, rank after rank in each step, and a state after."""
    ranks = [
        loader(world_size=world_size, batch_size=batch_size, rank=rank, **options)
        for rank in range(world_size)
    ]
    for rank in ranks if state else []:
        rank.load_state_dict(state)
    starts: list[int] = []
    for _ in range(num_steps):
        for rank in ranks:
            x, y = rank.next_batch()
            assert torch.equal(x, x[:, :1] + torch.arange(x.shape[1]))
            assert torch.equal(y, x + 1)
            starts += x[:, 0].tolist()
    first, *others = [rank.state_dict() for rank in ranks]
    assert all(other == first for other in others)
    return starts, first


@settings(max_examples=60, deadline=None)
@given(WORLD_SIZES, BATCH_SIZES, st.integers(2, 200), st.integers(1, 9), st.integers(0, 3))
def test_every_window_of_an_epoch_comes_once_over_all_ranks(
    world_size: int, batch_size: int, length: int, context: int, seed: int
) -> None:
    length = max(length, context + 1)
    options = {"length": length, "context": context, "seed": seed}
    num_windows = loader(**options).num_windows
    num_steps = -(-3 * num_windows // (world_size * batch_size))
    starts, _ = steps(num_steps, world_size, batch_size, **options)
    for epoch in range(3):
        seen = sorted(starts[epoch * num_windows : (epoch + 1) * num_windows])
        assert seen == list(range(seen[0], seen[0] + num_windows * context, context))
        assert 0 <= seen[0] < context
        assert seen[-1] + context < length
    # What no epoch has is less than a window and its last token at the front, and so at the end.
    assert length - num_windows * context <= 2 * context


@settings(max_examples=40, deadline=None)
@given(WORLD_SIZES, BATCH_SIZES, st.integers(0, 3))
def test_batches_of_all_ranks_are_the_batch_of_one_rank(
    world_size: int, batch_size: int, seed: int
) -> None:
    whole = loader(batch_size=world_size * batch_size, seed=seed)
    ranks = [
        loader(batch_size=batch_size, world_size=world_size, rank=rank, seed=seed)
        for rank in range(world_size)
    ]
    for _ in range(2 * whole.num_windows // whole.batch_size + 2):
        parts = [rank.next_batch() for rank in ranks]
        tokens, targets = whole.next_batch()
        assert torch.equal(torch.cat([x for x, _ in parts]), tokens)
        assert torch.equal(torch.cat([y for _, y in parts]), targets)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), WORLD_SIZES, BATCH_SIZES), min_size=2, max_size=4))
def test_run_resumed_at_other_world_and_batch_sizes_repeats_and_leaves_out_nothing(
    parts: list[tuple[int, int, int]],
) -> None:
    starts: list[int] = []
    state = None
    for num_steps, world_size, batch_size in parts:
        more, state = steps(num_steps, world_size, batch_size, state)
        starts += more
    straight, _ = steps(len(starts), 1, 1)
    assert starts == straight
    assert state["position"] == len(starts)


def test_order_is_that_of_the_first_version() -> None:
    """Recorded runs depend on it: these are its starts, of three epochs."""
    starts, _ = steps(125, 1, 1, length=1000, context=16, seed=3)
    assert starts[:5] == [12, 76, 636, 284, 60]
    assert starts[61:66] == [223, 671, 511, 63, 863]
    assert starts[122:] == [589, 173, 861]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_number_of_batches_counts_those_of_each_rank_also_when_resumed(world_size: int) -> None:
    def rank_of(rank: int) -> data.Loader:
        return loader(num_batches=5, batch_size=2, world_size=world_size, rank=rank)

    for rank in range(world_size):
        assert len(list(rank_of(rank))) == 5
        first, second = rank_of(rank), rank_of(rank)
        list(itertools.islice(first, 3))
        second.load_state_dict(first.state_dict())
        assert len(list(second)) == 2


def test_epoch_is_that_of_the_next_window() -> None:
    some = loader(length=48, batch_size=4)  # five windows
    epochs = []
    for _ in range(6):
        epochs.append(some.epoch)
        some.next_batch()
    assert epochs == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(("options", "answer"), [
    ({"rank": 2, "world_size": 2}, "rank must be below world_size 2, got 2"),
    ({"rank": -1}, "rank must be at least 0, got -1"),
    ({"world_size": 0}, "world_size must be at least 1, got 0"),
    ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"context": 0}, "context must be at least 1, got 0"),
    ({"seed": -1}, "seed must be at least 0, got -1"),
    ({"prefetch": -1}, "prefetch must be at least 0, got -1"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_number_out_of_its_range_is_refused(options: dict[str, int], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        loader(**options)


@pytest.mark.parametrize(("tokens", "got"), [
    (torch.zeros(100), r"\[100\] torch.float32 on cpu"),
    (torch.zeros(10, 10, dtype=torch.int64), r"\[10, 10\] torch.int64 on cpu"),
    (torch.zeros(100, dtype=torch.uint8, device="meta"), r"torch.uint8 on meta"),
], ids=["float", "matrix", "elsewhere"])  # fmt: skip
def test_tokens_that_are_no_row_of_integers_are_refused(tokens: torch.Tensor, got: str) -> None:
    with pytest.raises(ValueError, match=f"a row of integers on the host expected .* {got}"):
        data.Loader(tokens, context=8, batch_size=1)


def test_tokens_that_are_not_contiguous_give_the_same_batches_and_state() -> None:
    whole = torch.arange(800, dtype=torch.int16)
    strided = data.Loader(whole[::2], context=8, batch_size=3)
    plain = data.Loader(whole[::2].contiguous(), context=8, batch_size=3)
    for _ in range(20):
        assert torch.equal(strided.next_batch()[0], plain.next_batch()[0])
    assert strided.state_dict() == plain.state_dict()


def test_targets_across_documents_are_left_out_when_asked() -> None:
    tokens = torch.arange(400, dtype=torch.int32) % 5
    options: dict[str, Any] = {"context": 8, "batch_size": 3}
    plain = data.Loader(tokens, **options)
    masked = data.Loader(tokens, cross_document_targets=False, **options)
    for _ in range(20):
        (x, y), (x2, y2) = plain.next_batch(), masked.next_batch()
        assert torch.equal(x2, x)
        assert torch.equal(y2, torch.where(x == 0, -100, y))
    assert masked.state_dict() == plain.state_dict(), "the position is in the same order"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_targets_of_the_next_batches_are_counted_over_all_ranks(prefetch: int) -> None:
    """Across the ends of epochs, and while a thread makes batches of another one."""
    tokens = torch.arange(400, dtype=torch.int32) % 7 % 5
    options: dict[str, Any] = {"context": 8, "batch_size": 3, "world_size": 4}
    ranks = [
        data.Loader(tokens, cross_document_targets=False, rank=r, prefetch=prefetch, **options)
        for r in range(4)
    ]
    told = set()
    for _ in range(12):
        counts = {rank.num_targets(2) for rank in ranks}
        seen = [y for rank in ranks for _, y in (rank.next_batch(), rank.next_batch())]
        assert counts == {sum(int((y != data.IGNORED_TARGET).sum()) for y in seen)}
        told |= counts
    assert len(told) > 1
    for rank in ranks:
        rank.close()
    assert data.Loader(tokens, **options).num_targets(2) == 2 * 4 * 3 * 8


def test_position_with_another_tokenizer_is_refused_with_both() -> None:
    tokenizer = data.train_bpe(["abab"], 258)
    mine, theirs = loader(tokenizer=tokenizer), loader()
    with pytest.raises(ValueError, match=rf"another tokenizer: 'bytes' .* is '{tokenizer.name}'"):
        mine.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match=rf"another tokenizer: '{tokenizer.name}' .* is 'bytes'"):
        theirs.load_state_dict(mine.state_dict())


def test_position_of_the_first_version_is_one_in_bytes() -> None:
    theirs = loader()
    theirs.next_batch()
    state = theirs.state_dict()
    del state["tokenizer"]
    mine = loader()
    mine.load_state_dict(state)
    assert mine.position == 1
    with pytest.raises(ValueError, match="another tokenizer: 'bytes' was saved"):
        loader(tokenizer=data.train_bpe(["abab"], 258)).load_state_dict(state)
