"""Does a recorded call do what the call does, as often as it is replayed?

A part of the device chapter, where the backend declares ``graphs``. To record is not to run. A
replay reads what its inputs hold by now, writes to the tensors that the recorded call returned and
to nothing else, and takes no memory. Results are compared, bit by bit, with those of the call.
"""

import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anychip import ops
from anychip.conformance.case import Case, Context, check, check_equal_bits
from anychip.contract import Graph

ROWS, HIDDEN = 24, 320
REPLAYS = 3
MANY = 32
"""Replays among which memory that grows by one block would be seen."""
EPS = 1e-6
RATE = 0.25


def cases(context: Context) -> Iterator[Case]:
    """Where the backend declares graphs."""
    for name, run in QUESTIONS.items():
        yield Case(id=f"device/graphs/{name}", run=run, capability="graphs")


class Layer:
    """Some operators of ours and of torch, one after the other, on tensors that stay.

    Attributes:
        x, weight: inputs, (ROWS, HIDDEN) and (HIDDEN,) float32.
        count: int64, on the device: how often the work was done.
        calls: how often it was asked for.
    """

    def __init__(self, context: Context, seed: int = 0) -> None:
        self.context, self.calls = context, 0
        host = torch.Generator().manual_seed(context.seed + seed)
        self.inputs = [torch.randn(ROWS, HIDDEN, generator=host) for _ in range(REPLAYS)]
        self.x = self.inputs[0].to(context.device)
        self.weight = (1.0 + 0.1 * torch.randn(HIDDEN, generator=host)).to(context.device)
        self.count = torch.zeros((), dtype=torch.int64, device=context.device)
        context.call = "capture(work) and replay(); work: rms_norm, gelu, an addition, softmax"

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.count += 1
        y = ops.gelu(ops.rms_norm(self.x, self.weight, eps=EPS))
        return y, ops.softmax(y + self.x)

    def capture(self) -> Graph:
        """The work, recorded."""
        graph = self.context.backend.capture(self)
        check(isinstance(graph, Graph), f"capture() gives a Graph, got {graph!r}")
        self.context.backend.synchronize()
        return graph

    def check_results(self, when: str, results: tuple[Tensor, Tensor]) -> None:
        """Compares results with those of a call of the same work."""
        self.context.backend.synchronize()
        wanted = self()
        for number, (got, want) in enumerate(zip(results, wanted, strict=True)):
            check_equal_bits(f"result {number} {when}", got.cpu(), want.cpu())


def replays_like_the_call(context: Context) -> None:
    """A replay reads what the inputs hold by now, and writes to the tensors of the result."""
    layer = Layer(context)
    graph = layer.capture()
    results = tuple(graph.result)
    for number, values in enumerate(layer.inputs):
        layer.x.copy_(values)
        graph.replay()
        layer.check_results(f"of replay {number}, inputs changed before it", results)


def recording_does_not_run(context: Context) -> None:
    """Of all calls only the recorded one runs nothing; then each replay is one."""
    layer = Layer(context)
    graph = layer.capture()
    check(layer.calls >= 1, "capture() did not call the work")
    before, done = layer.calls - 1, int(layer.count)
    check(done == before, f"{layer.calls} calls, of which one was recorded, ran {done} times")
    for _ in range(REPLAYS):
        graph.replay()
    context.backend.synchronize()
    ran, called = int(layer.count) - before, layer.calls - before - 1
    check(ran == REPLAYS, f"{REPLAYS} replays ran the work {ran} times")
    check(called == 0, f"{REPLAYS} replays called the work's function {called} times")


def graphs_are_apart(context: Context) -> None:
    """Another graph, and other work, leave a graph's results alone; and it leaves theirs."""
    layers = [Layer(context, seed) for seed in range(2)]
    graphs = [layer.capture() for layer in layers]
    for graph in graphs:
        graph.replay()
    marks = [torch.full((ROWS, HIDDEN), float(i), device=context.device) for i in range(8)]
    for number, (layer, graph) in enumerate(zip(layers, graphs, strict=True)):
        layer.check_results(f"of graph {number} after other work", tuple(graph.result))
    for graph in graphs:
        graph.replay()
    context.backend.synchronize()
    for number, mark in enumerate(marks):
        want = torch.full((ROWS, HIDDEN), float(number))
        check_equal_bits("a tensor that was made between replays", mark.cpu(), want)


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
    "apart": graphs_are_apart,
    "training": steps_of_a_training,
    "memory": memory_stays,
}
