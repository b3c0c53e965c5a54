"""Kernels that memory bounds, at training sizes: bytes of the specification over time.

Next to a copy in the same rounds, torch, torch.compile, Liger-Kernel and QuACK.

Each call takes other tensors than the one before it, so that none is found in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional

from anychip.bench import operators
from anychip.bench.case import Case, Make
from anychip.contract import SampleMaker
from benchmarks.cuda.stage import Stage, main, stage

ROTATE_NBYTES = 1 << 30
"""Five times the largest L2 of a device so far and more."""
NORMS = ((8192, 1024), (8192, 4096), (16384, 8192), (8192, 16384), (65536, 4096))
GATES = ((8192, 4096), (8192, 14336), (65536, 4096))
LOGITS = ((8192, 32000), (8192, 50257), (8192, 128256), (4096, 152064))
TINY = ((64, 128),)


class OnDevice(SampleMaker):
    """Draws on the device: a host needs minutes for such sizes."""

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, device=self.device, dtype=torch.float32)
        return (x * scale).to(dtype or self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self.device)


@stage(seconds=120.0)
@click.option("--only", multiple=True, metavar="OP", help="Operators; all when not given.")
@click.option("--no-compile", is_flag=True, help="Without torch.compile.")
def command(stage: Stage, only: tuple[str, ...], no_compile: bool) -> None:
    """Measure bandwidth of memory-bound operators in bfloat16."""
    maker = OnDevice(stage.chip.device(), torch.bfloat16)
    for name, make in cases(stage).items():
        if only and name.partition(" ")[0] not in only:
            continue
        if not stage.has_time(name):
            break
        stage.attempt(name, measure, stage, name, make, maker, not (no_compile or stage.tiny))


def measure(stage: Stage, name: str, make: Make, maker: SampleMaker, compiled: bool) -> None:
    """One operator at one size."""
    report = operators.run(
        stage.chip,
        rounds=3 if stage.tiny else 9,
        progress=lambda _: None,
        dtype=torch.bfloat16,
        compiled=compiled,
        reference=False,
        window=0.002 if stage.tiny else 0.02,
        cases={name: make},
        maker=maker,
        rotate_nbytes=1 << 16 if stage.tiny else ROTATE_NBYTES,
    )
    stage.reports.append(report)


def cases(stage: Stage) -> dict[str, Make]:
    """By operator and sizes; those in the largest part of a training step come first."""
    sizes = {"norms": NORMS, "gates": GATES, "logits": LOGITS}
    found: dict[str, Make] = {}
    for kind, makes in MAKES.items():
        for rows, width in TINY if stage.tiny else sizes[kind]:
            for name, make in makes.items():
                found[f"{name} {rows} x {width}"] = partial(make, stage, rows, width)
    return found


def usable(stage: Stage, ways: dict[str, Callable[..., Any]], case: Case) -> Case:
    """The case with those ways of others that are installed and run once, forward and back."""
    kept: dict[str, Callable[..., Any]] = {}
    for name, way in ways.items():
        try:
            args = [_leaf(argument) for argument in case.args]
            y = way(*args, **case.attrs)
            outputs = [y] if isinstance(y, Tensor) else list(y)
            slopes = [t for t in outputs if t.requires_grad]
            torch.autograd.backward(slopes, [torch.ones_like(t) for t in slopes])
        except Exception as error:  # another project's way is left out, and the run goes on
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            stage.notes.append(f"{name} is left out: {reason}")
            continue
        kept[name] = way
    stage.notes = list(dict.fromkeys(stage.notes))
    return Case(args=case.args, attrs=case.attrs, eager=case.eager, peers=kept)


def _leaf(argument: Any) -> Any:
    floating = isinstance(argument, Tensor) and argument.is_floating_point()
    return argument.detach().clone().requires_grad_() if floating else argument


def _liger(function: str) -> Callable[..., Any]:
    return getattr(import_module("liger_kernel.transformers.functional"), function)  # type: ignore[no-any-return]


def _quack(function: str) -> Callable[..., Any]:
    return getattr(import_module("quack"), function)  # type: ignore[no-any-return]


def _rms_norm(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    ways = {
        "Liger": lambda x, w, *, eps: _liger("liger_rms_norm")(x, w, eps),
        "QuACK": lambda x, w, *, eps: _quack("rmsnorm")(x, w, eps=eps),
    }
    args = (m.normal(rows, width), m.normal(width))
    return usable(stage, ways, Case(args=args, attrs={"eps": 1e-6}, eager=eager))


def _layer_norm(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    ways = {"Liger": lambda x, w, b, *, eps: _liger("liger_layer_norm")(x, w, b, eps)}
    args = (m.normal(rows, width), m.normal(width), m.normal(width))
    return usable(stage, ways, Case(args=args, attrs={"eps": 1e-5}, eager=eager))


def _add_rms_norm(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.rms_norm(total, (x.shape[-1],), weight, eps), total

    ways = {"Liger": lambda x, r, w, *, eps: _liger("liger_fused_add_rms_norm")(x, r, w, eps)}
    args = (m.normal(rows, width), m.normal(rows, width), m.normal(width))
    return usable(stage, ways, Case(args=args, attrs={"eps": 1e-6}, eager=eager))


def _bias_dropout_add(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, residual: Tensor, rng: Tensor, bias: Tensor, *, p: float) -> Tensor:
        return residual + functional.dropout(x + bias, p)

    args = (m.normal(rows, width), m.normal(rows, width), m.rng(1, 0), m.normal(width))
    return Case(args=args, attrs={"p": 0.1}, eager=eager)


def _dropout(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    args = (m.normal(rows, width), m.rng(1, 0))
    return Case(args=args, attrs={"p": 0.1}, eager=lambda x, rng, *, p: functional.dropout(x, p))


def _softmax(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(x: Tensor, mask: None, bias: None, *, scale: float, causal: bool) -> Tensor:
        return functional.softmax(x * scale, -1)

    ways = {"QuACK": lambda x, *_, **__: _quack("softmax")(x)}
    args, attrs = (m.normal(rows, width), None, None), {"scale": 1.0, "causal": False}
    return usable(stage, ways, Case(args=args, attrs=attrs, eager=eager))


def _gelu(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    args = (m.normal(rows, width),)
    return Case(args=args, attrs={"approximate": "tanh"}, eager=functional.gelu)


def _swiglu(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    ways = {"Liger": lambda gate, up: _liger("liger_swiglu")(gate, up)}
    args = (m.normal(rows, width), m.normal(rows, width))
    case = Case(args=args, attrs={}, eager=lambda gate, up: functional.silu(gate) * up)
    return usable(stage, ways, case)


def _geglu(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    def eager(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
        return functional.gelu(gate, approximate=approximate) * up

    ways = {"Liger": lambda gate, up, **_: _liger("liger_geglu")(gate, up)}
    args = (m.normal(rows, width), m.normal(rows, width))
    return usable(stage, ways, Case(args=args, attrs={"approximate": "tanh"}, eager=eager))


def _cross_entropy(stage: Stage, rows: int, width: int, m: SampleMaker) -> Case:
    ways = {
        "Liger": lambda x, target: _liger("liger_cross_entropy")(x, target),
        "QuACK": lambda x, target: _quack("cross_entropy")(x, target).mean(),
    }
    args = (m.normal(rows, width), m.integers(width, rows))
    return usable(stage, ways, Case(args=args, attrs={}, eager=functional.cross_entropy))


MAKES: dict[str, dict[str, Callable[..., Case]]] = {
    "norms": {
        "rms_norm": _rms_norm,
        "layer_norm": _layer_norm,
        "add_rms_norm": _add_rms_norm,
        "bias_dropout_add": _bias_dropout_add,
        "dropout": _dropout,
    },
    "gates": {"swiglu": _swiglu, "geglu": _geglu, "gelu": _gelu},
    "logits": {"cross_entropy": _cross_entropy, "softmax": _softmax},
}


if __name__ == "__main__":
    main(command)
