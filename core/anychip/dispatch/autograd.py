"""The gradient of an operator: forward and backward rows in, one autograd node out.

Backward rows are first-order. Under ``create_graph=True`` the reference backward is differentiated
instead. Outputs among its inputs lead back to this node, as those that torch's own softmax saves
do. Residuals are computed again, by the spec's ``restore`` or else by the reference forward. So
their own dependence on the arguments is part of the second derivative.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anychip.contract import OperatorSpec, Row
from anychip.dispatch import deferral, promise, selection
from anychip.dispatch.kernel import Kernel, nothing_special
from anychip.dispatch.resolution import REFERENCE, Choice, reference_row
from anychip.dispatch.signature import Signature
from anychip.dispatch.tally import new_tally

_autocast = torch._C._is_any_autocast_enabled


class Gradient:
    """What an operator keeps between forward and backward, and how it goes back.

    Attributes:
        differentiable: positions of the arguments that may require gradients.
        kept: names of the tensors that a graph node keeps: the spec's ``saved``, then, when there
            are residuals among those and only the forward restores them, the other arguments.
        given: the arguments and outputs among ``saved``.
        places: where ``kept`` are found: the number of an argument, or ``~`` that of a result.
    """

    def __init__(
        self,
        spec: OperatorSpec,
        signature: Signature,
        door: Callable[..., Sequence[Tensor]],
        pair_door: Callable[[Row], Callable[..., Sequence[Tensor]]],
    ) -> None:
        outputs = (
            ("y",)
            if signature.num_outputs == 1
            else tuple(f"y{i}" for i in range(signature.num_outputs))
        )
        self.spec, self.signature, self.door, self.pair_door = spec, signature, door, pair_door
        self.num_outputs, self.single = signature.num_outputs, signature.num_outputs == 1
        self.results = (*outputs, *(r.name for r in spec.residuals))
        unknown = set(spec.saved) - {*signature.positional, *self.results}
        if unknown:
            raise ValueError(f"{spec.name}: saved names {sorted(unknown)} are not in the spec")
        residuals = {r.name for r in spec.residuals}
        self.given = tuple(n for n in spec.saved if n not in residuals)
        self._lost = tuple(n for n in spec.saved if n in residuals)
        again = bool(self._lost) and spec.restore is None
        self.kept = (
            *spec.saved,
            *(n for n in signature.positional if again and n not in spec.saved),
        )
        self.differentiable = tuple(signature.positional.index(n) for n in spec.differentiable)
        grads = tuple(f"grad{i}" for i in range(signature.num_outputs))
        self.kernel = Kernel(spec, "backward", (*grads, *spec.saved), pairs=False)
        self.places = tuple(self._place(name) for name in self.kept)

    def _place(self, name: str) -> int:
        if name in self.signature.positional:
            return self.signature.positional.index(name)
        return ~self.results.index(name)

    def keep(self, args: Sequence[Any], results: Sequence[Tensor]) -> list[Tensor | None]:
        """The tensors of one call that its graph node keeps, in the order of ``kept``."""
        return [args[i] if i >= 0 else results[~i] for i in self.places]

    def backward(
        self,
        pair: Row | None,
        grads: Sequence[Tensor],
        kept: Sequence[Any],
        attrs: Mapping[str, Any],
        needs: tuple[bool, ...],
    ) -> Sequence[Tensor | None]:
        """Gradients of the differentiable arguments.

        Args:
            pair: the paired row that ran forward, if it was one; ``kept`` is then what
                :func:`pair_keep` gave and all arguments after it.
        """
        if pair is None:
            order = self.recorded if torch.is_grad_enabled() else self.first_order
            return order(grads, kept, attrs, needs)
        assert pair.paired is not None
        arity = len(self.signature.positional)
        own, args = kept[: len(kept) - arity], kept[len(kept) - arity :]
        if torch.is_grad_enabled():
            named = dict(zip(self.signature.positional, args, strict=True))
            named.update(zip(self.given, own, strict=False))
            # A paired row has no canonical residuals; recorded() computes what they stand for.
            canonical = [named.get(name, grads[0]) for name in self.kept]
            return self.recorded(grads, canonical, attrs, needs)
        known = self.kernel.key((*grads, *own)) if nothing_special() else None
        if known is not None:
            return self.pair_backward(pair, known[1], (*grads, *own), attrs, needs)
        values = (attrs[n] for n in self.signature.attr_names)
        flat = self.pair_door(pair)(*grads, *own, *args, *values, list(needs))
        return self.wanted(flat, needs)

    def pair_backward(
        self,
        pair: Row,
        key: tuple[Any, ...],
        args: Sequence[Any],
        attrs: Mapping[str, Any],
        needs: tuple[bool, ...],
    ) -> Sequence[Tensor | None]:
        """Runs the backward of a paired row on plain tensors; counted."""
        assert pair.paired is not None
        plans = selection.current.plans
        choice = plans.get((pair, key))
        if choice is None:
            owners = selection.providers_for(next(a.device.type for a in args if a is not None))
            owner = next((p for p in owners if pair in tuple(p.table)), REFERENCE)
            row = replace(pair, direction="backward", function=pair.paired.backward)
            choice = plans[pair, key] = Choice.of(self.spec, row, owner)
        choice.count()
        found: Sequence[Tensor | None] = promise.run(choice, args, {**attrs, "needs": needs})
        return found

    def wanted(self, flat: Any, needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
        """What a door gave: an unwanted gradient is an empty tensor there, and None here."""
        flat = (flat,) if isinstance(flat, Tensor) else flat
        return [g if need else None for g, need in zip(flat, needs, strict=True)]

    def first_order(
        self,
        grads: Sequence[Tensor],
        kept: Sequence[Tensor],
        attrs: Mapping[str, Any],
        needs: tuple[bool, ...],
    ) -> Sequence[Tensor | None]:
        """Gradients by the row that is chosen for them."""
        args = (*grads, *kept[: len(self.spec.saved)])
        if nothing_special():
            known = self.kernel.key(args)
            if known is not None:
                attrs = {**attrs, "needs": needs}
                choice = self.kernel.choose(known[1], args, attrs)
                found: Sequence[Tensor | None] = promise.run(choice, args, attrs)
                return found
        flat = self.door(*args, *(attrs[n] for n in self.signature.attr_names), list(needs))
        return self.wanted(flat, needs)

    def needs(self, needed: Sequence[bool]) -> tuple[bool, ...]:
        """Which differentiable arguments want a gradient, of what autograd asks of all.

        Raises:
            RuntimeError: another argument wants one; its gradient would silently be zero.
        """
        needs = tuple(needed[i] for i in self.differentiable)
        if sum(needed) != sum(needs):
            names = self.signature.positional
            others = [n for i, n in enumerate(names) if needed[i] and i not in self.differentiable]
            raise RuntimeError(
                f"{self.spec.name} has no gradient for {', '.join(others)}, only for "
                f"{', '.join(self.spec.differentiable)}; pass {others[0]}.detach()"
            )
        return needs

    def recorded(
        self,
        grads: Sequence[Tensor],
        kept: Sequence[Any],
        attrs: Mapping[str, Any],
        needs: tuple[bool, ...],
    ) -> Sequence[Tensor | None]:
        """Gradients by the reference, recorded so that they can be differentiated again."""
        if self.spec.double_backward == "error":
            raise RuntimeError(
                f"{self.spec.name}: its gradient cannot be differentiated again "
                "(create_graph=True); its specification rules that out"
            )
        row = reference_row(self.spec, "backward")
        new_tally(
            row, REFERENCE, fallback="create_graph=True: backward rows are first-order"
        ).tick()
        named: dict[str, Any] = dict(zip(self.kept, kept, strict=True))
        # Autocast was applied to the arguments once; the reference's own torch calls are exact.
        with torch.autocast(grads[0].device.type, enabled=False) if _autocast() else nullcontext():
            if self._lost:
                named.update(self._restored(named, attrs))
            saved = (named[n] for n in self.spec.saved)
            found: Sequence[Tensor | None] = row.function(*grads, *saved, **attrs, needs=needs)
        return found

    def _restored(
        self, named: Mapping[str, Any], attrs: Mapping[str, Any]
    ) -> Iterable[tuple[str, Tensor]]:
        """What the reference computes again, by name: the saved residuals, or all results."""
        if self.spec.restore is not None:
            found = self.spec.restore(*(named[n] for n in self.given), **attrs)
            return zip(self._lost, self.signature.results(found), strict=True)
        found = self.spec.forward(*(named[n] for n in self.signature.positional), **attrs)
        return zip(self.results, self.signature.results(found), strict=True)


Recorded = tuple[Gradient, Choice, Mapping[str, Any]]
"""Gradient, choice and attributes: one argument, since each costs torch time to pass on."""


class Node(torch.autograd.Function):
    """The autograd node of the eager short cut. Every operator uses this one class."""

    @staticmethod
    def forward(ctx: Any, call: Recorded, *args: Any) -> Any:
        gradient, choice, attrs = call
        results = promise.run(choice, args, attrs)
        ctx.call = call
        listed = (results,) if type(results) is Tensor else results
        if choice.row.paired is not None:
            ctx.save_for_backward(*pair_keep(gradient, args, listed), *args)
        elif gradient.kept:
            ctx.save_for_backward(*gradient.keep(args, listed))
        return listed[0] if gradient.single else tuple(listed[: gradient.num_outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient, choice, attrs = ctx.call
        needs = gradient.needs(ctx.needs_input_grad[1:])
        pair = choice.row if choice.row.paired is not None else None
        if deferral.active:
            args = grads, ctx.saved_tensors, attrs, needs
            found = deferral.backward(ctx, 1, gradient, pair, *args)
        else:
            found = gradient.backward(pair, grads, ctx.saved_tensors, attrs, needs)
        result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, value, need in zip(gradient.differentiable, found, needs, strict=True):
            result[1 + place] = value if need else None
        return tuple(result)


def pair_keep(gradient: Gradient, args: Sequence[Any], results: Sequence[Tensor]) -> list[Any]:
    """What a paired row's backward is given: saved arguments and outputs, then its residuals."""
    count = gradient.num_outputs
    named = dict(zip(gradient.signature.positional, args, strict=True))
    named.update(zip(gradient.results[:count], results, strict=False))
    return [*(named[n] for n in gradient.given), *results[count:]]
