"""Conversations: which tokens are an answer's, by marks of a template and without them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from anychip.train import data
from anychip.train.data.packing import BEGINS, NO_TARGET, unmarked
from tests.integration.train import directories
from tests.unit.train import shards

Chat = list[tuple[str, str]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = directories.make(tmp_path_factory.mktemp("model"), "Llama")
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def talk(chat: Chat) -> tuple[str, Any]:
    return "here", [{"role": role, "content": text} for role, text in chat]


def learnt(tokens: Tensor, tokenizer: Any) -> str:
    """The text of the tokens that are targets."""
    return str(tokenizer.decode([int(t) for t in tokens if not t & NO_TARGET]))


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = "{% for m in messages %}{{ loop.revindex }}{{ m.role }}{{ m.content }}{% endfor %}"
LONG: Chat = directories.CHATS[1]
ANSWERS = "It is.<|im_end|>An hour; the rain.<|im_end|>"


@pytest.mark.parametrize("template", [directories.TEMPLATE, MARKED], ids=["compared", "marked"])
def test_answers_and_the_token_that_ends_them_are_targets_and_nothing_else(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    tokens = data.tokenize_messages([talk(LONG), talk(directories.CHATS[0])], tokenizer)
    assert learnt(tokens, tokenizer) == f"{ANSWERS}On the mat.<|im_end|>"
    texts = [
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in chat)
        for chat in (LONG, directories.CHATS[0])
    ]
    assert tokenizer.decode((tokens & (NO_TARGET - 1)).tolist()) == "".join(texts)
    first = len(tokenizer(texts[0], add_special_tokens=False)["input_ids"])
    assert (tokens & BEGINS).nonzero().flatten().tolist() == [0, first]


@pytest.mark.parametrize("end", [".jsonl.gz", ".tar", ".tgz", ".parquet"])
def test_conversations_of_every_format_are_those_written(tmp_path: Path, end: str) -> None:
    """Also where some messages have what others have not: Parquet has one form for all."""
    _, more = talk(LONG)
    more[0]["name"], more[1]["tags"] = "Ann", [{"kind": "a"}, {"of": None}]
    chats = [talk(directories.CHATS[0])[1], more, talk(LONG)[1]]
    file = shards.write(tmp_path / f"a{end}", chats, "messages")
    found = [value for _, value in data.read_messages([file], field="messages")]
    more[1]["tags"] = [{"kind": "a"}, {}] if end == ".parquet" else more[1]["tags"]
    assert found == chats
    if "tar" in end or "tgz" in end:
        samples = [{"json": json.dumps({"messages": chat})} for chat in chats]
        (tmp_path / "b.tar").write_bytes(shards.tar(samples))
        assert [v for _, v in data.read_messages([tmp_path / "b.tar"], field="messages")] == chats


def test_messages_that_are_no_utf8_or_no_json_are_refused_by_their_place(tmp_path: Path) -> None:
    ends = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"ab\xe9")])
    column = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([texts], ["content"]))
    pq.write_table(pa.table({"messages": column}), tmp_path / "a.parquet")
    (tmp_path / "a.tar").write_bytes(shards.tar([{"messages.json": "[{"}]))
    for name, answer in (
        ("a.parquet", "row 2: UTF-8 expected, got the byte 0xe9"),
        ("a.tar", r"sample 'folder.d/000000', messages.json: JSON expected"),
    ):
        with pytest.raises(ValueError, match=rf"{name}, {answer}"):
            list(data.read_messages([tmp_path / name], field="messages"))


def test_answer_that_is_written_like_the_template_has_no_further_marks(tokenizer: Any) -> None:
    """What a person writes does not move where answers are."""
    chat = [("user", "assistant\nOn the mat."), ("assistant", "user\nOn the mat.")]
    tokens = data.tokenize_messages([talk(chat)], tokenizer)
    assert learnt(tokens, tokenizer) == "user\nOn the mat.<|im_end|>"


@pytest.mark.parametrize(("template", "chat", "answer"), [
    (None, LONG, "no chat template"),
    (REWRITING, LONG, "changes what stands before an answer"),
    ("{{ raise_exception('no system') }}", LONG, "refuses it: no system"),
    ("{{ messages.__class__.__mro__ }}", LONG, "refuses it"),
    (directories.TEMPLATE, [("user", "Where?")], "the assistant says nothing"),
    (directories.TEMPLATE, [], "a list of messages expected"),
], ids=str)  # fmt: skip
def test_conversation_that_cannot_be_learnt_is_refused_by_its_place(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str | None, chat: Chat, answer: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=answer) as raised:
        data.tokenize_messages([talk(chat)], tokenizer)
    assert template is None or str(raised.value).startswith("here: ")


def marked(count: int = 300) -> tuple[Tensor, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tokens 0, 1, 2, ... of documents of 1 to 17 tokens; which are targets, and which begin."""
    generator = np.random.default_rng(1)
    begins = np.zeros(count, dtype=bool)
    begins[np.cumsum(generator.integers(1, 18, count))[:40].clip(max=count - 1)] = True
    begins[0] = True
    told = (generator.random(count) < 0.4) & ~begins
    row = np.arange(count) + np.where(told, 0, NO_TARGET) + np.where(begins, BEGINS, 0)
    return torch.from_numpy(row.astype(np.int32)), told, begins


def places(tokens: Tensor, begins: np.ndarray[Any, Any]) -> list[list[int]]:
    """Counted one by one."""
    found = []
    for row in tokens.tolist():
        here: list[int] = []
        for number, token in enumerate(row):
            here.append(0 if number == 0 or begins[token] else here[-1] + 1)
        found.append(here)
    return found


def test_batches_of_marked_tokens_have_their_targets_places_and_numbers() -> None:
    row, told, begins = marked()
    loader = data.Loader(row, context=16, batch_size=3, seed=4)
    for _ in range(20):
        number = loader.num_targets(2)
        found = 0
        for tokens, targets in (loader.next_batch(), loader.next_batch()):
            plain, position = unmarked(tokens)
            after = plain + 1
            want = np.where(told[after.numpy()], after.numpy(), data.IGNORED_TARGET)
            assert targets.tolist() == want.tolist()
            assert position.tolist() == places(plain, begins)
            found += int((targets >= 0).sum())
        assert found == number


def test_held_out_windows_of_marked_tokens_have_every_target_once() -> None:
    row, told, begins = marked(101)
    held_out = data.HeldOut(row, context=16, tokenizer=data.ByteTokenizer())
    tokens, targets = held_out.batch(range(held_out.num_windows + 1))
    assert sorted(targets[targets >= 0].tolist()) == np.flatnonzero(told).tolist()
    plain, position = unmarked(tokens[: held_out.num_windows - 1])
    assert position.tolist() == places(plain, begins)


@pytest.mark.parametrize(("name", "line", "answer"), [
    ("a.txt", "text", "messages are read from .jsonl, .parquet, .tar, not from plain text"),
    ("a.jsonl", json.dumps({"text": "x"}), "line 1: there is no field 'messages'"),
    ("a.jsonl", "", "is empty: it has no messages"),
], ids=str)  # fmt: skip
def test_file_without_messages_is_refused_by_name(
    tmp_path: Path, name: str, line: str, answer: str
) -> None:
    (tmp_path / name).write_text(line)
    with pytest.raises(ValueError, match=answer):
        list(data.read_messages([tmp_path / name], field="messages"))
