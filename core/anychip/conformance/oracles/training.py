"""Oracle of the training chapter: 200 steps of a small decoder in float64, and float32's spread.

Plain torch on the host: the decoder (Radford et al. 2019, section 2.3, as in
:mod:`anychip.train.models.gpt`) and two update rules, written out with nothing of ours. In float64
it gives the curve of losses that float32 approaches. In float32, with the parameters and the rows
of each batch in another order, it gives a sample of what rounding does to the curve: a permutation
changes no result but the order of every sum. ``tests/meta/training_data.py`` puts both into
``training.json``, which the chapter reads.

Note: The envelope
    With ``d(t)`` a run's loss minus float64's at step t, and ``s(t)`` the root mean square of the
    samples' up to t (never falling, never below half an ULP of the loss), a run's *deviation* is
    ``sqrt(mean over t of (d(t) / s(t))^2)``: 1 on average for float32 as the samples are. The
    limit is the 99.9 % quantile of the log-normal distribution through the samples' deviations,
    times ``ROOM``: a chip's functions may be a few ULP less exact than the host's (the table in
    :mod:`anychip.conformance.arithmetic`), and its sums longer chains.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anychip.conformance import trainee
from anychip.conformance.formats import FP32, Array, ulp
from anychip.contract import HOST

STEPS = 200
SAMPLES = 32
"""Float32 runs whose spread is the envelope."""
SIZES = trainee.Sizes(vocab=32, context=16, layers=2, heads=2, width=32, batch=8)
NORMAL_QUANTILE = 3.09
"""99.9 % of a normal distribution are below so many standard deviations."""
ROOM = 3.0
DATA = Path(__file__).with_name("training.json")

Params = dict[str, Tensor]
GradientChange = Callable[[Params], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the parameters are updated.

    Attributes:
        momentum: of plain gradient descent; None: AdamW with the settings below, clipped.
        lr: peak of the schedule: linear over ``warmup`` steps, then half a cosine to a tenth.
    """

    momentum: float | None
    lr: float
    warmup: int = 20
    max_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.1

    def rate(self, step: int) -> float:
        """Learning rate of a step, from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / (STEPS - self.warmup)
        return self.lr * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * done)))


RECIPES = {
    # Not clipped: the size of a gradient counts, which AdamW would divide out.
    "momentum": Recipe(momentum=0.9, lr=0.05),
    "adamw": Recipe(momentum=None, lr=3e-3),
}


class Envelope(NamedTuple):
    """What a candidate's curve is compared with.

    Attributes:
        losses: float64's, by step.
        spread: s(t) of the samples.
        limit: of the deviation.
        deviations: of the samples.
        smallest_bias: the least power of 2 that the limit detects when every gradient is larger by
            it, relatively.
    """

    losses: Array
    spread: Array
    limit: float
    deviations: Array
    smallest_bias: float = 0.0

    def deviation(self, losses: Sequence[float]) -> float:
        """Of a run: 1 is float32 as usual; not finite when a loss is not."""
        off = (np.asarray(losses) - self.losses[: len(losses)]) / self.spread[: len(losses)]
        return float(np.sqrt(np.mean(off**2)))


class Order(NamedTuple):
    """A permutation of what has no order: channels, inner units, and the rows of a batch."""

    width: Tensor
    inner: Tensor
    rows: Tensor


def orders(count: int) -> list[Order]:
    """As many, from the stream; the first leaves everything as it is."""
    inner = 4 * SIZES.width
    found = [Order(*(torch.arange(n) for n in (SIZES.width, inner, SIZES.batch)))]
    for number in range(1, count):
        keys = [trainee.uniform(1000 + 3 * number + i, n)
                for i, n in enumerate((SIZES.width, inner, SIZES.batch))]  # fmt: skip
        found.append(Order(*(torch.from_numpy(np.argsort(key, kind="stable")) for key in keys)))
    return found


def start(dtype: torch.dtype, order: Order) -> Params:
    """The decoder's parameters under their names, with channels and inner units in an order."""
    model = trainee.decoder(SIZES, torch.device(HOST))
    params = {}
    for name, param in model.named_parameters():
        value = param.detach()
        # Which dims are channels, and which are the MLP's inner units?
        if "c_fc" in name:
            value = value[order.inner]
        if "mlp.c_proj.weight" in name:
            value = value[:, order.inner]
        if name.endswith(("wte.weight", "wpe.weight", "c_attn.weight", "c_fc.weight")):
            value = value[:, order.width]
        elif "ln_" in name or "c_proj" in name:
            value = value[order.width]
        params[name] = value.to(dtype).clone().requires_grad_()
    return params


def loss_of(params: Params, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean loss, in the parameters' dtype."""
    length = tokens.shape[1]
    x = params["transformer.wte.weight"][tokens] + params["transformer.wpe.weight"][:length]
    for layer in range(SIZES.layers):
        own = f"transformer.h.{layer}."
        x = x + _attention(params, own + "attn.", _norm(params, own + "ln_1", x))
        inner = _linear(params, own + "mlp.c_fc", _norm(params, own + "ln_2", x))
        x = x + _linear(params, own + "mlp.c_proj", _gelu(inner))
    logits = _norm(params, "transformer.ln_f", x) @ params["transformer.wte.weight"].T
    picked = logits.gather(-1, targets[..., None])[..., 0]
    return (logits.logsumexp(-1) - picked).mean()


def _linear(params: Params, name: str, x: Tensor) -> Tensor:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _norm(params: Params, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return centred * scale * params[f"{name}.weight"] + params[f"{name}.bias"]


def _gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _attention(params: Params, own: str, x: Tensor) -> Tensor:
    batch, length, width = x.shape
    shape = (batch, length, SIZES.heads, width // SIZES.heads)
    parts = _linear(params, own + "c_attn", x).chunk(3, dim=-1)
    q, k, v = (part.reshape(shape).transpose(1, 2) for part in parts)
    scores = q @ k.transpose(-1, -2) / math.sqrt(shape[-1])
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
    return _linear(params, own + "c_proj", mixed.transpose(1, 2).reshape(batch, length, width))


def curve(
    recipe: Recipe, dtype: torch.dtype, order: Order, *, steps: int = STEPS,
    change: GradientChange | None = None,
) -> list[float]:  # fmt: skip
    """Losses by step.

    Args:
        change: what is done to the gradients, by name, before the update; to see it found.
    """
    params = start(dtype, order)
    moments = {name: [torch.zeros_like(p) for _ in range(2)] for name, p in params.items()}
    losses = []
    for step in range(steps):
        tokens, targets = (part[order.rows] for part in trainee.batch(SIZES, step))
        loss = loss_of(params, tokens, targets)
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        if change is not None:
            change(grads)
        with torch.no_grad():
            _update(recipe, step, params, grads, moments)
        losses.append(float(loss.detach()))
    return losses


def _update(
    recipe: Recipe, step: int, params: Params, grads: Params, moments: dict[str, list[Tensor]]
) -> None:
    rate = recipe.rate(step)
    if recipe.momentum is not None:
        for name, param in params.items():
            moments[name][0].mul_(recipe.momentum).add_(grads[name])
            param.sub_(rate * moments[name][0])
        return
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
    factor = min(1.0, recipe.max_norm / (norm + 1e-6))
    for name, param in params.items():
        grad, (first, second) = grads[name] * factor, moments[name]
        first.mul_(recipe.beta1).add_((1.0 - recipe.beta1) * grad)
        second.mul_(recipe.beta2).add_((1.0 - recipe.beta2) * grad.square())
        corrected = first / (1.0 - recipe.beta1 ** (step + 1))
        root = (second / (1.0 - recipe.beta2 ** (step + 1))).sqrt() + recipe.eps
        param.mul_(1.0 - rate * recipe.weight_decay).sub_(rate * corrected / root)


def envelope(losses: Sequence[float], samples: Sequence[Sequence[float]]) -> Envelope:
    """From float64's curve and those of the float32 samples."""
    exact = np.asarray(losses)
    off = np.asarray(samples) - exact
    spread = np.maximum(np.sqrt(np.mean(off**2, axis=0)), ulp(exact, FP32) / 2)
    spread = np.maximum.accumulate(spread)
    deviations = np.sqrt(np.mean((off / spread) ** 2, axis=1))
    logs = np.log(deviations)
    limit = ROOM * math.exp(float(logs.mean()) + NORMAL_QUANTILE * float(logs.std(ddof=1)))
    return Envelope(exact, spread, limit, deviations)


def load(name: str) -> Envelope:
    """The stored envelope of a recipe."""
    found = json.loads(DATA.read_text(encoding="utf-8"))[name]
    arrays = {key: np.asarray(found[key]) for key in ("losses", "spread", "deviations")}
    return Envelope(limit=found["limit"], smallest_bias=found["smallest_bias"], **arrays)
