"""The answer to "which implementation would serve this call, and why not the others?"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anychip.contract import FallbackError, Row
from anychip.dispatch.kernel import Kernel
from anychip.dispatch.resolution import Plan, resolve
from anychip.dispatch.selection import Provider


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One candidate."""

    implementation: str
    provider: str
    kind: str
    taken: bool
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The candidates for one call, in the order in which they are tried."""

    operator: str
    direction: str
    lines: tuple[Line, ...]
    error: str | None

    def __str__(self) -> str:
        rows = [f"{self.operator} ({self.direction}):"]
        for line in self.lines:
            mark = "->" if line.taken else "  "
            rows.append(f" {mark} {line.provider}: {line.implementation} [{line.kind}] {line.why}")
        return "\n".join(rows if self.error is None else [*rows, f"  error: {self.error}"])


def explain(kernel: Kernel, args: Sequence[Any], attrs: Mapping[str, Any]) -> Explanation:
    """Resolves a call without running it."""
    plan, error = None, None
    lines: list[Line] = []
    try:
        plan = resolve(kernel.situation(args))
        if kernel.check is not None:
            kernel.check(*args, **attrs)
    except (ValueError, FallbackError) as caught:
        plan, error = None, str(caught)
    if plan is not None:
        lines = _lines(kernel, plan, args, attrs)
        if not any(line.taken for line in lines):
            error = plan.refusal(kernel.spec, args, attrs)
    return Explanation(
        operator=kernel.spec.name, direction=kernel.direction, lines=tuple(lines), error=error
    )


def _lines(kernel: Kernel, plan: Plan, args: Sequence[Any], attrs: Mapping[str, Any]) -> list[Line]:
    lines = [_line(row, provider, False, why) for row, provider, why in plan.rejected]
    taken = False
    for choice in plan.choices:
        why = str(choice.refusal(kernel.spec, args, attrs) or "") if choice.conditional else ""
        if taken:
            lines.append(_line(choice.row, choice.provider, False, why or "not needed"))
            continue
        taken = not why
        lines.append(_line(choice.row, choice.provider, taken, why or "taken"))
    return lines


def _line(row: Row, provider: Provider, taken: bool, why: str) -> Line:
    return Line(
        implementation=row.label, provider=provider.name, kind=row.kind, taken=taken, why=why
    )
