"""The backend as the registry sees it where torch_npu is not: it says what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

import anychip
from anychip_npu import adapter, anychip_backend
from anychip_npu.adapter import Versions

ABSENT = adapter.versions().adapter is None
without_adapter = pytest.mark.skipif(not ABSENT, reason="torch_npu is installed here")


@without_adapter
def test_probe_without_the_adapter_is_unavailable_and_imports_no_torch() -> None:
    program = (
        "import sys; from anychip_npu import anychip_backend; made = anychip_backend(); "
        "probe = made.probe(); print(probe.status, len(made.operators), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["unavailable", "0", "False"]


@without_adapter
def test_backend_by_name_without_the_adapter_says_what_to_install() -> None:
    with pytest.raises(anychip.BackendUnavailableError) as caught:
        anychip.use("npu")
    assert "torch_npu is not installed" in caught.value.reason
    assert "pip install torch-npu" in str(caught.value.fix)


def test_backend_communicates_by_hccl_and_records_no_graphs() -> None:
    made = anychip_backend()
    assert (made.name, made.device_type, made.c10d_backend) == ("npu", "npu", "hccl")
    assert set(made.capabilities) == {"streams", "memory_stats", "memory_peak", "pinned_memory"}


@pytest.mark.parametrize(("torch", "needs", "found"), [
    ("2.13.0+cpu", "torch==2.13.0.*", Versions("2.13.0+cpu", "2.13.0", "==2.13.0.*", True)),
    ("2.12.1", "torch==2.13.0.*", Versions("2.12.1", "2.13.0", "==2.13.0.*", False)),
    ("2.12.1", "numpy", Versions("2.12.1", "2.13.0", "", True)),
    (None, "torch==2.13.0.*", Versions(None, "2.13.0", "==2.13.0.*", False)),
], ids=["fits", "other torch", "says nothing", "no torch"])  # fmt: skip
def test_versions_are_compared_by_what_the_adapter_demands(
    torch: str | None, needs: str, found: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("torch", torch), ("torch_npu", "2.13.0")):
        if version is not None:
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {needs}\n"
            )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert adapter.versions() == found
