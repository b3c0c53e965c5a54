"""Do the tensors of a backward called by hand belong to one forward call?

``torch.ops.<namespace>.<name>_backward`` takes gradients, arguments, outputs and residuals from
anybody, and a row that is given addresses reads as far as the shapes of some of them say. autograd
gets them from one forward call; door 2 therefore never asks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.contract import OperatorSpec
from anychip.dispatch.signature import Signature

_KNOWN = 4096
"""Calls, by shapes and attributes, that are remembered as right."""


class Agreement:
    """Shapes and dtypes of one operator's backward calls; each combination is looked at once.

    What the spec's ``check`` and ``fake`` say for the saved arguments is what gradients, outputs
    and residuals must be. An argument that is not saved is left out if it may be, and is otherwise
    made by ``shaped_like``; without that only outputs and their gradients are compared.

    Args:
        spec: the operator.
        signature: its signature.
        results: names of its outputs, then of its residuals.
        names: names of the backward's tensors: one gradient per output, then what is saved.
    """

    def __init__(
        self, spec: OperatorSpec, signature: Signature, results: Sequence[str], names: Sequence[str]
    ) -> None:
        self.spec, self.signature = spec, signature
        self.results, self.names = tuple(results), tuple(names)
        self._known: set[Any] = set()
        unknown = {place.partition("[")[0] for place in spec.shaped_like.values()} - {*names}
        if unknown:
            raise ValueError(
                f"{spec.name}: shaped_like names {sorted(unknown)}; its backward is given "
                f"{', '.join(names)}"
            )

    def check(
        self, tensors: Sequence[Tensor | None], values: Sequence[Any], needs: Sequence[bool]
    ) -> None:
        """Raises ValueError for tensors of a backward that are not of one forward call.

        Args:
            tensors: in the order of ``names``.
            values: of the attributes, in the signature's order.
            needs: which gradients are wanted.
        """
        key: list[Any] = [len(needs)]
        for tensor in tensors:
            key += (None,) if tensor is None else (tensor.shape, tensor.dtype)
        key += [tuple(v) if type(v) is list else v for v in values]
        known = tuple(key)
        if known in self._known:
            return
        if len(needs) != len(self.spec.differentiable):
            raise ValueError(
                f"{self.spec.name}_backward: needs must have one entry for each of "
                f"{', '.join(self.spec.differentiable)}, got {len(needs)}"
            )
        given = {
            name: without_data(tensor) for name, tensor in zip(self.names, tensors, strict=True)
        }
        attrs = dict(zip(self.signature.attr_names, values, strict=True))
        self._compare(given, self._expected(given, attrs))
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known.add(known)

    def _expected(
        self, given: Mapping[str, Tensor | None], attrs: Mapping[str, Any]
    ) -> Mapping[str, Tensor | None]:
        """Results of the forward call, without data, by name; the outputs alone, if unknown."""
        args = []
        for name in self.signature.positional:
            like = like_of(self.spec, given, name)
            if like is None and name not in given and not self.signature.may_be_none(name):
                return {name: given[name] for name in self.results if name in given}
            args.append(like)
        try:
            if self.spec.check is not None:
                self.spec.check(*args, **attrs)
        except ValueError as error:
            raise ValueError(f"{self.spec.name}_backward: {error}") from None
        found = self.signature.results(self.spec.fake(*args, **attrs))
        return dict(zip(self.results, found, strict=True))

    def _compare(
        self, given: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
    ) -> None:
        for name, place in (
            *((name, name) for name in self.results),
            *zip(self.results, self.names[: self.signature.num_outputs], strict=False),
        ):
            want, got = expected.get(name), given.get(place)
            if want is None or got is None or (got.shape, got.dtype) == (want.shape, want.dtype):
                continue
            raise ValueError(
                f"{self.spec.name}_backward: {place} must be {_form(want)} for these arguments, "
                f"got {_form(got)}"
            )


def like_of(spec: OperatorSpec, given: Mapping[str, Any], name: str) -> Any:
    """What is given of an argument, or has its shape and dtype by ``shaped_like``; None: unknown.

    Args:
        given: what a backward is given, by name.
    """
    if name in given:
        return given[name]
    place, _, dim = spec.shaped_like.get(name, "").partition("[")
    like = given.get(place)
    return like.new_empty(like.shape[int(dim[:-1])]) if dim and like is not None else like


def without_data(arg: Any) -> Any:
    """The argument with meta tensors in place of tensors; lists are looked into."""
    if isinstance(arg, Tensor):
        return torch.empty_like(arg, device="meta")
    return None if arg is None else [without_data(a) for a in arg]


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
