"""Rotary positions of transformers: a function of each model's file, which its attention calls.

transformers has no place for another one. So the fused attention runs the forward of its class with
one name changed: where it names the function of its file, it finds ours, which stands next to it
under a name of its own. All other names of the file stay what they are, and are found when they are
called.

The function gets cos and sin as tables that hold each angle twice. Which entries are twins is
not asked of values at run time: it is proved of the module that makes the tables, which is fused as
well, and returns them as a tuple of a type that says so. The function of the file serves calls with
other tensors than the two of such a tuple, or after a write to them.

Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.fusion.fused import (
    FLOATS,
    HOST,
    Args,
    Call,
    Forward,
    Fusion,
    Named,
    call_operator,
    label_of,
    own_class,
    own_code,
    place,
)
from anychip.fusion.probe import difference, inputs, replica, undisturbed

POSITIONS = "position_embeddings"
"""The argument of an attention, by transformers' name for it, that holds cos and sin."""
_POSITIONS = (0, 1, 2, 5, 1, 63, 4097, 1000003)
_LENGTH, _ANGLES, _REST = 5, 4, 4
"""Of the probe: tokens, angles of a token, and dims of a head beyond those that are turned."""


# cos and sin are (1 or B, S, R) each, and these entries are equal: i and i + R/2; 2 i and 2 i + 1.
Halves = namedtuple("Halves", ("cos", "sin"))
Pairs = namedtuple("Pairs", ("cos", "sin"))
# (1 or B, S, R/2): every angle once.
Narrow = namedtuple("Narrow", ("cos", "sin"))
LAYOUTS: dict[str, Any] = {"halves": Halves, "pairs": Pairs, "narrow": Narrow}


@dataclass(frozen=True)
class Tables(Fusion):
    """A module that makes cos and sin: as before, but returned as a type of ``LAYOUTS``."""

    layout: str

    kind, operator, unless = "rope", "rope", ""

    @property
    def count(self) -> int:
        return 0

    def run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Named) -> Any:
        return LAYOUTS[self.layout](*forward(module, *args, **kwargs))


@dataclass(frozen=True)
class Turn:
    """What a rope function of a model's file does with q, k, cos and sin.

    Attributes:
        layout: of cos and sin.
        partial: it leaves the dims beyond R alone; otherwise it takes none.
        interleaved: as of ``ops.rope``.
        keeps: the result has q's dtype; otherwise the wider one of q and cos.
    """

    layout: str
    partial: bool
    interleaved: bool
    keeps: bool

    def compute(
        self, call: Call, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, ...] | str:
        """q and k turned by ``ops.rope``, in their layout; or why it cannot serve the call.

        Args:
            q, k: (B, H, S, D), or (B, S, H, D).
            cos, sin: of ``layout``.
            unsqueeze_dim: the dim of q and k that is H, 1 or 2.
        """
        if not self._fits(q, k, cos, sin, unsqueeze_dim):
            given = {"q": q, "k": k, "cos": cos, "sin": sin}
            texts = [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in given.items()]
            return f"{', '.join(texts)}{' with a gradient' * cos.requires_grad}"
        dtype = q.dtype if self.keeps else torch.promote_types(q.dtype, cos.dtype)
        rows = [t.to(dtype).transpose(unsqueeze_dim, 2) for t in (q, k)]
        tables = [self._angles(t).float() for t in (cos, sin)]
        if cos.shape[0] > 1:
            # Positions of its own for each row of the batch: one long sequence of all of them.
            rows, tables = ([t.flatten(0, 1)[None] for t in each] for each in (rows, tables))
        attrs = {"interleaved": self.interleaved}
        turned = call(ops.rope, (*rows, *(t[0] for t in tables)), attrs)
        return tuple(
            y.reshape(x.transpose(unsqueeze_dim, 2).shape).transpose(unsqueeze_dim, 2)
            for x, y in zip((q, k), turned, strict=True)
        )

    def _fits(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int) -> bool:
        if (q.dim(), k.dim(), cos.dim()) != (4, 4, 3) or heads not in (1, 2):
            return False
        sizes = [(t.dtype, t.shape[0], t.shape[3 - heads], t.shape[3]) for t in (q, k)]
        dtype, batch, length, size = sizes[0]
        width = cos.shape[2] * (2 if self.layout == "narrow" else 1)
        return (
            sizes[0] == sizes[1]
            and (cos.dtype, cos.shape) == (sin.dtype, sin.shape)
            and {dtype, cos.dtype} <= {*FLOATS}
            and not (cos.requires_grad or sin.requires_grad)
            and cos.shape[0] in (1, batch)
            and cos.shape[1] == length
            and not (width % 2 or size % 2)
            and (width <= size if self.partial else width == size)
        )

    def _angles(self, table: Tensor) -> Tensor:
        """(1 or B, S, R/2): every angle once."""
        if self.layout == "halves":
            return table[..., : table.shape[-1] // 2]
        return table[..., 0::2] if self.layout == "pairs" else table


@dataclass(frozen=True)
class Rope:
    """The rope function of an attention, by its name in the file, and what it does."""

    function: str
    turn: Turn

    kind, operator, unless = "rope", "rope", "other dtypes, cos and sin from elsewhere"

    def put_into(self, forward: Forward) -> dict[str, str]:
        """Puts a function into the file of a forward: its name there, by that of the file's own."""
        ours = f"anychip_{self.turn.layout}_{self.function}"
        own = forward.__globals__
        own[ours] = _substitute(own[self.function], self.turn)
        return {self.function: ours}


def _substitute(original: Callable[..., Any], turn: Turn) -> Callable[..., Any]:
    """A function that is called like a rope function of a model's file."""
    label = label_of(original)

    def rotated(*args: Any, **kwargs: Any) -> Any:
        made: Any = "other arguments than q, k, cos and sin"
        if not isinstance(place.tables, LAYOUTS[turn.layout]):
            made = f"{POSITIONS} of no fused module"
        elif len(args) == 4 and kwargs.keys() <= {"unsqueeze_dim"}:
            cos, sin = place.tables
            made = f"not the two of {POSITIONS} as they are"
            if args[2] is cos and args[3] is sin and version_of(place.tables) == place.version:
                made = turn.compute(call_operator, *args, **kwargs)
        if not isinstance(made, str):
            return made
        own_code("rope", label, made, place.owner)
        return original(*args, **kwargs)

    return rotated


def tables_among(args: Args, kwargs: Named) -> tuple[Tensor, ...]:
    """cos and sin as a fused module has made them, among the arguments of an attention."""
    known = tuple(LAYOUTS.values())
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, known)), ())


def version_of(tables: tuple[Tensor, ...]) -> int:
    """How often tensors were written to; 0 where torch does not count it."""
    if torch.compiler.is_compiling():
        return 0
    return sum(t._version for t in tables if not t.is_inference())


def functions(module: nn.Module) -> dict[str, Any]:
    """The rope functions of its file that the forward of a module's class names, by these names.

    A superclass's forward that it calls is not looked into.
    """
    forward = inspect.unwrap(own_class(module).forward)
    if not isinstance(forward, FunctionType):
        return {}
    names = [name for name in forward.__code__.co_names if "rotary" in name or "rope" in name]
    found = {name: forward.__globals__.get(name) for name in names if not hasattr(module, name)}
    return {n: f for n, f in found.items() if callable(f) and not isinstance(f, type)}


def why_not_rewritten(forward: Any, functions: Named) -> str | None:
    """Why no other function can stand at the place of these; None when one can."""
    (function, *others) = functions.values()
    if others:
        return "it is not known which of them a call takes"
    if not isinstance(function, FunctionType):
        return f"it is a {type(function).__name__}, not a function"
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return "the forward that calls it is wrapped by a decorator"
    known = POSITIONS in inspect.signature(forward).parameters
    return None if known else f"its module takes no {POSITIONS}"


# What is proved: of the module that makes tables, and of the function that uses them


def makes_tables(module: nn.Module) -> bool:
    """Whether a module may make cos and sin: it takes positions and has no parameters."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType) or module._parameters or module._modules:
        return False
    return "position_ids" in inspect.signature(forward).parameters


def layout_of(module: nn.Module) -> str | None:
    """How the tables of a module hold their angles, a name of ``LAYOUTS``; None: it is none.

    Every kind of layer that it knows has to get tables of the same layout.
    """
    takes_kind = "layer_type" in inspect.signature(type(module).forward).parameters
    kinds = getattr(module, "layer_types", None) if takes_kind else None
    options: list[Named] = [{"layer_type": kind} for kind in kinds or ()] or [{}]
    found = {_layout(module, given) for given in options}
    return found.pop() if len(found) == 1 else None


def _layout(module: nn.Module, given: Named) -> str | None:
    x = torch.ones((1, len(_POSITIONS), 1), dtype=torch.float32, device=HOST)
    with undisturbed():
        try:
            forward: Any = type(module).forward
            made = forward(replica(module), x, torch.tensor([_POSITIONS], device=HOST), **given)
        except Exception:  # it is not known what it is: any error says that it is not this
            return None
    if type(made) is not tuple or len(made) != 2 or not all(map(_is_table, made)):
        return None
    tables = torch.stack(made)
    if tables.shape[-1] % 2 == 0 and torch.equal(*tables.chunk(2, dim=-1)):
        return "halves"
    return "pairs" if torch.equal(tables[..., 0::2], tables[..., 1::2]) else "narrow"


def _is_table(made: Any) -> bool:
    known = isinstance(made, Tensor) and not made.requires_grad and made.dtype == torch.float32
    return known and made.dim() == 3 and made.shape[:2] == (1, len(_POSITIONS))


@functools.cache
def turn_of(function: Callable[..., Any], layout: str) -> Turn | str:
    """What a function of q, k, cos and sin does with tables of a layout; or why it is not rope."""
    failed: list[tuple[int, str]] = []
    for partial, *rest in itertools.product((True, False), (False, True), (False, True)):
        turn = Turn(layout, partial, *rest)
        with undisturbed():
            for number, (what, args, given) in enumerate(_samples(function, layout)):
                why = difference(function, turn.compute, args, given)
                if why is not None:
                    failed.append((number, f"{what}{why}"))
                    break
            else:
                return turn
    return max(failed, key=lambda each: each[0])[1]


def _samples(
    function: Callable[..., Any], layout: str
) -> Iterator[tuple[str, dict[str, Tensor], Named]]:
    """What is special about a call, its positional arguments, and the others."""
    named = "unsqueeze_dim" in inspect.signature(function).parameters
    for what, rest, dtype, table in (
        ("", 0, torch.float32, torch.float32),
        ("heads that are longer than its tables: ", _REST, torch.float32, torch.float32),
        ("", 0, torch.bfloat16, torch.bfloat16),
        ("", 0, torch.bfloat16, torch.float32),
    ):
        for heads, batch in itertools.product((1, 2) if named else (1,), (1, len(inputs(())))):
            shapes = [(count, _LENGTH, 2 * _ANGLES + rest) for count in (3, 1)]
            q, k = (inputs(shape).transpose(heads, 1).to(dtype) for shape in shapes)
            options: Any = {"dtype": torch.float32, "device": HOST}
            tables = [torch.randn(batch, _LENGTH, _ANGLES, **options) for _ in range(2)]
            cos, sin = (_widened(t, layout).to(table) for t in tables)
            args = {"q": q, "k": k.flip(0), "cos": cos, "sin": sin}
            yield what, args, {"unsqueeze_dim": heads} if named else {}


def _widened(narrow: Tensor, layout: str) -> Tensor:
    """Tables of a layout with these angles."""
    if layout == "halves":
        return torch.cat((narrow, narrow), dim=-1)
    return narrow.repeat_interleave(2, dim=-1) if layout == "pairs" else narrow
