"""Decoders built from ``anychip.ops``, and what a trainer does with any of them."""

from typing import Any

import torch
from torch import Tensor, nn

from anychip.runtime import on_host
from anychip.train.models.decoder import Decoder, Layers, LossReduction, Parts
from anychip.train.models.gpt import GPT, GPTConfig
from anychip.train.models.llama import Llama, LlamaConfig
from anychip.train.models.pretrained import (
    Fuse,
    Pretrained,
    PretrainedConfig,
    PretrainedError,
    copy_description,
    load_tokenizer,
)

ModelConfig = GPTConfig | LlamaConfig | PretrainedConfig


def build(config: ModelConfig, fuse: Fuse | None = None) -> Decoder:
    """The model of a configuration, with fresh weights from torch's generator, or a directory's.

    Args:
        fuse: puts operators into a model of another library.

    Raises:
        OSError, PretrainedError, MissingExtraError: a directory's model cannot be built.
    """
    if isinstance(config, PretrainedConfig):
        return Pretrained(config, fuse)
    return GPT(config) if isinstance(config, GPTConfig) else Llama(config)


def without_data(config: ModelConfig) -> Decoder:
    """The model of a configuration, whose tensors have no data: they are on the device ``meta``.

    Raises:
        OSError, PretrainedError, MissingExtraError: a directory does not describe a model.
    """
    with torch.device("meta"):
        if isinstance(config, PretrainedConfig):
            return Pretrained(config, reads_weights=False)
        return build(config)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups as the field decays them: matrices yes, norms and biases (1-dim) no."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 0.8,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Appends ``count`` sampled tokens to each row.

    Args:
        tokens: (B, S) int64, S at least 1; only the last ``context`` of them are seen.
        temperature: 0 takes the likeliest token.
        top_p: the likeliest tokens are drawn from, as few as have this part of the probability.
        generator: on the CPU; the draw is made there, so that it is the same on every chip.

    Returns:
        (B, S + count) int64.
    """
    training = model.training
    model.eval()
    with model.reading_on():
        for _ in range(count):
            logits = on_host(_of_the_next(model, tokens).float())
            if temperature == 0.0:
                picked = logits.argmax(-1, keepdim=True)
            else:
                # In float64, and 0 for the likeliest: right at any temperature.
                below = (logits - logits.amax(-1, keepdim=True)).double()
                weights = _likeliest(torch.softmax(below / temperature, dim=-1), top_p)
                picked = torch.multinomial(weights, 1, generator=generator)
            tokens = torch.cat((tokens, picked.to(tokens.device)), dim=1)
    model.train(training)
    return tokens


def _of_the_next(model: Decoder, tokens: Tensor) -> Tensor:
    """Logits (B, V) of what follows the tokens; only the new ones are run, as long as all fit."""
    if tokens.shape[1] > model.config.context:
        model.past = None  # each token is at another place than before
    return model(tokens[:, -model.config.context :][:, model.read :])[:, -1]  # type: ignore[no-any-return]


def _likeliest(weights_BV: Tensor, part: float) -> Tensor:
    """The probabilities without those of tokens that others, who have the part, are likelier than.

    Source: Holtzman et al. 2020, arXiv:1904.09751, section 3.1.
    """
    if part >= 1.0:
        return weights_BV
    ranked, order = weights_BV.sort(dim=-1, descending=True, stable=True)
    is_out = ranked.cumsum(-1) - ranked >= part
    return weights_BV.masked_fill(is_out.scatter(-1, order, is_out), 0.0)


__all__ = [
    "GPT", "Decoder", "Fuse", "GPTConfig", "Layers", "Llama", "LlamaConfig", "LossReduction",
    "ModelConfig", "Parts", "Pretrained", "PretrainedConfig", "PretrainedError", "build",
    "copy_description", "generate", "load_tokenizer", "parameter_groups",
    "without_data",
]  # fmt: skip
