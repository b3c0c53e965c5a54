"""A training step of a 124 M and of a 1 B decoder on one device: ours next to torch's own ways.

Every way begins with the same weights and trains on the same batch; the first losses must agree.
Peak memory is of the way alone: each is made, measured and given up before the next one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor, nn

from anychip.bench.report import Report, Timing
from anychip.bench.timing import interleave
from anychip.comm import alone
from anychip.train import optim, precision, zero
from anychip.train.models import GPT, GPTConfig, Llama, LlamaConfig
from benchmarks.cuda import plain
from benchmarks.cuda.stage import Stage, main, stage

LEARNING_RATE, DECAY = 3e-4, 0.1
LOSS_APART = 0.02
"""Of first losses: bfloat16 has 8 bits, and a mean over many targets evens out most of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A decoder and its batch."""

    config: GPTConfig | LlamaConfig
    batch: int

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * self.config.context

    def flops(self, num_params: int) -> float:
        """Of a step: 6 per parameter and token, and 12 L S W / 2 per token for causal attention.

        Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
        """
        c = self.config
        return self.tokens * (6.0 * num_params + 6.0 * c.layers * c.context * c.width)


SETTINGS = {
    "124M": Setting(
        config=GPTConfig(vocab_size=50304, context=1024, layers=12, heads=12, width=768), batch=32
    ),
    "1B": Setting(
        config=LlamaConfig(
            vocab_size=32000, context=2048, layers=22, heads=32, kv_heads=4, width=2048, hidden=5632
        ),
        batch=4,  # of 8, torch in float32 fills more than 139 GiB
    ),
}
TINY = {
    "gpt": Setting(config=GPTConfig(vocab_size=64, context=16, layers=1, width=32), batch=2),
    "llama": Setting(config=LlamaConfig(vocab_size=64, context=16, layers=1, width=32), batch=2),
}
Step = Callable[[], Tensor]


@stage(seconds=150.0)
@click.option("--no-compile", is_flag=True, help="Without torch.compile.")
def command(stage: Stage, no_compile: bool) -> None:
    """Measure training steps."""
    for name, setting in (TINY if stage.tiny else SETTINGS).items():
        rows: list[Timing] = []
        for way, make in WAYS.items():
            if way == "torch.compile bf16" and (no_compile or stage.tiny):
                continue
            if way == "ours, graph" and "graphs" not in stage.chip.capabilities:
                continue
            if not stage.has_time(f"{name}, {way}"):
                break
            stage.attempt(f"{name}, {way}", measure, stage, setting, way, make, rows)
        losses = [row.facts["first loss"] for row in rows]
        if losses:
            apart = max(losses) - min(losses)
            stage.check(f"{name}, first losses", apart <= LOSS_APART, f"they are {apart:.4f} apart")
        stage.reports.append(
            Report(
                subject=f"training step, {name}",
                backend=stage.chip.name,
                device=stage.chip.identity(),
                threads=torch.get_num_threads(),
                rows=rows,
                notes=(f"{setting.batch} x {setting.config.context} tokens; {setting.config}",),
            )
        )


def measure(stage: Stage, setting: Setting, way: str, make: Any, rows: list[Timing]) -> None:
    """One way's speed, memory and first loss, as a row."""
    chip = stage.chip
    gc.collect()
    counts = "memory_peak" in chip.capabilities
    if counts:
        chip.memory.empty_cache()
        chip.memory.reset_peak()
    torch.manual_seed(1)
    config = setting.config
    with chip.device():  # a host draws 10^9 numbers in ten seconds
        model = GPT(config) if isinstance(config, GPTConfig) else Llama(config)
    step = make(stage, model, *batch(setting, chip.device()))
    first = float(step())
    rounds, window = (3, 0.001) if stage.tiny else (5, 0.5)
    taken = interleave({way: step}, rounds=rounds, window=window, synchronize=chip.synchronize)
    seconds = taken[way].median
    num_params = sum(p.numel() for p in model.parameters())
    facts: dict[str, Any] = {"tokens/s": setting.tokens / seconds}
    peak = chip.properties().flops.get(torch.bfloat16)
    if peak:
        facts["MFU"] = setting.flops(num_params) / seconds / peak
    if counts:
        facts["peak GB"] = (chip.memory.stats().peak_allocated or 0) / 1e9
    if rows:
        facts["x first row"] = rows[0].microseconds / (seconds * 1e6)
    facts["first loss"] = first
    best = taken[way].best * 1e6
    rows.append(Timing(name=way, microseconds=seconds * 1e6, best_microseconds=best, facts=facts))


def batch(setting: Setting, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, S)."""
    generator = torch.Generator().manual_seed(2)
    shape = (2, setting.batch, setting.config.context)
    tokens, targets = torch.randint(setting.config.vocab_size, shape, generator=generator)
    return tokens.to(device), targets.to(device)


def _loss(model: nn.Module, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The plain decoder on the model's parameters."""
    params = dict(model.named_parameters())
    config: Any = model.config
    function: Any = plain.gpt_loss if isinstance(config, GPTConfig) else plain.llama_loss
    loss = partial(function, params, config)
    return torch.compile(loss, dynamic=False) if compiled else loss


def _torch(narrow: bool, fused: bool, compiled: bool) -> Callable[..., Step]:
    def make(stage: Stage, model: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
        kind = tokens.device.type
        optimizer = torch.optim.AdamW(
            model.parameters(), LEARNING_RATE, weight_decay=DECAY, fused=fused
        )
        loss_of = _loss(model, compiled)

        def step() -> Tensor:
            with torch.autocast(kind, torch.bfloat16, enabled=narrow):
                loss = loss_of(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return make


def _ours(stage: Stage, model: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
    policy = precision.policy("bf16", stage.chip)
    comm = alone()
    comm.device = stage.chip.device_type
    rule = optim.adamw(LEARNING_RATE, weight_decay=DECAY)
    optimizer = zero.Optimizer(model, rule, comm, precision=policy)

    def step() -> Tensor:
        with policy.autocast():
            loss: Tensor = model(tokens, targets)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _ours_in_graph(stage: Stage, model: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
    """Forward and backward are recorded; the optimizer's numbers change, and it is called.

    Gradients are given up first, so that a replay writes them anew, to the same memory.
    """
    policy = precision.policy("bf16", stage.chip)
    comm = alone()
    comm.device = stage.chip.device_type
    rule = optim.adamw(LEARNING_RATE, weight_decay=DECAY)
    optimizer = zero.Optimizer(model, rule, comm, precision=policy)

    def gradients() -> Tensor:
        optimizer.zero_grad()
        with policy.autocast():
            loss: Tensor = model(tokens, targets)
        optimizer.backward(loss)
        return loss.detach()

    graph = stage.chip.capture(gradients)

    def step() -> Tensor:
        graph.replay()
        optimizer.step()
        loss: Tensor = graph.result
        return loss

    return step


WAYS: dict[str, Callable[..., Step]] = {
    "torch fp32 eager": _torch(narrow=False, fused=False, compiled=False),
    "torch bf16 eager, SDPA, fused AdamW": _torch(narrow=True, fused=True, compiled=False),
    "torch.compile bf16": _torch(narrow=True, fused=True, compiled=True),
    "ours, bf16 eager": _ours,
    "ours, graph": _ours_in_graph,
}


if __name__ == "__main__":
    main(command)
