"""What ``deploy`` has: manifests that their schemas allow, commands that train on two machines.

The machines are processes of this host, each with the variables that its own would have.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from tests.integration.collectives.processes import free_port
from tests.integration.train.processes import num_rows, variables
from tests.integration.train.test_ranks import SETTINGS

DEPLOY = Path(__file__).parents[3] / "deploy"
KUBERNETES = "1.34"
MACHINES = 2


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
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == MACHINES
    assert f"--nnodes {MACHINES} " in container()["args"][0]


Machine = tuple[list[str], Mapping[str, str]]
"""A command, and the variables that it is given."""


def of_kubernetes(folder: Path, port: int, settings: Sequence[str]) -> list[Machine]:
    """The Job's, with an address, a folder and settings of this host."""
    (script,) = container()["args"]
    here = {
        "anychip-0.anychip": "127.0.0.1", "29500": str(port), "/runs/job": str(folder / "out"),
        "--nproc-per-node 2": "--nproc-per-node 1", " $resume": f" $resume {' '.join(settings)}",
    }  # fmt: skip
    for known, mine in here.items():
        assert known in script
        script = script.replace(known, mine)
    secret = folder / "secret"
    secret.write_text("0" * 32, encoding="utf-8")
    given = {"BACKEND": "cpu", "ANYCHIP_INTERFACE": "lo", "ANYCHIP_SECRET_FILE": str(secret)}
    assert given.keys() == {each["name"] for each in container()["env"]}
    command = [*container()["command"], script]
    return [(command, {**given, "JOB_COMPLETION_INDEX": str(m)}) for m in range(MACHINES)]


SRUN = """#!/bin/bash
# Each machine runs what stands behind the options.
while [[ $1 == --* ]]; do shift; done
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & all+=($!); done
for one in "${all[@]}"; do wait "$one" || exit 1; done
"""


def of_slurm(folder: Path, port: int, settings: Sequence[str]) -> list[Machine]:
    """The script, with commands of SLURM that have two machines in this one."""
    tools = folder / "slurm"
    tools.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho 127.0.0.1\n"}.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    given = {
        "SLURM_JOB_ID": str(port - 20000), "SLURM_JOB_NAME": "anychip",
        "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": str(MACHINES), "RANKS_PER_NODE": "1",
        "OUT": str(folder / "out"), "ANYCHIP_INTERFACE": "lo",
        "PATH": f"{tools}{os.pathsep}{_path()}",
    }  # fmt: skip
    return [(["bash", str(DEPLOY / "slurm/train.sbatch"), *settings], given)]


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.grid
@pytest.mark.parametrize("machines", [of_kubernetes, of_slurm])
def test_the_command_trains_on_two_machines_and_goes_on(
    machines: Callable[[Path, int, Sequence[str]], list[Machine]], tmp_path: Path
) -> None:
    if machines is of_slurm and shutil.which("openssl") is None:
        pytest.skip("the script makes its secret by openssl, which is not here")
    port = free_port()
    while not 20000 <= port < 40000:
        port = free_port()
    for steps in (2, 4):
        ends = [
            subprocess.Popen(
                command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=variables() | {"PATH": _path(), **given},
            )
            for command, given in machines(tmp_path, port, [*SETTINGS, "--steps", str(steps)])
        ]  # fmt: skip
        for end in ends:
            output = end.communicate(timeout=200)[0]
            assert end.returncode == 0, output
        assert num_rows(tmp_path / "out") == steps
    metrics = (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["step"] for row in metrics] == [1, 2, 3, 4]
