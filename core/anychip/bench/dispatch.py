"""What a call costs before any work is done: both doors next to torch's own ways.

The operator has three tensor arguments and does nothing: its row returns a tensor made beforehand.
"""

from collections.abc import Callable
from typing import Any

import pluggy
import torch
from torch import Tensor

from anychip import runtime
from anychip.bench.report import Report, Timing
from anychip.bench.timing import Samples, interleave
from anychip.contract import Backend, Bound, Cost, OperatorSpec
from anychip.dispatch import native, promise
from anychip.dispatch.operator import Operator, registered
from anychip.dispatch.resolution import EXAMINED

_NAMESPACE = "anychip_bench"
_NAME = "three_tensors"
LIMITS_US = {
    "ops, no gradient": ("direct call", 1.0),
    "ops, gradient": ("autograd.Function, gradient", 2.0),
    "torch.ops, no gradient": ("direct call", 8.0),
    "torch.ops, gradient": ("direct call", 8.0),
}
"""What a call by one of the doors may take more than another call."""


def run(backend: Backend, *, rounds: int, progress: Callable[[int], None]) -> Report:
    """Times the doors and their peers on one host thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with runtime.policy(pin={_operator(backend).spec.name: "reference"}):
            calls = _calls(backend)
            for call in [*calls.values()] * 100:
                call()
            taken = interleave(
                calls,
                rounds=rounds,
                window=0.0005,  # shorter than a slice of the scheduler
                synchronize=backend.synchronize,
                progress=progress,
            )
    finally:
        torch.set_num_threads(threads)
    over: dict[str, tuple[str, float | None]] = {
        **LIMITS_US,
        "in Python, no gradient": ("direct call", None),
        "in Python, gradient": ("autograd.Function, gradient", None),
        "results examined": ("direct call", None),
    }
    rows = [_row(s, taken, *over.get(s.name, (None, None))) for s in taken.values()]
    served = f"in Python: {native.problem}" if native.module is None else "in C"
    return Report(
        subject="dispatch", backend=backend.name, device=backend.identity(), threads=1, rows=rows,
        notes=(
            "over: median over rounds of the difference within a round",
            f"ops: calls are taken {served}; in Python: the same without the native module",
            f"results examined: on the first call with a key and on one of {EXAMINED} after it, "
            "which the other lines contain; on every call under strict",
        ),
    )  # fmt: skip


def _row(
    samples: Samples, taken: dict[str, Samples], base: str | None, limit: float | None
) -> Timing:
    facts: dict[str, Any] = {"x torch.add": samples.ratio(taken["torch.add"])}
    if base is not None:
        facts |= {"over": base, "over us": samples.over(taken[base]) * 1e6}
    if limit is not None:
        facts["goal us"] = limit
    return Timing(
        name=samples.name,
        microseconds=samples.median * 1e6,
        best_microseconds=samples.best * 1e6,
        facts=facts,
    )


def _operator(backend: Backend) -> Operator[..., Any]:
    known = registered().get(_NAME)
    if known is not None:
        return known
    made = torch.empty(4, device=backend.device())

    def forward(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return made

    def backward(grad: Tensor, *, needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
        return grad, grad, grad

    return runtime.register(
        OperatorSpec(
            name=_NAME,
            namespace=_NAMESPACE,
            signature="(Tensor a, Tensor b, Tensor c) -> Tensor",
            equation="nothing is computed",
            source="for this benchmark only",
            forward=forward,
            backward=backward,
            fake=lambda a, b, c: a.new_empty(4),
            differentiable=("a", "b", "c"),
            samples=lambda maker: (),
            cost=lambda a, b, c: Cost(0, 0),
            bound=Bound(0, 0, lambda *_: 1),
        )
    )


def _calls(backend: Backend) -> dict[str, Callable[[], object]]:
    operator = _operator(backend)
    direct, door = operator.spec.forward, torch.ops.anychip_bench.three_tensors.default
    a, b, c = (torch.ones(4, device=backend.device()) for _ in range(3))
    p = torch.ones(4, device=backend.device(), requires_grad=True)
    known = operator.kernel.key((a, b, c))
    assert known is not None
    choice = operator.kernel.choose(known[1], (a, b, c), {})
    node = _node(direct)
    packaged, custom = _peers(direct)
    hook = _hook(direct)
    return {
        "direct call": lambda: direct(a, b, c),
        "ops, no gradient": lambda: operator(a, b, c),
        "ops, gradient": lambda: operator(p, b, c),
        "in Python, no gradient": lambda: Operator.__call__(operator, a, b, c),
        "in Python, gradient": lambda: Operator.__call__(operator, p, b, c),
        "results examined": lambda: promise.examined(choice, (a, b, c), {}),
        "autograd.Function, gradient": lambda: node.apply(p, b, c),
        "torch.ops, no gradient": lambda: door(a, b, c),
        "torch.ops, gradient": lambda: door(p, b, c),
        "torch.library Python operator": lambda: packaged(a, b, c),
        "torch.library.custom_op": lambda: custom(a, b, c),
        "pluggy hook, one plugin": lambda: hook(a=a, b=b, c=c),
        "torch.add": lambda: torch.add(a, b),
        "torch.add, gradient": lambda: torch.add(p, b),
    }


def _node(direct: Callable[..., Tensor]) -> type[torch.autograd.Function]:
    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return direct(a, b, c)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            return grad, grad, grad

    return Plain


_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def _peers(direct: Callable[..., Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The same function as a Library operator and as a custom_op, registered on first use."""
    if not hasattr(torch.ops.anychip_bench, "plain_library"):
        _library.define("plain_library(Tensor a, Tensor b, Tensor c) -> Tensor")
        _library.impl("plain_library", direct, "CompositeExplicitAutograd")
        # A custom_op may not return a tensor that it did not make.
        torch.library.custom_op(
            f"{_NAMESPACE}::custom",
            lambda a, b, c: torch.empty_like(a),
            mutates_args=(),
            schema="(Tensor a, Tensor b, Tensor c) -> Tensor",
        )
    ops = torch.ops.anychip_bench
    return ops.plain_library.default, ops.custom.default


def _hook(direct: Callable[..., Tensor]) -> Callable[..., Any]:
    spec, impl = pluggy.HookspecMarker(_NAMESPACE), pluggy.HookimplMarker(_NAMESPACE)

    class Specification:
        @spec(firstresult=True)
        def three(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor | None:
            return None

    class Plugin:
        @impl
        def three(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return direct(a, b, c)

    manager = pluggy.PluginManager(_NAMESPACE)
    manager.add_hookspecs(Specification)
    manager.register(Plugin())
    hook: Callable[..., Any] = manager.hook.three
    return hook
