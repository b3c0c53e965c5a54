"""A row that breaks its promise is named at once, with what was promised and what came."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ContractError, OperatorTable, ops
from anychip.contract.settings import SameBits
from anychip.dispatch.resolution import EXAMINED
from tests.unit.dispatch.calls import SPECS
from tests.unit.dispatch.tables import Install

SPEC = SPECS["rms_norm"]
X, W = torch.arange(8.0).reshape(2, 4) + 1, torch.ones(4)
OF = r"the row .*\.bad of 'pack0' \(anychip-pack0 4\.2\) "
DOORS = pytest.mark.parametrize("door", [ops, torch.ops.anychip], ids=["ops", "torch.ops"])


def table_of(change: Callable[..., Any], direction: str = "forward") -> OperatorTable:
    """rms_norm, whose results pass through ``change``."""
    table, right = OperatorTable(), getattr(SPEC, direction)

    def bad(*args: Any, **attrs: Any) -> Any:
        return change(*right(*args, **attrs))

    getattr(table, direction)("rms_norm")(bad)
    return table


def step(door: Any) -> None:
    door.rms_norm(X.clone().requires_grad_(), W.clone().requires_grad_()).sum().backward()


RESULTS: list[tuple[str, Callable[..., Any], str]] = [
    ("forward", lambda y, r: (y.double(), r), "2 (float64 (2, 4) on cpu, float32 (2,) on cpu)"),
    ("forward", lambda y, r: (y, r.half()), "2 (float32 (2, 4) on cpu, float16 (2,) on cpu)"),
    ("forward", lambda y, r: (y.t(), r), "2 (float32 (4, 2) on cpu, "),
    ("forward", lambda y, r: (y.to("meta"), r), "2 (float32 (2, 4) on meta, "),
    ("forward", lambda y, r: (y,), "1 (float32 (2, 4) on cpu)"),
    ("forward", lambda y, r: y, "float32 (2, 4) on cpu"),
    ("forward", lambda y, r: (y, r, r), "3 ("), ("forward", lambda y, r: None, "None"),
    ("forward", lambda y, r: ("y", 1), "2 (a str, a int)"),
    ("backward", lambda x, w: (x.double(), w), "2 (float64 (2, 4) on cpu, "),
    ("backward", lambda x, w: (w, x), "2 (float32 (4,) on cpu, float32 (2, 4) on cpu)"),
    ("backward", lambda x, w: (x, None), "2 (float32 (2, 4) on cpu, None)"),
    ("backward", lambda x, w: (x,), "1 (float32 (2, 4) on cpu)"),
    ("backward", lambda x, w: x, "float32 (2, 4) on cpu"),
]  # fmt: skip
PROMISED = {
    "forward": "y: float32 (2, 4), rstd: float32 (2,)",
    "backward": "x: float32 (2, 4), weight: float32 (4,)",
}


@DOORS
@pytest.mark.parametrize("case", RESULTS, ids=[f"{d}-{came}" for d, _, came in RESULTS])
def test_row_with_wrong_results_is_named_with_what_was_promised(
    case: tuple[str, Any, str], door: Any, install: Install
) -> None:
    direction, change, came = case
    install(table_of(change, direction))
    with pytest.raises(ContractError, match=rf"^rms_norm \({direction}\): {OF}") as caught:
        step(door)
    promised = f"broke its promise of 2 results on cpu ({PROMISED[direction]}): it returned {came}"
    assert promised in str(caught.value)
    if direction == "forward":
        with pytest.raises(ContractError, match=re.escape(promised)):
            door.rms_norm(X, W)


def test_gradient_of_an_argument_that_is_not_saved_is_like_the_references(install: Install) -> None:
    table = OperatorTable()
    table.backward("linear")(lambda grad, x, weight, **_: (grad @ weight, grad.t() @ x, grad))
    install(table)
    leaves = [t.requires_grad_() for t in (torch.ones(3, 4), torch.ones(5, 4), torch.ones(5))]
    with pytest.raises(ContractError, match=r"bias: float32 \(5,\)\): .*float32 \(3, 5\) on cpu\)"):
        ops.linear(*leaves).sum().backward()


@DOORS
@pytest.mark.parametrize(("which", "text"), [
    ("forward", "residual 0 of its own: float32"), ("backward", r"returned 1 \(float64 \(2, 4"),
])  # fmt: skip
def test_pair_with_wrong_results_is_named(
    which: str, text: str, door: Any, install: Install
) -> None:
    table = OperatorTable()
    table.pair(
        "gelu", forward=lambda x, approximate: (x, x) if which == "backward" else (x,),
        backward=lambda grad, x, own, approximate, needs: (grad.double(),), num_residuals=1,
        fake_residuals=lambda x, approximate: torch.empty_like(x),
    )  # fmt: skip
    install(table)
    with pytest.raises(ContractError, match=rf"gelu \({which}\).*{text}"):
        door.gelu(X.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize(("fallback", "found_at"), [("record", EXAMINED + 1), ("strict", 2)])
def test_row_is_examined_at_the_first_call_with_a_key_and_the_same_calls_after_it(
    fallback: Any, found_at: int, install: Install
) -> None:
    calls: list[int] = []

    def later(y: Tensor, rstd: Tensor) -> Any:
        calls.append(1)
        return (y.float() if len(calls) == 1 else y.double(), rstd)

    install(table_of(later))
    with anychip.policy(fallback=fallback):
        for _ in range(found_at - 1):
            ops.rms_norm(X, W)
        for x, w in ((X, W), (X.bfloat16(), W.bfloat16())):
            with pytest.raises(ContractError, match="broke its promise"):
                ops.rms_norm(x, w)
    assert len(calls) == found_at + 1


class _Other(BaseException):
    pass


@DOORS
@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), _Other("odd")], ids=repr)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_row_that_would_end_the_process_is_an_error_that_names_it(
    direction: str, error: BaseException, door: Any, install: Install
) -> None:
    def stop(*_: Any) -> Any:
        raise error

    install(table_of(stop, direction))
    said = re.escape(f"raised {type(error).__name__}({error}), which is no Exception")
    for _ in range(2):  # the first call is examined, the second is not
        with pytest.raises(ContractError, match=rf"rms_norm \({direction}\): {OF}{said}") as caught:
            step(door)
        assert caught.value.__cause__ is error


def test_condition_of_a_row_and_a_row_that_writes_in_place_cannot_end_the_process(
    install: Install,
) -> None:
    table = OperatorTable()

    def leave(*_: Any, **__: Any) -> bool:
        raise SystemExit(0)

    table.forward("gelu", accepts=leave)(SPECS["gelu"].forward)
    table.forward("clip")(leave)
    install(table)
    with pytest.raises(ContractError, match=r"gelu \(forward\): .*accepts\(\), raised SystemExit"):
        ops.gelu(X)
    with pytest.raises(ContractError, match=r"clip \(forward\): .* raised SystemExit\(0\)"):
        ops.clip([X.clone()], torch.tensor(1.0))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("mine")], ids=repr)
def test_interruption_and_errors_of_a_row_pass(error: BaseException, install: Install) -> None:
    def stop(*_: Any) -> Any:
        raise error

    install(table_of(stop))
    with pytest.raises(type(error)) as caught:
        ops.rms_norm(X, W)
    assert caught.value is error


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize(("change", "said"), [
    (lambda: torch.set_default_dtype(torch.float64), "default dtype from .*32 to .*float64"),
    (lambda: torch.set_num_threads(7), r"number of threads from \d to 7"),
    (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms from False"),
], ids=["dtype", "threads", "determinism"])  # fmt: skip
def test_row_that_changes_a_setting_of_torchs_is_named_and_the_setting_put_back(
    change: Callable[[], object], said: str, fails: bool, install: Install
) -> None:
    def settings() -> Any:
        threads, same = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        return torch.get_default_dtype(), threads, same

    def spoil(y: Tensor, rstd: Tensor) -> Any:
        change()
        return 1 / 0 if fails else (y, rstd)

    install(table_of(spoil))
    before = settings()
    with pytest.raises(ContractError, match=rf"{OF}changed torch's {said}") as caught:
        ops.rms_norm(X, W)
    assert isinstance(caught.value.__context__, ZeroDivisionError) == fails
    assert settings() == before


@pytest.mark.parametrize("within", [SameBits(), nullcontext()], ids=["another thread's", "own"])
def test_switch_for_the_same_bits_is_no_change(within: Any, install: Install) -> None:
    """Another thread leaves its block while the row runs; the row has one of its own."""
    within.__enter__()

    def switch(y: Tensor, rstd: Tensor) -> Any:
        within.__exit__(None, None, None)
        with SameBits():
            return y, rstd

    install(table_of(switch))
    ops.rms_norm(X, W)
    assert not torch.are_deterministic_algorithms_enabled()
