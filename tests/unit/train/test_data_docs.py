"""Does the example of docs/data.md run?"""

import gzip
import json
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
