"""Decoders of transformers, tiny: what ``anychip.fuse`` replaces in each, as docs/fusing.md shows.

``python -m tests.integration.fusion.families`` writes the table of that page anew.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import anychip
from anychip.fusion import FusionReport
from tests.unit.fusion import parity

PAGE = Path(__file__).parents[3] / "docs" / "fusing.md"
KINDS = ("norm", "activation", "rope", "attention", "loss")
VOCABULARY, WIDTH, LAYERS, HEADS = 97, 64, 2, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 112,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# What some call these sizes.
GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
HEAD = {"head_dim": WIDTH // HEADS}
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16}
SCORES = {"query_pre_attn_scalar": 16}
# Family and what its config has besides. Dropout is 0 everywhere.
FAMILIES: dict[str, dict[str, Any]] = {
    "Bloom": {"n_layer": LAYERS, "n_head": HEADS}, "CodeGen": {**GPT2, "rotary_dim": 8},
    "Cohere": {}, "Cohere2": WINDOW,
    "DeepseekV3": {
        **EXPERTS,
        **LATENT,
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    },
    "Ernie4_5": HEAD, "Exaone4": WINDOW, "Falcon": {}, "Gemma": HEAD,
    "Gemma2": {**HEAD, **SCORES, **WINDOW}, "Gemma3": {**HEAD, **SCORES, **WINDOW}, "Glm": HEAD,
    "GPT2": GPT2, "GPTBigCode": GPT2, "GPTJ": {**GPT2, "rotary_dim": 8},
    "GPTNeo": {"num_layers": LAYERS, "num_heads": HEADS, "attention_types": [[["global"], LAYERS]]},
    "GPTNeoX": {}, "GptOss": {**HEAD, **WINDOW, "num_local_experts": 4}, "Granite": {},
    "Llama": {}, "Mistral": WINDOW, "Mixtral": {"num_local_experts": 4},
    "Mpt": {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64},
    "Nemotron": {}, "Olmo": {}, "Olmo2": {}, "OPT": {"ffn_dim": 112, "word_embed_proj_dim": WIDTH},
    "Persimmon": {}, "Phi": {}, "Phi3": {}, "Qwen2": {}, "Qwen3": HEAD,
    "Qwen3Moe": {**HEAD, **EXPERTS, "num_experts": 4}, "SmolLM3": {}, "StableLm": {},
    "Starcoder2": {},
}  # fmt: skip
_PLAIN = "no norm, activation, attention or loss that an operator computes"
_EXPECTED = re.compile("Embedding|Linear|Conv1D|Dropout|Rotary|Experts|Identity")
"""Classes of which nothing was expected; experts hold their layers as one tensor each."""


def build(family: str, **changes: Any) -> Any:
    """A model with random weights, and no dropout but what the changes of its config ask for."""
    named = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{named}Config")(**{**SIZES, **FAMILIES[family], **changes})
    for name, value in vars(config).items():
        if isinstance(value, float) and re.search("drop", name) and name not in changes:
            setattr(config, name, 0.0)
    head = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, head)(config)
    parity.scramble(model)
    return model.train()


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 18), generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module) -> Tensor:
    value: Tensor = model(tokens(), labels=tokens()).loss
    return value


def row(family: str) -> str:
    """The row of a family: how many were replaced, what is left, and which calls are its own."""
    model = build(family)
    anychip.provenance(reset=True)
    report = anychip.fuse(model, linear=True)
    loss(model)
    counts = [str(report.count(kind)) for kind in KINDS]
    return f"| {' | '.join([family, *counts, '; '.join(_remarks(report)) or '-'])} |"


def _remarks(report: FusionReport) -> Iterable[str]:
    left: dict[str, None] = {}
    for entry in report.left:
        if entry.reason == _PLAIN:
            if not _EXPECTED.search(entry.source):
                left[f"{entry.source}: no operator"] = None
        else:
            # The numbers of a difference say nothing to a reader of the table.
            reason = re.sub(r"(differs|differ)( from the operator's).*", r"\1\2", entry.reason)
            left[f"{entry.source}: {reason}"] = None
    yield from sorted(left)
    for fallback in report.fallbacks():
        yield f"calls of {fallback.operator} with {fallback.fallback_reason} are its own"


def table() -> str:
    """The table of the page, line by line."""
    heads = ("model", *KINDS, "left, and why")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *map(row, FAMILIES)])


def written() -> str:
    """The table as the page has it."""
    text = PAGE.read_text("utf-8")
    found = re.search(r"^\| model \| norm .*?\n(?=\n)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{PAGE} has no such table"
    return found.group().rstrip("\n")


if __name__ == "__main__":
    anychip.use("cpu")
    PAGE.write_text(PAGE.read_text("utf-8").replace(written(), table()), encoding="utf-8")
