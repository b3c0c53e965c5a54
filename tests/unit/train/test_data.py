"""Text to tokens and windows: where epochs begin, seeds, and data that is refused.

Does the example of docs/data.md run?
"""

import gzip
import json
import re
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from anychip.train import data


def _loader(length: int = 1000, **settings: int) -> data.Loader:
    """Of a text in which every window can be told by its bytes: 251 is prime to the contexts."""
    tokens = torch.from_numpy((np.arange(length) % 251).astype(np.uint8))
    return data.Loader(tokens, **{"context": 16, "batch_size": 3, **settings})


def test_windows_begin_elsewhere_in_each_epoch_so_that_no_byte_keeps_its_place() -> None:
    loader = _loader(length=200, batch_size=1)  # short enough for a byte to be its own position
    shifts = set()
    for _ in range(300):
        shifts.add(min(int(x[0, 0]) for x, _ in islice(loader, loader.num_windows)))
    # In 300 draws one of 16 is missed with a chance of 16 * (15/16)^300 = 6e-8; the seed is fixed.
    assert shifts == set(range(16))


def test_order_differs_between_seeds_and_epochs_and_repeats_for_a_seed() -> None:
    def epochs(seed: int) -> list[list[int]]:
        loader = _loader(seed=seed, batch_size=1)
        first = [int(x[0, 0]) for x, _ in islice(loader, 2 * loader.num_windows)]
        return [first[: loader.num_windows], first[loader.num_windows :]]

    assert epochs(0) == epochs(0)
    assert epochs(0) != epochs(1)
    assert epochs(0)[0] != epochs(0)[1]
    assert epochs(0)[0] != sorted(epochs(0)[0])


@pytest.mark.parametrize(("other", "name"), [
    ({"length": 999}, "text"), ({"context": 8}, "context"), ({"seed": 5}, "seed"),
], ids=["text", "context", "seed"])  # fmt: skip
def test_position_in_other_data_is_refused_and_changes_nothing(
    other: dict[str, int], name: str
) -> None:
    mine, theirs = _loader(), _loader(**other)
    list(islice(theirs, 3))
    with pytest.raises(ValueError, match=f"the data has another {name}"):
        mine.load_state_dict(theirs.state_dict())
    assert mine.position == 0


def test_text_shorter_than_a_window_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"at least 17 bytes expected .* got 16"):
        _loader(length=16)


def test_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"ab\xff")
    (tmp_path / "b").write_bytes("\u00e9".encode())
    tokens = data.read_texts([tmp_path / "a", str(tmp_path / "b")])
    assert tokens.tolist() == [97, 98, 255, 0xC3, 0xA9]
    assert data.decode(tokens) == "ab\ufffd\u00e9"


@pytest.mark.parametrize(("content", "error", "answer"), [
    (b"", ValueError, "is empty"),
    (b"ab\0c", ValueError, "is binary: a zero byte at 2"),
    (None, FileNotFoundError, "file"),
], ids=["empty", "binary", "missing"])  # fmt: skip
def test_file_that_is_no_text_is_refused_by_name(
    tmp_path: Path, content: bytes | None, error: type[Exception], answer: str
) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(error, match=answer) as caught:
        data.read_texts([tmp_path / "file"])
    assert str(tmp_path / "file") in str(caught.value)


def test_python_documentation_is_text_enough_to_train_on() -> None:
    from pydoc_data.topics import topics

    text = data.decode(data.python_documentation())
    assert len(text) > 100_000
    assert all(topic in text for topic in topics.values())


ROOT = Path(__file__).parents[3]


def test_example_of_the_page_gives_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [topics[name] for name in sorted(topics)[:12]]
    for folder in ("texts", "more"):
        (tmp_path / folder).mkdir()
    (tmp_path / "texts" / "a.txt").write_text(texts[0])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[1:6])
    (tmp_path / "more" / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": texts[6:]}), tmp_path / "table.parquet")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    example, own_filter = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    exec(own_filter, names)
    assert names["Vowels"](least=2).measure(["xyz", "a tree"]) == [0, 3]
    x, y, tokenizer, tokens = (names[name] for name in ("x", "y", "tokenizer", "tokens"))
    assert x.shape == y.shape == (4, 64)
    assert tokenizer.decode(tokens) == "<|endoftext|>".join(texts)
    assert (tmp_path / "tokenizer.json").is_file()
