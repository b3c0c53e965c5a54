"""Splits: the cut against all cuts, costs against formulas, stages against the whole model."""

import copy
import itertools
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anychip import ops
from anychip.train.models import GPT, Decoder, GPTConfig, Llama, LlamaConfig, build
from anychip.train.parallel import (
    LayerCost,
    estimate_costs,
    make_stage,
    measure_costs,
    merge,
    num_layers,
    partition,
    split_layers,
    stage_costs,
)

CONFIGS = {
    "gpt": GPTConfig(vocab_size=61, context=16, layers=4, heads=2, width=32),
    "llama": LlamaConfig(vocab_size=61, context=16, layers=4, heads=4, kv_heads=2, width=32),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request: pytest.FixtureRequest) -> Decoder:
    return build(request.param)


def brute_force(rows: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(dearest stage, sum of squares) of the best of all cuts."""
    found, count = [], len(rows[0])
    for inner in itertools.combinations(range(1, count), len(rows) - 1):
        cuts = pairwise((0, *inner, count))
        sums = [sum(row[a:b]) for row, (a, b) in zip(rows, cuts, strict=True)]
        found.append((max(sums), sum(s * s for s in sums)))
    return min(found)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data(), st.booleans())
def test_partition_is_the_best_of_all_cuts(
    costs: list[int], data: st.DataObject, differ: bool
) -> None:
    """Of stages on one chip, and on chips that are some times slower."""
    stages = data.draw(st.integers(1, len(costs)))
    slower = [data.draw(st.integers(1, 5)) if differ else 1 for _ in range(stages)]
    rows = [[cost * by for cost in costs] for by in slower]
    parts = partition(rows if differ else costs, stages)
    assert [i for part in parts for i in part] == list(range(len(costs)))
    assert len(parts) == stages
    assert all(len(part) for part in parts)
    sums = [sum(row[i] for i in part) for row, part in zip(rows, parts, strict=True)]
    assert (max(sums), sum(s * s for s in sums)) == brute_force(rows)


def test_partition_of_floats_is_even() -> None:
    assert partition([0.1] * 8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


@pytest.mark.parametrize(("costs", "stages", "message"), [
    ([1, 2], 3, "from 1 to 2 stages of 2 layers, got 3"),
    ([1, 2], 0, "from 1 to 2 stages of 2 layers, got 0"),
    ([1, -2], 1, "costs of at least 0 expected"),
], ids=["too-many", "none", "negative"])  # fmt: skip
def test_partition_that_cannot_be_says_why(costs: list[int], stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(costs, stages)


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_stages_in_a_row_compute_the_bits_of_the_whole_model(model: Decoder, stages: int) -> None:
    tokens, targets = torch.randint(61, (2, 2, 12)).unbind(0)
    modules = [make_stage(model, part) for part in partition([1] * num_layers(model), stages)]
    x = tokens
    for module in modules[:-1]:
        x = module(x)
    assert torch.equal(modules[-1](x), model(tokens))
    assert torch.equal(modules[-1](x, targets), model(tokens, targets))


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_state_dicts_of_all_stages_are_the_one_of_the_model(model: Decoder, stages: int) -> None:
    parts = partition([1] * num_layers(model), stages)
    whole = merge([make_stage(model, part).state_dict() for part in parts])
    assert whole.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(whole[name], value), name


def test_stage_loads_its_part_of_the_state_dict(model: Decoder) -> None:
    other = build(model.config)
    module = make_stage(model, range(2, 6))
    state = other.state_dict()
    module.load_state_dict({name: state[name] for name in module.state_dict()})
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_tied_head_has_a_copy_only_where_the_embedding_is_elsewhere() -> None:
    model = GPT(CONFIGS["gpt"])  # type: ignore[arg-type]
    weight = model.transformer.wte.weight
    first, middle, last = (make_stage(model, part) for part in partition([1] * 6, 3))
    assert first.tied == (weight,)
    assert first.tied[0] is weight
    assert middle.tied == ()
    assert last.tied[0] is last.lm_head.weight
    assert torch.equal(last.tied[0], weight)
    assert last.tied[0].data_ptr() != weight.data_ptr()
    assert make_stage(model, range(6)).tied == ()
    llama = make_stage(Llama(CONFIGS["llama"]), range(5, 6))  # type: ignore[arg-type]
    assert llama.tied == ()


def test_stage_that_is_copied_runs_its_own_parameters() -> None:
    stage = make_stage(build(CONFIGS["gpt"]), range(4, 6))
    other = copy.deepcopy(stage)
    x = torch.randn(1, 3, 32)
    before = stage(x)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert torch.equal(stage(x), before)
    assert not bool(other(x).any())
    assert other.tied[0] is other.lm_head.weight


def test_sequential_stage_keeps_names_and_bits() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    one, two = (make_stage(model, part) for part in (range(2), range(2, 5)))
    x = torch.randn(4, 3)
    assert torch.equal(two(one(x)), model(x))
    assert list(two.state_dict()) == [f"{i}.{n}" for i in (2, 3, 4) for n in ("weight", "bias")]


@pytest.mark.parametrize("layers", [range(0), range(3, 7), range(-1, 2), range(0, 6, 2)], ids=repr)
def test_stage_of_layers_that_are_not_there_is_refused(layers: range) -> None:
    with pytest.raises(ValueError, match="consecutive layers from 0 to 5 expected"):
        make_stage(build(CONFIGS["gpt"]), layers)


def test_stage_of_an_unknown_model_says_what_to_do() -> None:
    with pytest.raises(TypeError, match="got Linear; write a module per stage yourself"):
        make_stage(nn.Linear(2, 2), range(1))  # type: ignore[arg-type]


def test_merge_of_stages_that_overlap_names_the_key() -> None:
    state = make_stage(build(CONFIGS["gpt"]), range(1)).state_dict()
    with pytest.raises(ValueError, match=r"stage 1 has .*'transformer.wpe.weight'"):
        merge([state, state])


def test_estimated_costs_of_a_block_are_those_of_its_products() -> None:
    batch, length, width, vocab = 3, 12, 32, 61
    model = GPT(CONFIGS["gpt"])  # type: ignore[arg-type]
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    costs = estimate_costs(model, tokens, tokens)
    assert len(costs) == num_layers(model) == 6
    # 12 D^2 multiply-adds per token in the projections; causal attention and the rest come on top.
    products = 2 * batch * length * 12 * width * width
    for cost in costs[1:-1]:
        assert cost == costs[1]
        assert products < cost.forward < 1.3 * products
        assert 2 * products < cost.backward < 2.6 * products
    head = 2 * batch * length * width * vocab
    assert head < costs[-1].forward < 1.3 * head
    assert costs[0].forward < 0.02 * products


def test_estimated_costs_of_plain_torch_are_torchs_formulas() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    costs = estimate_costs(model, torch.zeros(5, 8))
    assert costs == [(2 * 5 * 8 * 16, 4 * 5 * 8 * 16), (0, 0), (2 * 5 * 16 * 4, 4 * 5 * 16 * 4)]


def test_estimated_costs_count_bytes_where_the_device_moves_them_slowly() -> None:
    model, tokens = GPT(CONFIGS["gpt"]), torch.zeros(2, 8, dtype=torch.int64)  # type: ignore[arg-type]
    slow = estimate_costs(model, tokens, tokens, flops_per_byte=1e6)
    lookups = ((tokens, model.transformer.wte.weight), (tokens[0], model.transformer.wpe.weight))
    nbytes = sum(ops.embedding.spec.cost(*lookup).nbytes for lookup in lookups)
    assert nbytes > 0
    assert slow[0].forward == 1e6 * nbytes


def test_estimate_leaves_the_model_as_it_was(model: Decoder) -> None:
    tokens = torch.randint(61, (2, 8))
    before = model(tokens)
    estimate_costs(model, tokens, tokens)
    assert torch.equal(model(tokens), before)
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def test_measured_costs_order_layers_as_their_work_does() -> None:
    model = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 2))
    costs = measure_costs(model, torch.randn(512, 4), repeats=5)
    assert costs[1].total == max(cost.total for cost in costs)
    assert all(min(cost) > 0 and math.isfinite(cost.total) for cost in costs)
    assert all(p.grad is None for p in model.parameters())


def test_measured_costs_of_a_decoder_have_every_layer(model: Decoder) -> None:
    tokens = torch.randint(61, (2, 8))
    assert len(measure_costs(model, tokens, tokens, repeats=1)) == num_layers(model)


def test_split_balances_a_heavy_head() -> None:
    costs = [LayerCost(0, 0), *[LayerCost(1, 2)] * 4, LayerCost(2, 4)]
    parts = split_layers(build(CONFIGS["gpt"]), 2, costs)
    assert parts == [range(0, 4), range(4, 6)]
    assert stage_costs(costs, parts) == [(3, 6), (3, 6)]
    with pytest.raises(ValueError, match="costs of the 6 layers of GPT expected, got 5"):
        split_layers(build(CONFIGS["gpt"]), 2, costs[:5])
