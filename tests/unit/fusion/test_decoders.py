"""Whole decoders in plain torch: what is replaced, and that the training stays the same."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs

import anychip
from tests.unit.fusion import parity, plain
from tests.unit.fusion.plain import LAYERS, VOCABULARY

BOUND = parity.gradient_bound(LAYERS, 4 * plain.WIDTH)
CALLED = {"attention": LAYERS, "cross_entropy": 1}
SERVED = {
    plain.gpt: {**CALLED, "layer_norm": 2 * LAYERS + 1, "gelu": LAYERS},
    plain.llama: {**CALLED, "rms_norm": 2 * LAYERS + 1, "swiglu": LAYERS},
}


@pytest.fixture(params=SERVED, ids=lambda build: build.__name__)
def model(request: pytest.FixtureRequest) -> nn.Module:
    made: nn.Module = request.param()
    made.served = SERVED[request.param]
    parity.scramble(made)
    return made


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (3, 23), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def test_fused_decoder_is_served_by_operators_alone(model: nn.Module) -> None:
    report = anychip.fuse(model)
    counts = {kind: report.count(kind) for kind in ("norm", "activation", "attention", "loss")}
    assert list(counts.values()) == [2 * LAYERS + 1, LAYERS, LAYERS, 1]
    assert report.count() == sum(counts.values())
    assert {entry.source for entry in report.left} == {"Embedding", "Linear"}
    model(*batch()).backward()
    rows = anychip.provenance().rows()
    assert {row.operator: row.calls for row in rows if row.direction == "forward"} == model.served
    assert report.fallbacks() == ()


def test_fused_decoder_loss_and_gradients_equal_float64(model: nn.Module) -> None:
    exact, before = copy.deepcopy(model).double(), copy.deepcopy(model)
    anychip.fuse(model)
    losses = [each(*batch()) for each in (exact, before, model)]
    for value in losses:
        value.backward()
    for each, value in zip((before, model), losses[1:], strict=True):
        assert parity.relative(value, losses[0]) <= BOUND
        for (name, param), wide in zip(each.named_parameters(), exact.parameters(), strict=True):
            assert parity.relative(param.grad, wide.grad) <= BOUND, name


def test_fused_decoder_state_dict_is_the_same_and_loads_both_ways(model: nn.Module) -> None:
    before = copy.deepcopy(model)
    state = dict(model.state_dict(keep_vars=True))
    anychip.fuse(model)
    after = dict(model.state_dict(keep_vars=True))
    assert list(after) == list(state)
    assert all(after[name] is state[name] for name in state)
    fused = model(*batch())
    model.load_state_dict(before.state_dict())
    assert torch.equal(model(*batch()), fused)
    assert model.head.weight is model.embedding.weight


def test_fuse_again_finds_nothing_to_do(model: nn.Module) -> None:
    count = anychip.fuse(model).count()
    kinds = [type(module) for module in model.modules()]
    report = anychip.fuse(model)
    assert (report.count(), report.before) == (0, count)
    assert str(report).startswith(f"nothing was replaced; {count} were replaced before")
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.grid
def test_fused_decoder_compiles_without_a_break(model: nn.Module) -> None:
    torch._dynamo.reset()
    want = model(*batch())
    anychip.fuse(model)
    graphs = EagerAndRecordGraphs()
    got = torch.compile(model, backend=graphs, fullgraph=True)(*batch())
    assert parity.relative(got, want) <= 2 * BOUND
    targets = [str(node.target) for graph in graphs.graphs for node in graph.graph.nodes]
    assert sum("anychip.attention" in target for target in targets) == LAYERS
    torch._dynamo.reset()


def test_fused_decoder_in_bf16_stays_within_its_rounding(model: nn.Module) -> None:
    model.bfloat16()
    want, before = copy.deepcopy(model).double()(*batch()), model(*batch())
    anychip.fuse(model)
    got = model(*batch())
    assert got.dtype == before.dtype == torch.bfloat16
    # Chains of 7 operators a layer with one rounding of 2^-9 each, in quadrature; and the result's.
    limit = (2 * (7 * (LAYERS + 1)) ** 0.5 + 1) * 2.0**-9
    assert parity.relative(got, want) <= limit
