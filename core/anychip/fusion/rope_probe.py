"""Which tables of angles does a module make, and what does a rope function do with them?

Both are run on small inputs, as in ``probe``, and with its bound. What is found is what
``rope.Tables`` and ``rope.Turn`` say; everything else is left as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from anychip.fusion.fused import HOST
from anychip.fusion.probe import UNIT, Roundings, inputs, replica, undisturbed
from anychip.fusion.rope import Turn

_POSITIONS = (0, 1, 2, 5, 1, 63, 4097, 1000003)
_LENGTH, _ANGLES, _REST = 5, 4, 4
"""Of the probe: tokens, angles of a token, and dims of a head beyond those that are turned."""


def makes_tables(module: nn.Module) -> bool:
    """Whether a module may make cos and sin: it takes positions and has no parameters."""
    names = inspect.signature(type(module).forward).parameters
    return "position_ids" in names and not module._parameters and not module._modules


def layout_of(module: nn.Module) -> str | None:
    """How the tables of a module hold their angles, a name of ``rope.LAYOUTS``; None: it is none.

    Every kind of layer that it knows has to get tables of the same layout.
    """
    kinds = getattr(module, "layer_types", None) or ()
    takes_kind = "layer_type" in inspect.signature(type(module).forward).parameters
    options: list[dict[str, Any]] = [{"layer_type": kind} for kind in kinds if takes_kind]
    found = {_layout(module, given) for given in options or [{}]}
    return found.pop() if len(found) == 1 else None


def _layout(module: nn.Module, given: dict[str, Any]) -> str | None:
    twin = replica(module, torch.Generator(HOST).manual_seed(11))
    x = torch.ones((1, len(_POSITIONS), 1), dtype=torch.float32, device=HOST)
    position_ids = torch.tensor([_POSITIONS], device=HOST)
    with undisturbed():
        try:
            made = type(module).forward(twin, x, position_ids, **given)
        except Exception:  # it is not known what it is: any error says that it is not this
            return None
    if type(made) is not tuple or len(made) != 2 or not all(map(_is_table, made)):
        return None
    tables = torch.stack(made)
    width = tables.shape[-1]
    if width % 2 == 0 and torch.equal(*tables.chunk(2, dim=-1)):
        return "halves"
    return "pairs" if torch.equal(tables[..., 0::2], tables[..., 1::2]) else "narrow"


def _is_table(made: Any) -> bool:
    known = isinstance(made, Tensor) and not made.requires_grad and made.dtype == torch.float32
    return known and made.dim() == 3 and made.shape[:2] == (1, len(_POSITIONS))


def turn_of(function: Callable[..., Any], layout: str) -> Turn | str:
    """What a function of q, k, cos and sin does with tables of a layout; or why it is not rope."""
    with undisturbed():
        reasons = []
        for interleaved in (False, True):
            turn = Turn(layout, interleaved, partial=False, keeps=False)
            try:
                why = _difference(function, turn, 2 * _ANGLES)
                if why is None:
                    return _completed(function, turn)
            except Exception as error:  # as above
                why = f"it cannot be called with q, k, cos and sin: {type(error).__name__}"
            reasons.append(why)
    return reasons[0]


def _completed(function: Callable[..., Any], turn: Turn) -> Turn | str:
    """The turn with what the function does about longer heads and mixed dtypes."""
    try:
        why = _difference(function, replace(turn, partial=True), 2 * _ANGLES + _REST)
        turn = replace(turn, partial=True)
    except RuntimeError:  # shapes that do not fit
        why = None
    if why is not None:
        return f"heads that are longer than its tables: {why}"
    q = torch.ones((1, 1, _LENGTH, 2 * _ANGLES), dtype=torch.bfloat16, device=HOST)
    narrow, wide = (
        _dtypes(function, q, torch.ones((1, _LENGTH, _width(turn)), dtype=dtype, device=HOST))
        for dtype in (torch.bfloat16, torch.float32)
    )
    if narrow != {torch.bfloat16} or wide not in ({torch.bfloat16}, {torch.float32}):
        return f"it gives {', '.join(map(str, narrow | wide))} for torch.bfloat16"
    return replace(turn, keeps=wide == {torch.bfloat16})


def _dtypes(function: Callable[..., Any], q: Tensor, table: Tensor) -> set[torch.dtype]:
    return {y.dtype for y in function(q, q, table, table)}


def _difference(function: Callable[..., Any], turn: Turn, size: int) -> str | None:
    """What tells a function from ``ops.rope``, for heads of this size."""
    q, k = inputs((3, _LENGTH, size)), inputs((1, _LENGTH, size)).flip(0)
    for heads in (1, 2) if _takes_dim(function) else (1,):
        q, k = (t if heads == 1 else t.transpose(1, 2) for t in (q, k))
        for batch in (1, q.shape[0]):
            for why in _compared(function, turn, (q, k), heads, batch):
                return why
    return None


def _takes_dim(function: Callable[..., Any]) -> bool:
    return "unsqueeze_dim" in inspect.signature(function).parameters


def _compared(
    function: Callable[..., Any], turn: Turn, rows: tuple[Tensor, Tensor], heads: int, batch: int
) -> Iterator[str]:
    generator = torch.Generator(HOST).manual_seed(17)
    options: Any = {"dtype": torch.float32, "device": HOST, "generator": generator}
    cos, sin = (_widened(torch.randn(batch, _LENGTH, _ANGLES, **options), turn) for _ in range(2))
    roundings = Roundings()
    ours, theirs = ([t.clone().requires_grad_() for t in rows] for _ in range(2))
    got = turn.compute(ours[0], ours[1], cos, sin, heads=heads, call=roundings.call)
    named = {"unsqueeze_dim": heads} if _takes_dim(function) else {}
    want = function(*theirs, cos, sin, **named)
    if [tuple(y.shape) for y in want] != [tuple(t.shape) for t in rows]:
        yield f"it gives {', '.join(str(tuple(y.shape)) for y in want)}"
        return
    cotangents = [torch.randn(y.shape, **options) for y in want]
    grads = torch.autograd.grad(got, ours, cotangents)
    wanted = torch.autograd.grad(want, theirs, cotangents)
    for part, pairs, limit in (
        ("result", zip(got, want, strict=True), roundings.forward),
        ("gradient", zip(grads, wanted, strict=True), roundings.backward),
    ):
        for mine, other in pairs:
            top = other.detach().abs().amax(-1, keepdim=True)
            if not bool(((mine - other).abs() <= 2 * limit * UNIT * top).all()):
                yield f"its {part} differs from the operator's"


def _widened(narrow: Tensor, turn: Turn) -> Tensor:
    """Tables of a layout with these angles."""
    if turn.layout == "halves":
        return torch.cat((narrow, narrow), dim=-1)
    return narrow.repeat_interleave(2, dim=-1) if turn.layout == "pairs" else narrow


def _width(turn: Turn) -> int:
    return _ANGLES if turn.layout == "narrow" else 2 * _ANGLES
