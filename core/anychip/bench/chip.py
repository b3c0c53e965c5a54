"""Where does the time of a training step go on a chip with a C library, and what to write next?

A step of a small GPT, in rounds. In each the bridge times every kernel of the library, what is
computed on the host for want of one, and copies, one after the other; what is left is Python,
torch's dispatch and the waiting between them.

The gain of a kernel: its time on the host, copies to the host and back included, less the least
that it can take, the bytes that were copied at the rate of the device's own copies.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from anychip.bench.report import Report, Timing
from anychip.cabi import Library
from anychip.cabi.spent import Spent, listed_as
from anychip.contract import Backend, UnsupportedError
from anychip.train import optim, zero
from anychip.train.models import GPTConfig, build

NEXT = 3
SHOWN = 12
_COPY_NBYTES = 16 << 20
_STEP = "step"


def run(
    backend: Backend,
    *,
    rounds: int,
    progress: Callable[[int], None],
    model: GPTConfig | None = None,
    batch_size: int = 4,
) -> Report:
    """Times steps, each part and each operator.

    Raises:
        UnsupportedError: the backend is no C library, and has no bridge to time.
    """
    if not isinstance(backend, Library):
        text = f"bench chip is for chips with a C library (docs/c-abi.md); {backend.name} is none"
        raise UnsupportedError(text)
    step = _step(backend, model or GPTConfig(layers=2, width=64, context=64), batch_size)
    step()
    seconds: dict[str, list[float]] = {}
    spent: dict[str, list[Spent]] = {}
    for number in range(rounds):
        seconds.setdefault(_STEP, []).append(_taken(backend, step))
        with backend.profiling() as found:
            whole = _taken(backend, step)
        for part, taken in _parts(found, whole).items():
            seconds.setdefault(part, []).append(taken)
        for name, of in _by_listed_name(found).items():
            spent.setdefault(name, []).append(of)
        progress(number + 1)
    rate = 2 * _COPY_NBYTES / _copy_seconds(backend, rounds)
    rows = [_row(part, taken, statistics.median(seconds[_STEP])) for part, taken in seconds.items()]
    kernels = sorted((_kernel(name, of, rate) for name, of in spent.items()), key=_gain)[::-1]
    return Report(
        subject="chip",
        backend=backend.name,
        device=backend.identity(),
        threads=torch.get_num_threads(),
        rows=[*rows, *kernels[:SHOWN]],
        notes=(*_next(kernels, statistics.median(seconds[_STEP])),
               f"gain: less the bytes at {rate / 1e9:.2f} GB/s, the rate of the device's copies"),
    )  # fmt: skip


def _step(backend: Backend, config: GPTConfig, batch_size: int) -> Callable[[], object]:
    torch.manual_seed(0)
    decoder = build(config).to(backend.device())
    tokens = torch.randint(config.vocab_size, (batch_size, config.context)).to(backend.device())
    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    optimizer = zero.Optimizer(decoder, rule, backend.communicator())

    def step() -> None:
        optimizer.backward(decoder(tokens, tokens))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _taken(backend: Backend, call: Callable[[], object]) -> float:
    backend.synchronize()
    start = time.perf_counter()
    call()
    backend.synchronize()
    return time.perf_counter() - start


def _copy_seconds(backend: Backend, rounds: int) -> float:
    source = torch.ones(_COPY_NBYTES // 4, device=backend.device())
    target = torch.empty_like(source)
    return statistics.median(
        _taken(backend, lambda: target.copy_(source)) for _ in range(rounds + 1)
    )


def _parts(found: Iterable[Spent], whole: float) -> Mapping[str, float]:
    """Seconds of a step's parts, which are the whole."""
    native, host, copied, copies = 0.0, 0.0, 0.0, 0.0
    for of in found:
        native += of.seconds * (of.who == "native")
        host += (of.seconds - of.copied_s) * (of.who == "host")
        copied += of.copied_s * (of.who == "host")
        copies += of.seconds * (of.who == "copy")
    rest = whole - native - host - copied - copies
    return {
        "timed piece by piece": whole, "- native kernels": native, "- computed on the host": host,
        "- copied for the host": copied, "- other copies": copies, "- Python and dispatch": rest,
    }  # fmt: skip


def _by_listed_name(found: Iterable[Spent]) -> Mapping[str, Spent]:
    """What the host computed, by the name that a library would list; others by torch's."""
    merged: dict[str, Spent] = {}
    for of in found:
        if of.who == "host":
            name = listed_as(of.name) or of.name
            before = merged.get(name, Spent("host", name, 0, 0.0, 0.0, 0))
            merged[name] = Spent(
                "host", name, before.calls + of.calls, before.seconds + of.seconds,
                before.copied_s + of.copied_s, before.nbytes + of.nbytes,
            )  # fmt: skip
    return merged


def _row(name: str, seconds: Sequence[float], step: float) -> Timing:
    median = statistics.median(seconds)
    facts = {"of step": f"{median / step:.0%}"}
    times = (median * 1e6, min(seconds) * 1e6)
    return Timing(name=name, microseconds=times[0], best_microseconds=times[1], facts=facts)


def _kernel(name: str, rounds: Sequence[Spent], rate: float) -> Timing:
    seconds, copied, calls, nbytes = (
        statistics.median(getattr(of, field) for of in rounds)
        for field in ("seconds", "copied_s", "calls", "nbytes")
    )
    facts = {
        "calls": int(calls),
        "copies us": copied * 1e6,
        "gain us": max(0.0, seconds - nbytes / rate) * 1e6,
        "can be listed": "no" if name.startswith("aten::") else "yes",
    }
    best = min(of.seconds for of in rounds)
    return Timing(name=name, microseconds=seconds * 1e6, best_microseconds=best * 1e6, facts=facts)


def _gain(kernel: Timing) -> float:
    return float(kernel.facts["gain us"])


def _next(kernels: Sequence[Timing], step: float) -> list[str]:
    listed = [kernel for kernel in kernels if kernel.facts["can be listed"] == "yes"]
    return [
        f"write next, {number}: {kernel.name} saves up to {_gain(kernel):.0f} us of a step, "
        f"{_gain(kernel) / step / 1e6:.0%}"
        for number, kernel in enumerate(listed[:NEXT], 1)
    ]
