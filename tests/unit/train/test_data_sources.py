"""Files to documents: every format, in the order promised, and errors that name file and line."""

import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anychip.train import data
from anychip.train.data import extra

DOCUMENTS = ["first\nof two lines", "\u00e9\U0001f600 \u4e2d", "x" * 3000]


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> None:
    rows = [json.dumps({"id": i, field: text}) for i, text in enumerate(documents)]
    lines = "\n\n".join(rows).encode()  # a blank line between two is no document
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)


def write_parquet(path: Path, documents: list[str], field: str = "text") -> None:
    table = pa.table({"id": list(range(len(documents))), field: documents})
    pq.write_table(table, path, row_group_size=2)


def write_large_strings(path: Path, documents: list[str], field: str = "text") -> None:
    pq.write_table(pa.table({field: pa.array(documents, pa.large_string())}), path)


def write_dictionary(path: Path, documents: list[str], field: str = "text") -> None:
    pq.write_table(pa.table({field: pa.array(documents).dictionary_encode()}), path)


def assert_refused(path: Path, answer: str) -> None:
    """The error says this, and which file it is."""
    with pytest.raises(ValueError, match=answer) as caught:
        list(data.read_documents([path]))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("field", ["text", "content"])
@pytest.mark.parametrize(("name", "write"), [
    ("a.jsonl", write_jsonl), ("a.jsonl.gz", write_jsonl), ("A.JSONL", write_jsonl),
    ("a.parquet", write_parquet), ("large.parquet", write_large_strings),
    ("dictionary.parquet", write_dictionary),
])  # fmt: skip
def test_documents_of_a_file_are_those_written(
    tmp_path: Path, name: str, write: Callable[[Path, list[str], str], None], field: str
) -> None:
    write(tmp_path / name, DOCUMENTS, field)
    assert list(data.read_documents([tmp_path / name], field=field)) == DOCUMENTS


def test_parquet_of_many_batches_has_every_row_in_order(tmp_path: Path) -> None:
    rows = [str(i) for i in range(2500)]
    write_parquet(tmp_path / "a.parquet", rows)
    assert list(data.read_documents([tmp_path / "a.parquet"])) == rows


@pytest.mark.parametrize("name", ["a.txt", "README", "a.py", "a.txt.gz"])
def test_other_file_is_one_document_with_its_line_ends(tmp_path: Path, name: str) -> None:
    text = "one\r\ntwo\n\u00e9\r"
    packed = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(packed)
    assert list(data.read_documents([str(tmp_path / name)])) == [text]


def test_directory_gives_data_files_of_all_folders_sorted_by_path(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", "B.TXT", "notes.md", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "a" / "c.jsonl.gz", ["packed"])
    write_parquet(tmp_path / "a" / "d.parquet", ["row"])
    expected = ["B.TXT", "a/b/c.txt", "packed", "row", "a/z.txt", "b.txt"]
    assert list(data.read_documents([tmp_path])) == expected


def test_pattern_gives_every_file_that_matches_sorted_by_path(tmp_path: Path) -> None:
    for name in ("2.md", "10.md", "1.txt", "x/3.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.md").mkdir()

    def names(pattern: str) -> list[str]:
        files = data.find_files([tmp_path / pattern])
        return [file.relative_to(tmp_path).as_posix() for file in files]

    assert names("*.md") == ["10.md", "2.md"]
    assert names("[0-2].*") == ["1.txt", "2.md"]
    assert names("**/*.md") == ["10.md", "2.md", "x/3.md"]


def test_paths_keep_their_order_and_a_name_with_brackets_is_a_file(tmp_path: Path) -> None:
    paths = [tmp_path / "b", tmp_path / "[a]", tmp_path / "b"]
    for path in paths:
        path.write_text(path.name)
    assert list(data.read_documents(paths)) == ["b", "[a]", "b"]


@pytest.mark.parametrize(("name", "content", "answer"), [
    ("a.txt", b"", "is empty"), ("a.txt", b"ab\0c", "is binary: a zero byte at 2"),
    ("a.txt", b"a\nb\nc\xe9d\n", r", line 3: UTF-8 expected, got the byte 0xe9"),
    ("a.txt.gz", b"plain text", "is damaged, or not packed with gzip"),
    ("a.txt.gz", gzip.compress(b"a text" * 9, mtime=0)[:-9],
     "is damaged, or not packed with gzip"),
    ("a.jsonl", b"", "is empty"), ("a.jsonl", b"\n \n", "is empty: it has no document"),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": }\n', r", line 3: JSON expected, got .* column 10"),
    ("a.jsonl", b'{"text": "a"}\n["text"]\n', r", line 2: an object with the field 'text' exp"),
    ("a.jsonl", b'{"id": 1, "body": "a"}\n', r", line 1: .* no field 'text'; .*: id, body$"),
    ("a.jsonl", b"{}\n", r", line 1: there is no field 'text'; .*: none$"),
    ("a.jsonl", b'{"text": null}\n', r", line 1: a string expected .* got 'null'"),
    ("a.jsonl", b'{"text": 3}\n', r", line 1: a string expected .* got '3'"),
    ("a.jsonl", b'{"text": "a\xff"}\n', r", line 1: UTF-8 expected, got the byte 0xff"),
    ("a.jsonl", b'{"text": "a\\u0000"}\n', r", line 1: text expected, got U\+0000 at 1"),
    ("a.jsonl", b'{"text": "\\ud83d"}\n', r", line 1: .* the surrogate U\+D83D without its"),
    ("a.jsonl", b"9" * 5000 + b"\n", r", line 1: JSON expected that Python can read"),
    ("a.jsonl", b"[" * 200_000 + b"\n", r", line 1: JSON expected that Python can read"),
    ("a.jsonl.gz", gzip.compress(b'{"text": 3}\n', mtime=0), r", line 1: a string expected"),
    ("a.parquet", b"", "is damaged, or no Parquet"),
    ("a.parquet", b"PAR1 and then something else PAR1", "is damaged, or no Parquet"),
], ids=lambda value: value[:24].decode("latin1") if isinstance(value, bytes) else None)  # fmt: skip
def test_file_that_has_no_documents_is_refused_by_name_and_line(
    tmp_path: Path, name: str, content: bytes, answer: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert_refused(tmp_path / name, answer)


@pytest.mark.parametrize(("columns", "answer"), [
    ({"id": [1], "body": ["a"]}, "there is no column 'text'; .*: id, body$"),
    ({"text": [1, 2]}, "strings expected in the column 'text', got int64"),
    ({"text": ["a", None]}, "row 2: a string expected in 'text', got 'null'"),
    ({"text": ["a", "b", "\0"]}, r"row 3: text expected, got U\+0000 at 0"),
    ({"text": pa.array([], pa.string())}, "is empty: it has no document"),
], ids=["missing", "integers", "null", "zero", "no-rows"])  # fmt: skip
def test_parquet_without_texts_is_refused_by_name_and_row(
    tmp_path: Path, columns: dict[str, object], answer: str
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    assert_refused(path, answer)


def test_parquet_that_is_no_utf8_is_refused_by_name_and_row(tmp_path: Path) -> None:
    """The format's own reader does not look."""
    path = tmp_path / "a.parquet"
    for dtype in (pa.string(), pa.large_string()):
        offset = pa.int64() if dtype == pa.large_string() else pa.int32()
        ends = pa.array([0, 1, 2, 4], offset).buffers()[1]
        column = pa.Array.from_buffers(dtype, 3, [None, ends, pa.py_buffer(b"abc\xe9")])
        for texts in (column, column.dictionary_encode()):
            pq.write_table(pa.table({"text": texts}), path)
            assert_refused(path, "row 3: UTF-8 expected, got the byte 0xe9")


def test_parquet_with_two_columns_of_the_name_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: 2 columns are named 'text'"):
        list(data.read_documents([tmp_path / "a.parquet"]))


def test_every_flipped_bit_in_a_page_with_a_checksum_is_found(tmp_path: Path) -> None:
    path, text = tmp_path / "a.parquet", "one text, not packed"
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table({"text": [text]}), path, write_statistics=False, **options)
    content = path.read_bytes()
    start = content.index(text.encode())
    for bit in range(8 * len(text)):
        damaged = bytearray(content)
        damaged[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.parquet is damaged, or no Parquet"):
            list(data.read_documents([path]))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_pipe_or_device_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).symlink_to("/dev/zero")
    for path in (tmp_path / name, str(tmp_path / "folder" / name)):
        for read in (data.read_texts, data.read_documents):
            with pytest.raises(
                ValueError, match="is a pipe, a socket or a device; a file expected"
            ):
                list(read([path]))


def test_empty_path_is_refused() -> None:
    with pytest.raises(ValueError, match="a data file is named '', which is no path"):
        data.find_files([""])


def test_parquet_damaged_in_the_middle_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [str(i) * 50 for i in range(4000)])
    content = bytearray(path.read_bytes())
    content[200 : len(content) // 2] = bytes(len(content) // 2 - 200)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet is damaged, or no Parquet"):
        list(data.read_documents([path]))


@pytest.mark.parametrize(("name", "error", "answer"), [
    ("absent.txt", FileNotFoundError, r"absent\.txt"),
    ("absent.jsonl", FileNotFoundError, r"absent\.jsonl"),
    ("absent.jsonl.gz", FileNotFoundError, r"absent\.jsonl\.gz"),
    ("absent.parquet", FileNotFoundError, r"absent\.parquet"),
    ("*.absent", FileNotFoundError, r"no data file matches the pattern .*\*\.absent"),
    ("empty", ValueError, r"empty has no file that ends in \.txt, .*\.parquet"),
])  # fmt: skip
def test_path_without_a_file_is_refused_by_name(
    tmp_path: Path, name: str, error: type[Exception], answer: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=answer):
        list(data.read_documents([tmp_path / name]))


@pytest.mark.parametrize("module", ["pyarrow", "tokenizers"])
def test_extra_that_is_not_installed_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    write_parquet(tmp_path / "a.parquet", ["a"])
    (tmp_path / "a.txt").write_text("text needs no extra")
    monkeypatch.setitem(sys.modules, module, None)
    assert len(list(data.read_documents([tmp_path / "a.txt"]))) == 1
    use: Callable[[], object] = {
        "pyarrow": lambda: list(data.read_documents([tmp_path / "a.parquet"])),
        "tokenizers": lambda: data.train_bpe(["a"], 300),
    }[module]
    with pytest.raises(data.MissingExtraError, match=rf"{module}.*pip install 'anychip\[data\]'"):
        use()


def test_extra_that_is_installed_and_broken_raises_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "anychip_broken_extra.py").write_text("import anychip_absent_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="anychip_absent_dependency") as caught:
        extra.require("anychip_broken_extra", "a test")
    assert not isinstance(caught.value, data.MissingExtraError)
