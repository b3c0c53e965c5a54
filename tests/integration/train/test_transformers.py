"""Models of transformers in a loop of one's own: ZeRO stage 3 has the bits of stage 0."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import optim, zero

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama, tied": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "Qwen3": lambda: transformers.Qwen3Config(**GROUPED),
    "GPT-2": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "Mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4),
}


@pytest.fixture(autouse=True)
def cpu() -> None:
    anychip.use("cpu")


class LoRA(nn.Module):
    """A linear layer that stays as it is, and two small ones beside it that learn (Hu et al. 2021,
    arXiv:2106.09685, section 4.1).
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def build(family: str, *, lora: bool = False, recomputes: bool = False) -> nn.Module:
    torch.manual_seed(11)
    made = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    model: nn.Module = made.float().train()
    if recomputes:
        model.activation_checkpointing_enable()  # type: ignore[operator]
    if lora:
        model.requires_grad_(False)
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj, 4)
            layer.mlp.down_proj = LoRA(layer.mlp.down_proj, 4)
    return model


def train(
    comm: Communicator, models: list[nn.Module], stage: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and norms of four steps of two batches, and every parameter after them."""
    model = models[comm.rank]
    rule = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))
    opt = zero.Optimizer(model, rule, comm, stage=stage, bucket_nbytes=20_000)
    found: list[Tensor] = []
    for step in range(4):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * comm.rank + micro)
            tokens = torch.randint(0, 96, (2, 12), generator=generator)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / 2
            found.append(loss.detach())
            opt.backward(loss)
        norm = opt.step().grad_norm
        assert norm is not None
        found.append(norm)
        opt.zero_grad()
    assert opt.sharded is not None
    if stage == 3:
        *units, root = opt.sharded.units
        assert len(units) == 3
        assert opt.sharded.peak_whole_nbytes == root.nbytes + 2 * max(unit.nbytes for unit in units)
    with opt.whole():
        return found, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(("family", "options"), [
    ("Llama, tied", {}),
    pytest.param("Llama, tied", {"recomputes": True}, marks=pytest.mark.grid),
    ("Qwen3", {"lora": True}),
    *(pytest.param(family, {}, marks=pytest.mark.grid) for family in ("Qwen3", "GPT-2", "Mixtral")),
], ids=lambda value: value if isinstance(value, str) else " ".join(value) or "whole")  # fmt: skip
def test_stage_3_has_the_bits_of_stage_0(family: str, options: dict[str, bool]) -> None:
    results = []
    for stage in (0, 3):
        models = [build(family, **options) for _ in range(2)]
        results.append(run_ranks(2, partial(train, models=models, stage=stage)))
    for (numbers, params), (want_numbers, want_params) in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(numbers, want_numbers, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(params, want_params, strict=True))
