"""Weights for transformers, and weights from it: the same bits, and the same logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from anychip.cli import group
from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import checkpoint, models, optim, run, zero
from anychip.train.checkpoint import CheckpointError, pretrained
from anychip.train.models import GPTConfig, LlamaConfig
from tests.integration.fusion import families
from tests.unit.train.checkpoint.test_arrangements import at, held_by, joined

CONFIGS: dict[str, Any] = {
    "gpt": GPTConfig(vocab_size=97, context=24, layers=2, heads=4, width=48),
    "llama": LlamaConfig(
        vocab_size=97, context=24, layers=2, heads=4, kv_heads=2, width=48, rope_base=500.0,
        norm_eps=1e-3,
    ),
}  # fmt: skip
ALWAYS = ("GPT2", "Qwen3", "Mixtral")


def optimizer_of(model: nn.Module, comm: Communicator, stage: int = 0) -> zero.Optimizer:
    return zero.Optimizer(model, optim.adamw(1e-2), comm, stage=stage, bucket_nbytes=12_000)


def scrambled(config: Any, seed: int = 0) -> Any:
    """Biases and norms that are not their initial values."""
    torch.manual_seed(seed)
    model = models.build(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model.eval()


@pytest.fixture(params=CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A model, and the directory where two ranks have saved it, each its part."""

    def work(comm: Communicator) -> None:
        opt = optimizer_of(model := ranks[comm.rank], comm, stage=3)
        checkpoint.save(tmp_path / "run", step=0, model=model, optimizer=opt, comm=comm)

    ranks = [scrambled(CONFIGS[request.param]) for _ in range(2)]
    run_ranks(2, work)
    return scrambled(CONFIGS[request.param]), tmp_path / "run"


def equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("part_nbytes", [1 << 30, 40_000, 1])
def test_transformers_loads_what_was_exported_and_gives_the_same_logits(
    saved: Any, tmp_path: Path, part_nbytes: int
) -> None:
    model, directory = saved
    out = tmp_path / "exported"
    written = pretrained.export(directory, out, config=model.config, part_nbytes=part_nbytes)
    parts = [path for path in written if path.suffix == ".safetensors"]
    assert (len(parts) == 1) == (part_nbytes == 1 << 30)
    written_nbytes = sum(
        t.nbytes for file in parts for t in safetensors.torch.load_file(file).values()
    )
    assert written_nbytes == sum(param.nbytes for param in model.parameters())  # tied ones once
    if part_nbytes == 40_000:
        assert all(path.stat().st_size < 45_000 for path in parts)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    tokens = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Both sum in float32, in different orders: the default of 1.3e-6 and 1e-5.
        torch.testing.assert_close(theirs.eval()(tokens).logits, model(tokens))


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 3), (3, 1)])
def test_what_transformers_has_saved_is_loaded_at_any_arrangement(
    saved: Any, tmp_path: Path, world_size: int, stage: int
) -> None:
    def work(comm: Communicator) -> dict[str, Tensor]:
        opt = optimizer_of(model := fresh[comm.rank], comm, stage=stage)
        pretrained.load(tmp_path / "theirs", model=model, optimizer=opt, comm=comm)
        with opt.whole():
            state = opt.stands_for(model).state_dict()
            return {name: value.clone() for name, value in state.items()}

    model, directory = saved
    pretrained.export(directory, tmp_path / "exported", config=model.config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert (tmp_path / "theirs" / pretrained.INDEX).exists()
    fresh = [scrambled(model.config, seed=1) for _ in range(world_size)]
    for got in run_ranks(world_size, work):
        equal(got, model.state_dict())


def test_stages_of_a_pipeline_load_their_own_of_it(tmp_path: Path) -> None:
    """A tied weight is in no part under the name that the last stage has for it."""

    def load(ours: run.Run) -> dict[str, Tensor]:
        given = {"model": ours.model, "optimizer": ours.optimizer, "names": ours.names}
        pretrained.load(tmp_path / "out", comm=ours.comm, **given)
        return held_by(ours)

    def save(ours: run.Run) -> Any:
        run.save(ours, tmp_path)
        return ours.config.model, held_by(ours)

    ((config, want),) = at("1", "run.steps=1", work=save)
    pretrained.export(tmp_path, tmp_path / "out", config=config)
    got = joined(at("2x2-stage2", "run.steps=1", work=load))
    assert any(name.endswith("lm_head.weight") for name in got)
    equal(*({n: t for n, t in each.items() if n.startswith("model.")} for each in (got, want)))


@pytest.mark.parametrize("family", [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.grid)
    for name in families.FAMILIES
])  # fmt: skip
def test_model_of_transformers_is_exported_and_loaded_under_its_names(
    tmp_path: Path, family: str
) -> None:
    model = families.build(family).eval()
    checkpoint.save(tmp_path / "run", step=0, model=model, optimizer=optimizer_of(model, alone()))
    out = tmp_path / "exported"
    pretrained.export(tmp_path / "run", out, config=model.config.to_dict(), part_nbytes=50_000)
    other = type(model).from_pretrained(out)
    equal(other.state_dict(), model.state_dict())
    with torch.no_grad():
        tokens = families.tokens()
        assert torch.equal(other.eval()(tokens).logits, model(tokens).logits)
    again = families.build(family)
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    pretrained.load(out, model=again, optimizer=optimizer_of(again, alone()))
    equal(again.state_dict(), model.state_dict())


def test_run_is_exported_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(tmp_path / "run"), str(tmp_path / "out")
    sizes = ("model.width=16", "model.layers=1", "model.context=8", "run.sample_tokens=0")
    assert group.run(["train", "--backend", "cpu", "--steps", "1", "--out", source, *sizes]) == 0
    capsys.readouterr()
    assert group.run(["export", source, out, "--part-size", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    files = {path.name: path.stat().st_size for path in Path(out).iterdir()}
    assert told == {"schema": 1, "directory": out, "files": files}
    assert transformers.AutoModelForCausalLM.from_pretrained(out).config.n_embd == 16
    capsys.readouterr()
    for words, answer in (
        ([source, out], "is not empty; nothing was written"),
        ([str(tmp_path), str(tmp_path / "new")], "there is no run of anychip train in"),
    ):
        assert group.run(["export", *words]) == 2
        assert answer in (told := capsys.readouterr().err)
        assert told.count("\n") == 1
    (tmp_path / "run" / "checkpoint" / "manifest.json").unlink()
    assert group.run(["export", source, str(tmp_path / "new")]) == 2
    assert "manifest.json cannot be read" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def damage(out: Path, change: str) -> None:
    """Of a directory with all tensors in one file."""
    file = out / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    if change == "less":
        del tensors["transformer.wpe.weight"]
    elif change == "more":
        tensors["transformer.h.2.ln_1.weight"] = torch.ones(48)
    elif change == "wider":
        tensors["transformer.h.0.mlp.c_fc.weight"] = torch.ones(48, 96)
    safetensors.torch.save_file(tensors, file)
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif change == "no_file":
        file.unlink()


@pytest.mark.parametrize(("change", "answer"), [
    ({"n_head": 2}, "n_head is 4 in this model and 2 in config.json"),
    ({"activation_function": "relu"}, "activation_function is gelu_new in this model and relu"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is True in this model and False"),
    ("less", "it has no model.transformer.wpe.weight"),
    ("more", "the model has no transformer.h.2.ln_1.weight"),
    ("wider", r"c_fc.weight: float32\[192, 48\] expected, got float32\[96, 48\]"),
    ("cut", "is not within it"),
    ("no_file", "cannot be read as transformers saves a model"),
], ids=str)  # fmt: skip
def test_other_models_and_damage_are_refused_and_nothing_is_changed(
    tmp_path: Path, change: Any, answer: str
) -> None:
    model, out = scrambled(CONFIGS["gpt"]), tmp_path / "out"
    checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer_of(model, alone()))
    pretrained.export(tmp_path, out, config=model.config)
    if isinstance(change, dict):
        config = {**pretrained.config_of(model.config), **change}
        (out / "config.json").write_text(json.dumps(config))
    else:
        damage(out, change)
    other = scrambled(model.config, seed=1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=answer):
        pretrained.load(out, model=other, optimizer=optimizer_of(other, alone()))
    equal(other.state_dict(), before)
