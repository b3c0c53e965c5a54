"""Directories of transformers in the stages of a pipeline, next to the whole model on one rank."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anychip import fuse, use
from anychip.comm import alone
from anychip.contract import UnsupportedError
from anychip.train import config, cutting, models, parallel
from anychip.train.parallel.saved import Saved
from tests.integration.fusion import families
from tests.integration.train import directories
from tests.integration.train.forked import Server
from tests.integration.train.test_fine_tuning import (
    BATCH,
    CLOSE,
    CONTEXT,
    LOGITS,
    LONG,
    LORA,
    RATE,
    SETTINGS,
    STEPS,
    anychip,
    load,
    logits,
    losses,
    pytestmark,
    train,
)
from tests.unit.train.test_planning import assert_plan_is_run

__all__ = ["pytestmark"]  # the warnings of PEFT
PARTS = 2
TEXT, CHATS = (), ("data.field=messages", f"model.context={LONG}")
AVERAGE = "optimizer.ema_decay=0.8"
STAGES = ("parallel.pipeline=2", f"data.accumulation={PARTS}", f"data.batch_size={BATCH // PARTS}")


def grid(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.grid)


def pipeline(
    ranks: Server, place: Path, folder: Path, *more: str, size: int = 2, code: int = 0
) -> str:
    """Trains the folder in stages, with results in ``two``; what the ranks have complained of."""
    context = () if CHATS[1] in more else (f"model.context={CONTEXT}",)
    words = ("--model", str(folder), "--steps", str(STEPS), "--out", "two", RATE, *context, *more)
    found = ranks.run("train", *words, *SETTINGS, world_size=size, cwd=place)
    told = "\n".join(ended.err for ended in found)
    assert [ended.code for ended in found] == [code] * size, told
    return told


# GPT-2 and Gemma 2 tie the head to the embedding; of Gemma 2 every other block is another kind.
@pytest.mark.parametrize(("family", "data", "adapters"), [
    ("Llama", CHATS, LORA), grid("GPT2", TEXT, ()),
    *(grid(family, TEXT, ()) for family in ("Llama", "Qwen3", "Gemma2", "Mixtral")),
    *(grid(family, TEXT, LORA) for family in ("GPT2", "Gemma2", "Mixtral")),
    grid("Gemma2", CHATS, ()), grid("GPT2", CHATS, ()),
], ids=str)  # fmt: skip
def test_stages_have_the_losses_of_one_rank_and_are_exported_as_the_whole(
    tmp_path: Path, ranks: Server, family: str, data: tuple[str, ...], adapters: tuple[str, ...]
) -> None:
    folder = directories.make(tmp_path / "model", family)
    text = directories.chats(tmp_path) if data else directories.texts(tmp_path)
    words = ("--data", text, *data, *adapters, *STAGES[1:], "eval.fraction=0.3", AVERAGE)
    train(folder, tmp_path / "one", *words)
    pipeline(ranks, tmp_path, folder, *words, STAGES[0])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=CLOSE)
    assert losses(tmp_path / "two")[-1] < losses(tmp_path / "two")[0] - 0.02
    samples = [(tmp_path / run / "sample.txt").read_text() for run in ("one", "two")]
    assert samples[0] == samples[1]
    found = {}
    for more in ((), ("--ema",)):
        for run in ("one", "two"):
            out = tmp_path / f"{run}-out{len(more)}"
            anychip("export", str(tmp_path / run), str(out), *more)
            found[run, more] = logits(load(out))
        torch.testing.assert_close(found["two", more], found["one", more], **LOGITS)
    assert not torch.allclose(found["one", ()], found["one", ("--ema",)], **LOGITS)


@pytest.mark.parametrize(("stage", "adapters"), [
    grid(stage, lora) for stage in range(4) for lora in ((), LORA)
], ids=str)  # fmt: skip
def test_two_replicas_of_two_stages_have_the_losses_of_one_rank(
    tmp_path: Path, ranks: Server, stage: int, adapters: tuple[str, ...]
) -> None:
    folder, text = directories.make(tmp_path / "model", "Llama"), directories.texts(tmp_path)
    train(folder, tmp_path / "one", "--data", text, *adapters, f"data.accumulation={PARTS}")
    words = ("--data", text, *adapters, *STAGES, f"optimizer.stage={stage}")
    pipeline(ranks, tmp_path, folder, *words, size=4)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=CLOSE)


@pytest.mark.grid
def test_rank_that_would_train_nothing_is_refused_by_all(tmp_path: Path, ranks: Server) -> None:
    folder, text = directories.make(tmp_path / "model", "Llama"), directories.texts(tmp_path)
    words = ("--data", text, *LORA, "parallel.pipeline=4", "data.accumulation=4")
    told = pipeline(ranks, tmp_path, folder, *words, size=4, code=2)
    assert "parallel.pipeline = 4: rank 0 would have no weight that is trained" in told


def opened(folder: Path, family: str) -> models.Pretrained:
    families.build(family).save_pretrained(folder)
    config = models.PretrainedConfig(path=str(folder), context=CONTEXT)
    return models.Pretrained(config, fuse).eval()


def in_stages(model: models.Pretrained, cuts: list[int], tokens: Tensor) -> Tensor:
    ends = [0, *cuts, parallel.num_layers(model)]
    x = tokens
    with torch.no_grad():
        for begin, end in pairwise(ends):
            stage = parallel.make_stage(model, range(begin, end))
            assert isinstance(stage, parallel.Stage)
            x = stage(x, tokens=tokens) if stage.needs_tokens else stage(x)
    return x


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("family", [
    name if name == "Gemma2" else grid(name) for name in families.FAMILIES if name != "OPT"
])  # fmt: skip
def test_family_cut_anywhere_has_the_bits_of_the_whole(
    tmp_path: Path, family: str, packs: bool
) -> None:
    model, tokens = opened(tmp_path, family), families.tokens()
    if packs:
        model.packs, tokens = True, tokens.int()
        tokens[:, ::5] |= 1 << 30  # where documents begin
    with torch.no_grad():
        whole = model(tokens)
    layers = parallel.num_layers(model)
    for cuts in ([1], [2], [layers - 1], [*range(1, layers)]):
        assert torch.equal(in_stages(model, cuts, tokens), whole), cuts
    costs = parallel.weigh_costs(model, tokens.numel())
    weights = sum(p.numel() for p in model.parameters())
    assert sum(cost.forward for cost in costs) >= 2.0 * tokens.numel() * weights
    if family != "DeepseekV3":  # whose attention torch has no shape for, without data
        costs = parallel.estimate_costs(model, tokens, tokens)
        assert all(cost.backward >= cost.forward > 0 for cost in costs[1:])
    assert model.packs == packs


def test_plan_has_the_stages_and_bytes_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = directories.make(tmp_path, "GPT2")
    words = [f"model.path={folder}", f"model.context={CONTEXT}", *STAGES, "--backend", "cpu"]
    capsys.readouterr()
    anychip("plan", "--nproc", "2", *words, "--json")
    stages = json.loads(capsys.readouterr().out)["stages"]
    model = models.Pretrained(models.PretrainedConfig(path=str(folder), context=CONTEXT))
    for number, stage in enumerate(stages):
        first, last = stage["layers"]
        held = parallel.make_stage(model, range(first, last + 1))
        count = sum(param.numel() for param in held.parameters())
        assert stage["parameters"] == count
        assert stage["nbytes"]["parameters"] == 4 * count
        assert len(held.tied) == 1, number
    assert sum(stage["cost"] for stage in stages) == pytest.approx(1.0)


@pytest.mark.grid
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize(("world_size", "more"), [
    (1, []), (2, ["optimizer.stage=0"]), (2, ["optimizer.stage=2"]), (2, ["optimizer.stage=3"]),
    (2, ["parallel.pipeline=2", "data.accumulation=2"]),
    (4, ["parallel.pipeline=2", "data.accumulation=2", "optimizer.stage=3"]),
], ids=["one", "stage0", "stage2", "stage3", "pipeline", "stage3_of_stages"])  # fmt: skip
def test_plan_of_adapters_is_what_the_run_is(
    tmp_path: Path, family: str, world_size: int, more: list[str]
) -> None:
    folder, text = directories.make(tmp_path / "model", family), directories.texts(tmp_path)
    settings = [f"model.path={folder}", f"model.context={CONTEXT}", "model.lora_rank=2", RATE]
    settings += [f'data.files=["{text}"]', "data.batch_size=2", *more]
    assert_plan_is_run(tmp_path, world_size, [*settings, "run.sample_tokens=5", "data.prefetch=0"])


@pytest.mark.parametrize(("family", "rank"), [
    ("Llama", 2), grid("Llama", 0), ("Mixtral", 0), ("Mixtral", 2)
])  # fmt: skip
def test_plan_knows_what_a_forward_keeps(tmp_path: Path, family: str, rank: int) -> None:
    """But what layers have in common, like angles of positions, counts once for each."""
    folder = directories.make(tmp_path, family)
    about = models.PretrainedConfig(path=str(folder), context=CONTEXT, lora_rank=rank)
    model, tokens = models.Pretrained(about), torch.zeros(2, CONTEXT, dtype=torch.int64)
    kept = Saved([*model.parameters(), *model.buffers(), tokens])
    with kept.of((0, 0)):
        loss = model(tokens, tokens)
    layers = [range(number, number + 1) for number in range(parallel.num_layers(model))]
    planned = parallel.estimate_bytes(models.without_data(about), layers, tokens, tokens)
    assert loss.requires_grad
    assert kept.nbytes <= sum(each.saved for each in planned) <= 1.2 * kept.nbytes


def test_plan_of_adapters_says_what_is_trained_and_refuses_a_rank_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = directories.make(tmp_path / "llama", "Llama")
    words = ["--backend", "cpu", f"model.context={CONTEXT}", "model.lora_rank=2"]
    capsys.readouterr()
    anychip("plan", *words, f"model.path={folder}")
    shown = capsys.readouterr().out
    assert shown.startswith("llama with")
    assert "are trained, in fp32" in shown
    told = (*words, f"model.path={folder}", "parallel.pipeline=4", "data.accumulation=4")
    anychip("plan", *told, code=2)
    assert "rank 0 would have no weight that is trained" in capsys.readouterr().err


def test_mfu_counts_six_operations_a_weight_and_token_where_all_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, chip = directories.make(tmp_path, "Llama"), use("cpu")
    known = replace(chip.properties(), flops={torch.float32: 1e9})
    monkeypatch.setattr(chip, "properties", lambda: known)
    for rank in (0, 4):
        words = [f"model.path={folder}", f"model.context={CONTEXT}", f"model.lora_rank={rank}"]
        settings = config.load(None, [*words, "data.batch_size=2", RATE])
        assert isinstance(settings.model, models.PretrainedConfig)
        model = models.Pretrained(settings.model)
        found = cutting.ideal_seconds(settings, chip, alone(), model, torch.float32)
        if rank:
            assert found is None
            continue
        assert found is not None
        table = model.net.get_input_embeddings().weight.numel()  # is looked up
        products = sum(p.numel() for p in model.parameters() if p.dim() == 2) - table
        # Attention and all that is elementwise come to less than a third in so small a model.
        assert 1 <= found * 1e9 / (6 * 2 * CONTEXT * products) <= 4 / 3


def test_model_without_one_list_of_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"OPTForCausalLM cannot be cut .*pipeline at 1"):
        parallel.num_layers(opened(tmp_path, "OPT"))


def test_cut_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    model, tokens = opened(tmp_path, "Olmo"), families.tokens()
    stages = [parallel.make_stage(model, part) for part in (range(2), range(2, 4))]
    parallel.check_cut(model, stages, tokens)  # type: ignore[arg-type]
    # Its last norm has no weights: nothing but its place says that it is not every stage's.
    assert model.parts.above == ("model.norm", "lm_head")
    model.parts = model.parts._replace(above=("lm_head",))
    stages = [parallel.make_stage(model, part) for part in (range(2), range(2, 4))]
    modes = [m.training for top in (model, *stages) for m in top.modules()]
    with pytest.raises(UnsupportedError, match=r"these 2 stages.*computes something else.*at 1"):
        parallel.check_cut(model, stages, tokens)  # type: ignore[arg-type]
    assert [m.training for top in (model, *stages) for m in top.modules()] == modes
    assert not any(m.training for m in model.modules())
