"""What update rules share: a schema, a check, a reference that writes, and samples.

A rule says how one tensor moves; :func:`operator_of` makes it an operator over lists. Such
operators write in place, return nothing, and read lr, step, scale, clip and found_inf from 0-dim
tensors on the device, so that no step waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip.contract import Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import lists

Move = Callable[..., Sequence[Tensor]]
"""``move(rate, param, grad, *states)``: the new parameter and states, all float32; 0-dim rate."""


class UpdateCall(NamedTuple):
    """The arguments of a rule. states: one list for each state that the rule has."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: tuple[Sequence[Tensor], ...]
    lr: Tensor
    step: Tensor
    scale: Tensor | None = None
    clip: Tensor | None = None
    found_inf: Tensor | None = None
    low_precision: Sequence[Tensor] | None = None
    trust: Tensor | None = None

    @classmethod
    def of(cls, args: Sequence[Any], num_states: int) -> UpdateCall:
        """From the positional arguments of a rule's operator."""
        params, grads, *rest = args
        return cls(params, grads, tuple(rest[:num_states]), *rest[num_states:])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UpdateFormula:
    """What sets one rule apart from the others.

    Attributes:
        states: names of the lists of float32 states.
        attrs: the schema's text for the attributes.
        prepare: ``prepare(count, **attrs)`` with the number of this step, 0-dim; returns how one
            tensor moves.
        sampled_attrs: attributes for one of the labels of :func:`sampled_scalars`.
        flops: per element.
        refuse: ``refuse(call, **attrs)`` raises ValueError for what only this rule refuses.
        has_states: ``has_states(**attrs)``; without, the lists of states are empty.
        trust: the rule takes a ``trust``, which scales the learning rate per tensor; computes it
            from the call and the attributes when it is not given, in one more pass.
    """

    states: tuple[str, ...]
    attrs: str
    prepare: Callable[..., Move]
    sampled_attrs: Callable[[str], Mapping[str, Any]]
    flops: int
    refuse: Callable[..., None] = lambda call, **attrs: None
    has_states: Callable[..., bool] = lambda **attrs: True
    trust: Callable[..., Tensor] | None = None

    def forward(self, *args: Any, **attrs: Any) -> None:
        """The reference."""
        call = UpdateCall.of(args, len(self.states))
        ratios = call.trust
        if self.trust is not None and ratios is None and call.params:
            ratios = self.trust(call, **attrs)
        write(call, self.prepare(call.step + 1.0, **attrs), ratios)

    def check(self, *args: Any, **attrs: Any) -> None:
        """Raises ValueError for arguments that do not fit together."""
        call = UpdateCall.of(args, len(self.states))
        self.refuse(call, **attrs)
        named = dict(zip(self.states, call.states, strict=True))
        check_call(call, named if self.has_states(**attrs) else {})
        lists.check_numbers(attrs)

    def samples(self, maker: SampleMaker) -> Iterator[Sample]:
        """One for each label of :func:`sampled_scalars`."""
        for label, scalars in sampled_scalars(maker):
            attrs = self.sampled_attrs(label)
            args = _sampled_args(maker, label, scalars, self.states, self.has_states(**attrs))
            if self.trust is not None:
                args.append(_sampled_trust(maker) if label == "found_inf" else None)
            yield Sample(tuple(args), attrs, label)

    def cost(self, *args: Any, **attrs: Any) -> Cost:
        """Everything read once, or twice for a trust; parameters and states written."""
        call = UpdateCall.of(args, len(self.states))
        passes = 1 if self.trust is None else 2
        written = lists.nbytes(call.params, *call.states)
        read = passes * (written + lists.nbytes(call.grads))
        return Cost(read + written, self.flops * lists.numel(call.params))


def operator_of(name: str, rule: UpdateFormula, **facts: Any) -> OperatorSpec:
    """The operator ``name``: one step of the rule; facts: equation, source and bound."""
    has_trust = rule.trust is not None
    scalars = ("lr", "step", "scale", "clip", "found_inf", *(("trust",) if has_trust else ()))
    return OperatorSpec(
        name=name, signature=_signature(rule.states, rule.attrs, has_trust), forward=rule.forward,
        fake=lambda *args, **attrs: None, check=rule.check,
        fixed_dtypes=dict.fromkeys((*rule.states, *scalars), "float32"),
        sizes=lambda params, *_, **__: {"numel": lists.numel(params), "tensors": len(params)},
        cost=rule.cost, samples=rule.samples, **facts,
    )  # fmt: skip


def _signature(states: tuple[str, ...], attrs: str, has_trust: bool) -> str:
    marks = iter("abcdef")
    written = [f"Tensor({next(marks)}!)[] params", "Tensor[] grads"]
    written += [f"Tensor({next(marks)}!)[] {name}" for name in states]
    scalars = ["Tensor lr", f"Tensor({next(marks)}!) step"]
    scalars += [f"Tensor? {name}=None" for name in ("scale", "clip", "found_inf")]
    copies = [f"Tensor({next(marks)}!)[]? low_precision=None"]
    extra = ["Tensor? trust=None"] if has_trust else []
    return f"({', '.join([*written, *scalars, *copies, *extra])}, *, {attrs}) -> ()"


def scaled(grad: Tensor, scale: Tensor | None, clip: Tensor | None) -> Tensor:
    """The gradient in float32, without the loss scale, clipped."""
    grad = grad.float()
    if scale is not None:
        grad = grad / scale
    return grad if clip is None else grad * clip


def write(call: UpdateCall, move: Move, ratios: Tensor | None = None) -> None:
    """Moves every tensor, unless the step is skipped."""
    if call.found_inf is None:
        skip = torch.zeros((), dtype=torch.bool, device=call.lr.device)
    else:
        skip = call.found_inf != 0
    for index, param in enumerate(call.params):
        states = [tensors[index] for tensors in call.states if tensors]
        grad = scaled(call.grads[index], call.scale, call.clip)
        rate = call.lr if ratios is None else call.lr * ratios[index]
        new, *moved = move(rate, param.float(), grad, *states)
        for state, value in zip(states, moved, strict=True):
            state.copy_(torch.where(skip, state, value))
        param.copy_(torch.where(skip, param, new.to(param.dtype)))
        if call.low_precision:
            low = call.low_precision[index]
            low.copy_(torch.where(skip, low, param.to(low.dtype)))
    call.step.copy_(torch.where(skip, call.step, call.step + 1.0))


def check_call(call: UpdateCall, states: Mapping[str, Sequence[Tensor]]) -> None:
    """Raises ValueError for shapes that do not fit together, of states that params are like."""
    lists.check_shapes("params", call.params, grads=call.grads, **states)
    if call.low_precision:
        lists.check_shapes("params", call.params, low_precision=call.low_precision)
    lists.check_scalars(
        lr=call.lr, step=call.step, scale=call.scale, clip=call.clip, found_inf=call.found_inf
    )
    if call.trust is not None and tuple(call.trust.shape) != (len(call.params),):
        raise ValueError(
            f"trust must have one entry per tensor, shape ({len(call.params)},), got "
            f"{tuple(call.trust.shape)}"
        )


def sampled_scalars(maker: SampleMaker) -> Iterator[tuple[str, list[Tensor | None]]]:
    """Labels, with scale, clip and found_inf: the three situations of a step."""
    for label, options in (
        ("plain", (None, None, None)),
        ("scale,clip", (1024.0, 0.5, 0.0)),
        ("found_inf", (1024.0, None, 1.0)),
    ):
        yield label, [None if value is None else maker.scalar(value) for value in options]


def sampled_tensors(maker: SampleMaker, states: tuple[str, ...]) -> list[list[Tensor]]:
    """Parameters, gradients and states; those that are averages of squares are positive."""
    params = [maker.normal(*shape, dtype=torch.float32) for shape in lists.SHAPES]
    grads = [maker.normal(*shape) for shape in lists.SHAPES]
    made = [params, grads]
    for name in states:
        values = [maker.normal(*shape, scale=0.1, dtype=torch.float32) for shape in lists.SHAPES]
        made.append([v.square() for v in values] if name.endswith("_sqs") else values)
    return made


def _sampled_args(
    maker: SampleMaker,
    label: str,
    scalars: list[Tensor | None],
    states: tuple[str, ...],
    has_states: bool,
) -> list[Any]:
    params, grads, *given = sampled_tensors(maker, states)
    if not has_states:
        given = [[] for _ in given]
    low = [p.to(torch.bfloat16) for p in params] if label == "scale,clip" else None
    return [params, grads, *given, maker.scalar(1e-2), maker.scalar(3.0), *scalars, low]


def _sampled_trust(maker: SampleMaker) -> Tensor:
    return torch.stack([maker.scalar(0.5 * (1 + index)) for index in range(len(lists.SHAPES))])
