"""The operators at training sizes: this backend's rows, the reference, torch eager, the bound.

The bound is the bytes that the spec says a call must move, over the rate of a copy measured in the
same rounds. A call faster than its bound read from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anychip import runtime
from anychip.bench.report import Report, Row
from anychip.bench.timing import interleave
from anychip.contract import Backend, SampleMaker
from anychip.dispatch.operator import Operator, registered

_TOKENS, _HIDDEN, _VOCABULARY = 4096, 1024, 8192
_COPY_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One operator at one size, with torch's own way to do the same, if there is one."""

    args: tuple[Any, ...]
    attrs: Mapping[str, Any]
    eager: Callable[..., Any] | None


def run(
    backend: Backend,
    *,
    rounds: int,
    progress: Callable[[int], None],
    names: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Report:
    """Times forward, and forward with backward where there is one.

    Args:
        names: operators; all when empty.
        dtype: of the floating-point arguments that the specs leave free.

    Raises:
        ValueError: an operator that has no case here.
    """
    maker = SampleMaker(backend.device(), dtype)
    known = _cases()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no benchmark for {', '.join(unknown)}; there are {', '.join(known)}")
    rows: list[Row] = []
    for name in names or tuple(known):
        rows += _rows(backend, registered()[name], known[name](maker), rounds, progress)
    return Report(
        subject=f"operators, {str(dtype).removeprefix('torch.')}",
        backend=backend.name,
        device=backend.identity(),
        threads=torch.get_num_threads(),
        rows=rows,
        notes=(
            "x bound: time over (bytes of the spec / rate of a copy in the same rounds)",
            "x torch, x reference: their time over ours, above 1 is faster",
        ),
    )


def _rows(
    backend: Backend,
    operator: Operator[..., Any],
    case: Case,
    rounds: int,
    progress: Callable[[int], None],
) -> list[Row]:
    name, found = operator.spec.name, []
    directions = [False] if operator.gradient is None else [False, True]
    for backward in directions:
        source = torch.empty(_COPY_BYTES // 4, device=backend.device())
        target = torch.empty_like(source)
        calls: dict[str, Callable[[], object]] = {
            "ours": _call(operator, case, backward, {}),
            "reference": _call(operator, case, backward, {name: "reference"}),
            "copy": partial(target.copy_, source),
        }
        if case.eager is not None:
            calls["torch"] = _call(case.eager, case, backward, None, operator)
        taken = interleave(
            calls, rounds=rounds, window=0.1, synchronize=backend.synchronize, progress=progress
        )
        nbytes = _nbytes(operator, case, backward)
        facts: dict[str, Any] = {
            "GB/s": nbytes / taken["ours"].median / 1e9,
            "x bound": taken["ours"].ratio(taken["copy"]) * 2 * _COPY_BYTES / nbytes,
            "x reference": taken["reference"].ratio(taken["ours"]),
        }
        if "torch" in taken:
            facts["x torch"] = taken["torch"].ratio(taken["ours"])
        found.append(
            Row(
                name=f"{name} {'forward + backward' if backward else 'forward'}",
                microseconds=taken["ours"].median * 1e6,
                best_microseconds=taken["ours"].best * 1e6,
                facts=facts,
            )
        )
    return found


def _nbytes(operator: Operator[..., Any], case: Case, backward: bool) -> int:
    spec = operator.spec
    total = spec.cost(*case.args, **case.attrs).nbytes
    if backward and spec.backward_cost is not None:
        total += spec.backward_cost(*case.args, **case.attrs).nbytes
    return total


def _call(
    function: Callable[..., Any],
    case: Case,
    backward: bool,
    pin: Mapping[str, str] | None,
    operator: Operator[..., Any] | None = None,
) -> Callable[[], object]:
    """A closure that runs a case once; with a backward, through autograd with a given gradient."""
    made = operator or function
    assert isinstance(made, Operator)
    args = list(case.args)
    leaves: list[Tensor] = []
    if backward:
        assert made.gradient is not None
        for place in made.gradient.differentiable:
            if args[place] is not None:
                args[place] = args[place].detach().requires_grad_()
                leaves.append(args[place])

    def policy() -> AbstractContextManager[Any]:
        return runtime.policy(pin=pin) if pin else nullcontext()

    def forward() -> Any:
        with policy():
            return function(*args, **case.attrs)

    if not backward:
        return forward
    outputs = _listed(forward())
    grads = [torch.ones_like(y) for y in outputs]

    def both() -> object:
        with policy():
            return torch.autograd.grad(_listed(function(*args, **case.attrs)), leaves, grads)

    return both


def _listed(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _cases() -> dict[str, Callable[[SampleMaker], Case]]:
    return {
        "rms_norm": _rms_norm,
        "layer_norm": _layer_norm,
        "dropout": _dropout,
        "gelu": lambda m: Case(
            args=(m.normal(_TOKENS, _HIDDEN),),
            attrs={"approximate": "tanh"},
            eager=functional.gelu,
        ),
        "swiglu": lambda m: Case(
            args=(m.normal(_TOKENS, _HIDDEN), m.normal(_TOKENS, _HIDDEN)),
            attrs={},
            eager=lambda gate, up: functional.silu(gate) * up,
        ),
        "rope": _rope,
        "cross_entropy": _cross_entropy,
        "l2_norm": lambda m: Case(
            args=([m.normal(_TOKENS, _HIDDEN)],),
            attrs={},
            eager=torch.nn.utils.get_total_norm,
        ),
        "adamw": _adamw,
    }


def _rms_norm(m: SampleMaker) -> Case:
    def eager(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    args = (m.normal(_TOKENS, _HIDDEN), m.normal(_HIDDEN))
    return Case(args=args, attrs={"eps": 1e-6}, eager=eager)


def _layer_norm(m: SampleMaker) -> Case:
    def eager(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    args = (m.normal(_TOKENS, _HIDDEN), m.normal(_HIDDEN), m.normal(_HIDDEN))
    return Case(args=args, attrs={"eps": 1e-5}, eager=eager)


def _dropout(m: SampleMaker) -> Case:
    args = (m.normal(_TOKENS, _HIDDEN), m.rng(1, 0))
    return Case(args=args, attrs={"p": 0.1}, eager=lambda x, rng, *, p: functional.dropout(x, p))


def _rope(m: SampleMaker) -> Case:
    heads, dim = _HIDDEN // 64, 64
    angles = m.normal(_TOKENS // 4, dim // 2, dtype=torch.float32)
    q, k = (m.normal(4, _TOKENS // 4, heads, dim) for _ in range(2))

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def eager(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None].to(q.dtype), sin[:, None].to(q.dtype)
        return turn(q, cos, sin), turn(k, cos, sin)

    args = (q, k, angles.cos(), angles.sin())
    return Case(args=args, attrs={"interleaved": False}, eager=eager)


def _cross_entropy(m: SampleMaker) -> Case:
    def eager(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits, target)

    args = (m.normal(_TOKENS // 4, _VOCABULARY), m.integers(_VOCABULARY, _TOKENS // 4))
    return Case(args=args, attrs={}, eager=eager)


def _adamw(m: SampleMaker) -> Case:
    sizes = [(_HIDDEN, _HIDDEN)] * 8
    params, moments, squares = (
        [m.normal(*size, dtype=torch.float32).square() for size in sizes] for _ in range(3)
    )
    grads = [p * 1e-3 for p in params]
    steps = [m.scalar(1.0) for _ in sizes]

    def eager(p: Any, g: Any, first: Any, second: Any, lr: Tensor, *_: Any) -> None:
        torch._fused_adamw_(
            p,
            g,
            first,
            second,
            [],
            steps,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    # torch's kernel is told the number of this step, ours the number of those before it.
    args = (params, grads, moments, squares, m.scalar(1e-3), m.scalar(0.0), None, None, None, None)
    return Case(args=args, attrs={}, eager=eager)
