"""``anychip train`` on the emulated chip: a config unchanged but for the device follows the host.

Run against torch_npu 2.13.0 on an emulated CANN; not run on Ascend silicon.
"""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_npu")

from tests.integration.train.processes import TINY, rows, train
from tests.npu.emulator_process import run

STEPS = 8
LINEAR = ("--steps", str(STEPS), "--out", "out")


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same run on the cpu."""
    return losses(tmp_path_factory.mktemp("host"), "--backend", "cpu")


def losses(folder: Path, *arguments: str) -> list[float]:
    """The losses of a run in a folder."""
    done = train(*TINY, *LINEAR, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [row["loss"] for row in rows(folder / "out")]


def test_host_curve_falls(on_host: list[float]) -> None:
    assert len(on_host) == STEPS
    assert on_host[-1] < on_host[0]


def test_training_on_the_chip_follows_the_host(on_host: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path, "--backend", "npu")

    # Float32 sums in another order, carried through the steps of AdamW.
    assert found == pytest.approx(on_host, rel=1e-4)
    operators = json.loads((tmp_path / "out/provenance.json").read_text())["operators"]
    mapped = {row["operator"] for row in operators if row["provider"] == "npu"}
    assert mapped >= {"linear", "embedding"}


@pytest.mark.grid
@pytest.mark.parametrize("settings", [
    ("optimizer.stage=1",), ("optimizer.stage=2",), ("parallel.pipeline=2", "model.layers=2"),
], ids=["zero-1", "zero-2", "1f1b"])  # fmt: skip
def test_two_ranks_over_hccl_follow_the_same_two_ranks_on_the_host(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    curves = []
    for backend in ("cpu", "npu"):
        folder = tmp_path / backend
        folder.mkdir()
        kept = [word for word in TINY if word.partition("=")[0] not in "".join(settings)]
        done = train(*kept, *settings, *LINEAR, "--backend", backend, "--nproc", "2", cwd=folder)
        assert done.returncode == 0, done.stderr[-4000:]
        curves.append([row["loss"] for row in rows(folder / "out")])

    assert len(curves[0]) == STEPS
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def train_in(folder: str, *words: str) -> None:
    """The command line, in this process."""
    from anychip.cli.group import run

    os.chdir(folder)
    sys.exit(run(["train", *TINY, "--backend", "npu", *LINEAR, *words]))


@pytest.mark.parametrize(("fault", "told"), [
    ({"FAIL_OPERATOR": "aclnnMm:9"},
     "ACL_ERROR_RT_AICORE_EXCEPTION (507015): aclnnMm: emulated fault: aclnnMm fails at call 9"),
    ({"LOSE_DEVICE_AFTER": 300},
     "ACL_ERROR_RT_LOST_HEARTBEAT (507010): emulated fault: the device is lost (heartbeat)"),
], ids=["operator", "device"])  # fmt: skip
def test_failure_of_the_device_is_told_in_one_line(
    fault: dict[str, object], told: str, tmp_path: Path
) -> None:
    ended = run(train_in, str(tmp_path), **fault)

    lines = [line for line in ended.err.splitlines() if line.startswith("anychip: ")]
    assert lines == [f"anychip: npu: synchronize(device current) failed with {told}"]
    assert "Traceback" not in ended.err
    assert ended.code == 1


@pytest.mark.grid
def test_link_that_is_down_is_told_and_closing_has_no_traceback(tmp_path: Path) -> None:
    fault = {"ANYCHIP_CANN_LINK_DOWN": "1", "ANYCHIP_CANN_LINK_TIMEOUT_S": "2"}
    done = train(*TINY, *LINEAR, "--backend", "npu", "--nproc", "2", cwd=tmp_path, **fault)

    assert done.returncode == 1
    assert "HcclAllReduce" in "".join(x for x in done.stderr.splitlines() if "anychip: " in x)
    assert "Exception ignored" not in done.stderr
    assert "anychip: RuntimeError" not in done.stderr
