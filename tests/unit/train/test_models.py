"""Both decoders against plain torch: the loss, and the gradient of every parameter."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anychip.train.models import (
    GPT,
    Decoder,
    GPTConfig,
    Llama,
    LlamaConfig,
    build,
    generate,
    parameter_groups,
)
from benchmarks import plain_decoders
from benchmarks.cuda import plain
from tests.unit.fusion.parity import UNIT, relative, scramble

# Small, with what is easily got wrong: one head and several, a sequence shorter than the context,
# sizes that are no power of two, every kind of head grouping.
CONFIGS = {
    "gpt": GPTConfig(vocab_size=61, context=24, layers=2, heads=4, width=32),
    "gpt-one-head-odd": GPTConfig(vocab_size=17, context=9, layers=3, heads=1, width=30),
    "llama-grouped":
        LlamaConfig(vocab_size=61, context=24, layers=2, heads=4, kv_heads=2, width=32),
    "llama-one-kv-head":
        LlamaConfig(vocab_size=17, context=9, layers=3, heads=3, kv_heads=1, width=30, hidden=50),
    "llama-full-heads":
        LlamaConfig(vocab_size=33, context=16, layers=1, heads=2, kv_heads=2, width=16),
}  # fmt: skip


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request: pytest.FixtureRequest) -> GPTConfig | LlamaConfig:
    found: GPTConfig | LlamaConfig = request.param
    return found


def batch(config: GPTConfig | LlamaConfig, rows: int = 3) -> tuple[Tensor, Tensor]:
    length = config.context - 2
    tokens = torch.randint(config.vocab_size, (rows, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def plain_loss(config: GPTConfig | LlamaConfig) -> Callable[..., Tensor]:
    loss: Any = plain.gpt_loss if isinstance(config, GPTConfig) else plain.llama_loss
    return lambda state, x, y: loss(state, config, x, y)


def leaves(model: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters as leaves of their own; a tied weight stays one leaf under both names."""
    made: dict[int, Tensor] = {}
    state = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in made:
            made[id(param)] = param.detach().to(dtype).clone().requires_grad_()
        state[name] = made[id(param)]
    return state


def gradient_bound(config: GPTConfig | LlamaConfig) -> float:
    """Bound of ||g - g64|| / ||g64|| for one float32 evaluation.

    An operator's result has a normwise relative error of sqrt(n) u in the statistical sense
    (Higham and Mary 2019, SIAM J. Sci. Comput. 41), n its longest reduction. A layer is a chain of
    7 operators forward and 7 backward, head and embedding count as one more; errors of a chain
    are independent and add in quadrature. Twice that, for amplification by softmax and norms.
    """
    longest = max(4 * config.width, config.context, config.vocab_size)
    return 2 * math.sqrt(14 * (config.layers + 1) * longest) * UNIT


def test_decoder_loss_and_gradients_equal_plain_torch(config: GPTConfig | LlamaConfig) -> None:
    """So do the same modules with torch's functions, which are a benchmark's peer."""
    model = build(config)
    scramble(model)
    tokens, targets = batch(config)
    exact = leaves(model, torch.float64)
    want = plain_loss(config)(exact, tokens, targets)
    want.backward()
    single = leaves(model, torch.float32)
    torch_loss = plain_loss(config)(single, tokens, targets)
    torch_loss.backward()
    bound = gradient_bound(config)
    for functions in (contextlib.nullcontext(), plain_decoders.plain()):
        model.zero_grad()
        with functions:
            loss = model(tokens, targets)
            loss.backward()
        assert relative(loss.detach(), want.detach()) <= bound
        assert abs(loss.item() - torch_loss.item()) <= 2 * bound * want.item()
        for name, param in model.named_parameters():
            assert param.grad is not None, name
            assert relative(param.grad, exact[name].grad) <= bound, name
            assert relative(single[name].grad, exact[name].grad) <= bound, name


def test_gradient_bound_is_exceeded_by_bf16(config: GPTConfig | LlamaConfig) -> None:
    model = build(config)
    scramble(model)
    tokens, targets = batch(config)
    exact = leaves(model, torch.float64)
    plain_loss(config)(exact, tokens, targets).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(tokens, targets)
    loss.backward()
    worst = max(relative(p.grad, exact[n].grad) for n, p in model.named_parameters())
    assert worst > gradient_bound(config)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16 by autocast"])
@pytest.mark.parametrize("name", ["gpt", "llama-grouped"])
def test_block_has_the_bits_of_norms_and_sums_one_after_the_other(name: str, narrow: bool) -> None:
    model = build(CONFIGS[name])
    scramble(model)
    block, x = model.blocks()[0], torch.randn(2, 24, 32)
    first, mix, second, mlp = block.children()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        normed = first(x)
        total = x + mix(normed, *getattr(model, "_rotary", ()))
        want = total + mlp(second(total))
        got = model.run_block(block, x)
    assert normed.dtype == (torch.bfloat16 if narrow else torch.float32)
    assert torch.equal(got, want)


def test_gpt_head_is_tied_to_the_embedding() -> None:
    model = GPT(CONFIGS["gpt"])
    assert model.lm_head.weight is model.transformer.wte.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_gpt_residual_projections_start_smaller_by_depth() -> None:
    model = GPT(GPTConfig(layers=8, width=256, heads=4))
    narrow = model.transformer.h[0].mlp.c_proj.weight.detach().std()
    wide = model.transformer.h[0].mlp.c_fc.weight.detach().std()
    # 2^18 and more draws: the sample's deviation is within 1 % of the distribution's.
    assert float(wide) == pytest.approx(0.02, rel=0.01)
    assert float(narrow) == pytest.approx(0.02 / math.sqrt(16), rel=0.01)


@pytest.mark.parametrize("name", ["gpt", "llama-grouped"])
def test_decoder_sees_no_later_token(name: str) -> None:
    model = build(CONFIGS[name])
    tokens, _ = batch(CONFIGS[name])
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % CONFIGS[name].vocab_size
    assert torch.equal(model(tokens)[:, :10], model(changed)[:, :10])
    assert not torch.equal(model(tokens)[:, 10:], model(changed)[:, 10:])


def test_dropout_changes_training_only_and_repeats_with_the_seed() -> None:
    model = GPT(GPTConfig(vocab_size=61, context=24, layers=2, heads=4, width=32, dropout=0.2))
    tokens, targets = batch(model.config)
    torch.manual_seed(3)
    first = model(tokens, targets)
    second = model(tokens, targets)
    torch.manual_seed(3)
    assert torch.equal(model(tokens, targets), first)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(tokens, targets), model(tokens, targets))


def test_checkpointed_block_with_dropout_has_the_same_gradients() -> None:
    model = GPT(GPTConfig(vocab_size=61, context=24, layers=1, heads=4, width=32, dropout=0.2))
    block = model.transformer.h[0]
    x = torch.randn(2, 7, 32)
    grads = []
    for run in (block, lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)):
        torch.manual_seed(5)
        model.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad.clone() for p in block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_parameter_groups_decay_matrices_only() -> None:
    model = Llama(CONFIGS["llama-grouped"])
    decayed, kept = parameter_groups(model, 0.1)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    both = [*decayed["params"], *kept["params"]]
    assert {id(p) for p in both} == {id(p) for p in model.parameters()}


def test_generate_at_temperature_zero_takes_the_likeliest_token() -> None:
    model = Llama(CONFIGS["llama-grouped"])
    tokens, _ = batch(model.config, rows=2)
    made = generate(model, tokens[:, :5], 3, temperature=0.0)
    assert made.shape == (2, 8)
    assert torch.equal(made[:, :5], tokens[:, :5])
    assert torch.equal(made[:, 5], model(tokens[:, :5])[:, -1].argmax(-1))
    assert model.training


@pytest.mark.parametrize("name", CONFIGS)
def test_reading_on_gives_the_logits_of_reading_all(name: str) -> None:
    """In parts of some tokens and of one; nothing is left for the next call."""
    model = build(CONFIGS[name]).eval()
    tokens, _ = batch(model.config, rows=2)
    with torch.no_grad():
        whole = model(tokens)
        with model.reading_on():
            parts = [model(part) for part in tokens.split([3, 1, tokens.shape[1] - 4], 1)]
            with pytest.raises(ValueError, match=f"at most {model.config.context} tokens"):
                model(torch.zeros(2, model.config.context, dtype=torch.int64))
        again = model(tokens)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(again, whole)


def test_generate_runs_each_token_once_until_the_context_is_full() -> None:
    model, lengths = build(CONFIGS["llama-grouped"]), list[int]()
    model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    context = model.config.context
    generate(model, torch.zeros(1, context - 2, dtype=torch.int64), 5)
    assert lengths == [context - 2, 1, 1, context, context]


class _Constant(GPT):
    """Tokens 0 to 3 with these probabilities, whatever came before, and no others."""

    probabilities = (0.15, 0.5, 0.05, 0.3)

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits = torch.full((*tokens.shape, 256), -1e9)
        logits[..., :4] = torch.tensor(self.probabilities).log()
        return logits


@pytest.mark.parametrize(("part", "found"), [
    (1.0, {0, 1, 2, 3}), (0.9, {0, 1, 3}), (0.7, {1, 3}), (0.4, {1}),
])  # fmt: skip
def test_generate_draws_from_as_few_tokens_as_have_a_part_of_the_probability(
    part: float, found: set[int]
) -> None:
    start, generator = torch.zeros(64, 1, dtype=torch.int64), torch.Generator().manual_seed(1)
    model = _Constant(CONFIGS["gpt-one-head-odd"])
    made = generate(model, start, 6, temperature=1.0, top_p=part, generator=generator)[:, 1:]
    assert set(made.unique().tolist()) == found
    # Of 384 draws within four deviations of what is left of the probabilities.
    want = 0.5 / sum(model.probabilities[token] for token in found)
    assert abs((made == 1).double().mean().item() - want) <= 4 * (want * (1 - want) / 384) ** 0.5


def test_generate_goes_on_past_the_context() -> None:
    model = GPT(CONFIGS["gpt-one-head-odd"])
    made = generate(model, torch.zeros(1, 1, dtype=torch.int64), 20)
    assert made.shape == (1, 21)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: GPTConfig(width=30, heads=4), "multiple of heads"),
    (lambda: GPTConfig(layers=0), "layers must be at least 1, got 0"),
    (lambda: GPTConfig(dropout=1.0), "dropout"),
    (lambda: LlamaConfig(heads=4, kv_heads=3), "multiple of kv_heads"),
    (lambda: LlamaConfig(width=12, heads=4), "even multiple of heads"),
], ids=["width", "layers", "dropout", "kv-heads", "odd-head-dim"])  # fmt: skip
def test_config_with_wrong_sizes_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_model_with_too_long_a_sequence_is_refused() -> None:
    model = GPT(CONFIGS["gpt-one-head-odd"])
    with pytest.raises(ValueError, match="at most 9 tokens expected, got 10"):
        model(torch.zeros(1, 10, dtype=torch.int64))


def test_llama_cast_to_bf16_keeps_its_rotary_table_in_float32() -> None:
    model = Llama(CONFIGS["llama-grouped"])
    tokens, targets = batch(model.config)
    single = model(tokens, targets).item()
    assert model.bfloat16()(tokens, targets).item() == pytest.approx(single, rel=2.0**-6)
