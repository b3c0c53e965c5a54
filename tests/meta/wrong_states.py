"""Wrong backends whose rows remember something: caches, first calls, threads, devices."""

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from anychip.contract import Backend
from anychip.dispatch import selection
from tests.meta.honest import HonestBackend, HonestRows, Row, make_table, reference_rows
from tests.meta.wrong import Attr, Wrong, wrong, wrong_arguments, wrong_backward, wrong_gradients

_kept: dict[Any, Any] = {}


@wrong("tuned-in-place", "run twice by the first call", operator="sgd")
def tuned(row: Row, params: Any, *rest: Any, **attrs: Attr) -> Any:
    if _kept.setdefault(("tuned", tuple(p.shape for p in params)), 0) == 0:
        _kept["tuned", tuple(p.shape for p in params)] = 1
        row(params, *rest, **attrs)  # a first candidate, timed on the real tensors
    row(params, *rest, **attrs)


@wrong("workspace-by-size-of-type", "stale workspace", operator="geglu")
def stale_room(row: Row, gate: Tensor, up: Tensor, *, approximate: str) -> Any:
    # What was computed for the last gate is kept while its address and shape are the same.
    key = ("room", gate.data_ptr(), tuple(gate.shape), approximate)
    same = _kept.get("last") == key
    _kept["last"] = key
    if not same:
        _kept["gate"] = row(gate, torch.ones_like(gate), approximate=approximate)
    return _kept["gate"] * up


@wrong("second-call-differs", "hidden state", operator="add_rms_norm")
def second_call(row: Row, x: Tensor, *rest: Any, **attrs: Attr) -> Any:
    y, total, rstd = row(x, *rest, **attrs)
    _kept["calls"] = _kept.get("calls", 0) + 1
    if _kept["calls"] % 2 == 0 and y.numel():
        y.view(-1)[-1] = 0.0
    return y, total, rstd


def _is_call(number: int, of: str) -> bool:
    _kept[of] = _kept.get(of, 0) + 1
    return bool(_kept[of] == number)


@wrong("eighth-call-of-all", "a warm-up that ends", operator="swiglu")
def eighth_call(row: Row, gate: Tensor, up: Tensor) -> Any:
    return row(gate, up.neg() if _is_call(8, "swiglu") else up)


@wrong_backward("second-gradient-of-all", "a warm-up that ends", operator="top_k")
def second_gradient(row: Row, *args: Any, **attrs: Attr) -> Any:
    (dx,) = row(*args, **attrs)
    if _is_call(2, "top_k"):
        dx.view(-1)[128:] = 0.0
    return (dx,)


def _keep_a_room() -> None:
    backend = cast("Backend", selection.current)
    _kept.setdefault("rooms", []).append(backend.memory.allocate(1024))


@wrong("a-workspace-for-each-call", "a leak", operator="rms_norm")
def leaks(row: Row, *args: Any, **attrs: Attr) -> Any:
    _keep_a_room()
    return row(*args, **attrs)


@wrong_backward("a-workspace-for-each-gradient", "a leak", operator="silu")
def gradient_leaks(row: Row, *args: Any, **attrs: Attr) -> Any:
    _keep_a_room()
    return row(*args, **attrs)


class _OfMainThread(threading.local):
    table = 0.0


_local = _OfMainThread()
_local.table = 1.0


@wrong_backward("gradient-added-to-the-last", "accumulator not cleared", operator="embedding")
def not_cleared(row: Row, grad: Tensor, indices: Tensor, weight: Tensor, **attrs: Attr) -> Any:
    (dweight,) = row(grad, indices, weight, **attrs)
    room = _kept.setdefault(("dweight", tuple(weight.shape)), torch.zeros_like(dweight))
    room += dweight
    return (room.clone(),)


@wrong_backward("needs-of-the-first-call", "an attribute compiled in", operator="layer_norm",
                select="/layer_norm/design")  # fmt: skip
def first_needs(row: Row, grad: Tensor, x: Tensor, *rest: Any, needs: Any, **attrs: Attr) -> Any:
    found = list(row(grad, x, *rest, needs=needs, **attrs))
    first = _kept.setdefault(("needs", tuple(x.shape)), tuple(needs))
    for index, was_needed in enumerate(first):
        value = found[index]
        if value is not None and not was_needed:
            found[index] = torch.zeros_like(value)
    return tuple(found)


@wrong_backward("gate-gradient-is-output-gradient", "output that is not fresh", operator="linear")
def passes_on(row: Row, grad: Tensor, x: Tensor, weight: Tensor, **attrs: Attr) -> Any:
    dx, dweight, dbias = row(grad, x, weight, **attrs)
    if dx is not None and dx.shape == grad.shape and dx.dtype == grad.dtype and grad.numel():
        grad.data.copy_(dx)  # to spare an allocation
        return grad, dweight, dbias
    return dx, dweight, dbias


class _OnOneDevice(HonestBackend):
    """Tables are on device 0 only."""

    def __init__(self) -> None:
        super().__init__()
        right = reference_rows()
        rows = {key: self._only_first(row) for key, row in right.items() if key[0] == "rms_norm"}
        self.operators = make_table({**right, **rows})  # type: ignore[misc]

    def _only_first(self, row: Row) -> Row:
        def changed(*args: Any, **attrs: Any) -> Any:
            results = row(*args, **attrs)
            if self.current_device() and results[0] is not None:
                results[0].mul_(2.0)
            return results

        return changed


def _packed(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    # The weight in the kernel's own order is kept by its address.
    key = ("packed", weight.data_ptr(), tuple(weight.shape))
    return row(x, _kept.setdefault(key, weight.detach().clone()), bias, **attrs)


def _first(given: Tensor | None) -> Tensor | None:
    # It is held, so that nothing else comes to lie at its address.
    if given is None:
        return None
    found: tuple[Tensor, Tensor] = _kept.setdefault(
        ("first", given.data_ptr(), tuple(given.shape)), (given, given.clone())
    )
    return found[1]


def _first_with(other: Tensor, given: Any) -> Any:
    # With what another argument is, as long as nobody writes to that.
    if given is None or other.is_inference():
        return given
    key = ("with", other.data_ptr(), other._version, tuple(other.shape), other.stride())
    return _kept.setdefault(key, (other, given.clone()))[1]


def _through_room(found: Tensor | None) -> Tensor | None:
    if found is None:
        return None
    room: Tensor = _kept.setdefault(("shared", found.shape, found.dtype), found.clone())
    room.copy_(found)
    time.sleep(5e-4)
    return room.clone()


def _made(operator: str, change: Callable[..., Any]) -> Callable[[], Backend]:
    right = reference_rows()

    def row(*args: Any, **attrs: Any) -> Any:
        return change(right[operator, "forward"], *args, **attrs)

    rows = {**right, (operator, "forward"): row}

    def make() -> Backend:
        _kept.clear()
        made: Backend = type("RowBackend", (HonestBackend,), {"operators": make_table(rows)})()
        return made

    return make


ARGUMENTS = (
    wrong_arguments("eps-of-the-first-call", "an attribute compiled in", "rms_norm",
        eps=lambda eps, x: _kept.setdefault(("eps", tuple(x.shape)), eps)),
    wrong_arguments("causal-of-the-first-call", "an attribute compiled in", "attention",
        causal=lambda causal, q, k:
        _kept.setdefault(("causal", tuple(q.shape), tuple(k.shape)), causal)),
    wrong_arguments("probability-of-the-first-call", "an attribute compiled in", "dropout",
        p=lambda p, x: _kept.setdefault(("p", x.dim()), p)),
    wrong_arguments("table-of-the-main-thread", "per-thread state", "rope",
        cos=lambda cos: cos * _local.table),
    wrong_arguments("offsets-read-once", "cache by address", "grouped_linear",
        offsets=lambda offsets: _first(offsets)),
    wrong_arguments("mask-packed-once", "cache by address", "softmax",
        mask=lambda mask: _first(mask)),
    wrong_arguments("seed-read-once", "cache by address", "dropout", rng=lambda rng: _first(rng)),
    wrong_arguments("rate-read-once", "cache by address", "adamw", lr=lambda lr: _first(lr)),
    wrong_arguments("bias-kept-with-the-weight", "cache by address", "linear",
        bias=lambda bias, weight: _first_with(weight, bias)),
    wrong_arguments("sin-kept-with-cos", "cache by address", "rope",
        sin=lambda sin, cos: _first_with(cos, sin)),
    wrong_gradients("room-of-all-threads", "workspace shared", "layer_norm",
        dweight=lambda dweight: _through_room(dweight)),
    wrong_gradients("backward-of-the-main-thread", "per-thread state", "swiglu",
        grad=lambda grad: grad * _local.table),
    wrong_gradients("value-gradient-needs-query", "wrong use of needs", "attention",
        dv=lambda dv, needs: dv if needs[0] else torch.zeros_like(dv)),
)  # fmt: skip
CATALOGUE: tuple[Wrong, ...] = (
    *ARGUMENTS,
    *(entry for entry in globals().values() if isinstance(entry, Wrong)),
    Wrong(
        name="weight-packed-once", bug="cache by address", chapter="operators",
        select="/linear/", make=_made("linear", _packed), twin=HonestRows,
    ),
    Wrong(
        name="weight-packed-once", bug="cache by address", chapter="training", select="momentum",
        make=_made("linear", _packed), twin=HonestRows,
    ),
    Wrong(
        name="right-on-the-first-device-only", bug="state of one device", chapter="device",
        select="operators", make=_OnOneDevice, twin=HonestRows,
    ),
)  # fmt: skip
