"""Which failures should be mended first? Those of operators that a training step calls most.

The weights are counted, not chosen: a step of each of the package's decoders is taken on torch's
meta device, where nothing is computed, with GPT-2's number of layers, and every call of a
registered operator counts: of the GPT, and of the Llama what the GPT does not call. What no step
calls by name (a device's methods, a collective) comes after, in the order of the chapters: a
chapter asks for what the ones before it have shown to work.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import anychip.ops  # noqa: F401 - defines our operators
from anychip.comm import alone
from anychip.conformance.report import Priority, Result
from anychip.dispatch.operator import registered
from anychip.train import optim, zero
from anychip.train.models import GPTConfig, LlamaConfig, build

LAYERS = 12
"""Radford et al. 2019, table 2: the smallest GPT-2."""
COUNT = 3
MODELS: Mapping[str, Callable[[], GPTConfig | LlamaConfig]] = {
    "GPT": lambda: GPTConfig(layers=LAYERS),
    "Llama": lambda: LlamaConfig(layers=LAYERS),
}


class _Calls(TorchDispatchMode):
    """Counts calls of our operators, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        namespace, _, name = str(function.name()).partition("::")
        if namespace == "anychip":
            name = name.partition(".")[0]
            self.counts[name.removesuffix("_forward").removesuffix("_backward")] += 1
        return function(*args, **(kwargs or {}))


@cache
def calls_per_step(model: str) -> Mapping[str, int]:
    """Calls of each operator, both directions, in one step of a decoder with AdamW, clipped."""
    with torch.device("meta"):
        decoder = build(MODELS[model]())
        tokens = torch.zeros(1, 8, dtype=torch.int64)
    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    comm = alone()
    comm.device = "meta"
    optimizer = zero.Optimizer(decoder, rule, comm)
    with _Calls() as calls:
        optimizer.backward(decoder(tokens, tokens))
        optimizer.step()
    found: Counter[str] = calls.counts
    return found


class _Weight(NamedTuple):
    calls: int
    model: str


def weight_of(subject: str) -> _Weight:
    """Calls of an operator in a step of the first model that calls it; 0 for other subjects."""
    found = (_Weight(calls_per_step(model).get(subject, 0), model) for model in MODELS)
    return next((weight for weight in found if weight.calls), _Weight(0, ""))


def subject_of(case: str) -> str:
    """The operator that a case is about, or the first two parts of its id."""
    chapter, _, rest = case.partition("/")
    name = rest.partition("/")[0]
    is_operator = name in registered() and chapter in ("operators", "gradients", "optimizer")
    return name if is_operator else f"{chapter}/{name}"


def next_to_fix(results: Iterable[Result], count: int = COUNT) -> tuple[Priority, ...]:
    """Subjects with failed cases: most calls in a step first, then in the order of the suite."""
    failed: dict[str, list[str]] = {}
    for result in results:
        if result.outcome == "failed":
            failed.setdefault(subject_of(result.case), []).append(result.case)
    found = []
    for subject, cases in failed.items():
        weight = weight_of(subject)
        found.append(Priority(subject, *weight, tuple(cases)))
    return tuple(sorted(found, key=lambda priority: -priority.calls)[:count])
