"""What a user decides about implementations, for how long, and that it is obeyed."""

import threading
from typing import Any

import pytest
import torch

import anychip
from anychip import FallbackError, OperatorTable, ops
from anychip.dispatch import selection
from tests.unit.dispatch.calls import SPECS
from tests.unit.dispatch.tables import Install

X, W = torch.ones(2, 8), torch.ones(8)
LABEL = "anychip_cpu.norm.rms_norm"


def _served(**policy: Any) -> list[tuple[str, str]]:
    """(provider, kind) of a rms_norm under a policy."""
    anychip.provenance(reset=True)
    with anychip.policy(**policy):
        ops.rms_norm(X, W)
    return [(r.provider, r.kind) for r in anychip.provenance().rows()]


@pytest.mark.parametrize(("policy", "kind"), [
    pytest.param({}, "native", id="none"),
    pytest.param({"pin": {"rms_norm": "cpu"}}, "native", id="pin-provider"),
    pytest.param({"pin": {"rms_norm": "anychip"}}, "native", id="pin-distribution"),
    pytest.param({"pin": {"rms_norm": "native"}}, "native", id="pin-kind"),
    pytest.param({"pin": {"rms_norm": LABEL}}, "native", id="pin-label"),
    pytest.param({"pin": {"rms_norm": "reference"}}, "reference", id="pin-reference"),
    pytest.param({"forbid": {"rms_norm": ["native"]}}, "reference", id="forbid-list"),
    pytest.param({"forbid": {"rms_norm": "native"}}, "reference", id="forbid-text"),
    pytest.param({"forbid": {"rms_norm": ("cpu",)}}, "reference", id="forbid-tuple"),
    pytest.param({"forbid": {"rms_norm": iter(["cpu"])}}, "reference", id="forbid-iterator"),
    pytest.param({"fallback": "strict", "pin": {"rms_norm": "reference"}}, "reference",
                 id="strict-pin-reference"),
    pytest.param({"fallback": "strict"}, "native", id="strict"),
])  # fmt: skip
def test_policy_decides_who_serves(policy: dict[str, Any], kind: str) -> None:
    assert [k for _, k in _served(**policy)] == [kind]
    assert _served() == [("cpu", "native")]


def test_pin_that_cannot_be_met_is_an_error_with_the_reason() -> None:
    with anychip.policy(pin={"rms_norm": "acme"}):
        with pytest.raises(FallbackError, match=r"rms_norm \(forward\) is pinned to 'acme'"):
            ops.rms_norm(X, W)
        ops.layer_norm(X, W)


def test_pin_to_a_row_that_refuses_a_call_is_an_error_that_names_the_pin(install: Install) -> None:
    table = OperatorTable()
    table.forward("rms_norm", limits={"hidden": {16}})(SPECS["rms_norm"].forward)
    install(table)
    with (
        anychip.policy(pin={"rms_norm": "pack0"}),
        pytest.raises(FallbackError, match=r"pins it to 'pack0'.*hidden must be in .*, got 8"),
    ):
        ops.rms_norm(X, W)


def test_forbidden_reference_is_not_a_fallback(install: Install) -> None:
    install(alone=True)
    with (
        anychip.policy(forbid={"rms_norm": "reference"}),
        pytest.raises(FallbackError, match="forbids the reference"),
    ):
        ops.rms_norm(X, W)


@pytest.mark.parametrize("key", ["pin", "forbid"])
def test_operator_that_does_not_exist_is_answered_with_the_nearest(key: str) -> None:
    with pytest.raises(ValueError, match="no operator is named 'rmsnorm'; did you mean 'rms_norm'"):
        with anychip.policy(**{key: {"rmsnorm": "reference"}}):
            pass
    with pytest.raises(ValueError, match=r"no operator is named 'zzz'; there are .*rms_norm"):
        with anychip.policy(**{key: {"zzz": "reference"}}):
            pass
    assert selection.current.policy == selection.Policy()


def test_unknown_fallback_is_refused_and_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match="fallback must be 'record' or 'strict', got 'silent'"):
        with anychip.policy(fallback="silent"):  # type: ignore[arg-type]
            pass
    assert _served() == [("cpu", "native")]


def test_nested_policies_add_up_and_come_off_in_turn() -> None:
    with anychip.policy(forbid={"rms_norm": ["native"]}):
        with anychip.policy(forbid={"rms_norm": ["mapped"]}, pin={"gelu": "reference"}) as inner:
            assert inner.forbid["rms_norm"] == {"native", "mapped"}
            assert _served()[0][1] == "reference"
            with anychip.policy(fallback="strict") as innermost:
                assert innermost.pin == {"gelu": "reference"}
                with pytest.raises(FallbackError, match="strict"):
                    ops.rms_norm(X, W)
        assert _served()[0][1] == "reference"
        assert selection.current.policy.pin == {}
    assert _served()[0][1] == "native"


def test_policy_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), anychip.policy(fallback="strict", pin={"gelu": "reference"}):
        raise KeyError
    assert selection.current.policy == selection.Policy()


def test_policies_of_overlapping_threads_leave_nothing_behind() -> None:
    """The first in is the first out: what it found on entry must not come back when it leaves."""
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with anychip.policy(fallback="strict"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with anychip.policy(pin={"rms_norm": "reference"}):
        leave.set()
        thread.join()
        assert selection.current.policy.fallback == "record"
        assert selection.current.policy.pin == {"rms_norm": "reference"}
    assert selection.current.policy == selection.Policy()


def test_label_is_the_same_for_the_same_policy_and_new_after_use() -> None:
    def label(**policy: Any) -> str:
        with anychip.policy(**policy):
            return selection.current.label

    plain = selection.current.label
    strict = label(fallback="strict")
    pinned = label(pin={"gelu": "reference"})
    forbidden = label(forbid={"gelu": ["cpu", "native"]})
    assert len({plain, strict, pinned, forbidden}) == 4
    assert label(fallback="strict") == strict
    assert label(forbid={"gelu": ["native", "cpu"]}) == forbidden
    assert label(forbid={"gelu": ["native"]}) not in {plain, strict, pinned, forbidden}
    assert selection.current.label == plain
    anychip.use("cpu")
    assert selection.current.label not in {plain, strict, pinned, forbidden}


def test_strict_policy_holds_in_backward_too(install: Install) -> None:
    install(alone=True)
    x = torch.ones(2, 8, requires_grad=True)
    y = ops.rms_norm(x, W)
    with anychip.policy(fallback="strict"), pytest.raises(FallbackError, match="rms_norm"):
        y.sum().backward()
    assert x.grad is None
