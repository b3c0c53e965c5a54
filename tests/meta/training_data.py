"""Makes ``training.json``: ``python -m tests.meta.training_data > FILE``.

A few minutes on one core. What the numbers mean stands in
:mod:`anychip.conformance.oracles.training`. The decoder (Radford et al. 2019, section 2.3, as in
:mod:`anychip.train.models.gpt`) and two update rules are written out in plain torch on the host.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anychip.conformance import trainee
from anychip.conformance.formats import FP32, ulp
from anychip.conformance.oracles.training import RECIPES, SIZES, STEPS, Envelope, Recipe
from anychip.contract import HOST

SAMPLES = 32
"""Float32 runs whose spread is the envelope."""
NORMAL_QUANTILE = 3.09
"""99.9 % of a normal distribution are below so many standard deviations."""
ROOM = 3.0
Params = dict[str, Tensor]
GradientChange = Callable[[Params], None]


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


def smallest_bias(recipe: Recipe, known: Envelope) -> float:
    """By trial in float32, from 2^-8 down to the first that stays below the limit."""
    found = math.inf
    for exponent in range(8, 24):
        losses = curve(
            recipe, torch.float32, orders(1)[0], change=partial(enlarge, factor=1.0 + 0.5**exponent)
        )
        if known.deviation(losses) <= known.limit:
            return found
        found = 0.5**exponent
    return found


def enlarge(grads: Params, factor: float) -> None:
    """Multiplies every gradient."""
    for grad in grads.values():
        grad.mul_(factor)


def make() -> dict[str, Any]:
    """What ``training.json`` holds."""
    torch.set_num_threads(1)
    data = {}
    for name, recipe in RECIPES.items():
        permuted = orders(SAMPLES)
        losses = curve(recipe, torch.float64, permuted[0])
        samples = [curve(recipe, torch.float32, order) for order in permuted]
        found = envelope(losses, samples)
        data[name] = {
            "smallest_bias": smallest_bias(recipe, found),
            "losses": [float(f"{value:.12g}") for value in found.losses],
            "spread": [float(f"{value:.4g}") for value in found.spread],
            "deviations": [float(f"{value:.4g}") for value in found.deviations],
            "limit": float(f"{found.limit:.4g}"),
        }
    return data


def text(data: dict[str, Any]) -> str:
    """As JSON, a line per list."""
    recipes = []
    for name, entry in data.items():
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()]
        recipes.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(recipes) + "\n}\n"


if __name__ == "__main__":
    print(text(make()), end="")
