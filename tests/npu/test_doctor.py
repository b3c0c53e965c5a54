"""``anychip doctor`` and the other tools in environments where something is missing.

Each environment is built here, as far as it can be: by variables, by a folder in front of
site-packages, by device files that a start-up file puts in place of /dev.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_npu")

LOADER = "libascendcl.so: cannot open shared object file: No such file or directory"
RELEASE = "2.13.0"
NO_DEVICES = {"ANYCHIP_CANN_DEVICES": "0"}


def anychip(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a changed environment; an empty value takes a variable away."""
    # torch and torch_npu are imported in the probe, which a busy machine does slowly.
    environment = {**os.environ, "ANYCHIP_PROBE_TIMEOUT": "100", **changes}
    for name in [name for name, value in changes.items() if not value]:
        del environment[name]
    return subprocess.run(
        [sys.executable, "-m", "anychip", *arguments], env=environment, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip


def in_front(folder: Path, **changes: str) -> dict[str, str]:
    """Variables with which a folder comes before all others on Python's path."""
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **changes}


def start_up(folder: Path, text: str, **changes: str) -> dict[str, str]:
    """Variables with which each Python begins by running ``text``."""
    (folder / "sitecustomize.py").write_text(text)
    return in_front(folder, **changes)


def test_doctor_on_the_emulated_chip_finds_all_in_order() -> None:
    done = anychip("doctor", "npu")
    assert done.returncode == 0, done.stdout
    assert f"ok  ready: 2 x Ascend910B1, torch_npu {RELEASE}, CANN 8.5.0" in done.stdout
    assert "ok  import torch works, and loads torch_npu by itself" in done.stdout
    assert "  no  " not in done.stdout


def test_doctor_without_cann_says_what_the_loader_says_and_why_import_torch_fails() -> None:
    done = anychip("doctor", "npu", LD_LIBRARY_PATH="")
    assert done.returncode == 3
    assert "no  unavailable: CANN is not installed: " in done.stdout
    assert LOADER in done.stdout
    assert "source its set_env.sh" in done.stdout
    assert "no  import torch fails: it loads torch_npu by itself: ImportError: " in done.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch start" in done.stdout


def test_doctor_without_cann_and_autoload_says_that_torch_works() -> None:
    done = anychip("doctor", "npu", LD_LIBRARY_PATH="", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 3
    assert LOADER in done.stdout
    assert "ok  import torch works, and leaves torch_npu out" in done.stdout


def test_doctor_with_cann_that_is_not_sourced_names_the_script(tmp_path: Path) -> None:
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit" / "set_env.sh").touch()
    text = (
        "from pathlib import Path\nfrom anychip_npu import cann\n"
        f"cann.INSTALLATIONS = (Path({str(tmp_path / 'toolkit')!r}),)\n"
    )
    done = anychip("doctor", "npu", **start_up(tmp_path, text, LD_LIBRARY_PATH=""))
    assert "no  unavailable: the environment of CANN is not set: " in done.stdout
    assert f"to fix it: source {tmp_path}/toolkit/set_env.sh, then start again" in done.stdout


def test_doctor_without_a_device_says_so() -> None:
    done = anychip("doctor", "npu", **NO_DEVICES)
    assert done.returncode == 3
    assert "no  unavailable: there is no Ascend device: no device files" in done.stdout
    assert "install the Ascend driver" in done.stdout


def test_doctor_for_a_user_outside_of_the_group_names_the_files_and_the_group(
    tmp_path: Path,
) -> None:
    for name in ("davinci0", "davinci_manager"):
        (tmp_path / name).touch()
    # Whoever runs the tests may open every file: the answer of access() is changed too.
    text = (
        "import os\nfrom pathlib import Path\nfrom anychip_npu import cann\n"
        f"cann.DEVICE_FILES = Path({str(tmp_path)!r})\n"
        "real = os.access\n"
        "os.access = lambda path, *a, **k: 'davinci' not in str(path) and real(path, *a, **k)\n"
    )
    done = anychip("doctor", "npu", **start_up(tmp_path, text, **NO_DEVICES))
    assert f"no  unavailable: no permission for {tmp_path}/davinci0" in done.stdout
    assert "to fix it: sudo usermod -aG HwHiAiUser" in done.stdout


@pytest.mark.parametrize(("release", "wanted", "status", "line"), [
    ("2.12.0", "==2.12.0.*", "incompatible", "torch_npu 2.12.0 is made for torch==2.12.0.*"),
    (None, "", "unavailable", "torch_npu is not installed"),
], ids=["other release", "absent"])  # fmt: skip
def test_doctor_with_another_adapter_or_none_says_what_to_install(
    tmp_path: Path, release: str | None, wanted: str, status: str, line: str
) -> None:
    """The metadata that pip leaves is what is looked at: a folder in front hides the real one."""
    if release is not None:
        folder = tmp_path / f"torch_npu-{release}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {release}\n"
            f"Requires-Dist: torch{wanted}\n"
        )
        changes = in_front(tmp_path)
    else:
        text = (
            "from importlib import metadata\nreal = metadata.version\n"
            "def version(name):\n"
            "    if name == 'torch_npu': raise metadata.PackageNotFoundError(name)\n"
            "    return real(name)\n"
            "metadata.version = version\n"
        )
        changes = start_up(tmp_path, text)
    done = anychip("doctor", "npu", **changes)
    assert done.returncode == 3
    assert f"no  {status}: {line}" in done.stdout
    assert "to fix it: pip install" in done.stdout


def test_table_without_cann_has_the_host_ready_and_says_what_the_chip_lacks() -> None:
    done = anychip("backends", "--no-cache", LD_LIBRARY_PATH="")
    assert done.returncode == 0, done.stderr
    assert "to fix npu: install CANN" in done.stdout
    assert "backend cpu (automatic" in done.stdout
    assert "extension" not in done.stdout


def test_training_on_the_host_without_cann_starts_again_without_autoload(tmp_path: Path) -> None:
    arguments = ["train", "--backend", "cpu", "--steps", "1", "--out", str(tmp_path / "out")]
    sizes = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16"]
    done = anychip(*arguments, *sizes, LD_LIBRARY_PATH="")
    assert done.returncode == 0, done.stderr
    assert "backend extension: torch_npu (ImportError: lib" in done.stderr
    assert "); starting again without torch's extensions" in done.stderr
    told = {"LD_LIBRARY_PATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    quiet = anychip(*arguments[:-1], str(tmp_path / "quiet"), *sizes, **told)
    assert quiet.returncode == 0, quiet.stderr
    assert "starting again" not in quiet.stderr
