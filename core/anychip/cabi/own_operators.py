"""anychip's own operators in a chip's library, listed there by name: ``anychip::rms_norm``.

A row calls the library by an operator of ``torch.ops.anychip_library`` that the bridge has made:
arguments, then the tensors to be written, whose shapes are the spec's to say. A backward's name is
``anychip::rms_norm.backward``. Names that no spec has are never called.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip.contract import OperatorSpec, OperatorTable
from anychip.operators import all_specs

Serve = Callable[[str, str], Callable[..., bool]]
"""From a listed name and a schema to the operator of torch's that calls the library."""
_BACKWARD = ".backward"


def rows(library: str, listed: Iterable[str], serve: Serve) -> OperatorTable:
    """The rows for those listed names that are operators of anychip.

    Args:
        library: the file's name, for people.
    """
    table = OperatorTable(declines=True)
    specs = {f"{s.namespace}::{s.name}": s for s in all_specs()}
    for name in listed:
        spec = specs.get(name.removesuffix(_BACKWARD))
        is_backward = name.endswith(_BACKWARD)
        if spec is None or (is_backward and spec.backward is None):
            continue
        function = _backward(spec, name, serve) if is_backward else _forward(spec, name, serve)
        function.__module__, function.__qualname__ = library, name
        (table.backward if is_backward else table.forward)(spec.name)(function)
    return table


def _forward(spec: OperatorSpec, name: str, serve: Serve) -> Callable[..., Any]:
    tensors, attributes = _arguments(spec)
    call = _Call(name, [f"{kind} {argument}" for argument, kind in tensors], attributes, serve)

    def forward(*args: Any, **attrs: Any) -> Any:
        results = spec.fake(*args, **attrs)
        written = (results,) if isinstance(results, Tensor) else results or ()
        return results if call(args, attrs, written) else NotImplemented

    return forward


def _backward(spec: OperatorSpec, name: str, serve: Serve) -> Callable[..., Any]:
    num_grads = spec.signature.rpartition("->")[2].count("Tensor")
    names = (*(f"grad{i}" for i in range(num_grads)), *spec.saved)
    call = _Call(name, [f"Tensor? {argument}" for argument in names], _arguments(spec)[1], serve)

    def backward(*args: Any, needs: Sequence[bool], **attrs: Any) -> Any:
        given = dict(zip(names, args, strict=True))
        wanted = zip(spec.differentiable, needs, strict=True)
        results = [_gradient(spec, given, argument) if need else None for argument, need in wanted]
        return results if call(args, attrs, results) else NotImplemented

    return backward


class _Call:
    """One of the library's operators; torch's is made by the first call, when there is a device."""

    def __init__(
        self, name: str, tensors: Sequence[str], attributes: Mapping[str, str], serve: Serve
    ) -> None:
        self._names = tuple(attributes)
        flat = [*tensors, *(f"{kind} {n}" for n, kind in attributes.items()), "Tensor?[] results"]
        schema = f"{re.sub(r'[:.]+', '_', name)}({', '.join(flat)}) -> bool"
        self._made: Callable[[], Callable[..., bool]] = partial(serve, name, schema)
        self._operator: Callable[..., bool] | None = None

    def __call__(
        self, args: Sequence[Any], attrs: Mapping[str, Any], results: Sequence[Tensor | None]
    ) -> bool:
        if self._operator is None:
            self._operator = self._made()
        return self._operator(*args, *(attrs[name] for name in self._names), list(results))


def _arguments(spec: OperatorSpec) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Names and types of a spec's tensors, and of its attributes."""
    text = re.sub(r"\(\w!\)|=[^,)]*", "", spec.signature.rpartition(") ->")[0][1:])
    tensors, _, attributes = (part.strip(", ") for part in text.partition("*"))
    split = [[w.split()[::-1] for w in part.split(", ") if w] for part in (tensors, attributes)]
    return [(name, kind) for name, kind in split[0]], {name: kind for name, kind in split[1]}


def _gradient(spec: OperatorSpec, given: Mapping[str, Any], name: str) -> Tensor | None:
    """To be written: as an argument, or as what the spec says is like it; None where neither is."""
    like, _, dim = spec.shaped_like.get(name, name).rstrip("]").partition("[")
    tensor = given.get(name if name in given else like)
    if tensor is None:
        return None
    if name in given or not dim:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    empty: Tensor = tensor.new_empty(tensor.shape[int(dim)])
    return empty
