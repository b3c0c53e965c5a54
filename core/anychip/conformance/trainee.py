"""What do the chapters about training train? A small decoder, and made-up text that it can learn.

Weights and text come from the Philox stream, in integers, so that every chip, torch and platform
begins with the same bits. Ranks are threads that share the device.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.conformance.oracles import philox
from anychip.contract import HOST, Communicator
from anychip.train.models import GPT, GPTConfig

T = TypeVar("T")


class Sizes(NamedTuple):
    """Of a decoder and its batches."""

    vocab: int = 32
    context: int = 12
    layers: int = 2
    heads: int = 2
    width: int = 24
    batch: int = 6


def uniform(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Numbers in [0, 1), multiples of 2^-32."""
    return np.asarray(philox.words(seed, 0, count), dtype=np.float64) / 2.0**32


def decoder(sizes: Sizes, device: torch.device, *, seed: int = 1, tied: bool = True) -> GPT:
    """A float32 GPT with weights from the stream.

    Args:
        tied: the head shares its weight with the embedding.
    """
    config = GPTConfig(
        vocab_size=sizes.vocab,
        context=sizes.context,
        layers=sizes.layers,
        heads=sizes.heads,
        width=sizes.width,
    )
    model = GPT(config)
    if not tied:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            if param.dim() > 1:
                param.copy_(weights(seed + number, param.shape))
    return model.to(device)


def weights(seed: int, shape: torch.Size) -> Tensor:
    """Uniform with the standard deviation 1 / sqrt(columns)."""
    width = math.sqrt(3.0 / shape[-1])
    values = (2.0 * uniform(seed << 20, shape.numel()) - 1.0) * width
    return torch.from_numpy(values.reshape(shape)).float()


def batch(sizes: Sizes, *index: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, S) int64 on the host; one batch per index and seed of the run.

    Each token follows from the one before it by one rule, but for one in eight, which is drawn.
    """
    key = 7 + (seed << 20)
    for part in index:
        key = key * 1009 + part + 1
    rows, length = sizes.batch, sizes.context + 1
    drawn = np.asarray(philox.words(key, 0, 2 * rows * length)).reshape(2, rows, length)
    tokens = np.asarray(drawn[0] % np.uint64(sizes.vocab), dtype=np.int64)
    keeps = np.asarray(drawn[1] % np.uint64(8)) == 0
    for place in range(1, length):
        ruled = (tokens[:, place - 1] * 5 + 3) % sizes.vocab
        tokens[:, place] = np.where(keeps[:, place], tokens[:, place], ruled)
    text = torch.from_numpy(tokens)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def place_of(device: torch.device) -> torch.device:
    """Where tensors are that are made on a device: a host leaves its index out."""
    return torch.empty(0, device=device).device


def alone_on(device: torch.device) -> Communicator:
    """The communicator of one rank on a device."""
    comm = alone()
    comm.device = device.type
    return comm


def run_on_device(
    device: torch.device, world_size: int, work: Callable[[Communicator], T]
) -> list[T]:
    """Ranks as threads that share a device; off the host they communicate by way of it."""

    return run_ranks(world_size, work, staged=None if device.type == HOST else device.type)
