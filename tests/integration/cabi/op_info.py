"""torch's own operator tests: sample inputs of its OpInfo database, on a chip next to the host.

``python -m tests.integration.cabi.op_info LIBRARY [LAST]`` asks the operators of the slice, those
after LAST. It prints the names of all, and a line of JSON before and after each that is asked: what
crashes here is one operator that missed, and not the end of the others.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests import slices

SEED = 20240229
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"}
UNDEFINED |= {"new_empty_strided"}
"""Operators whose values nobody promises: shape, strides and dtype are compared."""


def operators() -> dict[str, Any]:
    """Every entry of the database that takes float32, by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    named = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
    return {name: op for name, op in named.items() if op.supports_dtype(torch.float32, "cpu")}


def samples(op: Any) -> Iterator[Any]:
    """The database's sample inputs, the same every time."""
    torch.manual_seed(SEED)
    yield from op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, and names of the host, become those of the device."""
    if isinstance(value, torch.Tensor):
        return moved_tensor(value.detach(), device).requires_grad_(value.requires_grad)
    if value == "cpu" or (isinstance(value, torch.device) and value.type == "cpu"):
        return device
    return value


def moved_tensor(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """With what else its storage holds, which a view may go on to."""
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        return value.to(device)
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device)
    return whole.as_strided(value.size(), value.stride(), value.storage_offset())


def computed(op: Any, sample: Any, device: torch.device) -> list[Any]:
    """Results and gradients; the gradients of the results are the same on every device."""
    first, args, kwargs = tree_map(
        lambda value: moved(value, device), (sample.input, sample.args, sample.kwargs)
    )
    torch.manual_seed(SEED)
    with torch.device(device):
        found = op(first, *args, **kwargs)
    found = sample.output_process_fn_grad(found) if op.supports_autograd else found
    results = [value for value in tree_leaves(found) if value is not None]
    wanted = [x for x in tree_leaves((first, args, kwargs)) if needs_gradient(x)]
    differentiable = [x for x in results if needs_gradient(x)]
    if not op.supports_autograd or not wanted or not differentiable:
        return results
    torch.manual_seed(SEED)
    weights = [torch.randn(x.shape, dtype=x.dtype).to(device) for x in differentiable]
    gradients = torch.autograd.grad(differentiable, wanted, weights, allow_unused=True)
    return [*results, *gradients]


def needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def compare(op: Any, got: list[Any], want: list[Any], device: torch.device) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if not isinstance(b, torch.Tensor):
            assert b is a or b == a or b != b, f"{a} is not {b}"
            continue
        assert a.device.type == device.type, f"the result is on {a.device}"
        assert (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
        if op.name in UNDEFINED:
            assert a.stride() == b.stride()
            continue
        torch.testing.assert_close(a.detach().cpu(), b.detach(), equal_nan=True)


def asked(op: Any, device: torch.device) -> tuple[int, list[str]]:
    """How many samples there are that the host takes, and why some missed."""
    count, misses = 0, []
    for sample in samples(op):
        try:
            want = computed(op, sample, torch.device("cpu"))
        except Exception:
            continue
        count += 1
        try:
            compare(op, computed(op, sample, device), want, device)
        except Exception as error:
            misses.append(f"{type(error).__name__}: {error}"[:600])
    return count, misses


def main(library: str, last: str = "") -> None:
    import anychip

    device = anychip.use(library).device(0)
    warnings.simplefilter("ignore")
    known = operators()
    print(json.dumps({"known": [*known]}), flush=True)
    part = slices.chosen()
    names = [name for name in known if part.takes(f"op_info/{name}")]
    for name in names[names.index(last) + 1 if last else 0 :]:
        print(json.dumps({"begin": name}), flush=True)
        count, misses = asked(known[name], device)
        print(json.dumps({"operator": name, "samples": count, "misses": misses}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
