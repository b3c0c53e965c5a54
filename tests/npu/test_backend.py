"""The backend on torch_npu: what it says of itself, its rows, and that other tools find it.

Run against torch_npu 2.13.0 on an emulated CANN; not run on Ascend silicon.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_npu")

from tests.npu import backend_programs as programs
from tests.npu.emulator_process import run


def test_backend_says_what_torch_npu_and_cann_say() -> None:
    out = json.loads(run(programs.facts, MEMORY_MB=512, DEVICES=3, VERSION="8.3.0").checked().out)

    assert out["probe"] == ["ready", 3, "3 x Ascend910B1, torch_npu 2.13.0, CANN 8.3.0"]
    assert out["name"] == "Ascend910B1"
    assert out["total_memory"] == 512 << 20
    assert out["dtypes"] == ["torch.bfloat16", "torch.float16", "torch.float32"]
    assert out["identity"].startswith("Ascend910B1, driver ")
    assert out["identity"].endswith("CANN 8.3.0, torch_npu 2.13.0")
    assert out["reach"] is True


def test_memory_of_each_device_is_its_own() -> None:
    run(programs.memory_by_device, MEMORY_MB=256, DEVICES=2).checked()


def test_probe_imports_nothing_in_the_parent_and_the_backend_is_chosen() -> None:
    """A discovery that loads torch_npu would cost seconds, and could crash."""
    program = (
        "import sys, anychip; found = anychip.backends(use_cache=False);"
        "names = {r.name: r.status for r in found};"
        "print(names['npu'], names['cpu'], 'torch_npu' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "ANYCHIP_PROBE_TIMEOUT": "100"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ready", "ready", "False", "False"]


@pytest.mark.parametrize("autoload", ["0", "1"], ids=["by hand", "by torch"])
def test_backend_by_name_loads_torch_npu_whether_or_not_torch_does(autoload: str) -> None:
    program = (
        "import torch, anychip; chip = anychip.use('npu'); x = torch.ones(3, device='npu');"
        "found = float(anychip.ops.rms_norm(x[None], x, eps=0.0).sum());"
        "print(found, len(list(chip.operators)) > 20)"
    )
    done = subprocess.run([sys.executable, "-c", program], env={
        **os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload,
    }, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["3.0", "True"]
