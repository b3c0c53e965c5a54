"""Shards become a directory of tokens: the same bytes, whatever ends it and whoever works."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from anychip.cli.group import group
from anychip.train import config, data, run
from anychip.train.data import prepared
from anychip.train.preparing import Progress, Request, WorkerError, pipeline, prepare, workers
from tests.integration.train.processes import is_running
from tests.unit.train import shards
from tests.unit.train.stored_tensors import flip

TEXTS = shards.documents(300)
FILTERS = ("length:least=4", "duplicates:remember=64")
TINY = ("model.layers=1", "model.width=16", "model.heads=2", "model.context=8", "run.steps=2")


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups, and whatever is done is saved."""
    monkeypatch.setattr(pipeline, "CHARACTERS", 500)
    monkeypatch.setattr(pipeline, "SAVED_EVERY_S", 0.0)


def write(folder: Path, ends: tuple[str, ...] = (".jsonl.gz", ".tar", ".parquet")) -> Request:
    """As many shards, with a third of the texts each, the last ones twice."""
    names = [f"{number}{end}" for number, end in enumerate(ends)]
    each = len(TEXTS) // len(ends)
    for number, name in enumerate(names):
        texts = TEXTS[number * each : (number + 1) * each]
        shards.write(folder / name, [*texts, "", *texts[-3:]])
    return Request(sources=tuple(str(folder / name) for name in names))


def in_memory(request: Request) -> torch.Tensor:
    return data.tokenize(data.read_documents([*request.sources]))


def stored(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in (prepared.TOKENS, prepared.DOCUMENTS)}


@pytest.mark.parametrize("end", shards.EVERY)
def test_prepared_tokens_are_those_in_memory(tmp_path: Path, end: str) -> None:
    request = write(tmp_path, (end, end))
    about = prepare(request, tmp_path / "out")
    found, tokens = data.Prepared(tmp_path / "out"), in_memory(request)
    found.verify()
    assert found.read(0, len(found)).tolist() == tokens.tolist()
    assert found.digest == data.InMemory(tokens).digest
    ends = np.flatnonzero(tokens.numpy() == 0).tolist()
    told = np.fromfile(tmp_path / "out" / prepared.DOCUMENTS, "<i8")
    assert told.tolist() == [*ends, len(tokens)]
    assert (about["documents"], about["report"]["empty"]) == (306, 2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "documents.bin", "prepared.json", "tokens.bin",
    ]  # fmt: skip


def killing(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first processes are killed as soon as they are there."""
    start, left = workers._start, [times]

    def start_and_kill(request: Request) -> subprocess.Popen[bytes]:
        process = start(request)
        if left[0]:
            left[0] -= 1
            process.kill()
        return process

    monkeypatch.setattr(workers, "_start", start_and_kill)


def test_workers_write_the_same_also_when_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, said = Request(sources=write(tmp_path).sources, filters=FILTERS), list[str]()
    prepare(request, tmp_path / "alone")
    killing(1, monkeypatch)
    about = prepare(request, tmp_path / "out", num_workers=2, note=said.append)
    assert stored(tmp_path / "out") == stored(tmp_path / "alone")
    assert about["report"]["restarted_workers"] == len(said) == 1
    assert "a worker died with SIGKILL over the documents from data file" in said[0]


@pytest.mark.grid
def test_worker_that_is_killed_twice_ends_it_and_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = write(tmp_path)
    with monkeypatch.context() as patch:
        killing(2, patch)
        with pytest.raises(WorkerError, match=r"died with SIGKILL, twice over .*--resume"):
            prepare(request, tmp_path / "out", num_workers=1)
    assert not (tmp_path / "out" / prepared.DESCRIPTION).exists()
    prepare(request, tmp_path / "out", resume=True)
    assert data.Prepared(tmp_path / "out").digest == data.InMemory(in_memory(request)).digest


def close(writer: Any, *error: object) -> None:
    for file in writer._files:
        file.close()


@pytest.mark.parametrize(("groups", "every_s"), [(1, 0.0), (4, 0.0), (4, 1e9), (17, 1e9)])
def test_what_was_ended_anywhere_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int, every_s: float
) -> None:
    request = Request(sources=write(tmp_path).sources, filters=FILTERS)
    whole = prepare(request, tmp_path / "whole")
    monkeypatch.setattr(pipeline, "SAVED_EVERY_S", every_s)
    # As a process that is killed: nothing is saved on the way out.
    monkeypatch.setattr(pipeline._Writer, "__exit__", close)
    left = [groups]

    def stop(progress: Progress) -> None:
        left[0] -= 1
        if not left[0]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        prepare(request, tmp_path / "out", show=stop)
    with (tmp_path / "out" / prepared.TOKENS).open("ab") as file:
        file.write(b"not saved any more")
    monkeypatch.undo()
    about = prepare(request, tmp_path / "out", resume=True)
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    assert about == whole
    assert about["report"]["dropped"]["duplicates:remember=64"] >= 6


KILLED = """
import os, signal, sys
from pathlib import Path
from anychip.train.preparing import Request, pipeline, prepare, workers
pipeline.CHARACTERS, pipeline.SAVED_EVERY_S, start = 500, 0.0, workers._start
def noted(request):
    process = start(request)
    print(process.pid, flush=True)
    return process
workers._start = noted
def kill(progress):
    if progress.documents > 100:
        os.kill(os.getpid(), signal.SIGKILL)
prepare(Request(sources=(sys.argv[1],)), Path(sys.argv[2]), num_workers=2, show=kill)
"""


@pytest.mark.grid
def test_killed_process_leaves_no_worker_and_goes_on(tmp_path: Path) -> None:
    request = Request(sources=(str(shards.write(tmp_path / "a.jsonl", TEXTS)),))
    words = [sys.executable, "-c", KILLED, *request.sources, str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    for pid in map(int, done.stdout.split()):
        while is_running(pid):  # its input has ended; the limit of the test is that of waiting
            os.sched_yield()
    prepare(request, tmp_path / "out", resume=True)
    assert data.Prepared(tmp_path / "out").digest == data.InMemory(in_memory(request)).digest


GROWTH = """
import sys
from pathlib import Path
from anychip.train import data
from anychip.train.preparing import Request, prepare
def peak():  # of getrusage it would be that of the parent, before exec
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))
folder = Path(sys.argv[1])
prepare(Request(sources=(str(folder / "small.tar.zst"),)), folder / "small")
peaks = [peak()]
prepare(Request(sources=(str(folder / "large.tar.zst"),)), folder / "large")
peaks.append(peak())
row = data.join([data.Prepared(folder / "large")], 0)
loader = data.Loader(row, context=1024, batch_size=16, prefetch=2)
for _ in range(loader.num_windows // 16):
    loader.next_batch()
loader.close()
print(peaks[1] - peaks[0], peak() - peaks[1], len(row) >> 20)
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """64 MiB of it; benchmarks/streaming.py has 2 GiB, and a limit that the system holds."""
    text = "".join(f"{number:x} " for number in range(600))
    for name, count in (("small", 2000), ("large", 30_000)):
        shards.write(tmp_path / f"{name}.tar.zst", [f"{n} {text}" for n in range(count)])
    words = [sys.executable, "-c", GROWTH, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    preparing, reading, mib = map(int, done.stdout.split())
    assert mib >= 60
    # A group of documents and a batch are 1 MiB; the rest is what the allocator keeps.
    assert max(preparing, reading) < 20


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def cut_between_members(content: bytes) -> bytes:
    """Behind a whole member, where tarfile sees the end of an archive."""
    place = content.index(b"folder.d/000050.txt")
    return content[:place]


@pytest.mark.parametrize(("end", "damage", "answer"), [
    (".jsonl", cut, r"line \d+: JSON expected"),
    *((f"{plain}{packing}", cut, "is damaged, or not packed with")
      for plain in (".jsonl", ".tar") for packing in (".gz", ".bz2", ".xz", ".zst")),
    (".tar", cut, "is damaged, or no tar"), (".tar", cut_between_members, "is damaged, or no tar"),
    (".parquet", cut, "is damaged, or no Parquet"), (".jsonl", lambda content: b"", "is empty"),
], ids=lambda value: getattr(value, "__name__", str(value))[:24])  # fmt: skip
def test_damaged_shard_is_named_and_left_out_only_when_asked(
    tmp_path: Path, end: str, damage: Callable[[bytes], bytes], answer: str
) -> None:
    request = write(tmp_path, (".jsonl", end, ".jsonl"))
    bad, said = Path(request.sources[1]), list[str]()
    bad.write_bytes(damage(bad.read_bytes()))
    with pytest.raises(ValueError, match=f"{bad}.*{answer}"):
        prepare(request, tmp_path / "out")
    about = prepare(request, tmp_path / "out", resume=True, skip_corrupt=True, note=said.append)
    ((file, count, why),) = about["report"]["damaged"]
    assert file == str(bad)
    assert str(bad) in why
    assert len(said) == 1
    assert str(bad) in said[0]
    before = [*TEXTS[100:200], "", *TEXTS[197:200]][:count]
    first, last = (
        [*data.read_documents([path])] for path in (request.sources[0], request.sources[2])
    )
    tokens = data.tokenize([*first, *before, *last])
    assert data.Prepared(tmp_path / "out").digest == data.InMemory(tokens).digest


def test_directory_that_cannot_be_prepared_is_refused(tmp_path: Path) -> None:
    request, out = write(tmp_path), tmp_path / "out"
    other = Request(sources=request.sources, filters=("length:least=2",))
    with pytest.raises(FileNotFoundError, match=r"nothing in .*out to go on with"):
        prepare(request, out, resume=True)
    with pytest.raises(ZeroDivisionError):
        prepare(request, out, show=lambda progress: 1 // 0)
    with pytest.raises(FileExistsError, match=r"is not empty; .* add --resume"):
        prepare(request, out)
    with pytest.raises(ValueError, match="was begun with another filters; go on with the same"):
        prepare(other, out, resume=True)
    (Path(request.sources[0]).parent / "0.jsonl.gz").write_bytes(shards.PACK[".gz"](b"{}"))
    with pytest.raises(ValueError, match="was begun with another files"):
        prepare(request, out, resume=True)
    with pytest.raises(data.PreparedError, match=r"is not finished: it has no prepared.json"):
        data.Prepared(out)
    none = Request(sources=request.sources[1:], filters=("length:least=100000",))
    with pytest.raises(ValueError, match="no document is left of 208 that were read"):
        prepare(none, tmp_path / "none")


@pytest.mark.parametrize(("damage", "answer"), [
    (lambda out: flip(out / "tokens.bin"), "tokens.bin is damaged: its hash is not that"),
    (lambda out: flip(out / "documents.bin"), "documents.bin is damaged: its hash"),
    (lambda out: (out / "tokens.bin").write_bytes(b"ab"), "tokens.bin has 2 bytes, and prepared"),
    (lambda out: (out / "prepared.json").write_text("{}"), "an entry 'schema' expected"),
    (lambda out: (out / "prepared.json").write_text("no"), "prepared.json is damaged"),
    (lambda out: (out / "prepared.json").unlink(), "is not finished"),
], ids=["token", "end", "short", "empty", "no-json", "unfinished"])  # fmt: skip
def test_damaged_directory_is_refused_by_training_and_by_verify(
    tmp_path: Path, damage: Callable[[Path], object], answer: str
) -> None:
    out = tmp_path / "out"
    prepare(write(tmp_path), out)
    damage(out)
    with pytest.raises(data.PreparedError, match=answer):
        run.read_texts(config.load(None, [*TINY, f'data.files=["{out}"]']))
    done = CliRunner().invoke(group, ["data", "verify", str(out)])
    assert isinstance(done.exception, data.PreparedError)
    if "hash" in answer:  # what is not verified is as long as it says
        run.read_texts(config.load(None, [*TINY, "data.verify=false", f'data.files=["{out}"]']))


@pytest.mark.parametrize(("setting", "answer"), [
    ("data.tokenizer=bpe", "is tokens already, of which no tokenizer is trained"),
    ("data.tokenizer={own}", "prepared with the tokenizer bytes, .* set data.tokenizer=bytes"),
    ("data.end_of_document=false", "has an end-of-document token between documents"),
], ids=["bpe", "other", "end"])  # fmt: skip
def test_directory_of_other_settings_is_refused(tmp_path: Path, setting: str, answer: str) -> None:
    out, own = tmp_path / "out", tmp_path / "own.json"
    data.train_bpe(["abab"], 258).save(own)
    prepare(write(tmp_path), out)
    given = [*TINY, "model.vocab_size=300", f'data.files=["{out}"]', setting.format(own=own)]
    with pytest.raises(data.PreparedError, match=answer):
        run.read_texts(config.load(None, given))


def test_own_tokenizer_of_a_directory_is_what_training_takes(tmp_path: Path) -> None:
    request, own = write(tmp_path), tmp_path / "own.json"
    tokenizer = data.train_bpe(TEXTS, 400)
    tokenizer.save(own)
    about = prepare(Request(sources=request.sources, tokenizer=str(own)), tmp_path / "out")
    named = f"data.tokenizer={tmp_path / 'out' / 'tokenizer.json'}"
    files = json.dumps([str(tmp_path / "out"), *request.sources])
    found = run.read_texts(
        config.load(None, [*TINY, "model.vocab_size=400", named, f"data.files={files}"])
    )
    want = data.tokenize(data.read_documents([*request.sources]), tokenizer)
    assert (about["dtype"], found.tokenizer.name) == ("int16", tokenizer.name)
    ((row,), end) = found.tokens.rows, torch.tensor([tokenizer.end_of_document])
    twice = torch.cat((want, end, want))  # what was prepared, and behind it what is read now
    assert row.read(np.array([0]), len(row)).tolist() == [twice.tolist()]


def test_files_with_weights_are_a_mixture_and_a_part_of_each_is_held_out(tmp_path: Path) -> None:
    request, out = write(tmp_path), tmp_path / "out"
    prepare(request, out)
    files = [str(out), request.sources[1]]
    given = [f"data.files={json.dumps(files)}", "data.weights=[3, 1]", "eval.fraction=0.25"]
    found = run.read_texts(config.load(None, [*TINY, *given]))
    assert isinstance(found.tokens, data.Mixture)
    assert found.tokens.weights == (0.75, 0.25)
    wholes = [in_memory(Request(sources=one)) for one in (request.sources, request.sources[1:2])]
    cuts = [len(whole) - round(len(whole) * 0.25) for whole in wholes]
    for row, whole, cut_at in zip(found.tokens.rows, wholes, cuts, strict=True):
        assert row.read(np.array([0]), len(row)).tolist() == [whole[:cut_at].tolist()]
    rest = torch.cat([whole[cut_at:] for whole, cut_at in zip(wholes, cuts, strict=True)])
    assert found.held_out is not None
    held_out = found.held_out.read(np.array([0]), len(found.held_out))
    assert held_out.tolist() == [rest.tolist()]


def test_command_prepares_and_tells_programs(tmp_path: Path) -> None:
    request, out = write(tmp_path), tmp_path / "out"
    words = ["data", "prepare", *request.sources, "--out", str(out), "--workers", "0", "--json"]
    done = CliRunner().invoke(group, words, catch_exceptions=False, standalone_mode=False)
    told: dict[str, Any] = json.loads(done.stdout)
    assert (told["schema"], told["directory"], told["documents"]) == (1, str(out), 309)
    assert told["request"]["files"] == [[name, os.path.getsize(name)] for name in request.sources]
