"""One direction of one operator at run time: from the arguments to the row that serves them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack as _functorch_level
from torch.autograd import forward_ad
from torch.nn import Parameter

from anychip.contract import Direction, OperatorSpec
from anychip.dispatch import promise, selection
from anychip.dispatch.resolution import Choice, Plan, Situation, TensorFact, resolve

_deterministic = torch._C._get_deterministic_algorithms
GUARDS = (
    torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, _functorch_level,
    torch._C._is_any_autocast_enabled, torch._C._is_tracing,
)  # fmt: skip
"""What is asked whether a mode, transform, autocast or tracer is active."""

ALIGNMENT = 64
"""Bytes; the coarsest alignment that a key tells apart, a cache line and a 512-bit vector."""


def nothing_special() -> bool:
    """True when no mode, transform, autocast or tracer is active: the short cut may be taken."""
    for active in GUARDS:
        if active():
            return False
    return forward_ad._current_level < 0


def transformed() -> bool:
    """True under a functorch transform or forward-mode AD, which only plain torch can take."""
    return _functorch_level() is not None or forward_ad._current_level >= 0


class Kernel:
    """The rows of one direction of one operator, and the plans resolved for them.

    Args:
        spec: the operator.
        direction: forward or backward.
        names: names of the positional arguments of this direction.
        check_kinds: raises TypeError for a positional argument that is no tensor, or no list of
            tensors, where the schema wants one. Called once per key.
        pairs: whether paired rows may be chosen; no for an operator of ``torch.library`` whose
            schema fixes the residuals.
    """

    __slots__ = ("check", "check_kinds", "direction", "names", "pairs", "spec")

    def __init__(
        self,
        spec: OperatorSpec,
        direction: Direction,
        names: Sequence[str],
        *,
        pairs: bool,
        check_kinds: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        self.spec = spec
        self.direction: Direction = direction
        self.names = tuple(names)
        self.pairs = pairs
        self.check = spec.check if direction == "forward" else None
        self.check_kinds = check_kinds

    def key(self, args: Sequence[Any]) -> tuple[bool, tuple[Any, ...]] | None:
        """(an argument requires a gradient, key) of plain tensors; None if one is not plain.

        Plain is exactly ``Tensor`` or ``Parameter``, strided, with its bits as they are in memory:
        what a kernel that takes raw pointers may see.
        """
        grad = False
        key: list[Any] = [self, _deterministic()]
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                if arg.is_neg():
                    return None
                if arg.requires_grad:
                    grad = True
                try:
                    pointer = arg.data_ptr()
                except RuntimeError:  # sparse, or a batch of vmap: there is no memory of its own
                    return None
                if not pointer and arg.numel() and arg.device.type != "meta":
                    return None
                pointer |= ALIGNMENT
                key += (arg.dtype, arg.device, arg.is_contiguous(), pointer & -pointer)
            elif arg is None:
                key.append(None)
            elif kind is list or kind is tuple:
                inner = self.key(arg)
                if inner is None:
                    return None
                grad = grad or inner[0]
                key.append(_list_key(inner[1]))
            else:
                return None
        key.append(grad)
        return grad, tuple(key)

    def choose(self, key: tuple[Any, ...], args: Sequence[Any], attrs: Mapping[str, Any]) -> Choice:
        """The row for one call, counted. Everything that can be refused is refused here."""
        plan: Plan | None = selection.current.plans.get(key)
        if plan is None:
            plan = self.plan(key, args)
        if self.check is not None:
            self.check(*args, **attrs)
        choice = plan.choices[0] if plan.choices else None
        if choice is None or choice.conditional:
            return plan.pick(self.spec, args, attrs)
        choice.count()
        return choice

    def find(self, args: Sequence[Any]) -> Plan | None:
        """The plan for plain tensors; None if one is not plain."""
        known = self.key(args)
        if known is None:
            return None
        return selection.current.plans.get(known[1]) or self.plan(known[1], args)

    def peek(
        self, key: tuple[Any, ...], args: Sequence[Any], attrs: Mapping[str, Any]
    ) -> Choice | None:
        """The choice that :meth:`choose` would make, not counted; None where it would raise."""
        plan: Plan = selection.current.plans.get(key) or self.plan(key, args)
        takers = (
            c for c in plan.choices if not c.conditional or not c.refusal(self.spec, args, attrs)
        )
        return next(takers, None)

    def plan(self, key: tuple[Any, ...], args: Sequence[Any]) -> Plan:
        """Resolves a key and keeps the plan for as long as the selection lasts."""
        situation = self.situation(args)
        # Asking for the device type's owner may itself change the selection, so it comes first.
        selection.providers_for(situation.device_type)
        state = selection.current
        plan = resolve(situation)
        state.plans[key] = plan
        return plan

    def situation(self, args: Sequence[Any]) -> Situation:
        """What resolution needs to know of the arguments.

        Raises:
            TypeError: an argument is not of the kind that the schema wants.
        """
        if self.check_kinds is not None:
            self.check_kinds(args)
        facts = []
        grad = False
        for name, arg in zip(self.names, args, strict=True):
            tensors = [arg] if isinstance(arg, Tensor) else arg
            if tensors:
                facts.append(_fact(name, tensors))
                grad = grad or any(t.requires_grad for t in tensors)
        return Situation(
            spec=self.spec, direction=self.direction, facts=tuple(facts),
            deterministic=_deterministic(), needs_grad=grad, pairs=self.pairs,
        )  # fmt: skip

    def run(self, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """Runs the row for tensors that the dispatcher has taken modes and wrappers off."""
        args, key = self.plain(args)
        return promise.run(self.choose(key, args, attrs), args, attrs)

    def plain(self, args: Sequence[Any]) -> tuple[Sequence[Any], tuple[Any, ...]]:
        """Plain arguments and their key, for what the dispatcher hands to a kernel.

        Raises:
            TypeError: a tensor has no memory that a kernel could read.
        """
        known = self.key(args)
        if known is None:
            # A subclass without __torch_dispatch__ is an ordinary tensor with a name of its own.
            args = [_without_class(a) for a in args]
            known = self.key(args)
        if known is None:
            kinds = ", ".join(sorted({_kind(a) for a in args if a is not None}))
            raise TypeError(
                f"{self.spec.name}: strided tensors with data expected, got {kinds}; a kernel must "
                "not see any other"
            )
        return args, known[1]


def _without_class(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_without_class(a) for a in arg]
    kind, ordinary = cast("Any", type(arg)), cast("Any", Tensor)
    if kind is Tensor or kind is Parameter or not isinstance(arg, Tensor):
        return arg
    if kind.__torch_dispatch__ is not ordinary.__torch_dispatch__:
        return arg
    return arg.as_subclass(Tensor)


def _kind(arg: Any) -> str:
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(sorted({_kind(a) for a in arg}))}]"
    if type(arg) not in (Tensor, Parameter):
        return type(arg).__name__
    layout = str(arg.layout).removeprefix("torch.")
    return f"Tensor ({layout}, {'no data' if layout == 'strided' else 'not strided'})"


def _list_key(inner: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of a list: which facts occur in it, not how often or where."""
    facts = inner[2:-1]
    return tuple({facts[i : i + 4] for i in range(0, len(facts), 4)}) or ("empty",)


def _fact(name: str, tensors: Sequence[Tensor]) -> TensorFact:
    pointers = [_pointer(t) | ALIGNMENT for t in tensors]
    return TensorFact(
        name=name,
        dtypes=frozenset(t.dtype for t in tensors),
        devices=frozenset(t.device for t in tensors),
        contiguous=all(t.is_contiguous() for t in tensors),
        alignment=min(p & -p for p in pointers),
    )


def _pointer(tensor: Tensor) -> int:
    # Only a plain tensor has an address; what a compiler traces with counts as aligned.
    return tensor.data_ptr() if type(tensor) in (Tensor, Parameter) else 0
