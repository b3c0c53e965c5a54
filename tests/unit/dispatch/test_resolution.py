"""Which row serves a call: what the key tells apart, and what is checked on every call."""

from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ContractError, FallbackError, OperatorTable, ops
from tests.unit.dispatch.calls import SPECS, bits, call
from tests.unit.dispatch.tables import Function, Install, deterministic, uninstall

RMS = SPECS["rms_norm"]
W = torch.ones(8)


def _row(table: OperatorTable, label: str, log: list[str], **conditions: Any) -> None:
    """A row of rms_norm that is right, and says when it ran."""

    def forward(x: Tensor, weight: Tensor, *, eps: float) -> Any:
        log.append(label)
        return RMS.forward(x, weight, eps=eps)

    forward.__qualname__ = label
    table.forward("rms_norm", **conditions)(forward)


class Serve(Protocol):
    def __call__(self, *, alone: bool = False, **rows: dict[str, Any]) -> list[str]: ...


@pytest.fixture
def serve(install: Install) -> Serve:
    """Installs rows of rms_norm by their conditions, in order; who then ran is in the list."""

    def rows_of(*, alone: bool = False, **rows: dict[str, Any]) -> list[str]:
        table, log = OperatorTable(), []
        for label, conditions in rows.items():
            _row(table, label, log, **conditions)
        install(table, alone=alone)
        return log

    return rows_of


def _misaligned(*shape: int) -> Tensor:
    flat = torch.ones(torch.Size(shape).numel() + 1)[1:]
    assert flat.data_ptr() % 64 == 4
    return flat.view(shape)


# the key


@pytest.mark.parametrize(("conditions", "takes", "refuses"), [
    ({"dtypes": {torch.float32}}, torch.ones(2, 8), torch.ones(2, 8).bfloat16()),
    ({"contiguous": True}, torch.ones(2, 8), torch.ones(8, 2).t()),
    ({"alignment": 64}, torch.ones(2, 8), _misaligned(2, 8)),
], ids=["dtype", "layout", "alignment"])  # fmt: skip
def test_row_is_taken_only_for_keys_it_fits(
    conditions: dict[str, Any], takes: Tensor, refuses: Tensor, serve: Serve, rms_norm: Function
) -> None:
    log = serve(first=conditions, second={})
    for x, want in ((takes, "first"), (refuses, "second")) * 3:
        rms_norm(x, W)
        assert log.pop() == want
        assert not log


def test_alignment_counts_for_every_tensor_of_the_call(serve: Serve) -> None:
    log = serve(first={"alignment": 16}, second={})
    ops.rms_norm(torch.ones(2, 8), _misaligned(8))
    ops.rms_norm(torch.ones(2, 8), torch.ones(8))
    assert log == ["second", "first"]


def test_alignment_of_every_entry_of_a_list_counts(install: Install) -> None:
    table, log = OperatorTable(), []

    @table.forward("l2_norm", alignment=64, contiguous=True, dtypes={torch.float32})
    def first(tensors: list[Tensor]) -> Tensor:
        log.append("first")
        return SPECS["l2_norm"].forward(tensors)

    install(table)
    good = [torch.ones(4), torch.ones(2, 4), torch.ones(16)]
    ops.l2_norm(good)
    assert log.pop() == "first"
    for bad in (_misaligned(4), torch.ones(4, 4).t()[1:], torch.ones(4).half()):
        for place in range(4):
            ops.l2_norm([*good[:place], bad, *good[place:]])
            assert not log


def test_deterministic_mode_passes_over_rows_that_are_not(serve: Serve, rms_norm: Function) -> None:
    log = serve(atomics={"deterministic": False}, ordered={})
    x = torch.ones(2, 8)
    rms_norm(x, W)
    with deterministic():
        rms_norm(x, W)
        why = str(ops.rms_norm.explain(x, W))
    rms_norm(x, W)
    assert log == ["atomics", "ordered", "atomics"]
    assert "not deterministic, and torch's deterministic mode is on" in why


def test_selection_is_frozen_until_use(install: Install) -> None:
    table, log = OperatorTable(), []
    install(table)
    x = torch.ones(2, 8)
    ops.rms_norm(x, W)
    _row(table, "late", log)
    ops.rms_norm(x, W)
    assert not log
    install(table)
    ops.rms_norm(x, W)
    uninstall()
    ops.rms_norm(x, W)
    assert log == ["late", "late"]
    anychip.use("cpu")
    ops.rms_norm(x, W)
    assert log == ["late", "late"]


# limits and accepts


def test_limits_hold_on_every_call_of_one_key(serve: Serve, rms_norm: Function) -> None:
    log = serve(small={"limits": {"hidden": range(1, 9), "rows": {2, 4}}}, any={})
    for rows, hidden, want in ((2, 8, "small"), (2, 9, "any"), (4, 8, "small"), (3, 8, "any")) * 2:
        rms_norm(torch.ones(rows, hidden), torch.ones(hidden))
        assert log.pop() == want


def test_accepts_holds_on_every_call_of_one_key(serve: Serve, rms_norm: Function) -> None:
    log = serve(tiny_eps={"accepts": lambda x, weight, *, eps: eps < 1e-3}, any={})
    x = torch.ones(2, 8)
    for eps, want in ((1e-6, "tiny_eps"), (0.1, "any"), (1e-6, "tiny_eps")):
        rms_norm(x, W, eps=eps)
        assert log.pop() == want


def test_accepts_of_a_backward_is_told_which_gradients_are_wanted(
    install: Install, rms_norm: Function
) -> None:
    table, told = OperatorTable(), list[Any]()

    def accepts(*args: Tensor, eps: float, needs: tuple[bool, ...]) -> bool:
        told.append(needs)
        return True

    assert RMS.backward is not None
    table.backward("rms_norm", accepts=accepts)(RMS.backward)
    install(table)
    rms_norm(torch.ones(2, 8, requires_grad=True), W).sum().backward()
    assert told
    assert {*told} == {(True, False)}


def test_row_that_declines_a_call_leaves_it_to_the_next_and_is_counted_so(
    install: Install, rms_norm: Function
) -> None:
    table = OperatorTable()

    def forward(x: Tensor, weight: Tensor, *, eps: float) -> Any:
        return NotImplemented if eps > 1e-3 else [r + 1 for r in RMS.forward(x, weight, eps=eps)]

    def backward(*args: Any, **attrs: Any) -> Any:
        return NotImplemented

    table.forward("rms_norm", declines=True)(forward)
    table.backward("rms_norm", declines=True)(backward)
    install(table, alone=True)
    anychip.provenance(reset=True)
    x = torch.randn(2, 8, requires_grad=True)
    for eps, added in ((1e-6, 1), (0.1, 0), (1e-6, 1)):
        y = rms_norm(x, W, eps=eps)
        assert bits(y.detach()) == bits(RMS.forward(x.detach(), W, eps=eps)[0] + added)
    y.sum().backward()
    assert x.grad is not None
    rows = anychip.provenance().rows()
    served = {(row.direction, row.kind): row.calls for row in rows}
    assert served == {("forward", "native"): 2, ("forward", "reference"): 1,
                      ("backward", "reference"): 1}  # fmt: skip
    assert all("declined" in (row.fallback_reason or "") for row in rows if row.kind != "native")
    with (
        anychip.policy(fallback="strict"),
        pytest.raises(FallbackError, match=r"nothing was written.*forward: declined"),
    ):
        rms_norm(x, W, eps=0.1)


def test_row_that_refuses_everything_leaves_the_reference_and_the_reason(
    serve: Serve, rms_norm: Function
) -> None:
    log = serve(never={"limits": {"hidden": range(1, 5)}}, alone=True)
    x = torch.ones(2, 8)
    got = rms_norm(x, W)
    assert not log
    assert bits(got) == bits(RMS.forward(x, W, eps=1e-6)[0])
    rms_norm(torch.ones(2, 9), torch.ones(9))
    # One line whatever the sizes, or the report of a run with varying shapes would not end.
    (row,) = anychip.provenance().fallbacks()
    assert row.kind == "reference"
    assert "never: hidden must be in 1 to 4" in str(row.fallback_reason)
    assert row.calls == 2


def test_limit_on_a_size_that_does_not_exist_is_the_plugins_error(serve: Serve) -> None:
    serve(typo={"limits": {"hiden": range(1, 5)}})
    with pytest.raises(ContractError, match=r"limits speak of 'hiden'; .* are hidden, rows"):
        ops.rms_norm(torch.ones(2, 8), W)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "gelu", "linear", "attention"])
def test_limits_of_a_backward_row_speak_of_the_forward_call(name: str, install: Install) -> None:
    size = {"gelu": "numel", "linear": "in", "attention": "seq"}.get(name, "hidden")
    made = call(name, grad=True)
    arguments = torch._C.parse_schema(f"x::y{made.spec.signature}").arguments
    missing = sum(not a.kwarg_only for a in arguments) - len(made.args)
    sizes = made.spec.sizes(*made.args, *[None] * missing, **made.attrs)  # type: ignore[misc]
    log: list[str] = []

    def backward(*args: Any, **attrs: Any) -> Any:
        log.append("row")
        return made.spec.backward(*args, **attrs)  # type: ignore[misc]

    for fits in (True, False):
        table = OperatorTable()
        table.backward(name, limits={size: {sizes[size]} if fits else {sizes[size] + 1}})(backward)
        install(table)
        torch.autograd.grad(made().float().sum(), made.leaves())
        assert log == ["row"]


def test_limits_of_a_backward_row_that_is_not_given_the_arguments_are_refused(
    install: Install,
) -> None:
    table = OperatorTable()
    backward = SPECS["dropout"].backward
    assert backward is not None
    table.backward("dropout", limits={"numel": range(1, 5)})(backward)
    install(table)
    made = call("dropout", grad=True)
    with pytest.raises(ContractError, match="cannot have limits, since it is not given x"):
        made().sum().backward()


# order


def test_rows_are_tried_in_written_order_and_packs_first(install: Install) -> None:
    log: list[str] = []
    tables = [OperatorTable(), OperatorTable()]
    _row(tables[0], "a", log, limits={"rows": {1}})
    _row(tables[0], "b", log, limits={"rows": {1, 2}})
    _row(tables[1], "c", log, limits={"rows": {1, 2, 3}})
    install(*tables)
    for rows in (1, 2, 3, 4):
        ops.rms_norm(torch.ones(rows, 8), W)
    assert log == ["a", "b", "c"]
    served = sorted((r.provider, r.calls) for r in anychip.provenance().rows())
    assert served == [("cpu", 1), ("pack0", 1), ("pack0", 1), ("pack1", 1)]
    (pack,) = {r for r in anychip.provenance().rows() if r.provider == "pack1"}
    assert (pack.distribution, pack.version, pack.kind) == ("anychip-pack1", "4.2", "native")


# explain


def _explained(**policy: Any) -> str:
    with anychip.policy(**policy):
        return str(ops.rms_norm.explain(torch.ones(2, 8), W))


def test_explain_marks_what_a_call_would_take_and_runs_nothing(serve: Serve) -> None:
    log = serve(
        wide={"limits": {"hidden": range(16, 4097)}}, half={"dtypes": {torch.float16}}, mine={}
    )
    x = torch.ones(2, 8)
    answer = ops.rms_norm.explain(x, W)
    taken = [line for line in answer.lines if line.taken]
    assert [line.implementation.split(".")[-1] for line in taken] == ["mine"]
    assert answer.error is None
    why = {line.implementation.split(".")[-1]: line.why for line in answer.lines}
    assert why["wide"] == "hidden must be in 16 to 4096, got 8"
    assert why["half"] == "x is torch.float32"
    assert why["_rms_forward"] == "not needed"
    assert "-> pack0" in str(answer)
    assert not log
    assert not anychip.provenance().rows()
    ops.rms_norm(x, W)
    assert log == ["mine"]


@pytest.mark.parametrize(("policy", "text"), [
    ({"pin": {"rms_norm": "reference"}}, "the policy pins rms_norm to 'reference'"),
    ({"forbid": {"rms_norm": ["cpu"]}}, "the policy forbids 'cpu'"),
    ({"pin": {"rms_norm": "nobody"}}, "error: rms_norm (forward) is pinned to 'nobody'"),
    ({"fallback": "strict", "forbid": {"rms_norm": ["native"]}},
     "error: rms_norm: the policy is strict"),
    ({"forbid": {"rms_norm": ["native", "reference"]}}, "the policy forbids the reference"),
], ids=["pin", "forbid", "pin nobody", "strict", "forbid all"])  # fmt: skip
def test_explain_gives_the_policys_part(policy: dict[str, Any], text: str) -> None:
    assert text in _explained(**policy)


def test_explain_says_what_the_call_itself_would_raise(serve: Serve) -> None:
    serve(narrow={"limits": {"hidden": range(1, 5)}}, alone=True)
    with anychip.policy(fallback="strict"):
        x = torch.ones(2, 8)
        answer = ops.rms_norm.explain(x, W)
        with pytest.raises(FallbackError) as caught:
            ops.rms_norm(x, W)
    assert answer.error == str(caught.value)
    assert not any(line.taken for line in answer.lines)
    assert "weight must have shape" in str(ops.rms_norm.explain(x, torch.ones(3)).error)
    assert "must be float32" in str(ops.rms_norm.explain(x.double(), W).error)
