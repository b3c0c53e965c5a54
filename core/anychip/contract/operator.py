"""What an operator is (:class:`OperatorSpec`) and how a chip provides it (:class:`OperatorTable`).

A spec is the one row from which dispatch, autograd, fallback, conformance, benchmarks and documents
come. ``anychip.dispatch`` picks a row at a call; oracles live in ``anychip.conformance``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from anychip.contract.errors import ContractError

if TYPE_CHECKING:
    import torch

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
Direction = Literal["forward", "backward"]
RowKind = Literal["native", "mapped", "compiled", "reference"]
Limit = range | frozenset[int] | set[int]
Autocast = Literal["lower", "fp32", "promote", "none"]
Determinism = Literal["bitwise", "unordered"]


class Residual(NamedTuple):
    """A tensor that the forward direction leaves for the backward one, besides its outputs.

    Attributes:
        name: as the backward row names it.
        shape: in terms of the arguments, for people.
        dtype: torch's name for it, like ``"float32"``.
    """

    name: str
    shape: str
    dtype: str


class Cost(NamedTuple):
    """What one call must move and compute at least: the roofline's two numbers."""

    nbytes: int
    flops: int


class Bound(NamedTuple):
    """The constants of the error bound ``error / (ulp(want) / 2 + c * u_acc * kappa)``.

    Attributes:
        forward: roundings on the longest path from an input to an output, c for a reduction of
            length 1. A reduction of length n adds n in the worst case and sqrt(n) in the
            statistical one.
        backward: the same for the gradients.
        length: length of the reduction, given the call's arguments.
    """

    forward: float
    backward: float
    length: Callable[..., int]


class Sample(NamedTuple):
    """One call: positional arguments in the schema's order, and attributes."""

    args: tuple[Any, ...]
    attrs: Mapping[str, Any]
    label: str


Placement = int | Literal["partial"] | None
"""A tensor's place along one mesh axis: split along that dim, a term of a sum, or a full copy."""
Placements = Sequence[tuple[Sequence[Placement], Sequence[Placement]]]
"""Allowed combinations: placements of the results, then of the tensor arguments, in order."""


class Sharding(NamedTuple):
    """Under which placements the shards of an operator can be computed alone (for DTensor).

    Each function takes the arguments of its direction, of which only shapes may be read. "All
    replicated" is always allowed and need not be listed.
    """

    forward: Callable[..., Placements]
    backward: Callable[..., Placements]


class SampleMaker:
    """Where sample inputs come from: makes seeded tensors of one dtype on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        import torch

        self.device, self.dtype, self._torch = device, dtype, torch
        self._generator = torch.Generator().manual_seed(seed)

    def normal(
        self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Normal values times ``scale``; the same numbers on every device."""
        x = self._torch.randn(shape, generator=self._generator, dtype=self._torch.float32)
        x = x if scale == 1.0 else x * scale
        return x.to(dtype or self.dtype).to(self.device)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """int64 values from 0 to ``high - 1``."""
        return self._torch.randint(high, shape, generator=self._generator).to(self.device)

    def scalar(self, value: float) -> torch.Tensor:
        """A 0-dim float32 tensor."""
        return self._torch.tensor(value, dtype=self._torch.float32, device=self.device)

    def rng(self, seed: int, offset: int) -> torch.Tensor:
        """An int64[2] (seed, offset) tensor for a random operator."""
        return self._torch.tensor([seed, offset], device=self.device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorSpec:
    """One operator, complete.

    Attributes:
        name: identifier; ``torch.ops.<namespace>.<name>`` and the key of every table.
        signature: torch schema without the name, ``"(Tensor x, *, float eps=1e-06) -> Tensor"``.
            Tensors are positional, everything else keyword-only. ``(a!)`` marks what is written.
        equation: what is computed, in ASCII mathematics.
        source: paper and equation, or page, that defines it.
        forward: the reference: takes the arguments, returns outputs then residuals (a bare tensor
            when there is only one), in plain torch that autograd can differentiate twice; or writes
            in place and returns None.
        fake: same call on tensors without data; returns empty outputs and residuals.
        backward: reference backward, ``f(*output gradients, *saved, *, <attrs>, needs)``; ``needs``
            says per differentiable argument whether its gradient is wanted; returns a tuple with a
            gradient or None for each. None: the operator has no gradient.
        residuals: what the forward returns after its outputs.
        saved: names of arguments, outputs and residuals that the backward is given, in this order.
        differentiable: names of the arguments that may require gradients.
        deferrable: those of them that a later call of the backward, with the same tensors, may be
            asked for, with the bits of one call (Qi et al. 2023, arXiv:2401.10241).
        double_backward: ``reference`` differentiates the reference backward; ``error`` refuses.
        restore: ``f(*saved, **attrs)`` of the saved arguments and outputs gives the saved residuals
            again, differentiably, for a second derivative. None: the reference forward gives them,
            for which every argument is kept until backward.
        shaped_like: for an argument that the backward is not given, the tensor among those it is
            given that has its dtype and its shape, like ``{"x": "grad0"}``, or has it as a dim,
            like ``{"bias": "weight[0]"}``. By it what a backward is given and returns is checked.
        check: raises ValueError for shapes that do not fit together; called on every call.
        fixed_dtypes: argument name to the one dtype that it must have, or to those it may have,
            like ``{"rng": "int64", "offsets": ("int64", "int32")}``. Autocast leaves it as it is.
        indexes: integer argument to what its numbers count, like ``{"target": "logits[-1]"}``: each
            from 0 below that size; ``ends of x[0]``: ascending, from 0 up to it; ``bounds of``: so,
            and the first 0; ``each of``: each once. A host refuses others. Not named: any number.
        free_dtypes: those that all other arguments may have. Results have what ``fake`` says.
        sizes: names the sizes that a row's ``limits`` may speak of, given the arguments.
        autocast: under autocast, floating-point arguments are cast to its dtype (lower), to float32
            (fp32), to the widest dtype among them (promote), or left alone (none).
        sharding: placements under which shards can be computed alone, for DTensor. None: refused.
        cost, backward_cost: the roofline's numbers.
        determinism: ``bitwise``: same inputs, same bits, on every run.
        samples: sample calls for conformance and opcheck.
        bound: constants of the error bound.
        random: the operator takes ``rng``.
        namespace: torch.library namespace; third parties use their own.
    """

    name: str
    signature: str
    equation: str
    source: str
    forward: Function
    fake: Function
    samples: Callable[[SampleMaker], Iterable[Sample]]
    cost: Callable[..., Cost]
    bound: Bound
    backward: Function | None = None
    backward_cost: Callable[..., Cost] | None = None
    residuals: tuple[Residual, ...] = ()
    saved: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    deferrable: tuple[str, ...] = ()
    double_backward: Literal["reference", "error"] = "reference"
    restore: Function | None = None
    shaped_like: Mapping[str, str] = field(default_factory=dict)
    check: Function | None = None
    fixed_dtypes: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    indexes: Mapping[str, str] = field(default_factory=dict)
    free_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    sizes: Callable[..., Mapping[str, int]] | None = None
    autocast: Autocast = "none"
    sharding: Sharding | None = None
    determinism: Determinism = "bitwise"
    random: bool = False
    namespace: str = "anychip"

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ContractError(f"operator name must be an identifier, got {self.name!r}")
        if bool(self.differentiable) != (self.backward is not None):
            raise ContractError(
                f"operator {self.name!r}: a backward needs differentiable arguments and the other "
                f"way round; got differentiable={self.differentiable}, backward={self.backward}"
            )
        if not set(self.deferrable) <= set(self.differentiable):
            raise ContractError(f"operator {self.name!r}: no gradient: {self.deferrable=}")

    def dtypes_of(self, argument: str) -> tuple[str, ...]:
        """Names of the dtypes that an argument may have."""
        given = self.fixed_dtypes.get(argument, self.free_dtypes)
        return (given,) if isinstance(given, str) else given

    def __repr__(self) -> str:
        return f"OperatorSpec({self.namespace}::{self.name}{self.signature})"


class Pair(NamedTuple):
    """The second half of a paired row.

    Attributes:
        backward: ``f(*output gradients, *saved, *residuals, *, <attrs>, needs)``, where ``saved``
            leaves out the spec's own residuals.
        num_residuals: how many tensors the forward returns after its outputs.
        fake_residuals: same call as the forward on tensors without data; returns them empty.
    """

    backward: Function
    num_residuals: int
    fake_residuals: Function


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Row:
    """One implementation of one direction of an operator.

    Attributes:
        operator: name of the spec.
        direction: which direction ``function`` computes.
        function: called as the spec says.
        kind: native (own kernel), mapped (a library's), compiled (by a compiler), reference.
        dtypes: floating-point dtypes that it takes, over all tensors that the spec does not fix; or
            those of some tensors by name, like ``{"weight": {torch.float8_e4m3fn}}``.
        limits: size name to the values it takes; checked on every call.
        accepts: further condition, asked at every call with its arguments, of a backward with its
            ``needs`` too; cheap, writes nothing.
        contiguous: it takes contiguous tensors only.
        alignment: every tensor's address must be a multiple of this many bytes (up to 64).
        deterministic: it may run under torch's deterministic mode.
        paired: a *paired* row's backward and its residuals; see :meth:`OperatorTable.pair`.
        declines: it may return NotImplemented before it writes: the next row serves such a call.
        calls: what it calls of the chip's library, and what that is called there; for documents.
    """

    operator: str
    direction: Direction
    function: Function
    kind: RowKind
    dtypes: frozenset[torch.dtype] | Mapping[str, Set[torch.dtype]] | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    accepts: Callable[..., bool] | None = None
    contiguous: bool = False
    alignment: int = 1
    deterministic: bool = True
    paired: Pair | None = None
    declines: bool = False
    calls: Mapping[str, str] = field(default_factory=dict)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Which directions it serves."""
        return (self.direction,) if self.paired is None else ("forward", "backward")

    @property
    def label(self) -> str:
        """Module and name of the function, for people."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


class OperatorTable:
    """The rows of a backend or kernel pack, in the order in which they are tried.

    ``@table.forward("rms_norm", dtypes={torch.bfloat16}, limits={"hidden": range(1, 8193)})``

    Args:
        conditions: of :class:`Row`, for rows that do not say otherwise; ``kind`` is ``native``.
    """

    def __init__(self, **conditions: Any) -> None:
        self._rows: list[Row] = []
        self._conditions = {"kind": "native", **conditions}

    def forward(self, operator: str, **conditions: Any) -> Callable[[F], F]:
        """Decorator: the function is a forward row, or that of an in-place operator."""
        return self._add(operator, "forward", conditions)

    def backward(self, operator: str, **conditions: Any) -> Callable[[F], F]:
        """Decorator: the function is a split backward row, from the spec's canonical residuals."""
        return self._add(operator, "backward", conditions)

    def pair(
        self, operator: str, *, forward: Function, backward: Function, num_residuals: int,
        fake_residuals: Function, **conditions: Any,
    ) -> None:  # fmt: skip
        """Adds a *paired* row: residuals of its own, chosen for both directions or for neither."""
        pair = Pair(backward, num_residuals, fake_residuals)
        self._add(operator, "forward", {**conditions, "paired": pair})(forward)

    def rows(self, operator: str, direction: Direction) -> tuple[Row, ...]:
        """The rows for one direction, in written order."""
        return tuple(r for r in self._rows if r.operator == operator and r.direction == direction)

    def remade(self, change: Callable[[Row], Row | None]) -> OperatorTable:
        """A table of what ``change`` gives for each row, without those that it gives None for.

        Rows are declared before it is known what the chip's library has.
        """
        table = OperatorTable()
        table._rows = [made for made in map(change, self._rows) if made is not None]
        return table

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def _add(
        self, operator: str, direction: Direction, conditions: dict[str, Any]
    ) -> Callable[[F], F]:
        conditions = {**self._conditions, **conditions}
        if not isinstance(conditions.get("dtypes"), Mapping | None):
            conditions["dtypes"] = frozenset(conditions["dtypes"])
        kind, alignment = conditions["kind"], conditions.get("alignment", 1)
        if kind not in get_args(RowKind) or not 1 <= alignment <= 64:
            known = f"{', '.join(get_args(RowKind))} and 1 to 64 bytes are known"
            raise ContractError(f"row for {operator!r}: {kind=}, {alignment=}: {known}")

        def register(function: F) -> F:
            try:
                row = Row(operator=operator, direction=direction, function=function, **conditions)
            except TypeError as error:
                raise ContractError(f"row for operator {operator!r}: {error}") from None
            self._rows.append(row)
            return function

        return register
