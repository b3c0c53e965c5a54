"""A step of each update rule over a model's parameters, next to torch.optim's and the bound.

Ours is :class:`anychip.train.zero.Optimizer` as a trainer calls it. The bound is memory: what a
rule must read and write, touched once by torch in the same rounds, in place where it writes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip.bench.report import Report, Timing
from anychip.bench.timing import Samples, Timed, interleave
from anychip.comm import alone
from anychip.contract import Backend
from anychip.operators.adamw_8bit import BLOCK
from anychip.train import optim, zero

NUM_PARAMS = 25_000_000
_LAYERS = 12
_DECAY = 0.01
_LR = 1e-3


class Setting(NamedTuple):
    """An update rule, and its peers.

    Attributes:
        rule: ours.
        written: bytes of the states over those of the parameters.
        torch: torch's optimizer with the same settings, or None when it has none.
        deepspeed: name of DeepSpeed's class for the host, with its settings.
    """

    rule: optim.Rule
    written: float
    torch: Callable[..., torch.optim.Optimizer] | None
    deepspeed: tuple[str, Mapping[str, Any]] | None


def settings() -> dict[str, Setting]:
    """By rule."""
    decay: dict[str, Any] = {"weight_decay": _DECAY}
    return {
        "adamw": Setting(
            optim.adamw(_LR, **decay),
            2,
            lambda params, **how: torch.optim.AdamW(params, _LR, **decay, **how),
            ("DeepSpeedCPUAdam", {"lr": _LR, **decay, "adamw_mode": True}),
        ),
        "adamw-8bit": Setting(
            optim.adamw(_LR, **decay, states="8bit"), (2 + 2 * 4 / BLOCK) / 4, None, None
        ),
        "sgd": Setting(
            optim.sgd(_LR, momentum=0.9, **decay),
            1,
            lambda params, **how: torch.optim.SGD(params, _LR, momentum=0.9, **decay, **how),
            None,
        ),
        "lion": Setting(
            optim.lion(_LR, **decay), 1, None, ("DeepSpeedCPULion", {"lr": _LR, **decay})
        ),
        "lamb": Setting(optim.lamb(_LR, **decay), 2, None, None),
    }


def run(
    backend: Backend,
    *,
    rounds: int,
    progress: Callable[[int], None],
    names: tuple[str, ...] = (),
    num_params: int = NUM_PARAMS,
    window: float = 0.1,
) -> Report:
    """Times a step over one tensor, and over the 100 tensors of a decoder of the same size.

    Args:
        names: rules; all when empty.
        num_params: float32 parameters in all, about.
        window: seconds that one candidate runs per round, about.

    Raises:
        ValueError: a rule that there is not, or too few parameters for a decoder.
    """
    known = settings()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no rule {', '.join(unknown)}; there are {', '.join(known)}")
    decoder = decoder_shapes(num_params)
    total = sum(map(math.prod, decoder))
    shapes: dict[str, list[tuple[int, ...]]] = {
        "1 tensor": [(total,)],
        f"{len(decoder)} tensors": decoder,
    }
    rows: list[Timing] = []
    missing: list[str] = []
    for name in names or tuple(known):
        for label, sizes in shapes.items():
            taken = interleave(
                _calls(backend, known[name], sizes, missing),
                rounds=rounds,
                window=window,
                synchronize=backend.synchronize,
                progress=progress,
            )
            rows += [_row(f"{name}, {label}", known[name], total, s, taken) for s in taken.values()]
    setting = f"{total} float32 parameters with gradients; the learning rate is a number"
    return Report(
        subject="optimizers",
        backend=backend.name,
        device=backend.identity(),
        threads=torch.get_num_threads(),
        rows=rows,
        notes=(setting, *_NOTES, *dict.fromkeys(missing)),
    )


_NOTES = (
    "GB/s, x bound: gradients, parameters and states read, parameters and states written, each "
    "once; the bound is such traffic without arithmetic in the same rounds",
    "x ours: its time over ours, above 1 is slower",
)


def decoder_shapes(num_params: int) -> list[tuple[int, ...]]:
    """The 100 parameters of a decoder of 12 layers with about so many elements.

    Raises:
        ValueError: they would be narrower than 8.
    """
    # Embedding of 24 D rows, positions of D, and 12 D^2 per layer: 169 D^2, without vectors.
    width = math.isqrt(num_params // 169) // 8 * 8
    if width < 8:
        raise ValueError(f"at least {169 * 64} parameters expected, got {num_params}")
    layer: list[tuple[int, ...]] = [
        (width,),
        (3 * width, width),
        (width, width),
        (width,),
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
        (width,),
    ]
    return [(24 * width, width), (width, width), *layer * _LAYERS, (width,), (width,)]


def _row(
    group: str, setting: Setting, total: int, samples: Samples, taken: Mapping[str, Samples]
) -> Timing:
    facts = {
        "GB/s": _nbytes(setting, total) / samples.median / 1e9,
        "x bound": samples.ratio(taken[_BOUND]),
        "x ours": samples.ratio(taken[_OURS]),
    }
    return Timing(
        name=f"{group}: {samples.name}",
        microseconds=samples.median * 1e6,
        best_microseconds=samples.best * 1e6,
        facts=facts,
    )


def _nbytes(setting: Setting, total: int) -> float:
    return 4 * total * (3 + 2 * setting.written)


_OURS, _BOUND = "ours", "traffic"


def _calls(
    backend: Backend, setting: Setting, shapes: list[tuple[int, ...]], missing: list[str]
) -> dict[str, Timed]:
    device = backend.device()
    params = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    comm = alone()
    comm.device = backend.device_type
    calls: dict[str, Timed] = {_OURS: zero.Optimizer(params, setting.rule, comm).step}
    if setting.torch is not None:
        for how in ("for-loop", "foreach", "fused"):
            options = {"foreach": how == "foreach", "fused": how == "fused"}
            calls[f"torch {how}"] = setting.torch(params, **options).step
    if setting.deepspeed is not None:
        name, arguments = setting.deepspeed
        try:
            calls[name] = _of_deepspeed(backend, name, params, arguments)
        except RuntimeError as error:
            missing.append(f"{name} is left out: {error}")
    calls[_BOUND] = _traffic(backend, sum(map(math.prod, shapes)), setting.written)
    return calls


def _of_deepspeed(
    backend: Backend, name: str, params: list[Tensor], options: Mapping[str, Any]
) -> Timed:
    """A step of an optimizer of DeepSpeed's, which it compiles when it is first made.

    Raises:
        RuntimeError: it cannot be had here, and why.
    """
    if backend.device_type != "cpu":
        raise RuntimeError("it updates parameters on the host only")
    if find_spec("deepspeed") is None:
        raise RuntimeError("deepspeed is not installed (pip install anychip[bench])")
    try:
        package = "lion" if "Lion" in name else "adam"
        made = getattr(importlib.import_module(f"deepspeed.ops.{package}"), name)
        return made(params, **options).step  # type: ignore[no-any-return]
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def _traffic(backend: Backend, total: int, states: float) -> Timed:
    """Reads gradients, and reads and writes parameters and states, as one pass must."""
    sizes = (total, total, round(total * states))
    grads, *written = (torch.ones(size, device=backend.device()) for size in sizes)

    def touch() -> None:
        for tensor in written:
            tensor.mul_(1.0)
        grads.sum()

    return touch
