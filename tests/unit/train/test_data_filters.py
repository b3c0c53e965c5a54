"""Which documents stay: by length, by what came before, by what a model says of them."""

import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anychip
from anychip.train import config, data, loop, models, run
from anychip.train.data.packing import NO_TARGET
from anychip.train.preparing import Filter, FilterError, Request, filters, prepare
from tests.integration.train import directories
from tests.unit.train import shards

TINY = (
    "run.sample_tokens=2", "run.steps=30", "model.layers=1", "model.heads=2", "model.width=32",
    "model.context=16", "data.batch_size=8", "optimizer.lr=1e-2", "run.precision=fp32",
)  # fmt: skip


def kept(rule: Filter, documents: list[Any]) -> list[Any]:
    measures = rule.measure(documents)
    return [d for d, measure in zip(documents, measures, strict=True) if rule.keeps(measure)]


@pytest.mark.parametrize(("text", "stays"), [
    ("length:least=2", ["ab", "abc"]), ("length:most=2", ["", "ab"]),
    ("length:least=2,most=2", ["ab"]), ("length", ["", "ab", "abc"]),
])  # fmt: skip
def test_length_keeps_what_is_within_its_bounds(text: str, stays: list[str]) -> None:
    (rule,) = filters.make([text])
    assert kept(rule, ["", "ab", "abc"]) == stays


def words(generator: np.random.Generator, count: int) -> list[str]:
    return [f"{number:x}" for number in generator.integers(1 << 24, size=count)]


def test_nearly_equal_texts_are_found_and_others_stay() -> None:
    """By the sets of 8 bytes that two texts have: a changed word changes 15 of 1,300 or so."""
    generator, documents, copies = np.random.default_rng(1), [], []
    for _ in range(100):
        text = words(generator, 200)
        documents.append(" ".join(text))
        text[int(generator.integers(200))] = "changed"
        copies.append(" ".join(text).upper() + "\n")
    (rule,) = filters.make(["duplicates"])
    assert kept(rule, documents) == documents
    # 0.98 alike: all 16 bands of 8 differ with a probability below 1e-13.
    assert kept(rule, copies) == []
    half = [" ".join([*text.split()[:100], *words(generator, 100)]) for text in documents]
    assert len(kept(rule, half)) > 85  # 0.33 alike: 1 of 440 is found, of 100 some 0.2


def test_duplicates_are_remembered_as_far_as_said_and_across_a_state() -> None:
    generator = np.random.default_rng(2)
    documents = [" ".join(words(generator, 30)) for _ in range(400)]
    (rule,), (other,), (few,) = (
        filters.make([t]) for t in ("duplicates", "duplicates", "duplicates:remember=8")
    )
    assert kept(rule, documents) == documents
    other.restore(rule.state())
    assert kept(other, documents) == []
    assert kept(few, documents) == documents
    assert len(kept(few, documents[:100])) == 100
    assert few.state().nbytes == 8 * 128


@pytest.mark.parametrize(("text", "answer"), [
    ("size", "there is no filter 'size'; there are: .*length"),
    ("length:lest=2", "there is no option 'lest'; there are: least, most"),
    ("length:least", "name:option=value,option=value expected"),
    ("length:least=2,least=3", "name:option=value,option=value expected"),
    ("length:least=a", "numbers expected, got least='a'"),
    ("length:least=3,most=2", "least at most as large as most expected"),
    ("duplicates:remember=0", "remember must be a whole number of at least 1"),
    ("perplexity:model=/nowhere", "/nowhere has no config.json"),
    ("language:only=en+xx", "there is no language 'xx'; there are: .*, en, "),
])  # fmt: skip
def test_filter_that_cannot_be_made_is_refused_with_what_there_is(text: str, answer: str) -> None:
    with pytest.raises(FilterError, match=answer):
        filters.make([text])


TEXTS_OF = {
    "en": "The river rises in the hills and flows past three old towns before it meets the sea.",
    "de": "Der Fluss entspringt in den Bergen und fliesst an drei alten Staedten vorbei zum Meer.",
    "fr": "La riviere prend sa source dans les collines et traverse trois vieilles villes.",
    "ru": "\u0440\u0435\u043a\u0430 \u0442\u0435\u0447\u0435\u0442 \u043a \u043c\u043e\u0440\u044e",
}


@pytest.mark.parametrize(("text", "stays"), [
    ("language:only=en", ["en"]), ("language:only=de+ru", ["de", "ru"]),
    ("language:only=en,most=0.5,least=0", ["de", "fr", "ru"]),
])  # fmt: skip
def test_language_keeps_what_is_likely_in_one_of_those_named(text: str, stays: list[str]) -> None:
    (rule,) = filters.make([text])
    documents: list[Any] = [*TEXTS_OF.values(), talk(TEXTS_OF["en"], TEXTS_OF["en"])]
    want: list[Any] = [TEXTS_OF[name] for name in stays]
    assert kept(rule, documents) == want + [documents[-1]] * ("en" in stays)
    assert kept(rule, [TEXTS_OF["en"] * 100 + TEXTS_OF["de"] * 1000]) == [
        TEXTS_OF["en"] * 100 + TEXTS_OF["de"] * 1000
    ] * ("en" in stays)


def test_language_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(data.MissingExtraError, match=r"py3langid.*pip install 'anychip\[data\]'"):
        filters.make(["language:only=en"])


class Vowels(Filter):
    """A person's own."""

    def measure(self, documents: Any) -> list[Any]:
        return [sum(letter in "aeiou" for letter in document) for document in documents]

    def keeps(self, measure: Any) -> bool:
        return bool(measure)


def test_filter_of_anybody_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = metadata.EntryPoint("vowels", f"{__name__}:Vowels", filters.GROUP)
    entries = metadata.EntryPoints([entry, *metadata.entry_points(group=filters.GROUP)])
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries)
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda entry: Vowels)
    (tmp_path / "a.jsonl").write_text('{"text": "xyz"}\n{"text": "abc"}\n')
    request = Request(sources=(str(tmp_path / "a.jsonl"),), filters=("vowels",))
    about = prepare(request, tmp_path / "out")
    assert data.Prepared(tmp_path / "out").read(0, 3).tobytes() == b"abc"
    assert about["report"]["dropped"] == {"vowels": 1}


def test_perplexity_of_a_run_is_that_of_its_model(tmp_path: Path) -> None:
    """Against a loss that torch computes in float64 of the model's logits."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 60)
    given = [*TINY, f'data.files=["{tmp_path / "a.txt"}"]']
    built = loop.build(config.load(None, given), anychip.use("cpu"))
    (tmp_path / "run").mkdir()
    loop.train(built, tmp_path / "run", lambda row: None)
    texts = ["the cat sat on the mat. the cat", "zq#xv!pw%kj", "x"]
    (rule,) = filters.make([f"perplexity:model={tmp_path / 'run'},most=20"])
    found = rule.measure(texts)
    for text, measure in zip(texts[:2], found, strict=False):
        tokens = torch.tensor(list(text.encode()))[:17]
        built.model.eval()
        with torch.no_grad():
            logits = built.model(tokens[None, :-1])[0].double()
        loss = torch.nn.functional.cross_entropy(logits, tokens[1:])
        # Sums of 16 losses in float32, each of a model whose logits are those of float32.
        assert math.log(measure) == pytest.approx(float(loss), rel=1e-5)
    assert found[0] < 20 < found[1]
    assert found[2] is None
    assert kept(rule, texts) == texts[:1]


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_weakness_is_the_loss_with_the_instruction_over_that_without(tmp_path: Path) -> None:
    folder = directories.make(tmp_path / "model", "Llama")
    (rule,) = filters.make([f"weakness:model={folder},context=128,most=1e9"])
    tokenizer = models.load_tokenizer(str(folder))
    chats = [talk("Where is the cat?", "On the mat."), talk("a", ""), talk("Why?", "The rain.")]
    found = rule.measure(chats)
    net = models.build(models.PretrainedConfig(path=str(folder), context=64)).eval()

    def loss(tokens: torch.Tensor, told: torch.Tensor) -> float:
        with torch.no_grad():
            logits = net(tokens[None, :-1])[0].double()
        each = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
        return float(each[told[1:]].mean())

    for chat, measure in ((chats[0], found[0]), (chats[2], found[2])):
        row = data.tokenize_messages([("here", chat)], tokenizer)
        tokens, told = (row & (NO_TARGET - 1)).long(), (row & NO_TARGET) == 0
        alone = tokens[told]
        want = loss(tokens, told) / loss(alone, torch.ones_like(alone, dtype=torch.bool))
        assert measure == pytest.approx(want, rel=1e-4)
    with pytest.raises(ValueError, match="is for messages"):
        rule.measure(["a text"])


@pytest.mark.parametrize("end", [".jsonl", ".tar.zst", ".parquet"])
def test_messages_are_prepared_as_they_are_read(tmp_path: Path, end: str) -> None:
    folder = str(directories.make(tmp_path / "model", "Llama"))
    file = shards.write(
        tmp_path / f"a{end}", [talk(*(text for _, text in c[-2:])) for c in directories.CHATS],
        "messages",
    )  # fmt: skip
    given = [f"model.path={folder}", "model.context=32", "data.field=messages"]
    read = run.read_texts(config.load(None, [*given, f'data.files=["{file}"]'], note=str))
    prepare(Request(sources=(str(file),), field="messages", tokenizer=folder), tmp_path / "out")
    settings = config.load(None, [*given, f'data.files=["{tmp_path / "out"}"]'], note=str)
    stored = run.read_texts(settings)
    assert isinstance(read.tokens, data.Mixture)
    assert isinstance(stored.tokens, data.Mixture)
    assert stored.tokens.digest == read.tokens.digest
    loaders = [data.Loader(t.tokens, context=16, batch_size=2) for t in (read, stored)]
    for _ in range(20):
        counts = {loader.num_targets() for loader in loaders}
        (x, y), (x2, y2) = (loader.next_batch() for loader in loaders)
        assert counts == {int((y != data.IGNORED_TARGET).sum())}
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
    plain = config.load(None, [*given[:2], f'data.files=["{tmp_path / "out"}"]'], note=str)
    with pytest.raises(data.PreparedError, match=r"is messages, and the settings .* are for text"):
        run.read_texts(plain)
