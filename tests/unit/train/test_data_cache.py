"""Files that nobody has prepared are, before they are trained on, once: ``data.cache``."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from anychip.train import asking, config, data, preparing, run
from anychip.train.data import prepared
from anychip.train.preparing import cache, growing, pipeline
from tests.unit.train import shards

TEXTS = shards.documents(90)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups, and whatever is done is saved."""
    monkeypatch.setattr(pipeline, "CHARACTERS", 500)
    monkeypatch.setattr(pipeline, "SAVED_EVERY_S", 0.0)
    monkeypatch.setattr(growing, "PAUSE_S", 0.01)
    # A process takes seconds to begin.
    monkeypatch.setattr(growing, "_start", shards.InThread)
    monkeypatch.setattr(cache, "num_workers", lambda: 0)


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


def cached(chosen: config.Config, **how: Any) -> Path:
    return preparing.cached(chosen.data.files, chosen, **how).path


def test_tokens_are_those_in_memory_and_are_made_once(tmp_path: Path) -> None:
    names, place, told = files(tmp_path), tmp_path / "cache", list[int]()
    want = tokens(settings(names, ""))
    for _ in range(2):
        assert tokens(settings(names, place)) == want
    (made,) = place.iterdir()
    before = (made / prepared.DESCRIPTION).stat().st_mtime_ns
    cached(settings(names, place), show=lambda out, at: told.append(at.tokens))
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
    found = run.read_texts(config.Config(data=mixed.data, eval=held_out))
    assert isinstance(found.tokens, data.Mixture)
    assert found.held_out is not None
    paths = [row.pieces[0].tokens.path for row in found.tokens.rows]  # type: ignore[attr-defined]
    assert paths[2] == ready
    assert [piece.tokens.path for piece in found.held_out.pieces] == paths[:1]  # type: ignore[attr-defined]
    assert len({*paths}) == 3
    assert [len(row) for row in found.tokens.rows] == [
        len(data.tokenize(data.read_documents([name]))) for name in names
    ]
    (row,) = run.read_texts(settings([*names[:2], str(ready)], place)).tokens.rows  # type: ignore[union-attr]
    assert len([p for p in row.pieces if isinstance(p.tokens, data.Prepared)]) == 2


def test_files_that_a_run_is_asked_about_are_cached_and_not_filtered(tmp_path: Path) -> None:
    names, place = files(tmp_path), tmp_path / "cache"
    chosen = settings(names, place, filters=("length:least=100",))
    asked = config.Config(data=chosen.data, eval=config.EvalConfig(files=(names[0],)))
    found = asking._without_training(asked).held_out
    assert found is not None
    assert [type(piece.tokens) for piece in found.pieces] == [data.Prepared]
    want = [len(data.tokenize(data.read_documents([names[0]])))]
    want.append(sum(len(t.encode()) + 1 for t in TEXTS if len(t) >= 100) - 1)
    assert [len(found), len(tokens(chosen))] == want


def test_of_several_that_want_it_one_has_it_prepared_and_all_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, place, begun = files(tmp_path), tmp_path / "cache", list[int]()
    all_ask = threading.Barrier(4)

    def start(asked: dict[str, Any], descriptor: int) -> shards.InThread:
        begun.append(1)
        return shards.InThread(asked, descriptor)

    monkeypatch.setattr(growing, "_start", start)

    def ask(_: int) -> Path:
        all_ask.wait()
        return cached(settings(names, place))

    with ThreadPoolExecutor(4) as pool:
        (found,) = {*pool.map(ask, range(4))}
    assert len(begun) == 1
    data.Prepared(found).verify()


def test_what_was_ended_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    names, place, seen = files(tmp_path), tmp_path / "cache", list[int]()
    request, out = cache.request_of(names, settings(names, place))

    def stop(at: preparing.Progress) -> None:
        seen.append(at.documents)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preparing.prepare(request, out, show=stop)
    assert seen[-1] < len(TEXTS)
    assert tokens(settings(names, place)) == tokens(settings(names, ""))


def test_directory_with_nothing_to_go_on_with_is_an_error(tmp_path: Path) -> None:
    names, place = files(tmp_path), tmp_path / "cache"
    (cached(settings(names, place)) / prepared.DESCRIPTION).unlink()
    with pytest.raises(data.PreparedError, match="has nothing to go on with; remove it to begin"):
        cached(settings(names, place))


def test_damage_is_named_with_what_leaves_it_out_and_only_who_asks_trains_without(
    tmp_path: Path,
) -> None:
    names, place = files(tmp_path), tmp_path / "cache"
    Path(names[0]).write_text('{"text": "whole"}\n{"text": \n')
    answer = r"a\.jsonl, line 2: .*data\.skip_corrupt=true.* goes on without the rest"
    with pytest.raises(ValueError, match=answer):
        cached(settings(names, place))
    found = cached(settings(names, place, skip_corrupt=True))
    assert data.Prepared(found).read(0, 6).tobytes() == b"whole\0"
    with pytest.raises(data.PreparedError, match=answer):
        cached(settings(names, place))


@pytest.mark.parametrize(("given", "message"), [
    ({"files": ()}, "cache = 'place' needs files"),
    ({"tokenizer": "bpe"}, "needs a tokenizer that is there already, not 'bpe'"),
    ({"end_of_document": False}, "needs end_of_document = true"),
    ({"cache": "", "filters": ("length",)}, "filters needs cache"),
    ({"cache": "", "skip_corrupt": True}, "skip_corrupt needs cache"),
], ids=["files", "bpe", "end", "filters", "skip"])  # fmt: skip
def test_cache_that_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.DataConfig(**{"files": ("a.txt",), "cache": "place", **given})
