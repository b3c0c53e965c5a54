"""Directories of transformers trained by ``anychip train``, next to a plain loop in torch."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from anychip.cli import group
from anychip.cli.train_command import printable
from anychip.train import data, models
from tests.integration.train import directories
from tests.integration.train.forked import Server
from tests.integration.train.processes import rows

STEPS, CONTEXT, BATCH = 20, 24, 4
LONG = 64
"""A context in which answers stand behind another conversation."""
FAMILIES = ("Llama", "Qwen3", "Gemma2", "GPT2", "Mixtral")
ALWAYS = ("GPT2",)
SETTINGS = (
    *("run.precision=fp32", "run.sample_tokens=4", "run.seed=3"),
    *("schedule.kind=constant", "--backend", "cpu"),
)
RATE = f"optimizer.lr={directories.LR}"
REMARKABLE = {(3, True)}
"""Stages, and whether there are adapters, of which every commit runs a case."""
LORA = ("model.lora_rank=4", "model.lora_alpha=8")
# What differs is the order of float32 sums: measured 2e-6 at most, and 8e-5 of a logit.
CLOSE, LOGITS = 1e-5, {"rtol": 0, "atol": 5e-4}
# PEFT's own translation of its settings for experts, and an attribute's name that it asks for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def anychip(*words: str, code: int = 0) -> None:
    assert group.run(list(words)) == code


def train(folder: Path, out: Path, *more: str, steps: int = STEPS, rate: str = RATE) -> None:
    words = ("--model", str(folder), "--steps", str(steps), "--out", str(out), rate)
    shape = (f"data.batch_size={BATCH}", f"model.context={CONTEXT}")
    shape = tuple(w for w in shape if not any(m.startswith(w.partition("=")[0]) for m in more))
    anychip("train", *words, *SETTINGS, *shape, *more)


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out)]


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def batches(tokens: Tensor, context: int = CONTEXT) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows in the order of the loader, which is not what is tested here."""
    yield from data.Loader(tokens, context=context, batch_size=BATCH, seed=3)


def logits(model: Any) -> Tensor:
    tokens = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found: Tensor = model.eval()(tokens).logits
        return found


def family(*always: str) -> Any:
    return pytest.mark.parametrize("family", [
        pytest.param(name, marks=() if name in always else pytest.mark.grid) for name in FAMILIES
    ])  # fmt: skip


@family(*ALWAYS)
def test_losses_are_those_of_a_plain_loop_and_transformers_loads_the_result(
    tmp_path: Path, family: str
) -> None:
    folder = directories.make(tmp_path / "model", family)
    train(folder, tmp_path / "run", "--data", directories.texts(tmp_path))
    theirs = load(folder)
    want = directories.plain_losses(theirs, batches(directories.text_tokens(folder)), STEPS)
    assert losses(tmp_path / "run") == pytest.approx(want, abs=CLOSE)
    assert want[-1] < want[0] - 0.3
    anychip("export", str(tmp_path / "run"), str(tmp_path / "out"))
    exported, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values())
    torch.testing.assert_close(logits(exported), logits(theirs), **LOGITS)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.chat_template == directories.TEMPLATE
    assert again.eos_token == directories.END


@family("Qwen3")
def test_adapters_train_as_those_of_peft_and_are_exported_merged_or_alone(
    tmp_path: Path, family: str
) -> None:
    folder, text = directories.make(tmp_path / "model", family), directories.texts(tmp_path)
    # With a rate of 0 a run is its beginning: the first values of the adapters.
    train(folder, tmp_path / "begin", "--data", text, *LORA, rate="optimizer.lr=0", steps=1)
    anychip("export", str(tmp_path / "begin"), str(tmp_path / "first"), "--adapters")
    train(folder, tmp_path / "run", "--data", text, *LORA)
    theirs = peft.PeftModel.from_pretrained(load(folder), tmp_path / "first", is_trainable=True)
    tokens = directories.text_tokens(folder)
    want = directories.plain_losses(theirs.train(), batches(tokens), STEPS)
    assert losses(tmp_path / "run") == pytest.approx(want, abs=CLOSE)
    assert want[-1] < want[0] - 0.02

    anychip("export", str(tmp_path / "run"), str(tmp_path / "alone"), "--adapters")
    anychip("export", str(tmp_path / "run"), str(tmp_path / "merged"))
    about = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"]) == (4, 8)
    alone = peft.PeftModel.from_pretrained(load(folder), tmp_path / "alone")
    torch.testing.assert_close(logits(alone), logits(theirs), **LOGITS)
    assert not torch.allclose(logits(alone), logits(load(folder)), rtol=0, atol=2e-2)
    # The same weights, added up before or after: float32's default bounds.
    torch.testing.assert_close(
        logits(load(tmp_path / "merged")), logits(alone), rtol=1e-4, atol=1e-4
    )


@family("Llama")
@pytest.mark.parametrize(("stage", "adapters"), [
    pytest.param(stage, lora, marks=() if (stage, bool(lora)) in REMARKABLE else pytest.mark.grid)
    for stage in range(4) for lora in ((), LORA)
], ids=str)  # fmt: skip
def test_two_ranks_have_the_losses_of_one_at_every_stage(
    tmp_path: Path, ranks: Server, family: str, stage: int, adapters: tuple[str, ...]
) -> None:
    folder, text = directories.make(tmp_path / "model", family), directories.texts(tmp_path)
    train(folder, tmp_path / "one", "--data", text, *adapters)
    words = ("--model", str(folder), "--data", text, "--steps", str(STEPS), "--out", "two")
    more = (RATE, f"data.batch_size={BATCH // 2}", f"model.context={CONTEXT}", *adapters)
    more += (f"optimizer.stage={stage}",)
    for ended in ranks.run("train", *words, *SETTINGS, *more, world_size=2, cwd=tmp_path):
        assert ended.code == 0, ended.err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=CLOSE)
    anychip("export", str(tmp_path / "two"), str(tmp_path / "out"))
    anychip("export", str(tmp_path / "one"), str(tmp_path / "want"))
    both = logits(load(tmp_path / "out")), logits(load(tmp_path / "want"))
    torch.testing.assert_close(*both, **LOGITS)


def conversations(folder: Path) -> tuple[list[int], list[bool], list[int]]:
    """Tokens, which of them are an answer's, and their places, by splitting the text by hand."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens, answers, places = list[int](), list[bool](), list[int]()
    for chat in directories.CHATS:
        begin = len(tokens)
        for role, text in chat:
            for part, is_answer in (
                (f"<|im_start|>{role}\n", False), (f"{text}{directories.END}", role == "assistant"),
                ("\n", False),
            ):  # fmt: skip
                ids = tokenizer(part, add_special_tokens=False)["input_ids"]
                tokens += ids
                answers += [is_answer] * len(ids)
        places += range(len(tokens) - begin)
    return tokens, answers, places


@family("Gemma2")
def test_of_messages_answers_alone_are_learnt_and_no_conversation_sees_another(
    tmp_path: Path, family: str
) -> None:
    folder = directories.make(tmp_path / "model", family)
    # In two batches, which have different numbers of targets.
    parts = (f"data.batch_size={BATCH // 2}", "data.accumulation=2", f"model.context={LONG}")
    words = ("--data", directories.chats(tmp_path), "data.field=messages")
    train(folder, tmp_path / "run", *words, *parts)
    tokens, answers, places = map(torch.tensor, conversations(folder))

    def windows() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        numbers = torch.arange(len(tokens), dtype=torch.int32)
        for here, after in batches(numbers, LONG):
            position = torch.minimum(places[here], here - here[:, :1])
            yield tokens[here], tokens[after].masked_fill(~answers[after], -100), position

    want = directories.plain_losses(load(folder), windows(), STEPS)
    assert losses(tmp_path / "run") == pytest.approx(want, abs=CLOSE)


def test_run_is_resumed_evaluated_and_sampled_without_the_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = directories.make(tmp_path / "model", "GPT2"), directories.texts(tmp_path)
    run, whole = tmp_path / "run", tmp_path / "whole"
    more = ("--data", text, "eval.fraction=0.2", *LORA)
    train(folder, whole, *more, steps=4)
    train(folder, run, *more, steps=2)
    anychip("train", "--resume", "--out", str(run), "--steps", "4")
    assert losses(run) == losses(whole)
    folder.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    anychip("eval", str(run), "--json")
    told = json.loads(capsys.readouterr().out)
    held_out = json.loads((whole / "eval.jsonl").read_text().splitlines()[-1])
    assert {key: told[key] for key in held_out} == held_out
    anychip("sample", str(run), "The cat", "--temperature", "0", "--max-tokens", "6")
    out = capsys.readouterr().out
    anychip("export", str(run), str(tmp_path / "out"))
    model = load(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = tokenizer("The cat", return_tensors="pt", add_special_tokens=False)["input_ids"]
    for _ in range(6):
        prompt = torch.cat((prompt, model(prompt).logits[:, -1:].argmax(-1)), 1)
    assert out.strip() == printable(tokenizer.decode(prompt[0]), "utf-8").strip()


@pytest.mark.grid
def test_average_of_the_weights_is_exported_evaluated_and_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = directories.make(tmp_path / "model", "Llama"), directories.texts(tmp_path)
    weights, decay = [load(folder).state_dict()], 0.75
    more = ("--data", text, "eval.fraction=0.2", f"optimizer.ema_decay={decay}")
    for steps in (1, 2):
        train(folder, tmp_path / f"run{steps}", *more, steps=steps)
        anychip("export", str(tmp_path / f"run{steps}"), str(tmp_path / f"out{steps}"))
        weights.append(load(tmp_path / f"out{steps}").state_dict())
    anychip("export", str(tmp_path / "run2"), str(tmp_path / "average"), "--ema")
    for name, value in load(tmp_path / "average").state_dict().items():
        want = weights[0][name].double()
        for after in weights[1:]:
            want = decay * want + (1.0 - decay) * after[name].double()
        torch.testing.assert_close(value.double(), want, rtol=1e-6, atol=1e-7)
    told = []
    for words in ((), ("--ema",)):
        capsys.readouterr()
        anychip("eval", str(tmp_path / "run2"), "--data", text, "--json", *words)
        told.append(json.loads(capsys.readouterr().out)["loss"])
    assert told[0] != told[1]
    anychip("eval", str(tmp_path / "run2"), "--data", text, "--nproc", "2", "--ema", "--json")
    anychip("sample", str(tmp_path / "run2"), "The cat", "--ema", "--max-tokens", "3")
    train(folder, tmp_path / "plain", "--data", text, steps=1)
    anychip("sample", str(tmp_path / "plain"), "--ema", code=2)
    assert "no average of the weights, which optimizer.ema_decay" in capsys.readouterr().err


@family("Gemma2")
def test_reading_on_gives_the_logits_of_reading_all(tmp_path: Path, family: str) -> None:
    folder = directories.make(tmp_path, family)
    model = models.build(models.PretrainedConfig(path=str(folder), context=24)).eval()
    tokens = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(5))
    for model.packs in (False, True):  # type: ignore[attr-defined]
        with torch.no_grad(), model.reading_on():
            parts = torch.cat([model(part) for part in tokens.split([7, 1, 1, 11], 1)], 1)
        torch.testing.assert_close(parts, model(tokens).detach(), **LOGITS)


def test_threads_that_build_models_leave_the_library_as_it_was(tmp_path: Path) -> None:
    config = models.PretrainedConfig(path=str(directories.make(tmp_path, "GPT2")), context=8)
    tie_weights = transformers.PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: models.build(config), range(12)))
    assert len(found) == 12
    assert transformers.PreTrainedModel.tie_weights is tie_weights


def test_directory_without_weights_is_trained_from_scratch(tmp_path: Path) -> None:
    folder, text = directories.make(tmp_path / "model", "Llama"), directories.texts(tmp_path)
    for file in folder.glob("model*"):
        file.unlink()
    train(folder, tmp_path / "run", "--data", text, steps=2)
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32
    ).train()
    want = directories.plain_losses(theirs, batches(directories.text_tokens(folder)), 2)
    assert losses(tmp_path / "run") == pytest.approx(want, abs=CLOSE)


def spoil(folder: Path, change: Any) -> None:
    """Makes a directory one that is refused."""
    if isinstance(change, dict):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
    elif change == "pickle":
        for file in folder.glob("model*"):
            file.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif change:
        (folder / change).unlink()


@pytest.mark.parametrize(("change", "words", "answer"), [
    (None, ["model.layers=3"], "there is no setting 'model.layers' of a model in a directory"),
    (None, ["parallel.pipeline=2"], "start it with --nproc 2"),
    (None, ["model.context=65"], "more than the 64 positions"),
    (None, ["model.lora_targets=[\"q\"]"], "needs adapters: set lora_rank"),
    (None, ["model.lora_rank=2", "model.lora_targets=[\"nothing\"]"], "model.lora_targets: "),
    (None, ["data.field=messages", "data.tokenizer=bytes"], "data.tokenizer = 'model', got"),
    ("pickle", [], "weights in pickles, which can hold code"),
    ("config.json", [], "has no config.json"),
    ("tokenizer.json", [], "has no tokenizer.json"),
    ("model.safetensors.index.json", [], "cannot be loaded"),
    ({"quantization_config": {"quant_method": "awq"}}, [], "quantized weights"),
    ({"model_type": "mystery", "auto_map": {"AutoConfig": "code.Config"}}, [], "cannot be read"),
    ({"num_hidden_layers": 3}, [], "missing keys model.layers.2"),
    ({"vocab_size": 400}, [], "cannot be loaded"),
], ids=str)  # fmt: skip
def test_what_cannot_be_trained_is_refused_with_a_sentence_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, words: list[str], answer: str
) -> None:
    folder, text = directories.make(tmp_path / "model", "Llama"), directories.texts(tmp_path)
    spoil(folder, change)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    words = words if "model.context=65" in words else [*words, f"model.context={CONTEXT}"]
    given = ["--model", str(folder), "--data", text, "--out", str(tmp_path / "run")]
    anychip("train", *given, "--backend", "cpu", *words, code=2)
    assert answer in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


def test_kernels_that_a_config_names_are_not_asked_for(tmp_path: Path) -> None:
    folder = directories.make(tmp_path / "model", "Llama")
    spoil(folder, {"attn_implementation": "someone/kernel", "_attn_implementation": "a/b"})
    train(folder, tmp_path / "run", "--data", directories.texts(tmp_path), steps=1)


@pytest.mark.parametrize(("library", "given"), [("transformers", {}), ("peft", {"lora_rank": 2})])
def test_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, given: dict[str, int]
) -> None:
    folder = directories.make(tmp_path / "model", "Llama")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(data.MissingExtraError, match=rf"needs '{library}'.*'anychip\[hf\]'"):
        models.Pretrained(models.PretrainedConfig(path=str(folder), context=CONTEXT, **given))
