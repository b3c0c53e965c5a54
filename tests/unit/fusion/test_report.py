"""The report as a table and as data."""

import json

from torch import nn

import anychip
from tests.unit.fusion import modules
from tests.unit.fusion.modules import WIDTH


def model() -> nn.Module:
    return nn.Sequential(
        modules.RMSNorm(), modules.GatedMLP(), nn.LayerNorm(WIDTH), modules.RMSNorm(), nn.ReLU()
    )


def test_report_prints_a_table_with_counts_and_reasons() -> None:
    assert str(anychip.fuse(model())).splitlines() == [
        "replaced 4", "kind        count  from       to              the model's own code serves",
        "norm        2      RMSNorm    ops.rms_norm    other dtypes, or dtypes that torch mixes",
        "activation  1      GatedMLP   ops.swiglu      other dtypes",
        "norm        1      LayerNorm  ops.layer_norm  other dtypes, or dtypes that torch mixes",
        "", "left alone",
        "3  Linear  linear layers are replaced where asked: fuse(model, linear=True)",
        "1  ReLU    no norm, activation, attention or loss that an operator computes",
    ]  # fmt: skip


def test_report_as_json_names_every_module() -> None:
    report = anychip.fuse(model())
    found = json.loads(json.dumps(report.to_json()))
    assert (found["schema"], found["before"]) == (1, 0)
    assert found["replaced"][1] == {
        "path": "1", "kind": "activation", "source": "GatedMLP", "operator": "swiglu",
        "unless": "other dtypes",
    }  # fmt: skip
    assert [entry["path"] for entry in found["left"]] == ["1.w1", "1.w3", "1.w2", "4"]
    assert repr(report) == f"FusionReport({json.dumps(found)})"


def test_report_of_a_model_without_modules_says_nothing_was_replaced() -> None:
    report = anychip.fuse(nn.Sequential())
    assert str(report) == "nothing was replaced"
    assert report.to_json() == {"schema": 1, "before": 0, "replaced": [], "left": []}
