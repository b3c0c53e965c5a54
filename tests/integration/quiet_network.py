"""A network that nobody else uses, so that the kernel's counters are those of one test."""

import shutil
import subprocess

ALONE = ["sh", "-c", 'ip link set lo up && exec "$0" "$@"']


def prefix() -> list[str] | None:
    """A command that runs another one in a network namespace of its own; None: not allowed here."""
    for options in (["-n"], ["-rn"]):
        found = ["unshare", *options, *ALONE]
        if (
            shutil.which("unshare")
            and subprocess.run([*found, "true"], capture_output=True).returncode == 0
        ):
            return found
    return None
