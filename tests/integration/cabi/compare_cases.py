"""Training on a chip with each operator compared with the host: what agrees, and what is found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anychip import registry
from anychip.cabi import Library
from anychip.contract import OperatorTable
from anychip.dispatch import selection
from anychip.dispatch.operator import registered
from anychip.train import comparing, config, loop

SMALL = (
    *("model.width=32", "model.layers=1", "model.context=16", "data.batch_size=4"),
    *("data.prefetch=0", "run.sample_tokens=1", "model.dropout=0.1"),
)


def train(chip: Library, out: Path, steps: int) -> comparing.Comparison:
    out.mkdir(exist_ok=True)
    run = loop.build(config.load(None, [*SMALL, f"run.steps={steps}"]), chip)
    with comparing.compared(chip, "cpu", run, out) as comparison:
        loop.train(run, out, lambda row: None)
    return comparison


def test_chip_that_computes_right_agrees_for_five_steps(chip: Library, tmp_path: Path) -> None:
    found = train(chip, tmp_path, 5).to_json()
    operators = found["operators"]
    assert operators["anychip::adamw"]["calls"] == 10  # two groups; written in place
    assert operators["anychip::linear_backward"]["calls"] == 5 * 5
    assert operators["aten::add"]["calls"] > 10
    assert operators["anychip::dropout_forward"]["worst"] == 0.0  # the same mask
    assert all(each["worst"] < 0.5 for each in operators.values())
    assert found["left_out"] == {}
    assert not (tmp_path / "difference.pt").exists()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wrong_row_is_named_with_its_call(
    chip: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """One element of a large result is off by what no loss would show."""
    spec, table = registered()["gelu"].spec, OperatorTable()
    right: Callable[..., Any] = getattr(spec, direction)

    def wrong(*args: Any, **attrs: Any) -> Any:
        found = right(*args, **attrs)
        first = found if isinstance(found, torch.Tensor) else found[0]
        first.view(-1)[-3] += 1e-3
        return found

    getattr(table, direction)("gelu")(wrong)
    monkeypatch.setattr(chip, "operators", table)
    selection.activate(chip)
    with pytest.raises(comparing.DifferenceError) as raised:
        train(chip, tmp_path, 2)
    assert f"step 1: anychip.gelu{'_backward' * (direction == 'backward')}" in str(raised.value)
    assert "float32[4, 16, 128]" in str(raised.value)
    assert "at (3, 15, 125)" in str(raised.value)


def test_other_chip_of_the_same_device_is_refused(chip: Library, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="name a backend with other devices"),
        comparing.compared(chip, registry.name_of(chip), None, tmp_path),
    ):
        pass
