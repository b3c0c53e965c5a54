"""Steps of transformers' Llama on the host: eager, compiled and ours, with torch's memory and kept.

One process, candidates in turn in every round, the median over rounds of the ratio to another of
the same round. A candidate takes one step that is not timed after each change of memory.

    python benchmarks/host_training.py [--rounds 15] [--steps 3] [--precision fp32] [--json FILE]
    python benchmarks/host_training.py --precision bf16 --picture profile.png
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.profiler import ProfilerActivity, profile

import anychip
from anychip import host_memory
from anychip.comm import alone
from anychip.train import optim, zero

Step = Callable[[], None]
MODEL = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 8192,
}  # fmt: skip
BATCH, CONTEXT, LEARNING_RATE = 8, 256, 3e-4
SHADES = ("#1b6ca8", "#8a5fa8", "#d1793b", "#5b9f5b", "#e3b23c", "#9aa0a6")
MEMORIES = ("torch", "kept")


def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    made: nn.Module = LlamaForCausalLM(LlamaConfig(**MODEL))
    return made


def step_of(call: nn.Module, optimizer: Any, precision: str) -> Step:
    tokens = torch.randint(MODEL["vocab_size"], (BATCH, CONTEXT))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def eager(precision: str) -> Step:
    made = model()
    return step_of(made, torch.optim.AdamW(made.parameters(), LEARNING_RATE, fused=True), precision)


def compiled(precision: str) -> Step:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), LEARNING_RATE, fused=True)
    return step_of(torch.compile(made), optimizer, precision)


def ours(precision: str) -> Step:
    made = model()
    anychip.fuse(made, linear=True)
    rule = optim.adamw(LEARNING_RATE, weight_decay=0.01)
    return step_of(made, zero.Optimizer(made, rule, alone()), precision)


PARTS = {
    "matrix products": "mm|linear|matmul|mkldnn",
    "attention": "scaled_dot_product",
    "copies and casts": "copy_|_to_copy|cat|fill_|zero_",
    "operators of anychip, compiled kernels": "Node|anychip::|CompiledFx|Torch-Compiled",
    "optimizer": "Optimizer|_fused_adamw",
}
"""Pieces of work that torch's profiler names, by a pattern; the rest is everything else."""

CANDIDATES = {"eager": eager, "compiled": compiled, "anychip": ours}


def faults() -> int:
    """Pages that the system has given this process, filled with zeros."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def timed(step: Step, steps: int) -> tuple[float, float]:
    """Seconds and page faults of a step."""
    step()
    before, begin = faults(), time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin) / steps, (faults() - before) / steps


Measured = dict[str, list[float]]
"""By candidate and memory, one number for each round."""


def measure(precision: str, rounds: int, steps: int) -> tuple[Measured, Measured]:
    """Seconds, and page faults, of a step."""
    made = {name: make(precision) for name, make in CANDIDATES.items()}
    seconds: Measured = {f"{n}, {m}": [] for m in MEMORIES for n in made}
    pages: Measured = {name: [] for name in seconds}
    for number in range(rounds):
        for memory in MEMORIES if number % 2 == 0 else MEMORIES[::-1]:
            host_memory.keep() if memory == "kept" else host_memory.stop()
            for name, step in made.items():
                taken, given = timed(step, steps)
                seconds[f"{name}, {memory}"].append(taken)
                pages[f"{name}, {memory}"].append(given)
        print(f"round {number + 1} of {rounds}", flush=True)
    host_memory.stop()
    return seconds, pages


def ratio(seconds: Measured, slow: str, fast: str) -> float:
    """How many times faster the second is."""
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def parts(step: Step) -> dict[str, float]:
    """Seconds of one step by part, as torch's profiler measures it; it adds some to each call."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    found = dict.fromkeys((*PARTS, "everything else"), 0.0)
    for event in seen.key_averages():
        part = next((p for p, names in PARTS.items() if re.search(names, event.key)), None)
        found[part or "everything else"] += event.self_cpu_time_total / 1e6
    return found


def draw(precision: str, file: Path) -> None:
    """A bar for each candidate, with kept memory: where a step's time goes."""
    host_memory.keep()
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots()
    for name, make in CANDIDATES.items():
        step, start = make(precision), 0.0
        for _ in range(3):
            step()
        for (part, taken), color in zip(parts(step).items(), SHADES, strict=True):
            axes.barh(name, 1e3 * taken, left=1e3 * start, color=color, label=part)
            start += taken
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[: len(SHADES)], labels[: len(SHADES)], ncols=3, fontsize=8,
                loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlabel(f"ms of a step of Llama in {precision}, {torch.get_num_threads()} threads")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="draws where a step's time goes, no timing")
    given = parser.parse_args()
    anychip.use("cpu")
    print(f"{torch.get_num_threads()} threads, {given.precision}")
    if given.picture:
        return draw(given.precision, given.picture)
    seconds, pages = measure(given.precision, given.rounds, given.steps)
    for name, taken in seconds.items():
        base = f"eager, {name.partition(', ')[2]}"
        print(f"{name:16} {1e3 * statistics.median(taken):7.0f} ms"
              f"  {statistics.median(pages[name]):7.0f} page faults"
              f"  {ratio(seconds, base, name):5.2f} x eager with the same memory"
              f"  {ratio(seconds, 'eager, torch', name):5.2f} x eager with torch's")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps({"seconds": seconds, "page faults": pages}))


if __name__ == "__main__":
    main()
