"""No size, address or code, however wrong, ends the process or is taken for right.

The calls are made from the signatures that the module states, in a process of their own: run as a
program, this file prints every call before it makes it, and what came of it when that was wrong.
"""

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from anychip_cpu import native

HOSTILE = (-1, 0, 2**31, 2**62, 2**63 - 1)
LARGEST = 2**47
"""Elements that an address space has room for."""
NUMBERS = {"ignore_index", "seed", "offset", "column", "first"}
"""Of any value, as far as memory goes."""
CODES = {"dtype": 3, "reduction": 3, "format": 8, "activation": 8}
"""How many numbers there are of each."""
HELD = {"Tensors", "Update"}
"""Lists that the module makes, as arguments of its kernels."""
BUFFER = 4096
UNBOUND = {
    "available_isas", "build_info", "has_block_products", "num_threads", "openmp_status", "set_isa",
    "set_last_cache",
}  # fmt: skip
"""Functions that take no size, address or code, or one of which any is right."""

Parameters = Mapping[str, str]
Call = tuple[dict[str, Any], bool]
"""Arguments, and whether ValueError is the only right answer."""


def parameters(function: Any) -> Parameters:
    """Kind of each parameter: size, address, an enum's, number, flag, held, or a list."""
    text = function.__doc__.partition("(")[2]
    found = dict(re.findall(r"(\w+): ([^,=)]+)", text))
    found.pop("self", None)
    return {name: _kind(name, kind) for name, kind in found.items()}


def _kind(name: str, kind: str) -> str:
    one = kind.strip()
    if "Supports" in kind:  # not a kernel: the text is pybind11's
        sizes = {"numels", "nwords", "columns", "depth", "count", *NUMBERS}
        one = "int" if name in sizes else "dtype" if "dtypes" in name else "address"
    if one == "int":
        one = "number" if name in NUMBERS else "size"
    return f"{one}[]" if "Sequence" in kind else one


def right(kinds: Parameters, held: Any) -> dict[str, Any]:
    """Arguments that fit together: four elements everywhere, and a buffer for each address."""

    def value(name: str, kind: str) -> Any:
        if kind.endswith("[]"):
            return [value(name, kind[:-2]) for _ in range(2)]
        if kind == "address":
            buffers.append(torch.zeros(BUFFER, dtype=torch.uint8))
            return buffers[-1].data_ptr()
        known = {**dict.fromkeys(CODES, 0), **dict.fromkeys(HELD, held)}
        return {**known, "size": 4, "number": 0, "float": 0.0, "bool": False}[kind]

    made = {name: value(name, kind) for name, kind in kinds.items()}
    # What only one of them may be, or what has one value.
    fixed = {"up": 0, "terms": 1, "ends_q": 0, "ends_k": 0}
    return {**made, **{name: one for name, one in fixed.items() if name in made}}


buffers: list[torch.Tensor] = []


def calls(kinds: Parameters, base: Mapping[str, Any]) -> Iterator[Call]:
    """Every pair of hostile sizes, every address that is missing, every code that is unknown."""
    yield dict(base), False
    null = {n: [0] * 2 if "[]" in k else 0 for n, k in kinds.items() if "address" in k}
    sizes = [n for n, k in kinds.items() if k.startswith("size")]
    pairs = [(n,) for n in sizes] + list(itertools.combinations(sizes, 2))
    for names in pairs:
        for values in itertools.product(HOSTILE, repeat=len(names)):
            changed = {
                n: [v, base[n][1]] if isinstance(base[n], list) else v
                for n, v in zip(names, values, strict=True)
            }
            # What may exist is not in the buffers: without addresses it must be refused, too.
            missing = null if 2**31 in values else {}
            yield {**base, **changed, **missing}, any(not 0 <= v <= LARGEST for v in values)
    yield {**base, **null}, False
    for name, kind in kinds.items():
        for wrong in (-1, CODES[kind]) if kind in CODES else (0,) if kind == "address" else ():
            yield {**base, name: wrong}, kind in CODES
        if kind.endswith("[]"):
            yield {**base, name: base[name] * 2}, True
            yield {**base, name: base[name][:1]}, True


def try_all(function: Callable[..., Any], name: str, base: Mapping[str, Any]) -> None:
    for number, (arguments, refused) in enumerate(calls(parameters(function), base)):
        print(name, number, arguments, flush=True)
        try:
            function(**arguments)
            answer = "was taken"
        except (ValueError, IndexError, MemoryError) as error:
            answer = "was refused" if isinstance(error, ValueError) else repr(error)
        if (refused and answer != "was refused") or (not number and answer != "was taken"):
            print(f"WRONG: {name} {arguments} {answer}", flush=True)


def main() -> None:
    module: Any = native.kernels
    names = {n for n in dir(module) if callable(getattr(module, n))} - UNBOUND - HELD
    for name in sorted(names):
        function = getattr(module, name)
        kinds = parameters(function)
        held = HELD & {*kinds.values()}
        if not held:
            try_all(function, name, right(kinds, None))
            continue
        make = getattr(module, held.pop())
        whole = right(parameters(make.__init__), None)
        try_all(function, name, right(kinds, make(**whole)))

        def with_lists(
            function: Any = function, kinds: Parameters = kinds, make: Any = make, **lists: Any
        ) -> None:
            function(**right(kinds, make(**lists)))

        with_lists.__doc__ = make.__init__.__doc__
        try_all(with_lists, f"{name} {make.__name__}", whole)


@pytest.mark.skipif(native.kernels is None, reason=str(native.problem))
def test_native_function_with_hostile_arguments_raises_and_never_crashes() -> None:
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=600, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"exit code {done.returncode} at: {lines[-1]}\n{done.stderr}"
    assert not [line for line in lines if line.startswith("WRONG")]
    functions = {line.split()[0] for line in lines}
    assert len(lines) > 900
    assert {"lamb_sums_of_squares", "rms_norm_forward", "philox", "rope", "clip"} <= functions


if __name__ == "__main__":
    main()
