"""Which modules of a model can be replaced? Each is looked at once, and what it says is checked.

``table`` says what a module may be; that it computes the same is proved on small inputs.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from anychip.fusion import attention, loss, probe, rope, table
from anychip.fusion.fused import (
    FLOATS,
    Fusion,
    class_name,
    fuse_module,
    fusion_of,
    own_calls,
    own_class,
    why_not,
)
from anychip.fusion.report import LeftAlone, Replaced, Report

KINDS = ("norm", "activation", "rope", "attention", "loss")
Names = str | Iterable[str]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NO_TABLES = "no module of the model makes cos and sin for it"


def fuse(model: nn.Module, *, only: Names | None = None, skip: Names = ()) -> Report:
    """Replaces norms, activations, rope, attention and loss of a model by operators, in place.

    The modules stay the same objects with the same parameters, buffers, hooks and mode; the state
    dict does not change. A module is replaced only if it computes what the operator does, up to
    rounding, for random parameters and inputs of sizes from 2^-10 to 2^10, gradients included.
    Calls that an operator cannot serve go on to the model's own code and are counted in
    ``anychip.provenance()``; under the policy ``strict`` they are an error. A second call finds
    nothing to do.

    Args:
        model: any module. Fuse before it is sharded.
        only: kinds (norm, activation, rope, attention, loss) and paths of modules, ``*`` for
            anything; a path stands for all that is below it, too. None: everything.
        skip: in the same way, what to leave out.

    Returns:
        What was replaced, and what was left alone and why.

    Raises:
        ValueError: an entry of ``only`` or ``skip`` that is no kind and no module's path.
    """
    search = _Search(model, _Choice(model, only, skip))
    for path, module in list(model.named_modules()):
        search.visit(path, module)
    return Report(search.replaced, search.left(), search.before, map(own_calls, search.owners))


def unfuse(model: nn.Module) -> int:
    """Gives every module of a model, fused or copied from a fused one, its own code back.

    Returns:
        How many modules and loss functions were operators.
    """
    count = 0
    for module in model.modules():
        if fusion_of(module) is not None:
            count += 1
            module.__class__ = own_class(module)
        original = loss.loss_of(module)
        if isinstance(original, loss.LanguageModelLoss):
            count += 1
            owner: Any = module
            owner.loss_function = original.original
    return count


class _Choice:
    """What the caller wants to have replaced."""

    def __init__(self, model: nn.Module, only: Names | None, skip: Names) -> None:
        self._paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        self._only = None if only is None else self._known(only)
        self._skip = self._known(skip)

    def refusal(self, module: nn.Module, kind: str, *, only: bool = True) -> str | None:
        """Why it is not wanted; with ``only=False``, why not even for the sake of another one."""
        paths = self._paths[id(module)]

        def met(entry: str) -> bool:
            return entry == kind or any(_below(path, entry) for path in paths)

        if only and self._only is not None and not any(map(met, self._only)):
            return f"only {', '.join(self._only)}"
        return next((f"skip {entry}" for entry in self._skip if met(entry)), None)

    def _known(self, names: Names) -> tuple[str, ...]:
        entries = (names,) if isinstance(names, str) else tuple(names)
        paths = [path for found in self._paths.values() for path in found]
        for entry in entries:
            if entry not in KINDS and not any(_below(path, entry) for path in paths):
                near = difflib.get_close_matches(entry, [*KINDS, *paths], 1)
                hint = f"did you mean {near[0]!r}?" if near else f"kinds are {', '.join(KINDS)}"
                raise ValueError(f"{entry!r} is no kind and no module's path; {hint}")
        return entries


def _below(path: str, entry: str) -> bool:
    return fnmatch.fnmatchcase(path, entry) or fnmatch.fnmatchcase(path, f"{entry}.*")


@dataclass
class _Search:
    """One pass over a model."""

    model: nn.Module
    choice: _Choice
    replaced: list[Replaced] = field(default_factory=list)
    before: int = 0
    owners: list[object] = field(default_factory=list)
    _left: dict[tuple[int, str], LeftAlone] = field(default_factory=dict)
    _verdicts: dict[Any, str | None] = field(default_factory=dict)

    def visit(self, path: str, module: nn.Module) -> None:
        """Replaces one module, or functions that it calls, or notes why not."""
        if isinstance(module, torch.jit.ScriptModule):
            self._leave(path, module, "it is compiled by TorchScript")
            return
        known = fusion_of(module)
        self.before += 0 if known is None else known.count
        self._visit_loss(path, module)
        if known is None or isinstance(known, attention.Attention):
            attends = self._visit_attention(path, module)
            self._visit_rope(path, module)
            if not attends and fusion_of(module) is None:
                self._visit_layer(path, module)

    def _visit_layer(self, path: str, module: nn.Module) -> None:
        reasons = []
        for fusion in table.candidates(module):
            why = self.choice.refusal(module, fusion.kind) or why_not(module)
            why = why or _wrong_dtype(module) or _hooked(module, fusion)
            if why is None:
                # Layers of a model are alike: one answer serves all of them.
                key = (probe.likeness(module), fusion)
                if key not in self._verdicts:
                    self._verdicts[key] = probe.module_difference(module, fusion)
                if self._verdicts[key] is None:
                    self._replace(path, module, fusion)
                    return
                why = f"not {fusion.operator}: {self._verdicts[key]}"
            reasons.append(why)
        self._leave(path, module, reasons[0] if reasons else table.nothing(module))

    def _replace(self, path: str, module: nn.Module, fusion: Fusion) -> None:
        self._add(path, class_name(module), module, fusion)
        fuse_module(module, fusion)

    def _add(self, path: str, source: str, owner: object, what: Any) -> None:
        self.owners.append(owner)
        entry = {"kind": what.kind, "operator": what.operator, "unless": what.unless}
        self.replaced.append(Replaced(path=path, source=source, **entry))

    def _leave(self, path: str, module: nn.Module, reason: str | None, source: str = "") -> None:
        # A function that is left alone may be that of a module that is not.
        if reason is not None:
            entry = LeftAlone(path=path, source=source or class_name(module), reason=reason)
            self._left[id(module), source] = entry

    def _visit_loss(self, path: str, module: Any) -> None:
        original = loss.loss_of(module)
        if isinstance(original, loss.LanguageModelLoss):
            self.before += 1
        elif original is not None:
            source = getattr(original, "__name__", type(original).__name__)
            why = self.choice.refusal(module, "loss")
            made = None if why else loss.recognized_loss(original)
            if made is None:
                why = why or "not the cross entropy of a language model"
                self._leave(path, module, why, source)
            else:
                module.loss_function = made
                self._add(path, source, made, loss.LanguageModelLoss)

    def _visit_attention(self, path: str, module: nn.Module) -> bool:
        """Whether it is one."""
        asks, mine = attention.found(module), _attention_of(module)
        if asks is not None and mine.asks is None:
            why = self.choice.refusal(module, "attention") or why_not(module)
            why = why or (_wrong_dtype(module) if asks == "torch" else None)
            why = why or attention.why_not_asked(module, self.model)
            if why is None:
                self._replace(path, module, replace(mine, asks=asks))
            else:
                self._leave(path, module, why, class_name(module))
        return asks is not None

    def _visit_rope(self, path: str, module: nn.Module) -> None:
        """Replaces the rope function of an attention, and lets the module of its tables say so."""
        functions, mine = rope.functions(module), _attention_of(module)
        if not functions or mine.rope is not None:
            return
        found = self.choice.refusal(module, "rope") or why_not(module)
        found = found or rope.why_not_rewritten(own_class(module).forward, functions)
        if found is None:
            ((name, function),) = functions.items()
            turns = [rope.turn_of(function, layout) for layout in self._makers]
            turn = next((turn for turn in turns if isinstance(turn, rope.Turn)), None)
            if turn is not None:
                made = rope.Rope(name, turn)
                self._add(path, name, module, made)
                fuse_module(module, replace(mine, rope=made))
                for maker in self._makers[turn.layout]:
                    fuse_module(maker, rope.Tables(turn.layout))
                return
            found = f"not rope: {turns[0]}" if turns else _NO_TABLES
        self._leave(path, module, found, ", ".join(functions))

    @functools.cached_property
    def _makers(self) -> dict[str, list[nn.Module]]:
        """The modules that make cos and sin, by the layout of these."""
        found: dict[str, list[nn.Module]] = {}
        for module in filter(rope.makes_tables, self.model.modules()):
            known = fusion_of(module)
            why = self.choice.refusal(module, "rope", only=False) or why_not(module)
            layout = known.layout if isinstance(known, rope.Tables) else None
            if known is None and why is None:
                layout = rope.layout_of(module)
            if layout is not None:
                found.setdefault(layout, []).append(module)
        return found

    def left(self) -> list[LeftAlone]:
        """What was left alone; children of a fused MLP that have no work any more are not."""
        done: set[int] = set()
        for module in self.model.modules():
            fusion = fusion_of(module)
            if fusion is not None:
                done.update(map(id, (module, *fusion.bystanders(module))))
        entries = self._left.items()
        return [entry for (key, source), entry in entries if source or key not in done]


def _attention_of(module: nn.Module) -> attention.Attention:
    known = fusion_of(module)
    return known if isinstance(known, attention.Attention) else attention.Attention()


def _wrong_dtype(module: nn.Module) -> str | None:
    wrong = {p.dtype for p in module.parameters() if p.dtype not in FLOATS}
    return f"operators take no {', '.join(map(str, wrong))}" if wrong else None


def _hooked(module: nn.Module, fusion: Fusion) -> str | None:
    """A child whose work the operator does would not be called any more, nor would its hooks."""
    for child in fusion.bystanders(module):
        if any(getattr(child, name) for name in _HOOKS):
            return f"hooks of its {type(child).__name__} would no longer be called"
    return None
