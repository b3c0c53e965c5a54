"""Whole decoders in plain torch: what is replaced, and that the training stays the same."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs

import anychip
from tests.unit.fusion import parity
from tests.unit.fusion.plain import GPT, HEADS, KV_HEADS, LAYERS, VOCABULARY, WIDTH, Llama
from tests.unit.train import plain_decoders

LONGEST = 4 * WIDTH
EXPECTED = {
    GPT: {"norm": 5, "activation": 2, "attention": 2, "loss": 1},
    Llama: {"norm": 5, "activation": 2, "attention": 2, "loss": 1},
}


@pytest.fixture(params=[GPT, Llama], ids=lambda kind: kind.__name__)
def model(request: pytest.FixtureRequest) -> nn.Module:
    made: nn.Module = request.param()
    parity.scramble(made)
    return made


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (3, 23), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(model: nn.Module) -> Tensor:
    value: Tensor = model(*batch())
    return value


def exact_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients in float64, from the functions that share no code with the model."""
    made: dict[int, Tensor] = {}
    state = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        made.setdefault(id(param), param.detach().double().requires_grad_())
        state[name] = made[id(param)]
    run: Callable[..., Any] = plain_decoders.gpt_loss
    sizes: tuple[int, ...] = (HEADS, LAYERS)
    if isinstance(model, Llama):
        run, sizes = plain_decoders.llama_loss, (HEADS, KV_HEADS, LAYERS)
    value = run(state, *sizes, *batch())
    value.backward()
    return value, {name: leaf.grad for name, leaf in state.items() if leaf.grad is not None}


def test_fuse_decoder_replaces_every_norm_activation_attention_and_loss(model: nn.Module) -> None:
    report = anychip.fuse(model)
    assert {kind: report.count(kind) for kind in EXPECTED[type(model)]} == EXPECTED[type(model)]
    assert report.count() == 10
    assert {entry.source for entry in report.left} == {"Embedding", "Linear"}


def test_fused_decoder_is_served_by_operators_alone(model: nn.Module) -> None:
    report = anychip.fuse(model)
    loss(model).backward()
    counts = {
        row.operator: row.calls for row in anychip.provenance().rows() if row.direction == "forward"
    }
    norm, product = ("layer_norm", "gelu") if isinstance(model, GPT) else ("rms_norm", "swiglu")
    assert counts == {norm: 5, product: 2, "attention": 2, "cross_entropy": 1}
    assert report.fallbacks() == ()


def test_fused_decoder_loss_and_gradients_equal_float64(model: nn.Module) -> None:
    bound = parity.gradient_bound(LAYERS, LONGEST)
    want, gradients = exact_gradients(model)
    before = copy.deepcopy(model)
    anychip.fuse(model)
    for each in (before, model):
        value = loss(each)
        value.backward()
        assert abs(value.item() - want.item()) <= bound * want.item()
        for name, param in each.named_parameters():
            assert parity.relative(param.grad, gradients[name]) <= bound, name


def test_fused_decoder_state_dict_is_the_same_and_loads_both_ways(model: nn.Module) -> None:
    before = copy.deepcopy(model)
    state = dict(model.state_dict(keep_vars=True))
    anychip.fuse(model)
    after = dict(model.state_dict(keep_vars=True))
    assert list(after) == list(state)
    assert all(after[name] is state[name] for name in state)
    fresh = type(model)()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(loss(fresh), loss(before))
    anychip.fuse(fresh)
    fresh.load_state_dict(before.state_dict())
    assert torch.equal(loss(fresh), loss(model))


def test_fused_gpt_head_stays_tied() -> None:
    model = GPT()
    anychip.fuse(model)
    assert model.lm_head.weight is model.transformer["wte"].weight


def test_fuse_again_finds_nothing_to_do(model: nn.Module) -> None:
    anychip.fuse(model)
    kinds = [type(module) for module in model.modules()]
    report = anychip.fuse(model)
    assert (report.count(), report.before) == (0, 10)
    assert str(report).startswith("nothing was replaced; 10 were replaced before")
    assert [type(module) for module in model.modules()] == kinds


def test_fused_decoder_compiles_without_a_break(model: nn.Module) -> None:
    torch._dynamo.reset()
    want = loss(model)
    anychip.fuse(model)
    graphs = EagerAndRecordGraphs()
    got = torch.compile(model, backend=graphs, fullgraph=True)(*batch())
    assert parity.relative(got, want) <= 2 * parity.gradient_bound(LAYERS, LONGEST)
    targets = [str(node.target) for graph in graphs.graphs for node in graph.graph.nodes]
    assert sum("anychip.attention" in target for target in targets) == LAYERS
    torch._dynamo.reset()


def test_fused_decoder_in_bf16_stays_within_its_rounding(model: nn.Module) -> None:
    want, _ = exact_gradients(model)
    model.bfloat16()
    before = loss(model)
    anychip.fuse(model)
    got = loss(model)
    assert got.dtype == before.dtype == torch.bfloat16
    # Chains of 7 operators a layer with one rounding of 2^-9 each, in quadrature; and the result's.
    limit = (2 * (7 * (LAYERS + 1)) ** 0.5 + 1) * 2.0**-9
    assert abs(got.item() - want.item()) <= limit * want.item()
