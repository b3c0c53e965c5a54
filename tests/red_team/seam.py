"""A correct backend with a place in front of each of its rows where a mistake can be put."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from anychip.contract import Backend, Row
from anychip.dispatch.signature import Signature
from anychip.operators import all_specs
from tests.meta.asynchronous import AsynchronousBackend
from tests.red_team.conditions import Call
from tests.red_team.effects import RAISED, Effect
from tests.red_team.mistake import Mistake

SPECS = {spec.name: spec for spec in all_specs()}
SIGNATURES = {name: Signature.parse(spec) for name, spec in SPECS.items()}
Target = tuple[str, str]
"""Operator and direction."""


def right_backend(name: str) -> Backend:
    """A new object of a correct backend."""
    if name == "asynchronous":
        return AsynchronousBackend()
    import anychip

    return type(anychip.use(name))()


def names_of(target: Target, args: tuple[Any, ...]) -> list[str]:
    """What a row's positional arguments are called."""
    operator, direction = target
    signature, names = SIGNATURES[operator], list(SIGNATURES[operator].positional)
    if direction == "backward":
        count = signature.num_outputs
        names = ["grad", *(f"grad{number}" for number in range(1, count))]
        names += SPECS[operator].saved
    own = [f"residual{number}" for number in range(len(args) - len(names))]
    return [*names, *own][: len(args)]


class Seam:
    """Holds a backend whose rows go through here, and the mistake that is made.

    Attributes:
        backend: to be activated.
        mistake: the one that is made; None: none.
        on_call: told of the calls of every row.
    """

    def __init__(self, name: str, mistake: Mistake | None = None) -> None:
        self.backend = right_backend(name)
        self.backend.operators = self.backend.operators.remade(self._changed)
        self.mistake = mistake
        self.on_call: Callable[[Target, Call], None] = lambda target, call: None

    @property
    def has_streams(self) -> bool:
        """Whether the backend has streams beside the first."""
        return "streams" in self.backend.capabilities

    def _changed(self, row: Row) -> Row:
        made = replace(row, function=self._through((row.operator, row.direction), row.function))
        if row.paired is not None:
            backward = self._through((row.operator, "backward"), row.paired.backward)
            made = replace(made, paired=row.paired._replace(backward=backward))
        return made

    def _through(self, target: Target, row: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **attrs: Any) -> Any:
            names = names_of(target, args)
            call = Call(dict(zip(names, args, strict=True)) | attrs)
            if any(isinstance(t, FakeTensor) for t in call.tensors()):
                return row(*args, **attrs)
            call.on_side_stream = on_side_stream(self.backend)
            self.on_call(target, call)
            mistake = self.mistake
            if mistake is None or mistake.target != target:
                return row(*args, **attrs)
            call.history = mistake.history
            applies = mistake.applies(call)
            call.enter()
            effect = mistake.effect if applies else Effect("nothing")
            return self._call(row, names, call, effect, target)

        return function

    def _call(
        self, row: Callable[..., Any], names: list[str], call: Call, effect: Effect, target: Target
    ) -> Any:
        if effect.name == RAISED:
            raise RuntimeError("a generated mistake")
        values = effect.on_arguments(call.values)
        args = [values[name] for name in names]
        attrs: Mapping[str, Any] = {n: v for n, v in values.items() if n not in names}
        returned = row(*args, **attrs)
        if returned is NotImplemented:
            return returned
        written = SIGNATURES[target[0]].written if target[1] == "forward" else ()
        if written:
            effect.on_results(flat([call.values[names[i]] for i in written]), call, written=True)
            return returned
        results = [returned] if isinstance(returned, Tensor) else list(returned)
        if effect.name == "nothing" and self.mistake is not None:
            call.history.results = [r if r is None else r.clone() for r in results]
            return returned
        made = effect.on_results(results, call, written=False)
        return made[0] if isinstance(returned, Tensor) else tuple(made)


def on_side_stream(backend: Any) -> bool:
    """Whether another stream than the first is current, or this is a stream's own thread, which
    does what the emulated device is given: of rows all but those that write their arguments.
    """
    if threading.current_thread().name.endswith("(_do)"):
        return True
    stream = getattr(getattr(backend, "thread", None), "stream", None)
    return stream is not None and stream is not backend.first


def flat(values: list[Any]) -> list[Any]:
    """Tensors, those of lists one by one."""
    found = []
    for value in values:
        found += list(value) if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if isinstance(value, Tensor)]
