"""Calls every native row of the CUDA backend with the samples of its specification.

    python -m tests.cuda_emulated.samples [--only OPERATOR ...]

For a build with a sanitizer, whose reports are the result: the numbers are the business of the unit
tests and of the conformance suite. Gradients are asked for too.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anychip
from anychip import operators, ops
from anychip.contract import OperatorSpec, SampleMaker

DTYPES = (torch.float32, torch.bfloat16)


def call(spec: OperatorSpec, args: tuple[Any, ...], attrs: dict[str, Any]) -> None:
    """One call, and its gradients where it has some."""
    names = [a.name for a in torch._C.parse_schema(f"x::y{spec.signature}").arguments]
    args = tuple(
        _leaf(argument) if name in spec.differentiable else argument
        for name, argument in zip(names, args, strict=False)
    )
    function: Callable[..., Any] = getattr(ops, spec.name)
    result = function(*args, **attrs)
    outputs = [result] if isinstance(result, Tensor) else list(result or ())
    outputs = [output for output in outputs if output.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _leaf(argument: Any) -> Any:
    return argument.clone().requires_grad_() if isinstance(argument, Tensor) else argument


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_emulated.samples")
    parser.add_argument("--only", nargs="*", default=None, help="names of operators")
    given = parser.parse_args()
    torch.set_num_threads(1)
    backend = anychip.use("cuda-emulated")
    calls = 0
    for spec in operators.all_specs():
        native = backend.operators.rows(spec.name, "forward")
        if not native or (given.only is not None and spec.name not in given.only):
            continue
        start = time.perf_counter()
        for dtype in DTYPES:
            for sample in spec.samples(SampleMaker(torch.device("cpu"), dtype)):
                if spec.differentiable:
                    call(spec, sample.args, dict(sample.attrs))
                else:
                    getattr(ops, spec.name)(*sample.args, **sample.attrs)
                calls += 1
        print(f"{spec.name}: {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{calls} calls")
    return 0 if calls else 1


if __name__ == "__main__":
    sys.exit(main())
