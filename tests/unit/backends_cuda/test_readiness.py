"""Does every state of a machine get its own reason, and advice that fits?"""

from typing import Any

import pytest

from anychip_cuda.driver import Answer, Files, Part
from anychip_cuda.readiness import TorchBuild, answer, answer_of_hip, findings, too_old

H200 = Part("NVIDIA H200", (9, 0), 132, 150 << 30, "default")
T4 = Part("NVIDIA T4", (7, 5), 40, 16 << 30, "default")
SLICE = H200._replace(name="NVIDIA H200 MIG 1g.18gb", multiprocessors=16, memory_nbytes=18 << 30)
CUDA_13, NO_CUDA = TorchBuild("2.13.0+cu130", "13.0", None), TorchBuild("2.13.0+cpu", None, None)
DRIVER = Answer((13, 0), (H200,))
REFUSED = Answer((13, 0), (), 100, "CUDA_ERROR_NO_DEVICE")
NOTHING = Files(0, ())

STATES: dict[str, tuple[tuple[Any, ...], str, str, str]] = {
    "no driver": ((Answer(label="libcuda.so.1 cannot be used"), NOTHING, NO_CUDA), "unavailable",
                  "no NVIDIA driver: libcuda.so.1 cannot be used", "install NVIDIA's driver"),
    "no device": ((REFUSED, NOTHING, CUDA_13), "unavailable", "NO_DEVICE", "install NVIDIA's"),
    "hidden": ((REFUSED, Files(8, ()), CUDA_13), "unavailable", "the system has 8",
               "CUDA_VISIBLE_DEVICES"),
    "forbidden": ((REFUSED, Files(8, ("/dev/nvidia0",)), CUDA_13), "unavailable",
                  "no permission for /dev/nvidia0", "read and write access"),
    "fabric": ((Answer((13, 0), (), 802, "CUDA_ERROR_SYSTEM_NOT_READY"), Files(8, ()), CUDA_13),
               "unavailable", "CUDA_ERROR_SYSTEM_NOT_READY (802)", "nvidia-fabricmanager"),
    "unknown": ((Answer((13, 0), (), 999, "CUDA_ERROR_UNKNOWN"), Files(1, ()), CUDA_13),
                "unavailable", "CUDA_ERROR_UNKNOWN (999)", "nvidia-smi"),
    "none left": ((Answer((13, 0)), NOTHING, CUDA_13), "unavailable", "shows no device", "install"),
    "torch without": ((DRIVER, NOTHING, NO_CUDA), "incompatible",
                      "2.13.0+cpu is built without CUDA", "a CUDA"),
    "old driver": ((Answer((12, 4), (H200,)), NOTHING, CUDA_13), "incompatible",
                   "needs a driver for CUDA 13 (branch 580 or newer)", "torch for CUDA 12"),
    "prohibited": (
        (Answer((13, 0), (H200._replace(compute_mode="prohibited"),)), NOTHING, CUDA_13),
        "unavailable", "compute mode is prohibited", "--compute-mode=DEFAULT",
    ),
    "one too old": ((Answer((13, 0), (H200, T4)), NOTHING, CUDA_13), "incompatible",
                    "NVIDIA T4 has compute capability 7.5, and 8.0", "CUDA_VISIBLE_DEVICES"),
}  # fmt: skip


@pytest.mark.parametrize("state", list(STATES))
def test_answer_on_a_machine_that_cannot_run_it_names_reason_and_fix(state: str) -> None:
    given, status, reason, fix = STATES[state]
    found = answer(*given, None)
    assert (found.status, found.device_count) == (status, 0)
    assert reason in found.reason
    assert found.fix is not None
    assert fix in found.fix
    assert "\n" not in found.reason + found.fix


def test_every_state_has_a_reason_of_its_own() -> None:
    reasons = [answer(*given, None).reason for given, *_ in STATES.values()]
    assert len(set(reasons)) == len(reasons)


def test_answer_when_all_devices_are_too_old_advises_nothing() -> None:
    found = answer(Answer((13, 0), (T4,)), NOTHING, CUDA_13, None)
    assert (found.status, found.fix) == ("incompatible", None)


@pytest.mark.parametrize(("parts", "problem", "reason"), [
    ((H200,), None, "1 x NVIDIA H200, native kernels"),
    ((H200, H200), "not built", "2 x NVIDIA H200, mapped and reference only"),
    ((SLICE,), None, "1 x NVIDIA H200 MIG 1g.18gb, native kernels"),
    ((H200._replace(compute_mode="exclusive process"),), None, "1 x NVIDIA H200, native kernels"),
], ids=["kernels", "no kernels", "slice", "exclusive"])  # fmt: skip
def test_answer_on_a_machine_that_can_run_it_says_what_serves(
    parts: tuple[Part, ...], problem: str | None, reason: str
) -> None:
    found = answer(Answer((13, 0), parts), NOTHING, CUDA_13, problem)
    assert (found.status, found.device_count) == ("ready", len(parts))
    assert (found.kind, found.reason) == ("accelerator", reason)


def test_answer_of_hip_is_honest_about_the_kernels() -> None:
    torch = TorchBuild("2.13.0+rocm7.0", None, "7.0.1")
    ready, absent = answer_of_hip(2, torch), answer_of_hip(0, torch)
    assert (ready.status, ready.device_count) == ("ready", 2)
    assert "mapped and reference only" in ready.reason
    assert (absent.status, absent.device_count) == ("unavailable", 0)
    assert "/dev/kfd" in str(absent.fix)


@pytest.mark.parametrize(
    ("driver", "built_for", "runs"),
    [
        ((13, 0), "13.0.88", True),
        ((13, 0), "13.2", True),  # minor versions are compatible
        ((13, 0), "12.8", True), ((12, 9), "13.0", False), ((13, 2), "14.0", False),
    ],
    ids=["same", "newer minor", "older major", "newer major", "unknown major"],
)  # fmt: skip
def test_too_old_goes_by_the_major_version(
    driver: tuple[int, int], built_for: str, runs: bool
) -> None:
    assert (too_old(driver, built_for) == "") is runs


def test_findings_name_each_device_and_what_stands_in_the_way() -> None:
    exclusive = H200._replace(compute_mode="exclusive process")
    first, one, two = findings(Answer((13, 0), (exclusive, T4)), CUDA_13)
    assert first.ok
    assert "driver for CUDA 13.0" in first.text
    assert one.ok
    assert "132 multiprocessors, 150.0 GiB, compute mode exclusive process" in one.text
    assert "one process at a time" in str(one.fix)
    assert not two.ok
    assert findings(Answer(label="none"), CUDA_13) == []
    assert not findings(DRIVER, NO_CUDA)[0].ok
