"""Does -k select what pytest's -k would, and does one whole id mean one case?"""

import pytest

from anychip.conformance.case import Case
from anychip.conformance.expression import parse, select

IDS = [
    "operators/rms_norm/fp32/4x8", "operators/rms_norm/fp32/4x80", "operators/rms_norm/bf16/4x8",
    "operators/layer_norm/bf16/4x8", "gradients/rms_norm/fp32/rule:twice", "device/current_device",
]  # fmt: skip


def chosen(text: str) -> list[str]:
    return [case.id for case in select([Case(id=i, run=lambda _: None) for i in IDS], text)]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", IDS), ("rms_norm and bf16", [IDS[2]]), ("RMS_NORM AND".lower() + " BF16", [IDS[2]]),
        ("bf16 or device", [IDS[2], IDS[3], IDS[5]]), ("not rms_norm", [IDS[3], IDS[5]]),
        ("rms_norm and not (bf16 or gradients)", [IDS[0], IDS[1]]), ("not not device", [IDS[5]]),
        ("norm and bf16 or device and current", [IDS[2], IDS[3], IDS[5]]), ("rule:twice", [IDS[4]]),
        ("4x8", IDS[:4]), ("nothing", []),
    ],
)  # fmt: skip
def test_expression_selects_by_words_of_the_id(text: str, want: list[str]) -> None:
    assert chosen(text) == want


def test_whole_id_selects_that_case_alone() -> None:
    assert chosen(IDS[0]) == [IDS[0]]


@pytest.mark.parametrize("text", ["and", "a and", "(a or b", "a b", "a )", "not", "()", "a (b)"])
def test_malformed_expression_says_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"-k .* expected, got"):
        parse(text)
