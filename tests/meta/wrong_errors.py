"""Wrong backends that the errors chapter has to find."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anychip
from anychip.contract import Backend, Communicator, OperatorTable
from tests.meta.honest import HonestBackend, HonestRows, Row, make_table, reference_rows
from tests.meta.wrong import Wrong

Rows = dict[tuple[str, str], Row]


def wrong(
    name: str, bug: str, select: str, make_rows: Callable[[Rows], OperatorTable] | None = None,
    **parts: Any,
) -> Wrong:  # fmt: skip
    """The honest backend with another table, or other methods."""

    def make() -> Backend:
        table = make_table(reference_rows()) if make_rows is None else make_rows(reference_rows())
        made: Backend = type(name, (HonestBackend,), {"operators": table, **parts})()
        return made

    return Wrong(name=name, bug=bug, chapter="errors", select=select, make=make, twin=HonestRows)


def _says_native(rows: Rows) -> OperatorTable:
    right = rows["softmax", "forward"]

    def softmax(*args: Any, **attrs: Any) -> Any:
        return right(*args, **attrs)

    table = make_table({key: row for key, row in rows.items() if key[0] != "softmax"})
    table.forward("softmax", kind="native")(softmax)
    return table


def _casts(rows: Rows) -> OperatorTable:
    right = rows["gelu", "forward"]

    def gelu(x: Tensor, **attrs: Any) -> Any:
        return right(x.float(), **attrs)

    return make_table({**rows, ("gelu", "forward"): gelu})


def _computes_coarsely(rows: Rows) -> OperatorTable:
    right = rows["rms_norm", "forward"]

    def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Any:
        if x.dtype != torch.float16:
            return right(x, weight, eps=eps)
        y, rstd = right(x.bfloat16(), weight.bfloat16(), eps=eps)
        return y.to(x.dtype), rstd

    return make_table({**rows, ("rms_norm", "forward"): rms_norm})


def _refuses_late(rows: Rows) -> OperatorTable:
    """accepts() unscales before it looks at the sizes."""
    table = OperatorTable()

    def accepts(tensors: Any, norm: Tensor, **_: Any) -> bool:
        for tensor in tensors:
            tensor.mul_(0.5)
        return False

    table.forward("clip", kind="mapped", accepts=accepts)(rows["clip", "forward"])
    return table


def _raises(rows: Rows) -> OperatorTable:
    table = OperatorTable()

    def accepts(x: Tensor, weight: Tensor, bias: Any, **_: Any) -> bool:
        return bool(x.shape[0] > weight.shape[7])

    table.forward("linear", kind="mapped", accepts=accepts)(rows["linear", "forward"])
    return table


def _calls_another(rows: Rows) -> OperatorTable:
    """What it cannot do itself it asks the dispatcher for, which counts the call again."""
    right, state = rows["swiglu", "forward"], {"inside": False}

    def swiglu(gate: Tensor, up: Tensor) -> Any:
        if state["inside"] or not gate.numel():
            return right(gate, up)
        state["inside"] = True
        try:
            return anychip.ops.swiglu(gate, up)
        finally:
            state["inside"] = False

    return make_table({**rows, ("swiglu", "forward"): swiglu})


def _any_settings(self: HonestBackend, **settings: Any) -> Communicator:
    return HonestBackend.communicator(self)


def _any_seed(self: HonestBackend, seed: Any, index: int | None = None) -> torch.Generator:
    self.check_index(index)
    return torch.Generator().manual_seed(int(seed or 0))


CATALOGUE: tuple[Wrong, ...] = (
    wrong("reference-under-another-name", "fallback not recorded", "softmax/fallback",
          _says_native),
    wrong("result-of-another-dtype", "unsupported dtype silently cast", "gelu/unclaimed", _casts),
    wrong("half-computed-as-brain", "unsupported dtype silently cast", "rms_norm/unclaimed",
          _computes_coarsely),
    wrong("writes-before-it-refuses", "write to an argument", "clip/fallback", _refuses_late),
    wrong("question-that-raises", "an error of its own", "linear/fallback", _raises),
    wrong("call-counted-twice", "fallback not recorded", "swiglu/fallback", _calls_another),
    wrong("settings-not-read", "an argument without effect", "methods",
          communicator=_any_settings),
    wrong("any-seed-will-do", "missing check of an argument", "methods", generator=_any_seed),
)  # fmt: skip
