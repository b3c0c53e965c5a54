"""Decoders of Hugging Face transformers, tiny and with random weights: fused and as they were."""

import copy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs

import anychip
from tests.unit.fusion import parity

pytest.importorskip("transformers")

from tests.integration.fusion import families
from tests.integration.fusion.families import HEADS, KINDS, LAYERS, WIDTH, loss, tokens

BOUND = parity.gradient_bound(LAYERS, 4 * WIDTH)
TIED = {"head_dim": 24, "tie_word_embeddings": True}
SPECIFIED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name.lower(): (name, {}) for name in ("Llama", "Qwen2", "Qwen3")},
    "qwen3-tied": ("Qwen3", TIED),
    "gpt2": ("GPT2", {}),
}
# Two norms a layer and one at the end; Qwen3 has two more in each attention.
NORMS = {"llama": 5, "qwen2": 5, "qwen3": 9, "qwen3-tied": 9, "gpt2": 5}


def build(name: str, **changes: Any) -> Any:
    family, mine = SPECIFIED[name]
    return families.build(family, **mine, **changes)


@pytest.fixture(params=SPECIFIED)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def forward_calls() -> Counter[str]:
    """By operator, whichever of its rows served them."""
    found = Counter[str]()
    for row in anychip.provenance().rows():
        found[row.operator] += row.calls if row.direction == "forward" else 0
    return +found


def test_fused_model_is_served_by_operators_alone(name: str) -> None:
    model = build(name)
    report = anychip.fuse(model)
    turns = 0 if name == "gpt2" else LAYERS
    assert [report.count(kind) for kind in KINDS] == [NORMS[name], LAYERS, turns, LAYERS, 1]
    loss(model).backward()
    norm, product = ("layer_norm", "gelu") if name == "gpt2" else ("rms_norm", "swiglu")
    wanted = {norm: NORMS[name], product: LAYERS, "attention": LAYERS, "cross_entropy": 1}
    assert forward_calls() == (wanted if name == "gpt2" else {**wanted, "rope": LAYERS})
    assert report.fallbacks() == ()


@pytest.mark.parametrize("options", [
    {}, {"cache_implementation": "static", "disable_compile": True},
], ids=["cache", "static-cache"])  # fmt: skip
def test_fused_model_generates_what_it_did(name: str, options: dict[str, Any]) -> None:
    before = build(name).eval()
    model = copy.deepcopy(before)
    report = anychip.fuse(model)
    prompt = tokens()[:, :5]
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 9, "do_sample": False}
    got, want = (each.generate(prompt, **given, **options) for each in (model, before))
    assert torch.equal(got, want)
    if not options:
        assert forward_calls()["attention"] == LAYERS * (got.shape[1] - prompt.shape[1])
        assert report.fallbacks() == ()


def batches(padded: str) -> dict[str, Tensor]:
    """Arguments besides the tokens; labels leave out what is padding."""
    mask = torch.ones_like(tokens())
    if padded == "packed":
        positions = torch.cat([torch.arange(n) for n in (5, 1, 12)])
        return {"labels": tokens(), "position_ids": positions.expand(2, -1)}
    mask[0, slice(4) if padded == "left" else slice(13, None)] = 0
    return {"labels": tokens().masked_fill(mask == 0, -100), "attention_mask": mask}


@pytest.mark.parametrize("padded", ["left", "right", "packed"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fused_model_with_padded_and_packed_batches_keeps_the_operators(
    name: str, padded: str
) -> None:
    before = build(name)
    model = copy.deepcopy(before)
    report = anychip.fuse(model)
    got, want = (each(tokens(), use_cache=False, **batches(padded)) for each in (model, before))
    for made in (got, want):
        made.loss.backward()
    assert parity.relative(got.loss, want.loss) <= 2 * BOUND
    kept = batches(padded)["labels"] != -100
    assert parity.relative(got.logits[kept], want.logits[kept]) <= 2 * BOUND
    for (path, ours), theirs in zip(model.named_parameters(), before.parameters(), strict=True):
        assert parity.relative(ours.grad, theirs.grad) <= 2 * BOUND, path
    assert report.fallbacks() == ()
    calls = forward_calls()
    assert calls["attention_varlen"] == LAYERS
    assert "attention" not in calls


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_fused_model_compiles_without_a_break_and_counts_what_is_its_own() -> None:
    torch._dynamo.reset()
    before = build("llama")
    model = copy.deepcopy(before)
    report = anychip.fuse(model)
    graphs = EagerAndRecordGraphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    got, want = (each(tokens(), labels=tokens()).loss for each in (compiled, before))
    assert parity.relative(got, want) <= 2 * BOUND
    assert report.fallbacks() == ()
    targets = [str(node.target) for graph in graphs.graphs for node in graph.graph.nodes]
    for operator in ("attention", "rope"):
        assert sum(f"anychip.{operator}" in target for target in targets) == LAYERS
    mask = torch.ones_like(tokens())
    mask[0, :4] = 0
    got, want = (each(tokens(), attention_mask=mask).logits for each in (compiled, before))
    assert parity.relative(got[mask.bool()], want[mask.bool()]) <= 2 * BOUND
    (row,) = report.fallbacks()
    assert (row.operator, row.fallback_reason) == ("attention", "a mask, in compiled code")
    assert row.implementation.endswith("sdpa_attention_forward")
    torch._dynamo.reset()


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss(model).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fused_model_with_attention_dropout_is_the_operators_and_repeats(name: str) -> None:
    option = {"attn_pdrop" if name == "gpt2" else "attention_dropout": 0.2}
    model = build(name, **option).train()
    report = anychip.fuse(model)
    first, again = gradients(model), gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert forward_calls()["attention_dropout"] == 2 * LAYERS
    assert report.fallbacks() == ()
    assert not all(torch.equal(a, b) for a, b in zip(first, gradients(model.eval()), strict=True))
    assert forward_calls()["attention"] == LAYERS


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensors", "reentrant"])
def test_fused_model_with_checkpointing_and_dropout_has_the_same_gradients(reentrant: bool) -> None:
    model = build("llama", attention_dropout=0.2).train()
    report = anychip.fuse(model)
    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), want, strict=True))
    calls = forward_calls()
    assert (calls["rope"], calls["attention_dropout"]) == (3 * LAYERS, 3 * LAYERS)
    assert report.fallbacks() == ()


def test_fused_model_generates_from_prompts_padded_on_the_left_what_it_did() -> None:
    before = build("llama").eval()
    model = copy.deepcopy(before)
    report = anychip.fuse(model)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0  # so every row of the batch has positions of its own
    options = {"max_new_tokens": 7, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    prompt = tokens()[:, :6]
    got, want = (each.generate(prompt, **options) for each in (model, before))
    assert torch.equal(got, want)
    steps = got.shape[1] - prompt.shape[1]
    assert forward_calls()["rope"] == LAYERS * steps
    assert forward_calls()["attention_varlen"] == LAYERS
    # Later queries are fewer than the keys that they see: there is no operator for those.
    (row,) = report.fallbacks()
    assert (row.calls, row.fallback_reason) == (LAYERS * (steps - 1), "a mask")


def test_fused_loss_over_given_items_and_shifted_labels_equals_the_original() -> None:
    before = build("llama")
    model = copy.deepcopy(before)
    report = anychip.fuse(model)
    labels = tokens()
    shifted = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    cases: list[dict[str, Any]] = [
        {"num_items_in_batch": torch.tensor(40)}, {"num_items_in_batch": 7},
        {"shift_labels": shifted}, {"ignore_index": -7},
    ]  # fmt: skip
    for options in cases:
        labels[:, 3:6] = options.get("ignore_index", -100)
        got, want = (each(tokens(), labels=labels, **options).loss for each in (model, before))
        assert parity.relative(got, want) <= 2 * BOUND
    assert report.fallbacks() == ()


@pytest.mark.parametrize("config_of", [
    lambda model: model.config, lambda model: copy.deepcopy(model.config),
    lambda model: type(model.config).from_dict(model.config.to_dict()),
], ids=["same", "copy", "saved"])  # fmt: skip
def test_fuse_leaves_another_model_of_its_config_alone(config_of: Callable[[Any], Any]) -> None:
    model = build("llama")
    anychip.fuse(model)
    other = type(model)(config_of(model))
    loss(other)
    assert anychip.provenance().rows() == ()
    assert other.config._attn_implementation == "sdpa"


def test_unfuse_gives_every_module_its_own_code_back(name: str) -> None:
    before = build(name)
    model = copy.deepcopy(before)
    report = anychip.fuse(model)
    fused = copy.deepcopy(model)
    for each in (model, fused):
        # A module of tables is fused besides, and an attention with rope is one module.
        assert anychip.unfuse(each) == report.count() + (1 - LAYERS if name != "gpt2" else 0)
        kinds = zip(each.modules(), before.modules(), strict=True)
        assert all(type(ours) is type(theirs) for ours, theirs in kinds)
        assert torch.equal(loss(each), loss(before))
        assert anychip.unfuse(each) == 0
    assert anychip.provenance().rows() == ()
    assert anychip.fuse(model).count() == report.count()


def test_attention_implementation_can_be_set_back() -> None:
    model = build("llama")
    anychip.fuse(model)
    model.set_attn_implementation("eager")
    assert model(tokens(), output_attentions=True).attentions[0].shape == (2, HEADS, 18, 18)
    assert "attention" not in forward_calls()


def test_fuse_eager_attention_is_left_with_the_way_to_change_it() -> None:
    report = anychip.fuse(build("llama", attn_implementation="eager"))
    assert report.count("attention") == 0
    (reason,) = {e.reason for e in report.left if e.source == "LlamaAttention"}
    assert reason.startswith("its attention is 'eager'")


def test_fuse_part_of_the_model_takes_that_part_and_later_the_rest() -> None:
    model = build("llama")
    report = anychip.fuse(model, only="model.layers.1")
    assert sorted((e.kind, e.path) for e in report.replaced) == [
        ("activation", "model.layers.1.mlp"), ("attention", "model.layers.1.self_attn"),
        ("norm", "model.layers.1.input_layernorm"),
        ("norm", "model.layers.1.post_attention_layernorm"), ("rope", "model.layers.1.self_attn"),
    ]  # fmt: skip
    loss(model)
    assert forward_calls() == {"attention": 1, "rope": 1, "rms_norm": 2, "swiglu": 1}
    rest = anychip.fuse(model, skip="rope")
    assert (rest.before, rest.count("attention"), rest.count("rope")) == (5, 1, 0)
    assert [(e.kind, e.path) for e in anychip.fuse(model).replaced] == [
        ("rope", "model.layers.0.self_attn")
    ]


@pytest.mark.grid
def test_fused_models_load_in_another_process(tmp_path: Path) -> None:
    models = [build(name) for name in SPECIFIED]
    counts = [anychip.fuse(model).count() for model in models]
    saved = (models, tokens(), [loss(model).detach() for model in models])
    torch.save(saved, tmp_path / "saved.pt")
    code = (
        "import sys, torch, anychip; anychip.use('cpu')\n"
        "models, tokens, wanted = torch.load(sys.argv[1], weights_only=False)\n"
        "print(*(anychip.fuse(model).before for model in models))\n"
        "losses = [model(tokens, labels=tokens).loss for model in models]\n"
        "print(*(torch.equal(loss, want) for loss, want in zip(losses, wanted)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "saved.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.stdout.split() == [*map(str, counts), *["True"] * len(models)], done.stderr
