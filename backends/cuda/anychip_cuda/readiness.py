"""Can this backend run here? From facts about driver, torch and kernels to one line and what helps.

Facts are gathered by whoever calls; here nothing is looked up, so that every answer can be tested.

Versions: kernels and torch's libraries of CUDA 13 need a driver of branch 580 or newer, those of
CUDA 12 one of branch 525; a driver runs what was built for its own major version and for older
ones. Source: NVIDIA, CUDA Compatibility, section Minor Version Compatibility.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anychip.contract import Finding, Probe
from anychip_cuda.driver import NO_DEVICE, Answer, Files, Part

OLDEST = (8, 0)
"""Compute capability of the oldest devices: bfloat16 and asynchronous copies begin there."""
BRANCHES = {12: 525, 13: 580}
"""Major version of CUDA to the first branch of the driver that runs it."""
GET_TORCH = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
GET_DRIVER = "install NVIDIA's driver, and start containers with access to the devices"

Version = tuple[int, int]


class TorchBuild(NamedTuple):
    """What torch was built for: its own version, and those of CUDA and of ROCm, or None."""

    version: str
    cuda: str | None
    hip: str | None


def answer(driver: Answer, files: Files, torch: TorchBuild, kernels_problem: str | None) -> Probe:
    """The backend's answer on a machine of NVIDIA's.

    Args:
        kernels_problem: why the native kernels are not used, or None when they are.
    """
    if driver.version is None:
        return Probe.unavailable(f"no NVIDIA driver: {driver.label}", fix=GET_DRIVER)
    if driver.code:
        return _refused(driver, files)
    if not driver.parts:
        return Probe.unavailable("the driver shows no device", fix=GET_DRIVER)
    if torch.cuda is None:
        return Probe.incompatible(f"torch {torch.version} is built without CUDA", fix=GET_TORCH)
    problem = too_old(driver.version, torch.cuda)
    if problem:
        return Probe.incompatible(
            f"torch {torch.version}: {problem}",
            fix=f"update the driver, or install a torch for CUDA {driver.version[0]}",
        )
    usable = [part for part in driver.parts if part.compute_mode != "prohibited"]
    if not usable:
        return Probe.unavailable(
            f"{driver.parts[0].name}: its compute mode is prohibited",
            fix="sudo nvidia-smi --compute-mode=DEFAULT",
        )
    return _by_parts(driver.parts, kernels_problem)


def _by_parts(parts: Sequence[Part], kernels_problem: str | None) -> Probe:
    old = [part for part in parts if part.capability < OLDEST]
    if old:
        return Probe.incompatible(
            f"{old[0].name} has compute capability {_text(old[0].capability)}, and "
            f"{_text(OLDEST)} is the oldest that works",
            fix="leave it out by CUDA_VISIBLE_DEVICES" if len(old) < len(parts) else None,
        )
    names = ", ".join(dict.fromkeys(part.name for part in parts))
    served = "native kernels" if kernels_problem is None else "mapped and reference only"
    return Probe.ready(len(parts), reason=f"{len(parts)} x {names}, {served}")


def answer_of_hip(count: int, torch: TorchBuild) -> Probe:
    """The backend's answer for a build of torch for ROCm, whose device type is cuda too.

    Args:
        count: devices that torch counts.
    """
    if not count:
        return Probe.unavailable(
            f"torch {torch.version} is built for ROCm {torch.hip}, and counts no device",
            fix="install the amdgpu driver, and give this process access to /dev/kfd and /dev/dri",
        )
    return Probe.ready(
        count,
        reason=f"{count} x ROCm {torch.hip} device, mapped and reference only: "
        "the kernels are built for NVIDIA devices",
    )


def _refused(driver: Answer, files: Files) -> Probe:
    """Why the driver's library shows nothing."""
    if files.forbidden:
        return Probe.unavailable(
            f"the driver answers {driver.label}: no permission for {', '.join(files.forbidden)}",
            fix="give this user, or this container, read and write access to them",
        )
    if driver.code == NO_DEVICE and files.installed:
        return Probe.unavailable(
            f"the driver answers {driver.label}, and the system has {files.installed}: they are "
            "hidden, or divided (MIG) without an instance",
            fix="unset CUDA_VISIBLE_DEVICES; nvidia-smi -L lists devices and instances",
        )
    if driver.code == NO_DEVICE:
        return Probe.unavailable(f"the driver answers {driver.label}", fix=GET_DRIVER)
    help_of = {
        802: "start nvidia-fabricmanager, and wait until it has finished",
        803: "the kernel module and libcuda differ in version: reboot, or unload the module",
        804: "take the forward compatibility libraries off the library path",
    }
    return Probe.unavailable(
        f"the driver answers {driver.label} ({driver.code})",
        fix=help_of.get(driver.code, "nvidia-smi and the kernel's log (dmesg) say more"),
    )


def too_old(driver: Version, built_for: str) -> str:
    """Why a driver does not run what was built for a CUDA version like "13.0"; "" when it does."""
    needed = int(built_for.split(".")[0])
    if driver[0] >= needed:
        return ""
    branch = f" (branch {BRANCHES[needed]} or newer)" if needed in BRANCHES else ""
    return (
        f"built for CUDA {built_for}, which needs a driver for CUDA {needed}{branch}; "
        f"this one is for CUDA {_text(driver)}"
    )


def findings(driver: Answer, torch: TorchBuild) -> list[Finding]:
    """The driver, next to what torch was built for, and its devices."""
    if driver.version is None:
        return []
    built = f"torch {torch.version} is built for CUDA {torch.cuda}"
    found = [Finding(torch.cuda is not None, f"driver for CUDA {_text(driver.version)}, {built}")]
    for index, part in enumerate(driver.parts):
        text = (
            f"device {index}: {part.name}, compute capability {_text(part.capability)}, "
            f"{part.multiprocessors} multiprocessors, {part.memory_nbytes / 2**30:.1f} GiB, "
            f"compute mode {part.compute_mode}"
        )
        works = part.capability >= OLDEST and part.compute_mode != "prohibited"
        fix = None
        if part.compute_mode == "exclusive process":
            fix = "one process at a time: ranks need a device each"
        found.append(Finding(works, text, fix))
    return found


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
