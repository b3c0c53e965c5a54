"""Which modules of a model can be replaced? Each is looked at once, and what it says is checked.

``table`` says what a module may be; that it computes the same is proved on small inputs.
"""

import difflib
import fnmatch
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from anychip.fusion import attention, loss, probe, rope, table
from anychip.fusion.report import FusionReport, LeftAlone, Replaced
from anychip.fusion.stand_ins import StandIn, own_calls, own_class, stand_ins_of

KINDS = ("norm", "activation", "rope", "attention", "loss", "linear")
UNASKED = {"linear": "linear layers are replaced where asked: fuse(model, linear=True)"}
"""Kinds that stay unless they are named: there is a gain on some chips only."""
Names = str | Iterable[str]


def fuse(
    model: nn.Module, *, only: Names | None = None, skip: Names = (), linear: bool = False
) -> FusionReport:
    """Replaces norms, activations, rope, attention and loss of a model by operators, in place.

    The modules stay the same objects with the same parameters, buffers, hooks and mode. One is
    replaced only if it computes what the operator does, up to rounding, gradients included. Calls
    that an operator cannot serve go on to the model's own code and are counted in
    ``anychip.provenance()``; under the policy ``strict`` they are an error.

    Args:
        model: any module. Fuse before it is sharded.
        only: kinds (norm, activation, rope, attention, loss, linear) and paths of modules, ``*``
            for anything; a path stands for all that is below it, too. None: all kinds but linear.
        skip: in the same way, what to leave out.
        linear: linear layers, too. They compute what torch's do, at most more quickly: on a host,
            16-bit products by way of float32 where the processor is quicker with these.

    Returns:
        What was replaced, and what was left alone and why.

    Raises:
        ValueError: an entry of ``only`` or ``skip`` that is no kind and no module's path.
    """
    return _Search(model, _Choice(model, only, skip, linear=linear)).report()


def unfuse(model: nn.Module) -> int:
    """Gives every module and loss of a model, or of a copy, its own code back; says how many."""
    count = 0
    for module in model.modules():
        if stand_ins_of(module):
            count += 1
            module.__class__ = own_class(module)
        owner: Any = module
        original = loss.loss_of(module)
        if isinstance(original, loss.ModelLoss):
            count += 1
            owner.loss_function = original.original
    return count


class _Choice:
    """What the caller wants to have replaced."""

    def __init__(self, model: nn.Module, only: Names | None, skip: Names, *, linear: bool) -> None:
        self._paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        self._only = None if only is None else self._known(only)
        self._skip = self._known(skip)
        self._unasked = {} if linear or "linear" in (self._only or ()) else UNASKED

    def refusal(self, module: nn.Module, kind: str, *, only: bool = True) -> str | None:
        """Why it is not wanted; with ``only=False``, why not even for the sake of another one."""

        def met(entry: str) -> bool:
            return entry == kind or any(_below(path, entry) for path in self._paths[id(module)])

        if only and self._only is not None and not any(map(met, self._only)):
            return f"only {', '.join(self._only)}"
        if kind in self._unasked:
            return self._unasked[kind]
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


class _Search:
    """One pass over a model."""

    def __init__(self, model: nn.Module, choice: _Choice) -> None:
        self.model, self.choice = model, choice
        self.replaced: list[Replaced] = []
        self.before, self.owners = 0, list[object]()
        self._left: dict[tuple[int, str], LeftAlone] = {}
        self._verdicts: dict[Any, tuple[int, str] | None] = {}

    def report(self) -> FusionReport:
        """What became of every module; children that have no work any more are not in it."""
        for path, module in list(self.model.named_modules()):
            if isinstance(module, torch.jit.ScriptModule):
                self._leave(path, module, "it is compiled by TorchScript")
            else:
                self._visit(path, module)
        done: set[int] = set()
        for module in self.model.modules():
            for each in stand_ins_of(module):
                done.update(map(id, (module, *each.idle(module))))
        left = [entry for (key, source), entry in self._left.items() if source or key not in done]
        return FusionReport(self.replaced, left, self.before, map(own_calls, self.owners))

    def _visit(self, path: str, module: nn.Module) -> None:
        """Replaces one module, or functions that it calls, or notes why not."""
        kinds, original = [each.kind for each in stand_ins_of(module)], loss.loss_of(module)
        fused_loss = isinstance(original, loss.ModelLoss)
        self.before += sum(map(bool, kinds)) + fused_loss
        if original is not None and not fused_loss:
            source = getattr(original, "__name__", type(original).__name__)
            self._try(path, module, "loss", [loss.ModelLoss(original)], source)
        if kinds and not {*kinds} & {"attention", "rope"}:
            return
        attends, name = "attention" in kinds, own_class(module).__name__
        if not attends:
            found: Any = attention.proposals(module, self.model)
            attends = self._try(path, module, "attention", found, name)
        if "rope" not in kinds and (names := rope.functions(module)):
            found = rope.proposals(module, names, self._makers)
            self._try(path, module, "rope", found, ", ".join(names))
        known = attends or stand_ins_of(module)
        if not known and not self._try(path, module, "", table.proposals(module)):
            self._leave(path, module, table.nothing(module))

    def _try(
        self, path: str, module: nn.Module, kind: str, found: Iterable[Any], source: str = ""
    ) -> bool:
        """Puts the first proposal that is proved onto a module; was there any?"""
        reasons = []
        for each in found:
            why = self._refuted(module, kind, each)
            if why is None:
                source = source or own_class(module).__name__
                self.replaced.append(Replaced(path, each.kind, source, each.operator, each.unless))
                self.owners.append(each.onto(module))
                for maker in self._makers[each.layout] if isinstance(each, rope.Rope) else ():
                    rope.Tables(each.layout).onto(maker)
                return True
            reasons.append(why)
        if reasons:
            # Of the one that came furthest.
            self._leave(path, module, max(reasons, key=lambda why: why[0])[1], source)
        return bool(reasons)

    def _refuted(self, module: nn.Module, kind: str, each: StandIn | str) -> tuple[int, str] | None:
        """What speaks against a proposal, and how far it came; None: it is proved."""
        if isinstance(each, str):
            return 0, self.choice.refusal(module, kind) or each
        if (why := self.choice.refusal(module, each.kind) or each.unfit(module)) is not None:
            return 0, why
        # Layers of a model are alike: one proof serves all of them.
        key = (each, each.subject(module))
        if key not in self._verdicts:
            self._verdicts[key] = probe.refutation(each.comparisons(module))
        found = self._verdicts[key]
        return None if found is None else (found[0], f"not {each.operator}: {found[1]}")

    def _leave(self, path: str, module: nn.Module, reason: str | None, source: str = "") -> None:
        # A function that is left alone may be that of a module that is not.
        if reason is not None:
            entry = LeftAlone(path, source or own_class(module).__name__, reason)
            self._left[id(module), source] = entry

    @functools.cached_property
    def _makers(self) -> dict[str, list[nn.Module]]:
        """The modules that make cos and sin, by the layout of these."""
        found: dict[str, list[nn.Module]] = {}
        for module in self.model.modules():
            known = [each for each in stand_ins_of(module) if isinstance(each, rope.Tables)]
            refusal = self.choice.refusal(module, "rope", only=False)
            if known or not (stand_ins_of(module) or refusal or StandIn().unfit(module)):
                layout = known[0].layout if known else rope.layout_of(module)
                if layout is not None:
                    found.setdefault(layout, []).append(module)
        return found
