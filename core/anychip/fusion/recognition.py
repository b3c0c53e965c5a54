"""Which modules of a model can be replaced? Each is looked at once, and what it says is checked.

Parameters, attributes and children make a module a candidate; that it computes the same is proved
on small inputs. A class of torch that is known to mean something else is not tried.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from anychip.fusion import activation, attention, loss, norm, probe, rope, rope_probe
from anychip.fusion.fused import (
    FLOATS,
    Fusion,
    Unary,
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
_FUNCTIONALS = (
    "layer_norm",
    "rms_norm",
    "gelu",
    "softmax",
    "Softmax",
    "cross_entropy",
    "multi_head_attention_forward",
)


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
    search.visit_rope()
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

    def refusal(self, module: nn.Module, kind: str) -> str | None:
        """Why it is not wanted."""
        if self._only is not None and not any(self._meets(e, module, kind) for e in self._only):
            return f"only {', '.join(self._only)}"
        return self.skip(module, kind)

    def skip(self, module: nn.Module, kind: str) -> str | None:
        """Why it is not wanted, whatever is."""
        met = next((e for e in self._skip if self._meets(e, module, kind)), None)
        return None if met is None else f"skip {met}"

    def _known(self, names: Names) -> tuple[str, ...]:
        entries = (names,) if isinstance(names, str) else tuple(names)
        paths = [path for found in self._paths.values() for path in found]
        for entry in entries:
            if entry not in KINDS and not any(_below(path, entry) for path in paths):
                near = difflib.get_close_matches(entry, [*KINDS, *paths], 1)
                hint = f"did you mean {near[0]!r}?" if near else f"kinds are {', '.join(KINDS)}"
                raise ValueError(f"{entry!r} is no kind and no module's path; {hint}")
        return entries

    def _meets(self, entry: str, module: nn.Module, kind: str) -> bool:
        return entry == kind or any(_below(path, entry) for path in self._paths[id(module)])


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
    _done: set[int] = field(default_factory=set)
    _verdicts: dict[Any, str | None] = field(default_factory=dict)
    _turns: dict[Any, rope.Turn | str] = field(default_factory=dict)
    _rope: list[tuple[str, nn.Module, dict[str, Any]]] = field(default_factory=list)
    _tables: list[nn.Module] = field(default_factory=list)

    def visit(self, path: str, module: nn.Module) -> None:
        """Replaces one module, or notes why not."""
        if isinstance(module, torch.jit.ScriptModule):
            self._leave(path, module, "it is compiled by TorchScript")
            return
        self._visit_loss(path, module)
        known, own = fusion_of(module), own_class(module)
        if rope_probe.makes_tables(module):
            self._tables.append(module)
        functions = rope.functions(module, own)
        if functions:
            self._rope.append((path, module, functions))
        if known is not None:
            self._known(module, known)
        asks = attention.asks(module, own)
        if asks is not None:
            self._visit_attention(path, module, asks)
        elif known is None and not self._visit_module(path, module):
            self._leave(path, module, _nothing(module))

    def _known(self, module: nn.Module, known: Fusion) -> None:
        self._finish(module, known)
        if isinstance(known, attention.Attention):
            self.before += (known.asks is not None) + (known.rope is not None)
        elif not isinstance(known, rope.Tables):
            self.before += 1

    def _visit_module(self, path: str, module: nn.Module) -> bool:
        """Whether it was replaced, or left alone for a reason that is known."""
        reasons: list[str] = []
        for fusion in _candidates(module):
            why = self.choice.refusal(module, fusion.kind) or why_not(module)
            why = why or _wrong_dtype(module) or _hooked(module, fusion)
            if why is not None:
                self._leave(path, module, why)
                return True
            found = self._difference(module, fusion) if isinstance(fusion, Unary) else None
            if found is None:
                self._replace(path, module, fusion)
                return True
            reasons.append(f"not {fusion.operator}: {found}")
        if reasons:
            self._leave(path, module, reasons[0])
        return bool(reasons)

    def _difference(self, module: nn.Module, fusion: Unary) -> str | None:
        # Layers of a model are alike: one answer serves all of them.
        key = (probe.likeness(module), fusion)
        if key not in self._verdicts:
            self._verdicts[key] = probe.difference(module, fusion)
        return self._verdicts[key]

    def _replace(self, path: str, module: nn.Module, fusion: Fusion) -> None:
        if isinstance(fusion, norm.Norm):
            fusion = replace(fusion, promotes=probe.promotes(module))
        self._add(path, class_name(module), module, fusion)
        fuse_module(module, fusion)
        self._finish(module, fusion)

    def _finish(self, module: nn.Module, fusion: Fusion) -> None:
        self._done.add(id(module))
        if isinstance(fusion, activation.GatedMLP):
            self._done.update(id(other) for other in activation.bystanders(module, fusion))

    def _add(
        self,
        path: str,
        source: str,
        owner: object,
        what: Fusion | type[rope.Rope] | type[loss.LanguageModelLoss],
    ) -> None:
        self.owners.append(owner)
        entry = {"kind": what.kind, "operator": what.operator, "unless": what.unless}
        self.replaced.append(Replaced(path=path, source=source, **entry))

    def _leave(self, path: str, module: nn.Module, reason: str | None, source: str = "") -> None:
        # A function that is left alone may be that of a module that is not.
        if reason is not None:
            entry = LeftAlone(path=path, source=source or class_name(module), reason=reason)
            self._left[id(module), source] = entry

    def _visit_loss(self, path: str, module: nn.Module) -> None:
        original = loss.loss_of(module)
        if original is None:
            return
        if isinstance(original, loss.LanguageModelLoss):
            self.before += 1
            return
        source = getattr(original, "__name__", type(original).__name__)
        why = self.choice.refusal(module, "loss")
        made = None if why else loss.recognized_loss(original)
        if made is None:
            why = why or "not the cross entropy of a language model"
            self._leave(path, module, why, source)
            return
        owner: Any = module
        owner.loss_function = made
        self._add(path, source, made, loss.LanguageModelLoss)

    def _visit_attention(self, path: str, module: nn.Module, asks: attention.Asks) -> None:
        known = fusion_of(module)
        mine = known if isinstance(known, attention.Attention) else attention.Attention()
        if mine.asks is not None:
            return
        why = self.choice.refusal(module, "attention") or why_not(module)
        why = why or (_wrong_dtype(module) if asks == "torch" else None)
        why = why or attention.why_not_asked(module, self.model)
        if why is None:
            self._replace(path, module, replace(mine, asks=asks))
        else:
            self._leave(path, module, why)

    def visit_rope(self) -> None:
        """Replaces rope functions of attentions, and lets the modules of their tables say so."""
        tables: dict[str, list[nn.Module]] = {}
        for module in self._tables if self._rope else ():
            layout = self._layout(module)
            if layout is not None:
                tables.setdefault(layout, []).append(module)
        for path, module, functions in self._rope:
            known = fusion_of(module)
            mine = known if isinstance(known, attention.Attention) else attention.Attention()
            if mine.rope is not None:
                continue
            source = ", ".join(functions)
            found = self._rope_of(module, functions, tables)
            if isinstance(found, str):
                self._leave(path, module, found, source)
                continue
            self._add(path, source, module, rope.Rope)
            fuse_module(module, replace(mine, rope=found))
            for maker in tables[found.turn.layout]:
                self._done.add(id(maker))
                if fusion_of(maker) is None:
                    fuse_module(maker, rope.Tables(found.turn.layout))

    def _layout(self, module: nn.Module) -> str | None:
        known = fusion_of(module)
        if isinstance(known, rope.Tables):
            return known.layout
        refused = self.choice.skip(module, "rope") or why_not(module)
        return None if known or refused else rope_probe.layout_of(module)

    def _rope_of(
        self, module: nn.Module, functions: dict[str, Any], layouts: Iterable[str]
    ) -> rope.Rope | str:
        """What replaces an attention's rope function, or why nothing does."""
        forward: Any = own_class(module).forward
        why = self.choice.refusal(module, "rope") or why_not(module)
        why = why or rope.why_not_rewritten(forward, functions)
        if why is not None:
            return why
        (name,) = functions
        reasons = []
        for layout in layouts:
            found = self._turn(functions[name], layout)
            if isinstance(found, rope.Turn):
                return rope.Rope(name, found, rope.index_of_positions(forward))
            reasons.append(f"not rope: {found}")
        return reasons[0] if reasons else "no module of the model makes cos and sin for it"

    def _turn(self, function: Any, layout: str) -> rope.Turn | str:
        if (function, layout) not in self._turns:
            self._turns[function, layout] = rope_probe.turn_of(function, layout)
        return self._turns[function, layout]

    def left(self) -> list[LeftAlone]:
        """What was left alone; children of a fused MLP that have no work any more are not."""
        return [
            entry for (key, source), entry in self._left.items() if source or key not in self._done
        ]


def _candidates(module: nn.Module) -> Iterator[Fusion]:
    if isinstance(module, nn.CrossEntropyLoss):
        if type(module).forward is nn.CrossEntropyLoss.forward and module.weight is None:
            yield loss.CrossEntropy()
        return
    found: tuple[Callable[[nn.Module], Iterator[Unary]], ...] = (
        norm.candidates,
        activation.gelu_candidates,
        activation.mlp_candidates,
    )
    yield from chain.from_iterable(find(module) for find in found)


def _wrong_dtype(module: nn.Module) -> str | None:
    wrong = {p.dtype for p in module.parameters() if p.dtype not in FLOATS}
    return f"operators take no {', '.join(map(str, wrong))}" if wrong else None


def _hooked(module: nn.Module, fusion: Fusion) -> str | None:
    """A child whose work the operator does would not be called any more, nor would its hooks."""
    if isinstance(fusion, activation.GatedMLP):
        for child in activation.bystanders(module, fusion):
            if any(getattr(child, name) for name in _HOOKS):
                return f"hooks of its {type(child).__name__} would no longer be called"
    return None


def _nothing(module: nn.Module) -> str | None:
    """Why nothing stands for a module; None for a container, of which nothing was expected."""
    if type(module).__module__.startswith("torch.nn"):
        named = None
    else:
        kind = type(module)
        found = (n for n in _FUNCTIONALS if attention.calls(module, kind, n, deeply=True))
        named = next(found, None)
    if named is not None:
        return f"it calls {named} itself"
    if isinstance(module, nn.MultiheadAttention):
        return "its attention is inside one function of torch"
    if module._modules or type(module).__module__ == nn.Sequential.__module__:
        return None
    if isinstance(module, nn.CrossEntropyLoss):
        return "it weighs its classes, or has a forward of its own"
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return "it has no weight, or is over several dims"
    return "no norm, activation, attention or loss that an operator computes"
