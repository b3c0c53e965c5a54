"""Reasons in one line; who a backend came from."""

from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anychip.contract import Backend, ContractError, OperatorTable, Probe
from anychip.registry import loading, provenance_of


@given(st.text(max_size=2000))
def test_one_line_for_any_text_is_printable_and_short(text: str) -> None:
    line = loading.one_line(text)
    assert line == "" or line.isprintable()
    assert len(line) <= loading.MAX_REASON
    assert line == line.strip()


def test_one_line_for_text_that_fits_changes_only_white_space() -> None:
    assert loading.one_line("  a\n\tb \x1b[0m c ") == "a b [0m c"
    assert loading.one_line("x" * 400) == "x" * 296 + " ..."


def test_describe_error_without_a_message_is_its_type() -> None:
    assert loading.describe(KeyError()) == "KeyError"
    assert loading.describe(ValueError("a\nb")) == "ValueError: a b"


class _ByHand(Backend):
    name, device_type, api, operators = "by_hand", "cpu", (2, 0), OperatorTable()
    capabilities: ClassVar = {"memory_stats": 1}

    def device(self, index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def probe(self) -> Probe:
        return Probe.ready(1, kind="host")


def test_ask_fills_in_the_device_type() -> None:
    assert loading.ask(_ByHand()) == Probe(
        status="ready", reason="1 device", kind="host", device_count=1, device_type="cpu"
    )


def test_provenance_of_a_backend_made_by_hand_is_its_module() -> None:
    assert provenance_of(_ByHand()) == (__name__, "not installed")


@pytest.mark.parametrize(
    ("method", "lacks"), [("empty_cache", "empty_cache"), ("stats", "memory_allocated")]
)
def test_default_that_the_adapter_does_not_carry_names_the_file_of_the_plugin(
    method: str, lacks: str
) -> None:
    with pytest.raises(ContractError) as caught:
        getattr(_ByHand().memory, method)()
    assert str(caught.value) == (
        f"backend 'by_hand': torch.cpu has no {lacks}(), on which the contract's memory.{method}() "
        f"stands; override {method}() in tests's memory.py"
    )
