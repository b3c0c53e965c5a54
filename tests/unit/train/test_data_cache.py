"""Files that nobody has prepared are, before they are trained on, once: ``data.cache``."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from anychip.train import config, data, preparing, run
from anychip.train.data import prepared
from anychip.train.preparing import cache, pipeline
from tests.unit.train import shards

TEXTS = shards.documents(90)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups, and whatever is done is saved."""
    monkeypatch.setattr(pipeline, "CHARACTERS", 500)
    monkeypatch.setattr(pipeline, "SAVED_EVERY_S", 0.0)
    monkeypatch.setattr(cache, "PAUSE_S", 0.01)
    monkeypatch.setattr(cache, "num_workers", lambda: 0)  # a process takes seconds to begin


def files(folder: Path) -> list[str]:
    names = [str(folder / name) for name in ("a.jsonl", "b.tar", "c.jsonl.gz")]
    for number, name in enumerate(names):
        shards.write(Path(name), TEXTS[30 * number :][:30])
    return names


def settings(names: list[str], place: Path | str, **more: Any) -> config.Config:
    given = {"files": tuple(names), "cache": str(place), **more}
    return config.Config(data=config.DataConfig(**given))


def tokens(chosen: config.Config) -> list[int]:
    (row,) = run.read_texts(chosen).tokens.rows  # type: ignore[union-attr]
    return [token for piece in row.pieces for token in piece.tokens.read(0, len(piece.tokens))]


def test_tokens_are_those_in_memory_and_are_made_once(tmp_path: Path) -> None:
    names, place, told = files(tmp_path), tmp_path / "cache", list[int]()
    want = tokens(settings(names, ""))
    for _ in range(2):
        assert tokens(settings(names, place)) == want
    (made,) = place.iterdir()
    before = (made / prepared.DESCRIPTION).stat().st_mtime_ns
    preparing.cached(settings(names, place), show=lambda out, at: told.append(at.tokens))
    assert (made / prepared.DESCRIPTION).stat().st_mtime_ns == before
    assert not told
    os.utime(names[0], ns=(1, 1))  # as if it had another content of the same size
    assert tokens(settings(names, place)) == want
    assert len([*place.iterdir()]) == 2


def test_held_out_files_and_parts_of_a_mixture_have_their_own(tmp_path: Path) -> None:
    names, place = files(tmp_path), tmp_path / "cache"
    ready = tmp_path / "ready"
    preparing.prepare(preparing.Request(sources=(names[2],)), ready)
    mixed = settings([*names[:2], str(ready)], place, weights=(1.0, 2.0, 1.0))
    held_out = config.EvalConfig(files=(names[0],))
    found = preparing.cached(config.Config(data=mixed.data, eval=held_out))
    assert found.data.files[2] == str(ready)
    assert found.eval.files == found.data.files[:1]
    assert len({*found.data.files}) == 3
    assert [len(row) for row in run.read_texts(mixed).tokens.rows] == [  # type: ignore[union-attr]
        len(data.tokenize(data.read_documents([name]))) for name in names
    ]
    one = preparing.cached(settings([*names[:2], str(ready)], place))
    assert len(one.data.files) == 2


def test_of_several_that_want_it_one_prepares_and_all_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, place, begun, found = files(tmp_path), tmp_path / "cache", list[int](), list[Any]()
    really, all_ask = pipeline.prepare, threading.Barrier(4)
    finished = list[Path]()

    def prepare(request: Any, out: Path, **how: Any) -> Any:
        if not begun:
            all_ask.wait()
        begun.append(1)
        about = really(request, out, **how)
        finished.append(out)
        return about

    monkeypatch.setattr(cache, "prepare", prepare)

    def ask() -> None:
        found.append(preparing.cached(settings(names, place)).data.files)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({*found}) == 1
    assert len(finished) == 1
    data.Prepared(Path(found[0][0])).verify()


def test_what_was_ended_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    names, place, seen = files(tmp_path), tmp_path / "cache", list[int]()

    def stop(out: Path, at: preparing.Progress) -> None:
        seen.append(at.documents)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preparing.cached(settings(names, place), show=stop)
    assert seen[-1] < len(TEXTS)
    again = list[int]()
    assert preparing.cached(settings(names, place), show=lambda out, at: again.append(at.documents))
    assert again[0] > seen[0]
    assert tokens(settings(names, place)) == tokens(settings(names, ""))


def test_directory_with_nothing_to_go_on_with_is_an_error(tmp_path: Path) -> None:
    names, place = files(tmp_path), tmp_path / "cache"
    (made,) = preparing.cached(settings(names, place)).data.files
    (Path(made) / prepared.DESCRIPTION).unlink()
    with pytest.raises(data.PreparedError, match="has nothing to go on with; remove it to begin"):
        preparing.cached(settings(names, place))


def test_damage_is_named_with_what_leaves_it_out(tmp_path: Path) -> None:
    names = files(tmp_path)
    Path(names[0]).write_text('{"text": "whole"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: .*data prepare .*--skip-corrupt"):
        preparing.cached(settings(names, tmp_path / "cache"))


@pytest.mark.parametrize(("given", "message"), [
    ({"files": ()}, "cache = 'place' needs files"),
    ({"tokenizer": "bpe"}, "needs a tokenizer that is there already, not 'bpe'"),
    ({"end_of_document": False}, "needs end_of_document = true"),
], ids=["files", "bpe", "end"])  # fmt: skip
def test_cache_that_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.DataConfig(**{"files": ("a.txt",), "cache": "place", **given})
