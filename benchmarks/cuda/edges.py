"""Where kernels go wrong on a device: widths at an edge, odd addresses, more than 2^31 elements,
other streams, recorded graphs, other threads.

Widths and addresses are compared with the reference on the same device; large arrays with the same
operator on their last rows; streams, graphs and threads with a plain call, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anychip
from anychip import ops
from benchmarks.cuda.calls import Call, apart, different, every_call
from benchmarks.cuda.stage import Stage, main, stage

WIDTHS = (
    7, 8, 9, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049,
    4095, 4096, 4097, 8191, 8192, 8193, 16384, 16391, 32768, 50257, 65536, 65537, 152064,
)  # fmt: skip
"""Around each power of two where a launch may change its shape, and vocabularies in use."""
HUGE = 2**31 + 4096


@stage(seconds=90.0)
def command(stage: Stage) -> None:
    """Ask for edges of sizes, addresses, streams and graphs."""
    device = stage.chip.device()
    for width in WIDTHS[:9] if stage.tiny else WIDTHS:
        for name, row in ROWS.items():
            for offset in (0, 1):
                what = f"{name}, width {width}, {'odd' if offset else 'even'} address"
                stage.attempt(what, like_the_reference, name, row, width, offset, device)
    for name, call in EMPTY.items():
        stage.attempt(f"{name} of nothing", call, device)
    for call in every_call(stage.chip, tiny=True):
        stage.attempt(f"{call.name} from another thread", from_thread, call)
        if "streams" in stage.chip.capabilities:
            stage.attempt(f"{call.name} on another stream", on_stream, stage, call)
        if "graphs" in stage.chip.capabilities:
            stage.attempt(f"{call.name} in a graph", in_graph, stage, call)
    numel = 2**16 if stage.tiny else HUGE
    for name, work in LARGE.items():
        if stage.has_time(f"{name} of {numel} elements"):
            stage.attempt(f"{name} of {numel} elements", work, numel, device)
            stage.chip.synchronize()
            if "memory_stats" in stage.chip.capabilities:
                stage.chip.memory.empty_cache()


def drawn(*shape: int, device: torch.device, offset: int = 0, seed: int = 0) -> Tensor:
    """bfloat16 normal values from an address that is off by ``offset`` elements."""
    generator = torch.Generator(device=device).manual_seed(seed)
    numel = torch.Size(shape).numel() + offset
    whole = torch.randn(numel, generator=generator, device=device).bfloat16()
    return whole[offset:].view(shape)


def like_the_reference(
    name: str, row: Callable[..., Any], width: int, offset: int, device: torch.device
) -> str:
    """The difference between the chip's row and the reference, with gradients."""
    given = [drawn(3, width, device=device, offset=offset, seed=s) for s in range(2)]
    weights = [drawn(width, device=device, offset=offset, seed=s) for s in (2, 3)]

    def run() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (*given, *weights)]
        y = row(*leaves)
        outputs = [y] if isinstance(y, Tensor) else list(y)
        # Not ones: with these the gradient of softmax is noise.
        slopes = [drawn(*t.shape, device=device, seed=9).to(t.dtype) for t in outputs]
        grads = torch.autograd.grad(outputs, leaves, slopes, allow_unused=True)
        return [t.detach() for t in (*outputs, *(g for g in grads if g is not None))]

    got = run()
    with anychip.policy(pin={name: "reference"}):
        return apart(got, run())


ROWS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, r, w, b: ops.rms_norm(x, w, eps=1e-6),
    "layer_norm": lambda x, r, w, b: ops.layer_norm(x, w, b, eps=1e-5),
    "add_rms_norm": lambda x, r, w, b: ops.add_rms_norm(x, r, w, eps=1e-6),
    "add_layer_norm": lambda x, r, w, b: ops.add_layer_norm(x, r, w, b, eps=1e-5),
    "softmax": lambda x, r, w, b: ops.softmax(x, scale=0.5),
    "gelu": lambda x, r, w, b: ops.gelu(x, approximate="tanh"),
    "bias_gelu": lambda x, r, w, b: ops.bias_gelu(x, w, approximate="tanh"),
    "swiglu": lambda x, r, w, b: ops.swiglu(x, r),
    "geglu": lambda x, r, w, b: ops.geglu(x, r, approximate="tanh"),
    "cross_entropy": lambda x, r, w, b: ops.cross_entropy(x, last_class(x), reduction="none"),
}


def last_class(x: Tensor) -> Tensor:
    """Targets that are the last class of every row."""
    return torch.full(x.shape[:-1], x.shape[-1] - 1, device=x.device)


def _empty(call: Callable[[Tensor, Tensor], Tensor]) -> Callable[[torch.device], str]:
    def ask(device: torch.device) -> str:
        for shape in ((0, 64), (0, 0)):
            y = call(drawn(*shape, device=device), drawn(shape[1], device=device))
            if y.shape != shape:
                return f"shape {tuple(y.shape)}, expected {shape}"
        return ""

    return ask


EMPTY = {
    "rms_norm": _empty(lambda x, w: ops.rms_norm(x, w, eps=1e-6)),
    "layer_norm": _empty(lambda x, w: ops.layer_norm(x, w, w, eps=1e-5)),
    "gelu": _empty(lambda x, w: ops.gelu(x)),
    "softmax": _empty(lambda x, w: ops.softmax(x)),
    "swiglu": _empty(lambda x, w: ops.swiglu(x, x)),
}


# Where a call comes from


def from_thread(call: Call) -> str:
    """The difference between this thread's results and another one's."""
    found: list[list[Tensor]] = []
    want = call()
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return different(found[0], want) if found else "the thread's call raised"


def on_stream(stage: Stage, call: Call) -> str:
    """The difference between the first stream's results and another one's."""
    want = call()
    stream, before = stage.chip.stream(), stage.chip.current_stream()
    stream.wait_stream(before)
    with stage.chip.use_stream(stream):
        got = call()
    before.wait_stream(stream)
    return different(got, want)


def in_graph(stage: Stage, call: Call) -> str:
    """The difference between a plain call and the second replay of a recorded one."""
    if call.spec.signature.count("!"):
        return ""  # what it writes is what it reads: each replay goes on from there
    args, leaves = call.fresh()
    graph = stage.chip.capture(lambda: call.on(args, leaves))
    graph.replay()
    with torch.no_grad():
        for t in leaves:
            t.mul_(0.5)
    graph.replay()
    got = [t.clone() for t in graph.result]
    return different(got, call.on(args, leaves))


# More than 2^31 elements


def _by_row(call: Callable[..., Any], width: int) -> Callable[[int, torch.device], str]:
    """Compares the last rows of a large array with the same rows alone."""

    def ask(numel: int, device: torch.device) -> str:
        x = torch.empty(-(-numel // width), width, dtype=torch.bfloat16, device=device).normal_()
        weight = drawn(width, device=device)
        last = call(x[-4:].clone(), weight)
        y = call(x, weight)
        return different([y[-4:]], [last])

    return ask


def large_dropout(numel: int, device: torch.device) -> str:
    """The mask at the end is that of the words which belong there."""
    x = torch.ones(numel, dtype=torch.bfloat16, device=device)
    start, rng = numel - 4096, torch.tensor([7, 11], device=device)
    later = rng + torch.tensor([0, start // 4], device=device)
    y = ops.dropout(x, rng, p=0.3)
    return different([y[start:]], [ops.dropout(x[start:].clone(), later, p=0.3)])


LARGE: dict[str, Callable[[int, torch.device], str]] = {
    "gelu": _by_row(lambda x, w: ops.gelu(x, approximate="tanh"), 4096),
    "swiglu": _by_row(lambda x, w: ops.swiglu(x, x), 4096),
    "rms_norm": _by_row(lambda x, w: ops.rms_norm(x, w, eps=1e-6), 8192),
    "layer_norm": _by_row(lambda x, w: ops.layer_norm(x, w, w, eps=1e-5), 8192),
    "softmax": _by_row(lambda x, w: ops.softmax(x, scale=0.5), 4096),
    "cross_entropy": _by_row(
        lambda x, w: ops.cross_entropy(x, last_class(x), reduction="none"), 4096
    ),
    "dropout": large_dropout,
}


if __name__ == "__main__":
    main(command)
