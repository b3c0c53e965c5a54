"""How a call finds its row: the key of a call, and the plan that is resolved once per key.

A plan lists the rows that may serve calls with this key, in written order, the reference last.
What a key cannot know (sizes, attributes) is a row's ``limits`` and ``accepts``, checked on every
call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from anychip.contract import HOST, ContractError, Direction, FallbackError, OperatorSpec, Row
from anychip.dispatch import selection
from anychip.dispatch.selection import Policy, Provider
from anychip.dispatch.signature import Signature
from anychip.dispatch.tally import Passed, Tally, new_tally

REFERENCE = Provider("reference", "anychip", None, table=None)  # type: ignore[arg-type]
EXAMINED = 1024
"""Of so many calls with a key one is examined, the first among them; a power of two."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorFact:
    """What resolution knows of one tensor argument, or of all entries of a list."""

    name: str
    dtypes: frozenset[torch.dtype]
    devices: frozenset[torch.device]
    contiguous: bool
    alignment: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Situation:
    """One key, spelled out."""

    spec: OperatorSpec
    direction: Direction
    facts: tuple[TensorFact, ...]
    deterministic: bool
    needs_grad: bool
    pairs: bool

    @property
    def device_type(self) -> str:
        """The one device type of the call; the host for a call without tensors."""
        return next(iter({d.type for fact in self.facts for d in fact.devices}), HOST)


class Refusal(NamedTuple):
    """Why a row does not take a call: its rule, and what of the call breaks it.

    The rule alone is counted, or every new size would make another line of the provenance.
    """

    rule: str
    got: str = ""

    def __str__(self) -> str:
        return f"{self.rule}, got {self.got}" if self.got else self.rule


DECLINED = Refusal("declined when it was called")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choice:
    """A row that may serve calls with a key."""

    spec: OperatorSpec
    row: Row
    function: Callable[..., Any]
    """The row's, or what calls it."""
    provider: Provider
    count: Callable[[], int]
    """Counts a call; ``itertools.count().__next__``, atomic under the interpreter's lock."""
    tally: Tally
    conditional: bool
    turn: Callable[[], int]
    """Number of the call with this key."""
    unexamined: int
    """Bits of the number, one of which is set when the call is not examined."""
    parts: tuple[Any, ...]
    """What csrc/dispatch reads, in its order."""

    @classmethod
    def of(
        cls, spec: OperatorSpec, row: Row, provider: Provider, reason: str | None = None,
        passed: Passed = (),
    ) -> Choice:  # fmt: skip
        """A choice under the policy in force.

        Args:
            reason: why the reference steps in.
            passed: the rows before it that do not take calls with this key.
        """
        tally, turn = new_tally(row, provider, reason, passed), itertools.count()
        observer = selection.current.observer
        function = row.function if observer is None else observer(row, provider)
        conditional = bool(row.limits) or row.accepts is not None
        unexamined = 0 if selection.current.policy.fallback == "strict" else EXAMINED - 1
        paired = row.paired is not None
        return cls(
            spec=spec, row=row, function=function, provider=provider, count=tally.tick,
            tally=tally, conditional=conditional, turn=turn.__next__, unexamined=unexamined,
            parts=(function, tally.counter, turn, unexamined, conditional, paired),
        )  # fmt: skip

    @property
    def title(self) -> str:
        """Operator, row and whoever brought it, for messages."""
        given = (self.provider.distribution or "", self.provider.version or "")
        return (
            f"{self.spec.name} ({self.row.direction}): the row {self.row.label} of "
            f"{self.provider.name!r} ({' '.join(given).strip()})"
        )

    def refusal(
        self, spec: OperatorSpec, args: Sequence[Any], attrs: Mapping[str, Any]
    ) -> Refusal | None:
        """Why the row does not take this call; None when it does. Writes nothing."""
        if self.row.limits:
            sizes = _sizes(spec, self.row, args, attrs)
            for name, allowed in self.row.limits.items():
                if name not in sizes:
                    raise ContractError(
                        f"{self.row.label}: limits speak of {name!r}; the sizes of {spec.name} are "
                        f"{', '.join(sizes) or 'none'}"
                    )
                if sizes[name] not in allowed:
                    return Refusal(f"{name} must be in {_limit_text(allowed)}", str(sizes[name]))
        try:
            if self.row.accepts is not None and not self.row.accepts(*args, **attrs):
                return Refusal("accepts() said no")
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise stray(f"{self.title}, asked by accepts(),", error) from error
        return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """What is tried for a key, in order, and what was left out and why.

    ``verdict`` says why the reference is not among the choices, if it is not.
    """

    choices: tuple[Choice, ...]
    rejected: tuple[tuple[Row, Provider, str], ...]
    verdict: str
    ticks: dict[tuple[str, ...], Callable[[], int]] = field(default_factory=dict)

    def pick(
        self, spec: OperatorSpec, args: Sequence[Any], attrs: Mapping[str, Any], declined: int = 0
    ) -> Choice:
        """The choice for one call, counted. Raises FallbackError before anything is written.

        Args:
            declined: so many choices at the beginning were asked, and do not take the call.
        """
        refused: list[str] = []
        for place, choice in enumerate(self.choices):
            refusal = choice.refusal(spec, args, attrs) if choice.conditional else None
            if refusal is None and place < declined:
                refusal = DECLINED
            if refusal is not None:
                refused.append(refusal.rule)
                continue
            if refused:
                self._tick_after(choice, tuple(refused))
            else:
                choice.count()
            return choice
        raise FallbackError(self.refusal(spec, args, attrs))

    def _tick_after(self, choice: Choice, refused: tuple[str, ...]) -> None:
        """Counts a call that the choices before this one refused, by these rules."""
        if refused not in self.ticks:
            before = zip(self.choices, refused, strict=False)
            passed = tuple((c.row, c.provider, rule) for c, rule in before)
            reason = choice.tally.fallback
            if choice.provider is REFERENCE:
                reason = "; ".join(f"{row.label}: {rule}" for row, _, rule in passed)
            passed = choice.tally.passed + passed
            self.ticks[refused] = new_tally(choice.row, choice.provider, reason, passed).tick
        self.ticks[refused]()

    def refusal(self, spec: OperatorSpec, args: Sequence[Any], attrs: Mapping[str, Any]) -> str:
        """Why no row takes a call, for people; for a call that :meth:`pick` refuses."""
        listed = [
            f"{c.row.label}: {c.refusal(spec, args, attrs) or DECLINED}"
            for c in self.choices
            if c.conditional or c.row.declines
        ]
        listed += [f"{row.label}: {why}" for row, _, why in self.rejected]
        return (
            f"{spec.name}: the policy {self.verdict} and no implementation takes this call; "
            f"nothing was written. {'; '.join(listed) or 'No backend in use has a row for it.'}"
        )


def stray(title: str, error: BaseException) -> ContractError:
    """The error in place of one that would end the process without a word."""
    return ContractError(
        f"{title} raised {type(error).__name__}({error}), which is no Exception and would end the "
        "process; a row raises an Exception"
    )


def resolve(situation: Situation) -> Plan:
    """The plan for a key under the current selection.

    Raises:
        ValueError: devices that differ, or a dtype that the operator does not take.
        FallbackError: the policy is strict and only the reference is left.
    """
    _check_facts(situation)
    policy = selection.current.policy
    pin = policy.pin.get(situation.spec.name)
    choices: list[Choice] = []
    rejected: list[tuple[Row, Provider, str]] = []
    for provider in selection.providers_for(situation.device_type):
        for row in provider.table.rows(situation.spec.name, situation.direction):
            why = _rejection(row, provider, situation, policy, pin)
            if why:
                rejected.append((row, provider, why))
                continue
            choices.append(Choice.of(situation.spec, row, provider, None, tuple(rejected)))
    shapes_only = situation.device_type == "meta"
    strict = policy.fallback == "strict" and pin != "reference" and not shapes_only
    if pin is not None and pin != "reference" and not choices:
        raise FallbackError(_pin_text(situation, pin, rejected))
    if pin is None or pin == "reference":
        if not strict and "reference" not in policy.forbid.get(situation.spec.name, ()):
            choices.append(_reference_choice(situation, pin, bool(choices), rejected))
    verdict = "is strict" if strict else "forbids the reference"
    if pin is not None and pin != "reference":
        verdict = f"pins it to {pin!r}"
    plan = Plan(choices=tuple(choices), rejected=tuple(rejected), verdict=verdict)
    if any(choice.row.declines for choice in choices):
        plan = _asking_on(plan)
    if not choices:
        plan.pick(situation.spec, (), {})
    return plan


def _asking_on(plan: Plan) -> Plan:
    """The plan, with the next row behind each that declines a call."""

    def asking_on(place: int, choice: Choice) -> Choice:
        def function(*args: Any, **attrs: Any) -> Any:
            found = choice.function(*args, **attrs)
            if found is not NotImplemented:
                return found
            next(choice.tally.declined)
            after = asking.pick(choice.spec, args, attrs, declined=place + 1)
            return after.function(*args, **attrs)

        return replace(choice, function=function, parts=(function, *choice.parts[1:]))

    choices = (asking_on(i, c) if c.row.declines else c for i, c in enumerate(plan.choices))
    asking = replace(plan, choices=tuple(choices))
    return asking


def _sizes(
    spec: OperatorSpec, row: Row, args: Sequence[Any], attrs: Mapping[str, Any]
) -> Mapping[str, int]:
    """The sizes that a row's limits speak of; those of the forward call, in both directions."""
    if spec.sizes is None:
        return {}
    if row.direction == "forward":
        return spec.sizes(*args, **attrs)
    saved = dict(zip(spec.saved, args[len(args) - len(spec.saved) :], strict=True))
    names, required = _positional(spec)
    if not required <= saved.keys():
        raise ContractError(
            f"{row.label}: a backward row of {spec.name} cannot have limits, since it is not given "
            f"{', '.join(sorted(required - saved.keys()))}; use accepts"
        )
    forward_attrs = {name: value for name, value in attrs.items() if name != "needs"}
    return spec.sizes(*(saved.get(name) for name in names), **forward_attrs)


@cache
def _positional(spec: OperatorSpec) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of the positional arguments, and of those among them that are never None."""
    signature = Signature.parse(spec)
    required = (
        n for n, may in zip(signature.positional, signature.optional, strict=True) if not may
    )
    return signature.positional, frozenset(required)


def reference_row(spec: OperatorSpec, direction: Direction) -> Row:
    """The spec's own plain torch, as a row."""
    function = spec.forward if direction == "forward" else spec.backward
    assert function is not None
    return Row(operator=spec.name, direction=direction, function=function, kind="reference")


def _reference_choice(
    situation: Situation,
    pin: str | None,
    others: bool,
    rejected: Sequence[tuple[Row, Provider, str]],
) -> Choice:
    row = reference_row(situation.spec, situation.direction)
    reason = None
    if pin is None and not others:
        reason = "; ".join(f"{r.label}: {why}" for r, _, why in rejected)
        reason = reason or _nobody(situation.device_type)
    return Choice.of(situation.spec, row, REFERENCE, reason, tuple(rejected))


def _nobody(device_type: str) -> str:
    """Whose tables have no row for an operator."""
    names = list(dict.fromkeys(p.name for p in selection.providers_for(device_type)))
    if not names:
        return f"no row for device type {device_type!r}"
    return f"no row in {' or '.join(map(repr, names))}"


def _rejection(
    row: Row, provider: Provider, situation: Situation, policy: Policy, pin: str | None
) -> str:
    names = {provider.name, provider.distribution, row.kind, row.label}
    if pin is not None and pin not in names:
        return f"the policy pins {situation.spec.name} to {pin!r}"
    forbidden = names & set(policy.forbid.get(situation.spec.name, ()))
    if forbidden:
        return f"the policy forbids {next(iter(forbidden))!r}"
    if row.paired is not None and not situation.pairs:
        return "a paired row, and this call keeps to the canonical residuals"
    if situation.deterministic and not row.deterministic:
        return "not deterministic, and torch's deterministic mode is on"
    for fact in situation.facts:
        wrong = untaken(row, situation.spec, fact.name, fact.dtypes)
        if wrong:
            return f"{fact.name} is {', '.join(sorted(map(str, wrong)))}"
        if row.contiguous and not fact.contiguous:
            return f"{fact.name} is not contiguous"
        if fact.alignment < row.alignment:
            return f"{fact.name} is aligned to {fact.alignment} bytes, not {row.alignment}"
    return ""


def untaken(
    row: Row, spec: OperatorSpec, name: str, dtypes: frozenset[torch.dtype]
) -> frozenset[torch.dtype]:
    """Those of a tensor's dtypes that a row does not take."""
    if isinstance(row.dtypes, Mapping):
        return dtypes - row.dtypes.get(name, dtypes)
    if row.dtypes is None or name in spec.fixed_dtypes:
        return frozenset()
    return frozenset(d for d in dtypes if d.is_floating_point) - row.dtypes


def _check_facts(situation: Situation) -> None:
    spec = situation.spec
    if len({d for fact in situation.facts for d in fact.devices}) > 1:
        listed = ", ".join(f"{f.name} on {_names(f.devices)}" for f in situation.facts)
        raise ValueError(f"{spec.name}: all tensors must be on one device, got {listed}")
    arguments, _ = _positional(spec)
    for fact in situation.facts:
        # Gradients, outputs and residuals have the dtypes of one forward call.
        allowed = spec.dtypes_of(fact.name) if fact.name in arguments else ()
        if allowed and fact.dtypes - named(allowed):
            text = " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))
            raise ValueError(f"{spec.name}: {fact.name} must be {text}, got {_names(fact.dtypes)}")


@cache
def named(names: tuple[str, ...]) -> frozenset[torch.dtype]:
    """torch's dtypes of these names."""
    return frozenset(getattr(torch, name) for name in names)


def _pin_text(situation: Situation, pin: str, rejected: Sequence[tuple[Row, Provider, str]]) -> str:
    why = "; ".join(f"{row.label}: {reason}" for row, _, reason in rejected)
    return (
        f"{situation.spec.name} ({situation.direction}) is pinned to {pin!r}, and no such "
        f"implementation takes this call: {why or 'no backend in use has a row for it'}"
    )


def _names(values: frozenset[Any]) -> str:
    return ", ".join(sorted(str(v).removeprefix("torch.") for v in values))


def _limit_text(allowed: object) -> str:
    if isinstance(allowed, range) and allowed.step == 1:
        return f"{allowed.start} to {allowed.stop - 1}"
    return str(allowed)
