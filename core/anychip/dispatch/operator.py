"""What a user calls: :class:`Operator`, the short cut of eager mode and the way to everything else.

Door 2, the short cut, is taken only when every tensor is exactly a Tensor or Parameter, and no
mode, transform, autocast or compiler is active; otherwise the call goes through door 1,
``torch.ops``. Both end at the same rows. Where :mod:`.native` has its module, a call of an operator
is taken there first, and comes here when it is unusual.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from anychip.contract import ContractError, OperatorSpec, Row
from anychip.dispatch import library, native, promise, selection
from anychip.dispatch.autograd import Gradient, Node
from anychip.dispatch.explanation import Explanation, explain
from anychip.dispatch.kernel import GUARDS, Kernel, nothing_special
from anychip.dispatch.resolution import REFERENCE, reference_row
from anychip.dispatch.signature import Signature
from anychip.dispatch.tally import new_tally

P = ParamSpec("P")
R = TypeVar("R")

_is_compiling = torch.compiler.is_compiling
_operators: dict[str, Operator[..., Any]] = {}


class Operator(native.ShortCut, Generic[P, R]):
    """An operator as a function. Made by :func:`operator` or :func:`register`, never directly."""

    def __init__(self, spec: OperatorSpec, stub: Callable[P, R] | None = None) -> None:
        self.spec = spec
        self.signature = Signature.parse(spec)
        self.gradient: Gradient | None = None
        if spec.backward is not None:
            self.gradient = Gradient(
                spec, self.signature, self._backward_door, self._pair_backward_door
            )
        self.kernel = Kernel(
            spec, "forward", self.signature.positional, pairs=True,
            check_kinds=self.signature.check_kinds,
        )  # fmt: skip
        self.pairs: dict[Row, str] = {}
        self._arity = len(self.signature.positional)
        self._attrs = dict(self.signature.attrs)
        self._whole = not self.signature.required_attrs
        self._writes = bool(self.signature.written) and self.gradient is None
        self.__wrapped__, self.__doc__ = stub, stub.__doc__ if stub else spec.equation
        self.__name__ = self.__qualname__ = spec.name
        self.__module__ = stub.__module__ if stub else __name__
        library.define(self)
        self._door = library.door(spec)
        signature = self.signature
        values = self._attrs, signature.attr_types, tuple(signature.defaults.values())
        counts = self._arity, len(signature.attr_names), signature.num_outputs, self._writes
        self.prepare(self.kernel, self.kernel.check, self.gradient, spec, *values, *counts)

    def __repr__(self) -> str:
        return f"<operator {self.spec.namespace}::{self.spec.name}{self.spec.signature}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        # There is one operator of a name in a process: a copy is the operator itself.
        return self.__name__ if self.__wrapped__ else (_operators.__getitem__, (self.spec.name,))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _is_compiling():
            return cast(R, self._compiled(*args, **kwargs))
        found = self.short_cut(*args, **kwargs)
        if found is NotImplemented:
            bound, attrs = self._bind(args, kwargs)
            self.signature.check_kinds(bound)
            found = self._door(*bound, **attrs)
        return cast(R, found)

    def short_cut(self, *args: Any, **kwargs: Any) -> Any:
        """What door 2 gives; NotImplemented for a call that must take door 1.

        This is the reference of csrc/dispatch/short_cut.c.
        """
        if not nothing_special():
            return NotImplemented
        attrs = self._attrs
        if kwargs or len(args) != self._arity or not self._whole:
            args, attrs = self._bind(args, kwargs)
        known = self.kernel.key(args)
        if known is None:
            return NotImplemented
        grad, key = known
        choice = self.kernel.choose(key, args, attrs)
        if self._writes:
            return library.run_written(self, choice, args, attrs)
        if self.gradient is None:
            return promise.run(choice, args, attrs)
        if grad and torch.is_grad_enabled():
            call = (self.gradient, choice, attrs)
            return Node.apply(call, *args)  # type: ignore[no-untyped-call]
        results = promise.run(choice, args, attrs)
        return results if type(results) is Tensor else self.outputs(results)

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Tensor, ...]:
        """Outputs, then the spec's residuals, like attention's y and lse. Nothing is recorded.

        With :meth:`backward`, for a program that joins calls by a rule of its own, as attention
        over blocks of keys is joined by lse.

        Raises:
            TypeError: the operator has no gradient, and so no residuals.
        """
        door, (bound, attrs) = self._part("_forward"), self._bind(args, kwargs)
        self.signature.check_kinds(bound)
        with torch.no_grad():
            found = door(*bound, **attrs)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    def backward(
        self, *tensors: Tensor | None, needs: Sequence[str] | None = None, **attrs: Any
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the spec's differentiable arguments, in its order. Nothing is recorded.

        Args:
            tensors: a gradient for each output, then what ``spec.saved`` names, as the arguments
                and :meth:`forward` have it; ``anychip operators NAME`` lists them.
            needs: the arguments whose gradients are wanted, the others' are None; None: all.
            attrs: the attributes of the call.

        Raises:
            TypeError: too many or too few tensors, an unknown attribute, or no gradient at all.
            ValueError: an argument that has no gradient, or tensors that are not of one call.
        """
        door, spec, signature = self._part("_backward"), self.spec, self.signature
        assert self.gradient is not None
        names = self.gradient.kernel.names
        if len(tensors) != len(names):
            raise TypeError(f"{spec.name}.backward() takes {', '.join(names)}; got {len(tensors)}")
        unknown = set(spec.differentiable if needs is None else needs) - {*spec.differentiable}
        if unknown:
            raise ValueError(
                f"{spec.name}: needs names {sorted(unknown)}, and there are gradients of "
                f"{', '.join(spec.differentiable)}"
            )
        _, values = signature.bind((tensors[0],) * self._arity, attrs)
        signature.check_attributes(values)
        wanted = tuple(needs is None or name in needs for name in spec.differentiable)
        with torch.no_grad():
            found = door(*tensors, *(values[n] for n in signature.attr_names), list(wanted))
        return tuple(self.gradient.wanted(found, wanted))

    def _part(self, suffix: str) -> Callable[..., Any]:
        if self.gradient is None:
            raise TypeError(f"{self.spec.name} has no gradient; call it")
        return library.door(self.spec, suffix)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """The candidates for this call in order, and why each would or would not be taken.

        Runs nothing and counts nothing. ``str()`` of the answer is a table.
        """
        bound, attrs = self._bind(args, kwargs)
        return explain(self.kernel, bound, attrs)

    def outputs(self, results: Any) -> Any:
        """The outputs among what a row returned: one tensor or a tuple."""
        count = self.signature.num_outputs
        if isinstance(results, Tensor) or results is None:
            return results
        return results[0] if count == 1 else tuple(results[:count])

    def _bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._whole and len(args) == self._arity and kwargs.keys() <= self._attrs.keys():
            self.signature.check_attributes(kwargs)
            return args, {**self._attrs, **kwargs}
        bound, attrs = self.signature.bind(args, kwargs)
        self.signature.check_attributes(attrs)
        return bound, attrs

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        """The call as a compiler sees it: the reference inlined, or one opaque operator."""
        bound, attrs = self._bind(args, kwargs)
        if selection.current.label == "":  # reading the label makes the compiler guard it
            raise AssertionError("a selection has a label")
        tensor = library.first_tensor(bound, floating=True)
        if tensor is None or not _inlines(self.spec.name, tensor.device.type, tensor.dtype):
            return self._detached(self._door, bound, attrs)
        if self.spec.check is not None:
            self.spec.check(*bound, **attrs)
        device_type = tensor.device.type
        if not torch.is_autocast_enabled(device_type):
            return self._detached(self.spec.forward, bound, attrs)
        names, rule = self.signature.positional, self.spec.autocast
        cast_to = library.cast_arguments(self.spec, rule, device_type, names, bound)
        with torch.autocast(device_type, enabled=False):
            return self._detached(self.spec.forward, cast_to, attrs)

    def _detached(
        self, function: Callable[..., Any], args: Sequence[Any], attrs: dict[str, Any]
    ) -> Any:
        """Outputs of a call that is not recorded if it writes; a compiler cannot look at leaves."""
        if not self.signature.written:
            return self.outputs(function(*args, **attrs))
        with torch.no_grad():
            return function(*args, **attrs)

    def _pair_backward_door(self, row: Row) -> Callable[..., Any]:
        suffix = library.pair_suffix(self, row).removesuffix("_forward")
        return library.door(self.spec, f"{suffix}_backward")

    def _backward_door(self, *flat: Any) -> Any:
        return library.door(self.spec, "_backward")(*flat)


def _inlines(name: str, device_type: str, dtype: torch.dtype) -> bool:
    """Whether compiled code should contain the reference itself: no row could serve the call."""
    spec, policy = _operators[name].spec, selection.current.policy
    if policy.fallback == "strict" and policy.pin.get(name) != "reference":
        return False
    pinned = policy.pin.get(name)
    rows = [
        row
        for provider in selection.providers_for(device_type)
        for direction in ("forward", "backward")
        for row in provider.table.rows(name, direction)
        if isinstance(row.dtypes, Mapping | None) or dtype in row.dtypes
    ]
    if (rows and pinned != "reference") or pinned not in (None, "reference"):
        return False
    reason = None if pinned else "inlined by the compiler: no row for it"
    new_tally(reference_row(spec, "forward"), REFERENCE, fallback=reason).tick()
    return True


# What torch.compiler.assume_constant_result does. That one imports the whole compiler for it, a
# second and a half in every program that never compiles.
_inlines._dynamo_marked_constant = True  # type: ignore[attr-defined]


def operator(spec: OperatorSpec) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Decorator: the typed stub under it becomes the operator of ``spec``.

    ``anychip.operator`` for third parties: the stub gives signature, types and docstring; its body
    is never run. :func:`register` does without one.

    Raises:
        ContractError: an operator of this name exists.
    """

    _refuse_second(spec)

    def wrap(stub: Callable[P, R]) -> Operator[P, R]:
        made = Operator(spec, stub)
        _operators[spec.name] = made
        return made

    return wrap


def register(spec: OperatorSpec) -> Operator[..., Any]:
    """Makes an operator of a third party's spec; it then has dispatch, autograd and conformance.

    Raises:
        ContractError: an operator of this name exists.
    """
    _refuse_second(spec)
    made: Operator[..., Any] = Operator(spec)
    _operators[spec.name] = made
    return made


def _refuse_second(spec: OperatorSpec) -> None:
    if spec.name in _operators:
        taken = _operators[spec.name].spec
        raise ContractError(f"operator {spec.name!r} exists already, as {taken}")


def registered() -> Mapping[str, Operator[..., Any]]:
    """All operators of this process by name, third parties' included."""
    return dict(_operators)


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError for a name that is no operator, with the nearest one."""
    for name in names:
        if name not in _operators:
            near = difflib.get_close_matches(name, _operators, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_operators)}"
            raise ValueError(f"no operator is named {name!r}; {hint}")


def _given(module: Any) -> dict[str, Any]:
    """What the native module asks torch and dispatch for; its twin is the code above."""
    node = type("Node", (Node,), {"forward": module.forward})
    flags = vars(torch.compiler), vars(forward_ad)
    if "_is_compiling_flag" not in flags[0] or "_current_level" not in flags[1]:
        raise AttributeError("the flags of a compiler and of forward-mode AD")
    return {
        "Tensor": Tensor, "Parameter": Parameter, "exchange": Tensor.__dlpack_c_exchange_api__,
        "dlpack_device": lambda tensor: torch.empty(0, device=tensor.device).__dlpack_device__(),
        "device": Tensor.device, "requires_grad": Tensor.requires_grad, "is_neg": Tensor.is_neg,
        "guards": GUARDS, "compiler": flags[0], "forward_ad": flags[1],
        "selection": vars(selection), "deterministic": torch._C._get_deterministic_algorithms,
        "grad_enabled": torch.is_grad_enabled, "examined": promise.examined,
        "refuse_end": promise.refuse_end, "run_written": library.run_written,
        # Past Function.apply, which looks for the transforms that the guards have looked for.
        "apply": super(torch.autograd.Function, node).apply,  # type: ignore[misc]
        "forward": Node.forward,
    }  # fmt: skip


native.connect(Operator, _given)
