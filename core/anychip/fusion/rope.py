"""Rotary positions of transformers: a function of each model's file, which its attention calls.

The function gets cos and sin as tables that hold each angle twice. Which entries are twins is
not asked of values at run time: it is proved of the module that makes the tables, which is fused as
well, and returns them as a tuple of a type that says so. The function of the file serves calls with
other tensors than the two of such a tuple, or after a write to them.

Source: Su et al. 2021, arXiv:2104.09864.
"""

import inspect
import itertools
import re
from collections import namedtuple
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.fusion.probe import HOST, Comparison, call, inputs, normal, replica, undisturbed
from anychip.fusion.stand_ins import FLOATS, Forward, StandIn, own_class
from anychip.fusion.swaps import Renames, can_be_renamed, file_of, place, served

POSITIONS = "position_embeddings"
"""The argument of an attention, by transformers' name for it, that holds cos and sin."""
_POSITIONS = (0, 1, 2, 5, 1, 63, 4097, 1000003)
_LENGTH, _ANGLES = 5, 4
"""Of the probe: tokens, and angles of a token."""


class AngleLayout(NamedTuple):
    """How cos and sin, (1 or B, S, R) each, hold their angles.

    Attributes:
        tables: the type of tuple that says so.
        narrow: gives (1 or B, S, R/2), every angle once.
        widen: gives tables with these angles.
    """

    tables: Any
    narrow: Callable[[Tensor], Tensor]
    widen: Callable[[Tensor], Tensor]


Halves = namedtuple("Halves", ("cos", "sin"))
Pairs = namedtuple("Pairs", ("cos", "sin"))
Narrow = namedtuple("Narrow", ("cos", "sin"))
LAYOUTS = {
    "halves": AngleLayout(Halves, lambda t: t.chunk(2, -1)[0], lambda t: torch.cat((t, t), -1)),
    "pairs": AngleLayout(Pairs, lambda t: t[..., 0::2], lambda t: t.repeat_interleave(2, -1)),
    "narrow": AngleLayout(Narrow, lambda t: t, lambda t: t),
}


@dataclass(frozen=True)
class Tables(StandIn):
    """A module that makes cos and sin: as before, but returned as a type of ``LAYOUTS``."""

    layout: str

    kind, operator, unless = "", "rope", ""

    def around(self, forward: Forward) -> Forward:
        kind = LAYOUTS[self.layout].tables
        return lambda *args, **kwargs: kind(
            *(t.clone() if _written(t) else t for t in forward(*args, **kwargs))
        )


@dataclass(frozen=True)
class Rope(Renames):
    """``ops.rope`` in the place of a file's function of q, k, cos and sin.

    Attributes:
        name: of the function in the file.
        layout: of cos and sin.
        partial: it leaves the dims beyond R alone; otherwise it takes none.
        interleaved: as of ``ops.rope``.
        keeps: the result has q's dtype; otherwise the wider one of q and cos.
    """

    name: str
    layout: str
    partial: bool
    interleaved: bool
    keeps: bool

    kind, operator, unless = "rope", "rope", "other dtypes, cos and sin from elsewhere"

    def comparisons(self, module: nn.Module) -> Iterator[Comparison]:
        function, widen = self.subject(module), LAYOUTS[self.layout].widen
        named = "unsqueeze_dim" in inspect.signature(function).parameters
        full, low = torch.float32, torch.bfloat16
        cases = ((0, full, full), (_ANGLES, full, full), (0, low, low), (0, low, full))
        rows = itertools.product(cases, (1, 2) if named else (1,), (True, False))
        for (rest, dtype, table), heads, one_row in rows:
            shapes = [(count, _LENGTH, 2 * _ANGLES + rest) for count in (3, 1)]
            q, k = (inputs(*shape).transpose(heads, 1).to(dtype) for shape in shapes)
            batch = 1 if one_row else len(q)
            cos, sin = (widen(normal(batch, _LENGTH, _ANGLES)).to(table) for _ in range(2))
            args = {"q": q, "k": k.flip(0), "cos": cos, "sin": sin}
            given: Any = {"unsqueeze_dim": heads} if named else {}
            what = "heads that are longer than its tables: " if rest else ""
            theirs, ours = (partial(f, **given) for f in (function, self.compute))
            yield Comparison(theirs, ours, args, what=what)

    def replacement(self, original: Any) -> Any:
        return served("rope", original, self._turned)

    def _turned(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...] | str:
        kind, given = LAYOUTS[self.layout].tables, (*place.given[0], *place.given[1].values())
        tables: Any = next((each for each in given if isinstance(each, kind)), None)
        if tables is None:
            return f"{POSITIONS} of no fused module"
        if len(args) != 4 or kwargs.keys() - {"unsqueeze_dim"}:
            return "other arguments than q, k, cos and sin"
        same = args[2] is tables[0] and args[3] is tables[1]
        if not same or _written(tables[0]) or _written(tables[1]):
            return f"not the two of {POSITIONS} as they are"
        return self.compute(*args, **kwargs)

    def compute(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
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
        tables = [LAYOUTS[self.layout].narrow(t).float() for t in (cos, sin)]
        shapes = [t.shape for t in rows]
        if cos.shape[0] > 1:
            # Positions of its own for each row of the batch: one long sequence of all of them.
            rows, tables = ([t.flatten(0, 1)[None] for t in each] for each in (rows, tables))
        turned = call(ops.rope, *rows, *(t[0] for t in tables), interleaved=self.interleaved)
        made = zip(turned, shapes, strict=True)
        return tuple(y.reshape(shape).transpose(unsqueeze_dim, 2) for y, shape in made)

    def _fits(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int) -> bool:
        if (q.dim(), k.dim(), cos.dim()) != (4, 4, 3) or heads not in (1, 2):
            return False
        mine, other = ((t.dtype, t.shape[0], t.shape[3 - heads], t.shape[3]) for t in (q, k))
        dtype, batch, length, size = mine
        width = cos.shape[2] * (2 if self.layout == "narrow" else 1)
        return (
            (mine, cos.dtype, cos.shape) == (other, sin.dtype, sin.shape)
            and {dtype, cos.dtype} <= {*FLOATS}
            and not (cos.requires_grad or sin.requires_grad or width % 2 or size % 2)
            and (cos.shape[0] in (1, batch) and cos.shape[1] == length)
            and (width <= size if self.partial else width == size)
        )


def _written(table: Tensor) -> bool:
    """Whether a tensor was written to since it was made, where torch counts it."""
    return not (torch.compiler.is_compiling() or table.is_inference()) and table._version > 0


def functions(module: nn.Module) -> list[str]:
    """The rope functions of its file that the forward of a module's class names."""
    file, code = file_of(module), getattr(inspect.unwrap(own_class(module).forward), "__code__", 0)
    names = [name for name in getattr(code, "co_names", ()) if re.search("rotary|rope", name)]
    found = [name for name in names if callable(file.get(name)) and not hasattr(module, name)]
    return [name for name in found if not isinstance(file[name], type)]


def proposals(
    module: nn.Module, names: list[str], layouts: Collection[str]
) -> Iterator[Rope | str]:
    """What the rope function of a module may do with tables of these layouts; or why none can."""
    function = file_of(module)[names[0]]
    if len(names) > 1:
        yield "it is not known which of them a call takes"
    elif not isinstance(function, FunctionType):
        yield f"it is a {type(function).__name__}, not a function"
    elif not can_be_renamed(module):
        yield "the forward that calls it is wrapped by a decorator"
    elif POSITIONS not in inspect.signature(own_class(module).forward).parameters:
        yield f"its module takes no {POSITIONS}"
    elif not layouts:
        yield "no module of the model makes cos and sin for it"
    else:
        flags = itertools.product(layouts, (True, False), (False, True), (False, True))
        yield from (Rope(names[0], *each) for each in flags)


def layout_of(module: nn.Module) -> str | None:
    """How cos and sin of a module hold their angles, a name of ``LAYOUTS``; None: it makes none.

    It takes positions and has no parameters. All kinds of layer that it knows get the same layout.
    """
    forward: Any = own_class(module).forward
    names = inspect.signature(forward).parameters if isinstance(forward, FunctionType) else ()
    if "position_ids" not in names or module._parameters or module._modules:
        return None
    kinds = getattr(module, "layer_types", None) if "layer_type" in names else None
    x = torch.ones((1, len(_POSITIONS), 1), dtype=torch.float32, device=HOST)
    with undisturbed():
        try:
            args = (replica(module, {}), x, torch.tensor([_POSITIONS], device=HOST))
            options: list[Any] = [{"layer_type": kind} for kind in kinds or ()] or [{}]
            made = [forward(*args, **given) for given in options]
            tables = [t for pair in made if type(pair) is tuple for t in pair]
            facts = {(t.dtype, t.requires_grad, t.dim(), *t.shape[:2]) for t in tables}
        except Exception:  # it is not known what it is: any error says that it is not this
            return None
    if len(tables) != 2 * len(made) or facts != {(torch.float32, False, 3, 1, len(_POSITIONS))}:
        return None
    for name, (_, narrow, widen) in LAYOUTS.items():
        if all(torch.equal(widen(narrow(t)), t) for t in tables):
            return name
    return None
