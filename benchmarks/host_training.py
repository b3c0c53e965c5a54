"""Steps of a decoder on the host: eager, compiled and ours, with torch's memory and kept blocks.

transformers' Llama, fused by us; or our own decoders, against the same in plain torch
(plain_decoders.py). One process, candidates in turn in every round, the median over rounds of the
ratio to another of the same round. A candidate takes one step that is not timed after each change
of memory.

    python -m benchmarks.host_training [--model llama] [--rounds 15] [--steps 3] [--json FILE]
    python -m benchmarks.host_training --precision bf16 --picture profile.png
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
from benchmarks import plain_decoders

Step = Callable[[], None]
MODEL = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 8192,
}  # fmt: skip
BATCH, CONTEXT, LEARNING_RATE = 8, 256, 3e-4
SHADES = ("#1b6ca8", "#8a5fa8", "#d1793b", "#5b9f5b", "#e3b23c", "#9aa0a6")
MEMORIES = ("torch", "kept")


def library_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    made: nn.Module = LlamaForCausalLM(LlamaConfig(**MODEL))
    return made


def own_model(name: str) -> nn.Module:
    """GPT or Llama of the same sizes as the library's."""
    made, config = plain_decoders.CONFIGS[name]
    torch.manual_seed(1)
    return made(
        config(
            vocab_size=MODEL["vocab_size"], context=CONTEXT, layers=MODEL["num_hidden_layers"],
            heads=MODEL["num_attention_heads"], width=MODEL["hidden_size"],
        )
    )  # fmt: skip


def step_of(loss_of: Callable[[torch.Tensor], Any], optimizer: Any, precision: str) -> Step:
    tokens = torch.randint(MODEL["vocab_size"], (BATCH, CONTEXT))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def made(candidate: str, model: str, precision: str) -> Step:
    """One of the candidates, for one of the models."""
    is_own = model in plain_decoders.CONFIGS
    module = own_model(model) if is_own else library_model()
    optimizer: Any
    if candidate == "anychip":
        if not is_own:
            anychip.fuse(module, linear=True)
        rule = optim.adamw(LEARNING_RATE, weight_decay=0.01)
        optimizer = zero.Optimizer(module, rule, alone())
    else:
        optimizer = torch.optim.AdamW(module.parameters(), LEARNING_RATE, fused=True)
    call = torch.compile(module) if candidate == "compiled" else module
    if not is_own:
        return step_of(lambda t: call(input_ids=t, labels=t).loss, optimizer, precision)
    step = step_of(lambda t: call(t, t), optimizer, precision)
    return step if candidate == "anychip" else plain_decoders.plain()(step)


PARTS = {
    "matrix products": "mm|linear|matmul|mkldnn",
    "attention": "scaled_dot_product",
    "copies and casts": "copy_|_to_copy|cat|fill_|zero_",
    "operators of anychip, compiled kernels": "Node|anychip::|CompiledFx|Torch-Compiled",
    "optimizer": "Optimizer|_fused_adamw",
}
"""Pieces of work that torch's profiler names, by a pattern; the rest is everything else."""

CANDIDATES = ("eager", "compiled", "anychip")


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


def measure(model: str, precision: str, rounds: int, steps: int) -> tuple[Measured, Measured]:
    """Seconds, and page faults, of a step."""
    all_steps = {name: made(name, model, precision) for name in CANDIDATES}
    seconds: Measured = {f"{n}, {m}": [] for m in MEMORIES for n in all_steps}
    pages: Measured = {name: [] for name in seconds}
    for number in range(rounds):
        for memory in MEMORIES if number % 2 == 0 else MEMORIES[::-1]:
            host_memory.keep() if memory == "kept" else host_memory.stop()
            for name, step in all_steps.items():
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


def draw(model: str, precision: str, file: Path) -> None:
    """A bar for each candidate, with kept memory: where a step's time goes."""
    host_memory.keep()
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots()
    for name in CANDIDATES:
        step, start = made(name, model, precision), 0.0
        for _ in range(3):
            step()
        for (part, taken), color in zip(parts(step).items(), SHADES, strict=True):
            axes.barh(name, 1e3 * taken, left=1e3 * start, color=color, label=part)
            start += taken
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[: len(SHADES)], labels[: len(SHADES)], ncols=3, fontsize=8,
                loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlabel(f"ms of a step of {model} in {precision}, {torch.get_num_threads()} threads")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    models = ("transformers", *plain_decoders.CONFIGS)
    parser.add_argument("--model", choices=models, default="transformers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="draws where a step's time goes, no timing")
    given = parser.parse_args()
    anychip.use("cpu")
    print(f"{torch.get_num_threads()} threads, {given.model}, {given.precision}")
    if given.picture:
        return draw(given.model, given.precision, given.picture)
    seconds, pages = measure(given.model, given.precision, given.rounds, given.steps)
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
