"""Which operators take the time of a step, who served them, and how near to the device's rates?

``anychip train --profile N``. The rows of dispatch are called by way of a clock for N steps, behind
a few for warming up; the same rows serve the same calls. Times are those of :mod:`.watching`: by
events of the device where it has streams, so that a call for which it waited takes that long too.
What is no operator of anychip's (torch's own, and what is between calls) is the rest.

Source: the Trace Event Format of Chrome, which Perfetto opens.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip.contract import Backend, Cost, Row, UnsupportedError
from anychip.dispatch import selection
from anychip.dispatch.agreement import like_of
from anychip.dispatch.operator import registered
from anychip.dispatch.selection import Provider
from anychip.train import files
from anychip.train.cutting import measured_rates
from anychip.train.run import Run
from anychip.train.watching import Clock, Watch

SCHEMA = 1
WARM_UP = 3
"""Steps before the first that counts."""


class Call(NamedTuple):
    """A call of a row: when, what it costs at least, and the dtype of its first tensor."""

    row: Row
    provider: Provider
    start: Any
    end: Any
    cost: Cost | None
    dtype: torch.dtype | None


class Event(NamedTuple):
    """A bar of the trace; seconds since the first profiled step began."""

    name: str
    start: float
    seconds: float
    facts: dict[str, Any]


class Profile(Watch):
    """A watch that looks at operators for some steps, and then writes what it saw.

    Args:
        run: whose steps it watches, on this rank.
        chip: its device.
        count: of steps.
        out: directory for ``trace.json`` and ``profile.json``; of rank r above 0 ``trace<r>.json``.

    Raises:
        UnsupportedError: the device measures no time between events.
        ValueError: fewer steps are left.
        OSError: ``parallel.rates`` cannot be read.
    """

    def __init__(self, run: Run, chip: Backend, count: int, out: Path) -> None:
        super().__init__(chip, run.watch.ideal_s)
        left = run.config.run.steps - run.step
        if left < WARM_UP + count:
            raise ValueError(
                f"--profile {count}: {WARM_UP} steps to warm up and {count} to look at expected, "
                f"and {left} are left; ask for fewer, or for more steps"
            )
        if self.clock is None:
            raise UnsupportedError(f"--profile: {chip.name} measures no time between events")
        self.out, self.count, self.rank = out, count, run.comm.rank
        self.about = {"backend": chip.name, "device": chip.identity()}
        self.first_step = run.step + WARM_UP + 1
        known = measured_rates(run.config, chip) or chip.properties()
        self.flops, self.bandwidth = known.flops, known.bandwidth
        self.result: dict[str, Any] | None = None
        self._observing = ExitStack()
        self._seen, self._is_recording = 0, False
        self._calls: list[Call] = []
        self._called: list[tuple[Call, Event]] = []
        self._parts: list[Event] = []
        self._total = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """As of :class:`Watch`; rows are found again in the last step before those that count."""
        number, self._seen = self._seen - WARM_UP, self._seen + 1
        if number == -1:
            self._observing.enter_context(selection.observed(self._observe))
        self._is_recording = 0 <= number < self.count
        if not self._is_recording:
            with super().step():
                yield
            return
        clock = self.clock
        assert clock is not None
        start = clock.mark()
        if number == 0:
            self._base, self._began_s = start, time.time()
        with super().step():
            yield
        self._keep(number, clock, start, clock.mark())
        if number == self.count - 1:
            self.close()
            self._write()

    def close(self) -> None:
        """Rows are called as before."""
        self._is_recording = False
        self._observing.close()

    def _observe(self, row: Row, provider: Provider) -> Callable[..., Any]:
        clock = self.clock
        assert clock is not None

        @wraps(row.function)
        def function(*args: Any, **attrs: Any) -> Any:
            if not self._is_recording:
                return row.function(*args, **attrs)
            start = clock.mark()
            found = row.function(*args, **attrs)
            end = clock.mark()
            if found is not NotImplemented:  # else the next row serves the call
                cost = cost_of(row, args, attrs)
                self._calls.append(Call(row, provider, start, end, cost, _dtype_of(args)))
            return found

        return function

    def _keep(self, number: int, clock: Clock, start: Any, end: Any) -> None:
        """Reads the marks of a step, which is done."""
        self._is_recording = False  # an evaluation or a checkpoint follows
        self._total += clock.seconds(start, end)
        step = {"step": self.first_step + number}
        for part, begun, ended in self.spans():
            self._parts.append(self._event(part, begun, ended, step))
        for call in self._calls:
            served = {"served by": call.row.label, "kind": call.row.kind, "of": call.provider.name}
            name = f"{call.row.operator} {call.row.direction}"
            self._called.append((call, self._event(name, call.start, call.end, {**step, **served})))
        self._calls = []

    def _event(self, name: str, start: Any, end: Any, facts: dict[str, Any]) -> Event:
        assert self.clock is not None
        seconds = self.clock.seconds
        return Event(name, seconds(self._base, start), seconds(start, end), facts)

    def _write(self) -> None:
        self.result = {
            "schema": SCHEMA, "rank": self.rank, **self.about, "first_step": self.first_step,
            "steps": self.count, "step_s": self._total / self.count, "operators": self._table(),
        }  # fmt: skip
        named = self.rank or ""
        files.write(self.out / f"trace{named}.json", json.dumps(self.trace()))
        files.write(self.out / f"profile{named}.json", json.dumps(self.result, indent=2) + "\n")

    def trace(self) -> dict[str, Any]:
        """Events in microseconds of the clock on the wall; a process per rank, two rows in it."""
        title = f"rank {self.rank}: {self.about['backend']}, {self.about['device']}"
        named = {"process_name": (0, title), "thread_name": (1, "parts of the step")}
        found: list[dict[str, Any]] = [
            {"ph": "M", "name": key, "pid": self.rank, "tid": tid, "args": {"name": name}}
            for key, (tid, name) in named.items()
        ]
        operators = {"args": {"name": "operators"}, "pid": self.rank, "tid": 2}
        found.append({"ph": "M", "name": "thread_name", **operators})
        rows = (("part", 1, self._parts), ("operator", 2, [event for _, event in self._called]))
        for kind, tid, events in rows:
            found += [
                {
                    "ph": "X", "name": event.name, "cat": kind, "pid": self.rank, "tid": tid,
                    "ts": 1e6 * (self._began_s + event.start), "dur": 1e6 * event.seconds,
                    "args": event.facts,
                }
                for event in events
            ]  # fmt: skip
        return {"traceEvents": found, "displayTimeUnit": "ms"}

    def _table(self) -> list[dict[str, Any]]:
        """A row per operator, direction and who served it; the one with most time first."""
        groups: dict[tuple[str, ...], list[tuple[Call, Event]]] = {}
        for call, event in self._called:
            key = (call.row.operator, call.row.direction, call.row.label, call.provider.name)
            groups.setdefault(key, []).append((call, event))
        return sorted(map(self._row, groups.values()), key=lambda row: -row["seconds"])

    def _row(self, group: Sequence[tuple[Call, Event]]) -> dict[str, Any]:
        call, seconds = group[0][0], sum(event.seconds for _, event in group)
        costs = [each.cost for each, _ in group if each.cost is not None]
        is_known = len(costs) == len(group) and seconds > 0
        bounds = [b for each, _ in group if (b := self._bound_s(each)) is not None]
        return {
            "operator": call.row.operator, "direction": call.row.direction,
            "implementation": call.row.label, "kind": call.row.kind,
            "provider": call.provider.name, "version": call.provider.version, "calls": len(group),
            "seconds": seconds, "share": seconds / self._total,
            "flops_per_s": sum(cost.flops for cost in costs) / seconds if is_known else None,
            "bytes_per_s": sum(cost.nbytes for cost in costs) / seconds if is_known else None,
            "of_roofline": sum(bounds) / seconds
            if is_known and len(bounds) == len(group)
            else None,
        }  # fmt: skip

    def _bound_s(self, call: Call) -> float | None:
        """What a call takes at least; None: its cost or a rate is not known."""
        rate = None if call.dtype is None else self.flops.get(call.dtype)
        if call.cost is None or not rate or not self.bandwidth:
            return None
        return max(call.cost.flops / rate, call.cost.nbytes / self.bandwidth)

    def __str__(self) -> str:
        if self.result is None:
            return "the run ended before the steps that were to be profiled; nothing was written"
        heads = ("operator", "", "calls", "ms", "share", "TFLOP/s", "GB/s", "roofline", "served by")
        lines = [heads, *map(_words, self.result["operators"])]
        rest = self._total - sum(event.seconds for _, event in self._called)
        share = f"{rest / self._total:.1%}"
        lines.append(("all else", "", "", f"{1e3 * rest:.2f}", share, "", "", "", ""))
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
        return "\n".join(
            [
                f"{self.count} steps of {1e3 * self._total / self.count:.2f} ms, on rank "
                f"{self.rank}; in {self.out}: trace.json (ui.perfetto.dev), profile.json",
                *(
                    "  ".join(
                        word.rjust(width) if 2 <= place <= 7 else word.ljust(width)
                        for place, (word, width) in enumerate(zip(line, widths, strict=True))
                    ).rstrip()
                    for line in lines
                ),
            ]
        )


def _words(row: Mapping[str, Any]) -> tuple[str, ...]:
    def scaled(name: str, scale: float) -> str:
        return "-" if row[name] is None else f"{row[name] / scale:.3g}"

    roofline = "-" if row["of_roofline"] is None else f"{row['of_roofline']:.0%}"
    served = f"{row['provider']}: {row['implementation']} ({row['kind']})"
    time_ms, share = f"{1e3 * row['seconds']:.2f}", f"{row['share']:.1%}"
    rates = scaled("flops_per_s", 1e12), scaled("bytes_per_s", 1e9), roofline
    return (
        row["operator"], row["direction"], str(row["calls"]), time_ms, share, *rates, served,
    )  # fmt: skip


def cost_of(row: Row, args: Sequence[Any], attrs: Mapping[str, Any]) -> Cost | None:
    """What a call of a row must move and compute, by its spec; None: that does not say.

    A backward's cost is stated by the arguments of the forward call, which are found again among
    what it is given.
    """
    operator = registered()[row.operator]
    spec, signature = operator.spec, operator.signature
    if row.direction == "forward":
        return spec.cost(*args, **attrs)
    if spec.backward_cost is None:
        return None
    own = {residual.name for residual in spec.residuals} if row.paired is not None else set()
    names = [f"grad{i}" for i in range(signature.num_outputs)]
    given = dict(zip([*names, *(n for n in spec.saved if n not in own)], args, strict=False))
    found = [like_of(spec, given, name) for name in signature.positional]
    for name, arg in zip(signature.positional, found, strict=True):
        if arg is None and name not in given and not signature.may_be_none(name):
            return None
    forward = {name: value for name, value in attrs.items() if name != "needs"}
    return spec.backward_cost(*found, **forward)


def _dtype_of(args: Sequence[Any]) -> torch.dtype | None:
    """Of the first tensor of floating-point numbers."""
    for arg in args:
        for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                return tensor.dtype
    return None


@contextmanager
def profiled(run: Run, chip: Backend, count: int, out: Path) -> Iterator[Profile]:
    """Context in which a run is profiled; arguments and errors are those of :class:`Profile`."""
    before, profile = run.watch, Profile(run, chip, count, out)
    run.watch = profile
    try:
        yield profile
    finally:
        profile.close()
        run.watch = before
