"""Does a recorded call do what the call does, as often as it is replayed?

A part of the device chapter, where the backend declares ``graphs``. To record is not to run. A
replay reads what its inputs hold by now, writes to the tensors that the recorded call returned and
to nothing else, and takes no memory. Results are compared, bit by bit, with those of the call.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from anychip import ops
from anychip.conformance.case import Case, Context, check, check_equal_bits
from anychip.conformance.races import READ, Race
from anychip.conformance.surroundings import again, in_thread
from anychip.contract import Graph

ROWS, HIDDEN = 24, 320
REPLAYS = 3
MANY = 40
"""Replays among which memory that grows by one block would be seen."""
LONG = 1100
"""Pieces of work in one graph: more than a list of 1024 has places."""
EPS = 1e-6
RATE = 0.25
PACKS: Mapping[str, Callable[..., Any]] = {
    "a tuple": lambda *found: found,
    "a dict": lambda *found: {"y": found[0], "others": list(found[1:])},
}
"""What work returns."""


def cases(context: Context) -> Iterator[Case]:
    """Where the backend declares graphs; most are asked again from elsewhere."""
    asked = [
        Case(id=f"device/graphs/{n}", run=q, capability="graphs") for n, q in QUESTIONS.items()
    ]
    yield from asked
    if "graphs" in context.backend.capabilities:
        yield from again("device/graphs", asked, ONCE)


class Layer:
    """Some operators of ours and of torch, one after the other, on tensors that stay.

    Attributes:
        x, weight: inputs, (ROWS, HIDDEN) and (HIDDEN,) float32.
        rate, rows, mask: a number, int64 indices of rows, and bool like x; on the device too.
        count: int64, on the device: how often the work was done.
        calls: how often it was asked for.
        fails: the call that raises; none at 0.
    """

    def __init__(self, context: Context, seed: int = 0, pack: str = "a tuple") -> None:
        self.context, self.pack, self.calls, self.fails = context, PACKS[pack], 0, 0
        host = torch.Generator().manual_seed(context.seed + seed)
        self.inputs = [torch.randn(ROWS, HIDDEN, generator=host) for _ in range(REPLAYS)]
        self.x = self.inputs[0].to(context.device)
        self.weight = (1.0 + 0.1 * torch.randn(HIDDEN, generator=host)).to(context.device)
        self.rate = torch.ones((), device=context.device)
        self.rows = torch.arange(REPLAYS, device=context.device)
        self.mask = self.x > 0
        self.count = torch.zeros((), dtype=torch.int64, device=context.device)
        context.call = "capture(work) and replay(); work: rms_norm, gelu, an addition, softmax"

    def __call__(self) -> Any:
        self.calls += 1
        self.count += 1
        if self.calls == self.fails:
            raise KeyError("on purpose")
        y = ops.gelu(ops.rms_norm(self.x, self.weight, eps=EPS))
        picked = torch.index_select(y, 0, self.rows) * self.rate
        return self.pack(y, picked, y.masked_fill(self.mask, RATE), ops.softmax(y + self.x))

    def change(self, number: int) -> None:
        """Gives the inputs other values, where they are."""
        self.x.copy_(self.inputs[number])
        self.rate.fill_(number + 2.0)
        self.rows.add_(number)
        self.mask.copy_(self.x > 0)

    def capture(self) -> Graph:
        """The work, recorded; the function has the same code each time, and is another one."""
        backend, before = self.context.backend, self.context.backend.current_stream()
        graph = backend.capture(lambda: self())
        check(isinstance(graph, Graph), f"capture() gives a Graph, got {graph!r}")
        check(backend.current_stream() == before, "capture() leaves another stream current")
        backend.synchronize()
        return graph

    def check_results(self, when: str, results: Any) -> None:
        """Compares results with those of a call of the same work."""
        self.context.backend.synchronize()
        wanted = self()
        check(type(results) is type(wanted), f"a result that is a {type(results).__name__} {when}")
        for number, pair in enumerate(zip(*map(tree_leaves, (results, wanted)), strict=True)):
            check_equal_bits(f"result {number} {when}", *(tensor.cpu() for tensor in pair))


def replays_like_the_call(context: Context) -> None:
    """A replay reads what the inputs hold by now, and writes to the tensors of the result.

    Also by another thread than the one that has recorded; new ones start on device 0.
    """
    for pack in PACKS:
        layer = Layer(context, pack=pack)
        graph = layer.capture()
        results = graph.result
        for number in range(REPLAYS):
            layer.change(number)
            context.backend.synchronize()
            in_thread(graph.replay) if number == 1 and not context.device.index else graph.replay()
            layer.check_results(f"of replay {number} of work that returns {pack}", results)


def recording_does_not_run(context: Context) -> None:
    """Of all calls only the recorded one runs nothing; then each replay is one."""
    layer = Layer(context)
    graph = layer.capture()
    check(layer.calls >= 1, "capture() did not call the work")
    before, done = layer.calls - 1, int(layer.count)
    check(done == before, f"{layer.calls} calls, of which one was recorded, ran {done} times")
    for _ in range(MANY):
        graph.replay()
    context.backend.synchronize()
    ran, called = int(layer.count) - before, layer.calls - before - 1
    check(ran == MANY, f"{MANY} replays ran the work {ran} times")
    check(called == 0, f"{MANY} replays called the work's function {called} times")


def long_work(context: Context) -> None:
    """All pieces of work are recorded; and a function anew when it is recorded again."""
    counts = torch.zeros(REPLAYS, dtype=torch.int64, device=context.device)
    graphs: dict[int, Graph] = {}

    def work() -> None:
        for _ in range(LONG):
            counts[len(graphs)].add_(1)

    while len(graphs) < REPLAYS:
        graphs[len(graphs)] = context.backend.capture(work)
    context.backend.synchronize()
    counts.zero_()
    for graph in graphs.values():
        graph.replay()
    found = counts.tolist()
    check(found == [LONG] * REPLAYS, f"graphs of {LONG} pieces of work did {found}")


def work_that_fails(context: Context) -> None:
    """Work that raises, at its first call or while it is recorded, leaves everything as it was."""
    layer, before = Layer(context), context.backend.current_stream()
    layer.capture()
    for fails in (1, layer.calls):
        layer.calls, layer.fails = 0, fails
        with suppress(Exception):
            layer.capture()
        what = f"after call {fails} of the work has raised"
        check(context.backend.current_stream() == before, f"another stream is current {what}")
        layer.fails = 0
        graph = layer.capture()
        layer.change(1)
        graph.replay()
        layer.check_results(f"of a capture {what}", graph.result)


def among_other_work(context: Context) -> None:
    """Replays are work of the current stream: behind what is queued there, before what follows."""
    race = Race(context)
    total = torch.zeros(READ, device=context.device)
    graph = race.backend.capture(lambda: total.add_(race.x[-READ:]) * 2.0)
    race.backend.synchronize()
    race.start()
    with race.backend.use_stream(race.stream):
        for _ in range(REPLAYS):
            graph.replay()
        race.x.zero_()
        result = graph.result
        found = result * 1.0
        del graph  # whose replays are queued
    race.settle()
    want = torch.full((READ,), 2.0 * REPLAYS * race.want)
    for what, got in {"read behind it on its stream": found, "at the end": result}.items():
        check_equal_bits(f"the result of replays, {what}", got.cpu(), want)


def graphs_are_apart(context: Context) -> None:
    """Another graph, and other work, leave a graph's results alone; and it leaves theirs."""
    layers = [Layer(context, seed) for seed in range(2)]
    graphs = [layer.capture() for layer in layers]
    if "memory_stats" in context.backend.capabilities:
        context.backend.memory.empty_cache()  # a graph's memory is in use
    for graph in graphs:
        graph.replay()
    marks = [torch.full((ROWS, HIDDEN), float(i), device=context.device) for i in range(8)]
    for number, (layer, graph) in enumerate(zip(layers, graphs, strict=True)):
        layer.check_results(f"of graph {number} after other work", graph.result)
    for graph in graphs:
        graph.replay()
    context.backend.synchronize()
    for i, mark in enumerate(marks):
        check_equal_bits("a tensor made meanwhile", mark.cpu(), torch.full((ROWS, HIDDEN), 1.0 * i))


def steps_of_a_training(context: Context) -> None:
    """Forward, gradients and an update in place, recorded: replays go on where the last ended."""
    layer = Layer(context)
    first, weight = layer.weight.clone(), layer.weight.requires_grad_()

    def step() -> Tensor:
        y = ops.gelu(ops.rms_norm(layer.x, weight, eps=EPS))
        loss = (y * y).mean()
        (slope,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight.sub_(slope, alpha=RATE)
        return loss.detach()

    context.call = "capture(step) and replay(); step: rms_norm, gelu, gradients, an update"
    graph = context.backend.capture(step)
    found = []
    for run in (graph.replay, step):
        with torch.no_grad():
            weight.copy_(first)
        for values in layer.inputs:
            layer.x.copy_(values)
            run()
        context.backend.synchronize()
        found.append(weight.detach().cpu().clone())
    check(not torch.equal(found[1], first.cpu()), "steps do not change the weight")
    check_equal_bits(f"the weight after {REPLAYS} replays of a step", *found)


def memory_stays(context: Context) -> None:
    """Replays take no memory: what is allocated after one is what is allocated after many."""
    memory, graph = context.backend.memory, Layer(context).capture()
    found = []
    for count in (1, MANY):
        for _ in range(count):
            graph.replay()
        context.backend.synchronize()
        gc.collect()
        found.append(memory.stats().allocated)
    check(found[0] == found[1], f"{MANY} replays: {found[0]} bytes before, {found[1]} after")


QUESTIONS: dict[str, Callable[[Context], None]] = {
    "replay": replays_like_the_call,
    "recording": recording_does_not_run,
    "long": long_work,
    "fails": work_that_fails,
    "among": among_other_work,
    "apart": graphs_are_apart,
    "training": steps_of_a_training,
    "memory": memory_stays,
}
ONCE = {"device/graphs/memory", "device/graphs/long"}
"""What others allocate meanwhile is not the graph's; and long work."""
