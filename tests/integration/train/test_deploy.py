"""What ``deploy`` has: manifests that their schemas allow, commands that train on two machines.

The machines are network namespaces, each with the variables and the interface that its own has.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from tests.integration import two_hosts
from tests.integration.train.processes import num_rows, on_two_hosts
from tests.integration.train.test_ranks import SETTINGS

DEPLOY = Path(__file__).parents[3] / "deploy"
KUBERNETES = "1.34"


def manifests(name: str) -> list[dict[str, Any]]:
    """Of a file."""
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")))


def container() -> dict[str, Any]:
    """The container of the Job."""
    _, job = manifests("job.yaml")
    found: dict[str, Any] = job["spec"]["template"]["spec"]["containers"][0]
    return found


def test_manifests_are_what_kubernetes_knows() -> None:
    found = [*manifests("runs.yaml"), *manifests("job.yaml")]
    assert [each["kind"] for each in found] == ["PersistentVolumeClaim", "Service", "Job"]
    for manifest in found:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_a_key_that_kubernetes_does_not_know_is_found() -> None:
    job = manifests("job.yaml")[-1]
    job["spec"]["completion"] = job["spec"].pop("completions")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_the_train_job_is_what_kubeflow_knows() -> None:
    (job,) = manifests("trainjob.yaml")
    known = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert known is not None
    assert known.to_dict() == job, "a key that is unknown is left out"
    (claim,) = manifests("runs.yaml")
    (node,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
        "replicatedJobs"
    ]
    (volume,) = node["template"]["spec"]["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_parts_of_the_job_name_each_other() -> None:
    (claim,), (service, job) = manifests("runs.yaml"), manifests("job.yaml")
    name, spec = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr {name}-0.{spec['subdomain']} " in container()["args"][0]
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert "--nnodes 2 " in container()["args"][0]


Machines = tuple[int, list[str], dict[str, str]]
"""How many times :mod:`tests.integration.two_hosts` starts a command on each, and with what."""


def of_kubernetes(folder: Path, settings: Sequence[str]) -> Machines:
    """The Job's, with an address, a folder and settings of this host."""
    (script,) = container()["args"]
    here = {
        "anychip-0.anychip": two_hosts.HOSTS[0], "/runs/job": str(folder / "out"),
        "--nproc-per-node 2": "--nproc-per-node 1", " $resume": f" $resume {' '.join(settings)}",
        "$JOB_COMPLETION_INDEX": "$RANK",
    }  # fmt: skip
    for known, mine in here.items():
        assert known in script
        script = script.replace(known, mine)
    secret = folder / "secret"
    secret.write_text("0" * 32, encoding="utf-8")
    given = {each["name"]: each["value"] for each in container()["env"]}
    given["ANYCHIP_SECRET_FILE"] = str(secret)
    return 1, [*container()["command"], script], given


SRUN = """#!/bin/bash
# Each machine runs what stands behind the options.
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 "$@" & here=$!
SLURM_NODEID=1 $SECOND "$@" && wait $here
"""


def of_slurm(folder: Path, settings: Sequence[str]) -> Machines:
    """The script, with commands of SLURM that know of two machines."""
    tools = folder / "slurm"
    tools.mkdir(exist_ok=True)
    scontrol = f"#!/bin/sh\necho {two_hosts.HOSTS[0]}\n"
    for name, text in {"srun": SRUN, "scontrol": scontrol}.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    given = {
        "SLURM_JOB_ID": "123456", "SLURM_JOB_NAME": "anychip", "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2", "RANKS_PER_NODE": "1", "OUT": str(folder / "out"),
        "PATH": f"{tools}{os.pathsep}{_path()}",
    }  # fmt: skip
    return 0, ["bash", str(DEPLOY / "slurm/train.sbatch"), *settings], given


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.grid
@pytest.mark.parametrize("machines", [of_kubernetes, of_slurm])
def test_the_command_trains_on_two_machines_and_goes_on(
    machines: Callable[[Path, Sequence[str]], Machines], tmp_path: Path
) -> None:
    if machines is of_slurm and shutil.which("openssl") is None:
        pytest.skip("the script makes its secret by openssl, which is not here")
    for steps in (2, 4):
        ranks, command, given = machines(tmp_path, [*SETTINGS, "--steps", str(steps)])
        with on_two_hosts(ranks, *command, cwd=tmp_path, **{"PATH": _path(), **given}) as job:
            output, errors = job.communicate(timeout=200)
        assert job.returncode == 0, output + errors
        assert num_rows(tmp_path / "out") == steps
    metrics = (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["step"] for row in metrics] == [1, 2, 3, 4]
