"""Can this backend run here? From facts about torch_npu, CANN and devices to one line and help.

Facts are gathered by whoever calls; here nothing is looked up, so that every answer can be tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from anychip.contract import Finding, Probe
from anychip_npu.adapter import Versions
from anychip_npu.cann import DeviceFiles

GET_ADAPTER = "pip install torch-npu, of the version of this torch"
GET_CANN = "install CANN's toolkit and kernels, and source its set_env.sh"
GET_DRIVER = "install the Ascend driver and firmware; in a container, pass /dev/davinci* through"
AUTOLOAD = (
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch start without Ascend devices: "
    "torch otherwise loads torch_npu at its own import, and fails with it"
)


class Facts(NamedTuple):
    """What was found on this machine.

    Attributes:
        versions: of torch and torch_npu.
        missing: the loader's words on the first of CANN's libraries that cannot be opened, or "".
        script: the set_env.sh of an installation of CANN, if one is found.
        obstacle: why torch_npu cannot be imported, or "".
        files: the kernel driver's device files.
        parts: name of each device that torch_npu counts.
        cann: CANN's version.
    """

    versions: Versions
    missing: str
    script: Path | None
    obstacle: str
    files: DeviceFiles
    parts: Sequence[str] = ()
    cann: str | None = None


def answer(facts: Facts) -> Probe:
    """The backend's answer: the first thing that is missing, in the order of installation."""
    known = facts.versions
    if known.adapter is None:
        present = f"; {_files(facts.files)}" if facts.files.devices else ""
        return Probe.unavailable(f"torch_npu is not installed{present}", fix=GET_ADAPTER)
    if not known.fits:
        return Probe.incompatible(
            f"torch_npu {known.adapter} is made for torch{known.wanted}, and torch is "
            f"{known.torch or 'not installed'}",
            fix=f"pip install 'torch{known.wanted}', or the torch-npu of this torch",
        )
    if facts.missing:
        return _without_cann(facts)
    if facts.obstacle:
        return Probe.broken(
            f"torch_npu {known.adapter} cannot be imported: {facts.obstacle}",
            fix=f"versions of CANN and torch_npu must belong together; {AUTOLOAD}",
        )
    if not facts.parts:
        return _without_device(facts.files)
    names = ", ".join(dict.fromkeys(facts.parts))
    return Probe.ready(
        len(facts.parts),
        reason=f"{len(facts.parts)} x {names}, torch_npu {known.adapter}, CANN {facts.cann}",
    )


def _without_cann(facts: Facts) -> Probe:
    """Why CANN's libraries are not found: not installed, or installed and not on the path."""
    if facts.script is not None:
        return Probe.unavailable(
            f"the environment of CANN is not set: {facts.missing}",
            fix=f"source {facts.script}, then start again",
        )
    return Probe.unavailable(f"CANN is not installed: {facts.missing}", fix=GET_CANN)


def _without_device(files: DeviceFiles) -> Probe:
    """Why torch_npu counts no device."""
    if files.forbidden:
        return Probe.unavailable(
            f"no permission for {', '.join(files.forbidden)}",
            fix="sudo usermod -aG HwHiAiUser $USER (the driver's group), then log in again",
        )
    if files.devices:
        return Probe.unavailable(
            f"torch_npu counts no device, and there are {_files(files)}: they are hidden, or busy",
            fix="unset ASCEND_RT_VISIBLE_DEVICES; npu-smi info lists devices and their processes",
        )
    return Probe.unavailable(f"there is no Ascend device: {_files(files)}", fix=GET_DRIVER)


def findings(facts: Facts, imported: tuple[bool, str]) -> list[Finding]:
    """torch_npu, CANN, devices and torch's own import, each by itself.

    Args:
        imported: whether ``import torch`` works here, and what happens.
    """
    known = facts.versions
    if known.adapter is None:
        return []
    made = f"torch_npu {known.adapter}, made for torch{known.wanted}; torch {known.torch}"
    found = [Finding(known.fits, made)]
    if facts.missing:
        found.append(Finding(False, f"CANN: {facts.missing}"))
    else:
        found.append(
            Finding(True, f"CANN {facts.cann or 'of unknown version'}: its libraries open")
        )
    works, text = imported
    found.append(Finding(works, text, None if works else AUTOLOAD))
    visible = _files(facts.files)
    if facts.files.forbidden:
        visible += f", no permission for {', '.join(facts.files.forbidden)}"
    found.append(Finding(not facts.files.forbidden, visible))
    found += [Finding(True, f"device {index}: {name}") for index, name in enumerate(facts.parts)]
    return found


def _files(files: DeviceFiles) -> str:
    return f"{files.devices or 'no'} device file{'' if files.devices == 1 else 's'} /dev/davinci*"
