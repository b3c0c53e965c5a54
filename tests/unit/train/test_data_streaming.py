"""Training begins before its data is prepared, and sees what it would see of data in memory."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as deeply
from hypothesis import strategies as st

import anychip
from anychip.train import config, data, lock, loop, preparing, run
from anychip.train.data.order import Order
from anychip.train.data.packing import NO_TARGET
from anychip.train.data.rows import Extent
from anychip.train.preparing import cache, growing, pipeline
from tests.integration.train import directories
from tests.integration.train.processes import is_running
from tests.unit.train import shards

TEXTS = shards.documents(300)
COMMON = ("run.steps=6", "model.context=16", "data.batch_size=4", "run.precision=fp32")
TINY = (*COMMON, "model.layers=1", "model.heads=2", "model.width=16")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups, each saved; nobody pauses long."""
    monkeypatch.setattr(pipeline, "CHARACTERS", 500)
    monkeypatch.setattr(pipeline, "SAVED_EVERY_S", 0.0)
    monkeypatch.setattr(growing, "FIRST", 100)
    monkeypatch.setattr(growing, "PAUSE_S", 0.001)
    monkeypatch.setattr("anychip.train.data.loader.PAUSE_S", 0.001)
    monkeypatch.setattr("anychip.train.data.prefetch.PAUSE_S", 0.001)


@deeply(max_examples=40, deadline=None)
@given(st.integers(9, 250), st.integers(1, 40), st.integers(1, 4), st.integers(0, 9))
def test_first_epoch_of_a_stream_has_neighbours_in_each_buffer_and_every_window_once(
    num_tokens: int, size: int, context: int, seed: int
) -> None:
    order = Order(num_tokens, context=context, seed=seed, shuffle_buffer=size)
    count = order.num_windows
    starts = order.starts(range(3 * count))
    for first in range(0, count, size):
        own = starts[first : min(count, first + size)]
        assert sorted(own // context) == list(range(first, min(count, first + size)))
    for epoch in (1, 2):
        assert np.unique(starts[epoch * count : (epoch + 1) * count] // context).size == count
    plain = Order(num_tokens, context=context, seed=seed)
    assert starts[count:].tolist() == plain.starts(range(count, 3 * count)).tolist()
    # What is there says as much as all of it, and no more than that is asked for.
    there = Order(0, False, context=context, seed=seed, shuffle_buffer=size)
    for tokens in range(num_tokens):
        there.grow(tokens, False)
        told = next((n for n in range(count + 1) if not there.are_there(range(n, n + 1))), count)
        assert told == min(count, (tokens - context) // context) // size * size or told == 0
        assert there.starts(range(told)).tolist() == starts[:told].tolist()


class Grows(data.InMemory):
    """A few tokens more whenever somebody asks."""

    def __init__(self, tokens: torch.Tensor, step: int) -> None:
        super().__init__(tokens)
        self.step, self.there = step, 0

    def extent(self) -> Extent:
        self.there = min(self.there + self.step, len(self.tokens))
        return Extent(self.there, self.there == len(self.tokens))

    def read(self, begin: int, end: int) -> Any:
        assert end <= self.there, "what is not there was read"
        return super().read(begin, end)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("weights", [(1.0,), (0.25, 0.75)], ids=["row", "mixture"])
def test_batches_of_tokens_that_grow_are_those_of_tokens_that_are_there(
    prefetch: int, weights: tuple[float, ...]
) -> None:
    """Over three epochs, with their numbers of targets."""
    texts = [torch.arange(n, dtype=torch.int32) % 97 for n in (1500, 700)][: len(weights)]
    options: dict[str, Any] = {
        "context": 8, "batch_size": 3, "rank": 1, "world_size": 2, "shuffle_buffer": 20, "seed": 7,
        "cross_document_targets": False,
    }  # fmt: skip
    known = data.Mixture([data.join([data.InMemory(t)], 0) for t in texts], weights)
    grows = [data.join([data.InMemory(t[:5]), Grows(t[5:], 30)], None) for t in texts]
    plain = data.Loader(known, **options)
    ahead = data.Loader(data.Mixture(grows, weights), prefetch=prefetch, **options)
    for _ in range(3 * plain.num_windows // 6):
        assert ahead.num_targets(2) == plain.num_targets(2)
        for mine, theirs in zip(ahead.next_batch(), plain.next_batch(), strict=True):
            assert torch.equal(mine, theirs)
    assert ahead.num_windows == plain.num_windows
    ahead.close()


def test_thread_that_waits_for_tokens_ends_when_nobody_wants_them() -> None:
    asked = threading.Semaphore(0)

    class Stops(Grows):
        def extent(self) -> Extent:
            there = min(super().extent().tokens, 200)
            if there == 200:
                asked.release()
            return Extent(there, False)

    row = data.join([Stops(torch.arange(400), 50)], None)
    loader = data.Loader(row, context=8, batch_size=4, shuffle_buffer=8, prefetch=2)
    for _ in range(6):  # of six that there are
        loader.next_batch()
    for _ in range(5):
        asked.acquire()
    loader.close()  # and joins
    assert not [t for t in threading.enumerate() if t.name == "anychip-prefetch"]


def settings(folder: Path, names: list[str], *more: str) -> config.Config:
    """Of files in a cache, as a stream in buffers of eight windows."""
    given = [f"data.files={json.dumps(names)}", f"data.cache={folder / 'cache'}"]
    model = COMMON if any("model.path" in text for text in more) else TINY
    return config.load(None, [*model, *given, "data.shuffle_buffer=8", *more], note=str)


def files(folder: Path, field: str = "text", documents: Any = TEXTS) -> list[str]:
    each = -(-len(documents) // 3)
    return [
        str(shards.write(folder / f"{n}{end}", documents[n * each : (n + 1) * each], field))
        for n, end in enumerate((".jsonl.gz", ".tar", ".parquet"))
    ]


@contextmanager
def as_asked(tokens: preparing.Growing, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prepares in a thread, a group of documents for each question how far it is."""
    is_asked, is_over = threading.Event(), threading.Event()
    monkeypatch.setattr(preparing.Growing, "_see_to_it", lambda self: is_asked.set())

    def show(at: preparing.Progress) -> None:
        is_asked.wait()
        is_asked.clear()
        if is_over.is_set():
            raise KeyboardInterrupt

    def work() -> None:
        request = preparing.Request.of(tokens._asked["request"])
        is_begun = (tokens.path / pipeline.PROGRESS).exists()
        try:
            preparing.prepare(request, tokens.path, resume=is_begun, show=show)
        except (KeyboardInterrupt, FileExistsError):  # that of what is finished
            pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        is_asked.set()
        thread.join()


@pytest.mark.parametrize("field", ["text", "messages"])
def test_windows_come_once_over_resumes_at_2_3_and_1_ranks_while_tokens_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Counted, over three epochs; preparing is ended with each run, and goes on in the next."""
    documents, more = TEXTS, list[str]()
    if field == "messages":
        documents = [
            [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}]
            for n in range(150)
        ]  # fmt: skip
        folder = directories.make(tmp_path / "model", "Llama")
        more = [f"model.path={folder}", "data.field=messages"]
    chosen = settings(tmp_path, files(tmp_path, field, documents), *more)
    with monkeypatch.context() as patch:
        patch.setattr(preparing.Growing, "_see_to_it", lambda self: None)
        first = run.read_data(chosen)[0]
    (piece,) = first.rows[0].pieces
    assert isinstance(piece.tokens, preparing.Growing)
    plain = run.read_data(replace(chosen, data=replace(chosen.data, cache="")))[0]
    seen, states = list[tuple[int, ...]](), list[Any]()
    count = data.Loader(plain, context=16, batch_size=1).num_windows
    is_made = list[bool]()
    for num_steps, world_size in ((count // 12, 2), (count // 12, 3), (count, 1), (count // 4, 2)):
        with as_asked(piece.tokens, monkeypatch):
            tokens = run.read_data(chosen)[0]
            ranks = [
                data.Loader(tokens, context=16, batch_size=2, rank=rank, world_size=world_size,
                            seed=5, prefetch=rank % 2, shuffle_buffer=8)
                for rank in range(world_size)
            ]  # fmt: skip
            for rank in ranks:
                rank.load_state_dict(states[-1] if states else rank.state_dict())
            for _ in range(num_steps):
                for x, y in (rank.next_batch() for rank in ranks):
                    seen += map(tuple, torch.cat((x, y), dim=1).tolist())
            states.append(ranks[0].state_dict())
            for rank in ranks:
                rank.close()
            is_made.append((piece.tokens.path / "prepared.json").exists())
    assert is_made == [False, False, True, True]
    straight = data.Loader(plain, context=16, batch_size=1, seed=5, shuffle_buffer=8)
    batches = [straight.next_batch() for _ in seen]
    assert seen == [tuple(torch.cat(batch, dim=1)[0].tolist()) for batch in batches]
    assert len(seen) > 2 * count
    starts = Order(len(plain), context=16, seed=5, shuffle_buffer=8).starts(range(2 * count))
    for epoch in (starts[:count], starts[count:]):
        assert np.unique(epoch).size == count
    windows = plain.rows[0].read(starts, 16) & ~NO_TARGET
    assert Counter(map(tuple, windows.tolist())) == Counter(w[:16] for w in seen[: 2 * count])


def killing(times: int, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The first processes are killed as soon as they are there."""
    start, made = growing._start, list[subprocess.Popen[bytes]]()

    def start_and_kill(asked: Any, descriptor: int) -> subprocess.Popen[bytes]:
        made.append(start(asked, descriptor))
        if len(made) <= times:
            made[-1].kill()
            made[-1].wait()
        return made[-1]

    monkeypatch.setattr(growing, "_start", start_and_kill)
    return made


def losses(chosen: config.Config, out: Path) -> list[float]:
    built = loop.build(chosen, anychip.use("cpu"))
    out.mkdir()
    return [row.loss for row in loop.train(built, out, lambda row: None)]


def test_run_of_a_stream_has_the_losses_of_one_in_memory_though_what_prepares_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names, made = files(tmp_path), killing(1, monkeypatch)
    chosen = settings(tmp_path, names, f"eval.files={json.dumps(names[:1])}")
    found = losses(chosen, tmp_path / "stream")
    in_memory = replace(chosen, data=replace(chosen.data, cache=""))
    assert found == losses(in_memory, tmp_path / "memory")
    assert len(made) == 3  # the killed one, the next one, and that of the held-out file
    assert "died with SIGKILL; it is started again" in capfd.readouterr().err
    evaluations = [(tmp_path / n / "eval.jsonl").read_text() for n in ("stream", "memory")]
    assert evaluations[0] == evaluations[1]


def test_process_that_is_killed_twice_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = killing(9, monkeypatch)
    with pytest.raises(preparing.WorkerError, match="died with SIGKILL, twice at the same pl"):
        loop.build(settings(tmp_path, files(tmp_path)), anychip.use("cpu"))
    assert len(made) == 2


@pytest.mark.grid
def test_truncated_shard_is_named_and_left_out_only_when_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = files(tmp_path)
    bad = Path(names[1])
    bad.write_bytes(bad.read_bytes()[:20_000])
    answer = rf"{bad} is damaged.*data\.skip_corrupt=true.* goes on without the rest of it"
    with pytest.raises(data.PreparedError, match=answer):
        loop.build(settings(tmp_path, names), anychip.use("cpu"))
    built = loop.build(settings(tmp_path, names, "data.skip_corrupt=true"), anychip.use("cpu"))
    for _ in range(built.loader.num_windows):  # over the end of what there is
        built.loader.next_batch()
    built.loader.close()
    assert f"left out: data file {bad} is damaged" in capfd.readouterr().err
    (row,) = built.loader.tokens.rows
    about = json.loads((row.pieces[0].tokens.path / "prepared.json").read_text())  # type: ignore[attr-defined]
    ((file, count, _),) = about["report"]["damaged"]
    assert (file, 0 < count < 100) == (str(bad), True)
    want = data.tokenize([*TEXTS[:100], *TEXTS[100 : 100 + count], *TEXTS[200:]])
    assert row.read(np.array([0]), len(row)).tolist() == [want.tolist()]
    with pytest.raises(data.PreparedError, match=answer):
        loop.build(settings(tmp_path, names), anychip.use("cpu"))


FAILS = """
import json, struct, sys
text = json.dumps({"error": "a.jsonl.gz is damaged"}).encode()
sys.stdout.buffer.write(struct.pack("<QQ", len(text), 0) + text)
"""


def test_what_was_prepared_before_it_failed_is_trained_on_and_may_be_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, groups = settings(tmp_path, files(tmp_path)), [20]
    request, out = cache.request_of(chosen.data.files, chosen)

    def stop(at: preparing.Progress) -> None:
        groups[0] -= 1
        if not groups[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preparing.prepare(request, out, show=stop)
    there = pipeline.progress_of(out)[0]["tokens"]

    def fail(asked: Any, descriptor: int) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", FAILS], stdin=pipe, stdout=pipe)

    monkeypatch.setattr(growing, "_start", fail)
    tokens, states = run.read_data(chosen)[0], list[Any]()
    loader = data.Loader(tokens, context=16, batch_size=4, prefetch=2, shuffle_buffer=8)

    def go_on() -> None:
        for _ in loader:
            states.append(loader.state_dict())

    with pytest.raises(data.PreparedError, match=r"a\.jsonl\.gz is damaged"):
        go_on()
    assert loader.position == (there - 16) // 16 // 8 * 8 > 100
    assert states[-1]["position"] == loader.position


LEFT = """
import os, signal, sys
from pathlib import Path
from anychip.train.preparing import Growing, Request
tokens = Growing(Request(sources=(sys.argv[1],)), Path(sys.argv[2]), num_workers=1)
print(tokens._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.grid
def test_process_ends_with_the_run_that_started_it(tmp_path: Path) -> None:
    """And lets another one go on."""
    (name, out) = (str(shards.write(tmp_path / "a.jsonl", TEXTS)), tmp_path / "out")
    out.mkdir()
    words = [sys.executable, "-c", LEFT, name, str(out)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert done.returncode == -signal.SIGKILL
    while is_running(int(done.stdout)):  # the limit of the test is that of waiting
        os.sched_yield()
    assert not lock.is_held(out)
    tokens = preparing.Growing(preparing.Request(sources=(name,)), out, num_workers=0)
    assert tokens.digest == tokens.digest
    row = data.join([tokens], 0)
    data.Loader(row, context=8, batch_size=1).next_batch()  # which takes all there is
    assert row.extent() == Extent(len(data.tokenize(TEXTS)), True)


@pytest.mark.parametrize(("given", "answer"), [
    (["eval.fraction=0.1"], "last part of all tokens, which are still made .* set eval.files"),
    (["data.tokenizer=bpe"], "needs a tokenizer that is there already"),
], ids=["fraction", "bpe"])  # fmt: skip
def test_stream_that_cannot_be_is_refused(tmp_path: Path, given: list[str], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        settings(tmp_path, files(tmp_path), *given)


def test_what_is_prepared_behind_a_stream_is_refused_and_before_it_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, ready = files(tmp_path), tmp_path / "ready"
    preparing.prepare(preparing.Request(sources=(names[0],)), ready)
    monkeypatch.setattr(preparing.Growing, "_see_to_it", lambda self: None)
    with pytest.raises(ValueError, match=r"ready cannot stand behind files of which tokens are st"):
        run.read_data(settings(tmp_path, [names[1], str(ready)]))
    (row,) = run.read_data(settings(tmp_path, [str(ready), names[1]]))[0].rows
    assert row.extent() == Extent(len(data.Prepared(ready)) + 1, False)
