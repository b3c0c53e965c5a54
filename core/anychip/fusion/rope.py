"""Rotary positions of transformers: a function of each model's file, which its attention calls.

transformers has no place for another one. So the fused attention runs the forward of its class with
one name changed: where it names the function of its file, it finds ours, which stands next to it
under a name of its own. All other names of the file stay what they are, and are found when they are
called.

The function gets cos and sin as tables that hold each angle twice. Which entries are twins is
not asked of values at run time: the module that makes the tables is fused as well, and returns them
as a tuple of a type that says so. An attention that is given any other tuple runs its own forward.

Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.fusion.fused import (
    FLOATS,
    Args,
    Call,
    Forward,
    Fusion,
    Named,
    call_operator,
    label_of,
    own_code,
    place,
)

UNLESS = "other dtypes, cos and sin from elsewhere"
POSITIONS = "position_embeddings"
"""The argument of an attention, by transformers' name for it, that holds cos and sin."""


class Halves(NamedTuple):
    """(1 or B, S, R) each; the entries i and i + R/2 are equal."""

    cos: Tensor
    sin: Tensor


class Pairs(NamedTuple):
    """(1 or B, S, R) each; the entries 2 i and 2 i + 1 are equal."""

    cos: Tensor
    sin: Tensor


class Narrow(NamedTuple):
    """(1 or B, S, R/2) each: every angle once."""

    cos: Tensor
    sin: Tensor


LAYOUTS: dict[str, Any] = {"halves": Halves, "pairs": Pairs, "narrow": Narrow}


@dataclass(frozen=True)
class Tables(Fusion):
    """A module that makes cos and sin: as before, but returned as a type of ``LAYOUTS``."""

    layout: str

    kind, operator, unless = "rope", "rope", ""

    def run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Named) -> Any:
        return LAYOUTS[self.layout](*forward(module, *args, **kwargs))


@dataclass(frozen=True)
class Turn:
    """What a rope function of a model's file does with q, k, cos and sin.

    Attributes:
        layout: of cos and sin.
        interleaved: as of ``ops.rope``.
        partial: it leaves the dims beyond R alone; otherwise it takes none.
        keeps: the result has q's dtype; otherwise the wider one of q and cos.
    """

    layout: str
    interleaved: bool
    partial: bool
    keeps: bool

    def refusal(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> str | None:
        """Why the operator cannot serve the call; None when it can. Arguments as of compute."""
        dtypes = [str(t.dtype) for t in (q, k, cos, sin) if t.dtype not in FLOATS]
        if dtypes:
            return f"dtypes {', '.join(dtypes)}"
        if q.dtype != k.dtype or cos.dtype != sin.dtype:
            return f"q is {q.dtype} and k {k.dtype}, cos {cos.dtype} and sin {sin.dtype}"
        if cos.requires_grad or sin.requires_grad:
            return "cos and sin have a gradient"
        return self._misfit(q, k, cos, sin, heads)

    def _misfit(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int) -> str | None:
        if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or heads not in (1, 2):
            return "not (batch, heads, seq, head_dim) with cos (batch, seq, R)"
        batch, length, size = q.shape[0], q.shape[3 - heads], q.shape[3]
        width = cos.shape[2] * (2 if self.layout == "narrow" else 1)
        fits = (k.shape[0], k.shape[3 - heads], k.shape[3]) == (batch, length, size)
        tables = cos.shape == sin.shape and cos.shape[0] in (1, batch) and cos.shape[1] == length
        whole = not (width % 2 or size % 2) and (width <= size if self.partial else width == size)
        if fits and tables and whole:
            return None
        return f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}"

    def compute(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads: int, call: Call
    ) -> tuple[Tensor, Tensor]:
        """q and k turned by ``ops.rope``, in their layout.

        Args:
            q, k: (B, H, S, D), or (B, S, H, D).
            cos, sin: of ``layout``.
            heads: the dim of q and k that is H, 1 or 2.
            call: how the operator is called.
        """
        dtype = q.dtype if self.keeps else torch.promote_types(q.dtype, cos.dtype)
        rows = [t.to(dtype) if heads == 2 else t.to(dtype).transpose(1, 2) for t in (q, k)]
        tables = [self._angles(t).float() for t in (cos, sin)]
        if cos.shape[0] == 1:
            turned = call(ops.rope, (*rows, *(t[0] for t in tables)), self._attrs)
        else:
            # Positions of its own for each row of the batch: one long sequence of all of them.
            flat = [t.flatten(0, 1)[None] for t in rows]
            turned = call(ops.rope, (*flat, *(t.flatten(0, 1) for t in tables)), self._attrs)
            turned = [y.reshape(t.shape) for y, t in zip(turned, rows, strict=True)]
        y, z = (t if heads == 2 else t.transpose(1, 2) for t in turned)
        return y, z

    @property
    def _attrs(self) -> dict[str, bool]:
        return {"interleaved": self.interleaved}

    def _angles(self, table: Tensor) -> Tensor:
        """(1 or B, S, R/2): every angle once."""
        if self.layout == "halves":
            return table[..., : table.shape[-1] // 2]
        return table[..., 0::2] if self.layout == "pairs" else table


@dataclass(frozen=True)
class Rope:
    """The rope function of an attention, for which ``ops.rope`` stands.

    Attributes:
        function: its name in the file of the forward.
        turn: what it does.
        index: which positional argument of the forward holds cos and sin.
    """

    function: str
    turn: Turn
    index: int

    kind, operator, unless = "rope", "rope", UNLESS

    def put_into(self, forward: Forward) -> dict[str, str]:
        """Puts a function into the file of a forward: its name there, by that of the file's own."""
        ours = f"anychip_{self.turn.layout}_{self.function}"
        own = forward.__globals__
        own[ours] = _substitute(own[self.function], self.turn)
        return {self.function: ours}

    def takes(self, module: nn.Module, forward: Forward, args: Args, kwargs: Named) -> bool:
        """Whether a call of the forward has tables of a fused module; counts a call with others."""
        given = args[self.index] if len(args) > self.index else kwargs.get(POSITIONS)
        known = isinstance(given, LAYOUTS[self.turn.layout])
        if given is not None and not known:
            why = f"{POSITIONS} of no fused module"
            own_code("rope", label_of(forward), why, id(module))
        return known


def _substitute(original: Callable[..., Any], turn: Turn) -> Callable[..., Any]:
    """A function that is called like a rope function of a model's file."""
    label = label_of(original)

    def rotated(*args: Any, **kwargs: Any) -> Any:
        heads = kwargs.get("unsqueeze_dim", 1)
        if len(args) != 4 or not kwargs.keys() <= {"unsqueeze_dim"}:
            why: str | None = "other arguments than q, k, cos and sin"
        else:
            why = turn.refusal(*args, heads=heads)
        if why is None:
            return turn.compute(*args, heads=heads, call=call_operator)
        own_code("rope", label, why, place.owner)
        return original(*args, **kwargs)

    return rotated


def functions(module: nn.Module, own: type[nn.Module]) -> dict[str, Any]:
    """The rope functions of its file that the forward of a module's class names, by these names.

    A superclass's forward that it calls is not looked into.
    """
    forward = inspect.unwrap(own.forward)
    if not isinstance(forward, FunctionType):
        return {}
    names = [name for name in forward.__code__.co_names if "rotary" in name or "rope" in name]
    found = {name: forward.__globals__.get(name) for name in names if not hasattr(module, name)}
    return {n: f for n, f in found.items() if callable(f) and not isinstance(f, type)}


def why_not_rewritten(forward: Callable[..., Any], functions: Named) -> str | None:
    """Why no other function can stand at the place of these; None when one can."""
    if len(functions) > 1:
        return "it is not known which of them a call takes"
    (function,) = functions.values()
    if not isinstance(function, FunctionType):
        return f"it is a {type(function).__name__}, not a function"
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return "the forward that calls it is wrapped by a decorator"
    if POSITIONS not in inspect.signature(forward).parameters:
        return f"its module takes no {POSITIONS}"
    if not _passes_on(forward, *functions):
        return f"its module does not hand over the two of {POSITIONS} as they are"
    return None


def _passes_on(forward: Callable[..., Any], function: str) -> bool:
    """Whether all calls of a function get what ``position_embeddings`` unpacks to, and no other."""
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(forward)))))
    except (OSError, SyntaxError):
        return False
    tables = {
        ast.unparse(node.targets[0])
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == POSITIONS
    }
    calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == function]
    handed = {", ".join(map(ast.unparse, call.args[2:4])) for call in calls}
    if len(handed) != 1 or {name.strip("()") for name in tables} != handed:
        return False
    # cos and sin are named where they are unpacked and handed over, and nowhere else.
    for name in handed.pop().split(", "):
        uses = [type(n.ctx) for n in nodes if isinstance(n, ast.Name) and n.id == name]
        if uses.count(ast.Load) != len(calls) or uses.count(ast.Store) != 1:
            return False
    return True


def index_of_positions(forward: Callable[..., Any]) -> int:
    """Which positional argument of a forward, behind self, holds cos and sin."""
    return list(inspect.signature(forward).parameters).index(POSITIONS) - 1
