"""One job on chips of two makes: the stages of a pipeline on the host and on a C library's chip."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from anychip.cabi import include_directory
from anychip.cli import group
from anychip.cli.exit_codes import CANNOT_RUN, WRONG_USE
from tests.integration.train.forked import Server
from tests.integration.train.processes import rows
from tests.unit.train.stored_tensors import stored

ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).with_name("by_references.py"))
SETTINGS = (
    *("run.sample_tokens=5", "model.kind=llama", "model.context=16", "model.layers=2"),
    *("model.heads=2", "model.width=32", "data.batch_size=2", "data.accumulation=2"),
    *("schedule.kind=constant", "data.prefetch=0"),
)
PIPELINE = "parallel.pipeline=2"


@pytest.fixture(scope="module")
def minichip(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("chips") / "libminichip.so"
    flags = ["-std=c11", "-O2", "-shared", "-fPIC", "-pthread", f"-I{include_directory()}"]
    subprocess.run(["gcc", *flags, ROOT / "examples/minichip/minichip.c", "-o", made], check=True)
    return str(made)


def train(ranks: Server, out: Path, *args: str, world_size: int = 1, by: str = SCRIPT) -> None:
    words = (*SETTINGS, *args, "--out", str(out))
    for ended in ranks.run(by, *words, world_size=world_size, cwd=out.parent):
        assert ended.code == 0, ended.err


def test_bits_are_the_same_on_every_arrangement_of_chips_that_compute_alike(
    ranks: Server, tmp_path: Path, minichip: str
) -> None:
    """Also where one goes on with what another one has begun."""
    train(ranks, tmp_path / "host", "--backend", "cpu", "--steps", "4")
    mixed = tmp_path / "mixed"
    chips = ("--backend", f"cpu,{minichip}", PIPELINE)
    train(ranks, mixed, *chips, "--steps", "2", world_size=2)
    served = json.loads((mixed / "provenance.json").read_text())["pipeline"]
    assert [part["backend"] for part in served] == ["cpu", "minichip"]
    # The first of the stages has no loss; each rank has counted its own calls.
    assert ["cross_entropy" in str(part["operators"]) for part in served] == [False, True]
    assert f'backend = ["cpu", "{minichip}"]' in (mixed / "config.toml").read_text()
    swapped = ("--resume", "--backend", f"{minichip},cpu", "--steps", "3")
    train(ranks, mixed, *swapped, world_size=2)
    train(ranks, mixed, "--resume", "--backend", "cpu", "parallel.pipeline=1", "--steps", "4")
    assert rows(mixed) == rows(tmp_path / "host")
    wanted, found = (stored(out / "checkpoint") for out in (tmp_path / "host", mixed))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


@pytest.mark.grid
def test_two_replicas_on_two_chips_follow_the_hosts_losses(
    ranks: Server, tmp_path: Path, minichip: str
) -> None:
    """With the host's kernels, and ZeRO between the replicas of a stage."""
    args = (PIPELINE, "--steps", "8", "optimizer.stage=2")
    for name, backend in {"host": "cpu", "mixed": f"cpu,{minichip}"}.items():
        train(ranks, tmp_path / name, *args, "--backend", backend, world_size=4, by="train")
    host, mixed = ([row["loss"] for row in rows(tmp_path / name)] for name in ("host", "mixed"))
    assert mixed == pytest.approx(host, rel=1e-4)  # float32 on both; the order of sums differs


@pytest.mark.parametrize(("args", "code", "message"), [
    (["--backend", "cpu,cpu", "--nproc", "2"], WRONG_USE,
     "2 chips, cpu, cpu, do not divide the 1 rank of parallel.pipeline = 1"),
    (["run.backend=['cpu', 'cpu', 'cpu']", PIPELINE, "--nproc", "2"], WRONG_USE,
     "3 chips, cpu, cpu, cpu, do not divide the 2 ranks of parallel.pipeline = 2"),
    (["--backend", "cpu,cpu", PIPELINE], WRONG_USE, "start it with --nproc 2"),
    (["--backend", "cpu,cpux", PIPELINE, "--nproc", "2"], WRONG_USE, "did you mean 'cpu'"),
    (["--backend", "cpu,./none.so", PIPELINE, "--nproc", "2"], CANNOT_RUN, "none.so"),
], ids=["no pipeline", "three", "one process", "unknown", "cannot run"])  # fmt: skip
def test_list_of_chips_that_cannot_be_is_refused(
    args: list[str], code: int, message: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert group.run(["train", *SETTINGS, *args]) == code
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
