"""Text to tokens and back: nothing lost, the same on every rank, and one row with marked ends."""

import json
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anychip.train import data
from tests import warm_python

TOPICS = [topics[name] for name in sorted(topics)]
BPE = data.train_bpe(TOPICS, 400)
TOKENIZERS: list[data.Tokenizer] = [data.ByteTokenizer(), BPE]

# Documents as sources gives them: no U+0000, no half of a surrogate pair.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))

each = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe"])


@each
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.one_of(TEXTS, st.sampled_from(TOPICS[:5])), max_size=4))
def test_text_encoded_and_decoded_is_the_text(tokenizer: data.Tokenizer, texts: list[str]) -> None:
    encoded = tokenizer.encode(texts)
    assert [tokenizer.decode(tokens) for tokens in encoded] == texts
    for tokens in encoded:
        assert not (tokens == tokenizer.end_of_document).any()
        assert all(0 <= token < tokenizer.vocab_size for token in tokens.tolist())


@each
def test_text_that_quotes_the_end_of_a_document_does_not_end_it(tokenizer: data.Tokenizer) -> None:
    (tokens,) = tokenizer.encode(["a<|endoftext|>b"])
    assert not (tokens == tokenizer.end_of_document).any()
    end = torch.tensor([tokenizer.end_of_document])
    assert tokenizer.decode(torch.cat([tokens, end])) == "a<|endoftext|>b<|endoftext|>"


def test_byte_tokenizer_gives_the_bytes_and_refuses_its_own_end() -> None:
    (tokens,) = data.ByteTokenizer().encode(["a\u00e9"])
    assert tokens.tolist() == [97, 0xC3, 0xA9]
    assert data.ByteTokenizer().decode(tokens[:2]) == "a\ufffd"
    with pytest.raises(ValueError, match=r"U\+0000 at 1, which ends a document"):
        data.ByteTokenizer().encode(["good", "a\0"])


def test_bpe_learns_the_most_frequent_pairs_first() -> None:
    # Worked by hand: "ab" stands 4 times, then "abab" twice; no other pair stands more than once.
    bpe = data.train_bpe(["abab abab"], 259)
    (tokens,) = bpe.encode(["abab ab"])
    assert [bpe.decode(token[None]) for token in tokens] == ["abab", " ", "ab"]


def test_bpe_makes_text_shorter_and_has_the_size_asked_for() -> None:
    text = TOPICS[0]
    assert BPE.vocab_size == 400
    assert len(BPE.encode([text])[0]) < 0.7 * len(text.encode())


def test_bpe_of_texts_with_few_pairs_has_the_size_that_they_give() -> None:
    assert data.train_bpe(["aa"], 1000).vocab_size == 258


def test_bpe_is_the_same_in_another_process_order_and_number_of_threads() -> None:
    code = (
        "from pydoc_data.topics import topics\n"
        "from anychip.train import data\n"
        "texts = sorted(topics.values(), key=len)\n"
        "print(data.train_bpe(texts, 400).name)"
    )
    for threads in ("1", "3"):
        env = {"RAYON_NUM_THREADS": threads, "PYTHONPATH": ":".join(sys.path)}
        done = warm_python.run("-c", code, env=env)
        assert done.stdout.strip() == BPE.name, done.stderr
    assert data.train_bpe(TOPICS, 401).name != BPE.name


def test_bpe_below_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 257 .* got 256"):
        data.train_bpe(["a"], 256)
    assert data.train_bpe(["aaaa"], 257).vocab_size == 257


def test_bpe_saved_and_loaded_gives_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("what was there before")
    BPE.save(path)
    loaded = data.BPETokenizer.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    assert (loaded.name, loaded.vocab_size) == (BPE.name, BPE.vocab_size)
    text = "a<|endoftext|>b " + TOPICS[1]
    assert torch.equal(loaded.encode([text])[0], BPE.encode([text])[0])


def test_bpe_of_others_is_loaded_without_what_they_add_or_cut(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    library.add_special_tokens(["<unk>", "</s>"])
    library.add_tokens(["ab", "c"])
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    library.enable_truncation(2)
    library.enable_padding(length=8)
    library.save(str(tmp_path / "theirs.json"))
    with pytest.raises(ValueError, match=r"theirs\.json: .* no token '<\|endoftext\|>'"):
        data.BPETokenizer.load(tmp_path / "theirs.json")
    theirs = data.BPETokenizer.load(tmp_path / "theirs.json", end_of_document="</s>")
    assert (theirs.end_of_document, theirs.vocab_size) == (1, 4)
    assert theirs.encode(["cabcc"])[0].tolist() == [3, 2, 3, 3]


@pytest.mark.parametrize(("content", "answer"), [
    ("{}", "JSON of `tokenizers` expected"), ("no JSON", "JSON of `tokenizers` expected"),
    (tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0}, "a")).to_str(),
     "a BPE model expected, got WordLevel"),
], ids=["other-json", "text", "word-level"])  # fmt: skip
def test_file_that_is_no_bpe_is_refused_by_name(tmp_path: Path, content: str, answer: str) -> None:
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match=answer) as caught:
        data.BPETokenizer.load(tmp_path / "other.json")
    assert str(tmp_path / "other.json") in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        data.BPETokenizer.load(tmp_path / "absent.json")


@each
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "no-ends"])
def test_documents_are_joined_in_order_with_the_end_between_two(
    tokenizer: data.Tokenizer, ends: bool
) -> None:
    generator = random.Random(0)
    # Beyond one group of a million characters, with an end on both sides of its seam.
    documents = ["", *("word " * generator.randrange(3000) for _ in range(200)), "a", "", "b"]
    assert sum(map(len, documents)) > 1 << 20
    expected: list[int] = []
    for text in filter(None, documents):
        if expected and ends:
            expected.append(tokenizer.end_of_document)
        expected += tokenizer.encode([text])[0].tolist()
    assert data.tokenize(iter(documents), tokenizer, end_of_document=ends).tolist() == expected


def test_one_text_file_gives_the_tokens_of_read_texts(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one \u00e9")
    (tmp_path / "b").write_text("two")
    one, both = [tmp_path / "a"], [tmp_path / "a", tmp_path / "b"]
    assert torch.equal(data.tokenize(data.read_documents(one)), data.read_texts(one))
    joined = data.tokenize(data.read_documents(both), end_of_document=False)
    assert torch.equal(joined, data.read_texts(both))
    assert joined.dtype == torch.uint8


@pytest.mark.parametrize(("vocab_size", "dtype"), [
    (256, torch.uint8), (257, torch.int16), (1 << 15, torch.int16),
    ((1 << 15) + 1, torch.int32), (1 << 20, torch.int32),
], ids=str)  # fmt: skip
def test_largest_token_fits_in_the_dtype(vocab_size: int, dtype: torch.dtype) -> None:
    class Largest(data.ByteTokenizer):
        def encode(self, texts: object) -> list[torch.Tensor]:
            return [torch.tensor([vocab_size - 1])]

    tokenizer = Largest()
    tokenizer.vocab_size = vocab_size
    tokens = data.tokenize(["a"], tokenizer)
    assert (tokens.dtype, tokens.tolist()) == (dtype, [vocab_size - 1])


@pytest.mark.parametrize("documents", [[], ["", ""]], ids=["none", "empty"])
def test_no_text_at_all_is_refused(documents: list[str]) -> None:
    with pytest.raises(ValueError, match="the data has no text"):
        data.tokenize(documents)


def by_hand(tokens: list[list[int]], end: int) -> tuple[list[list[int]], list[int]]:
    """positions and cu_seqlens, token by token."""
    places, starts, count = [], [], 0
    for row in tokens:
        place, line = 0, []
        for token in row:
            if place == 0:
                starts.append(count)
            line.append(place)
            place = 0 if token == end else place + 1
            count += 1
        places.append(line)
    return places, [*starts, count]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.data())
def test_boundaries_in_a_batch_are_those_found_token_by_token(
    rows: int, width: int, draw: st.DataObject
) -> None:
    row = st.lists(st.integers(0, 2), min_size=width, max_size=width)
    tokens = draw.draw(st.lists(row, min_size=rows, max_size=rows))
    places, starts = by_hand(tokens, 0)
    batch = torch.tensor(tokens)
    assert data.positions(batch, 0).tolist() == places
    seqlens = data.cu_seqlens(batch, 0)
    assert (seqlens.tolist(), seqlens.dtype) == (starts, torch.int32)
    targets = torch.arange(rows * width).reshape(rows, width)
    masked = data.mask_targets(batch, targets, 0)
    ends = [
        data.IGNORED_TARGET if token == 0 else target
        for target, token in enumerate(token for row in tokens for token in row)
    ]
    assert masked.flatten().tolist() == ends
    assert targets.flatten().tolist() == list(range(rows * width)), "the batch stays as it was"


def test_training_json_names_the_end_so_that_other_programs_find_it(tmp_path: Path) -> None:
    BPE.save(tmp_path / "a.json")
    (added,) = json.loads((tmp_path / "a.json").read_text())["added_tokens"]
    assert (added["content"], added["id"], added["special"]) == ("<|endoftext|>", 0, True)
