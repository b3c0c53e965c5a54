"""What a process of Python needs to load a module that was built with a sanitizer."""

import subprocess

RUNTIMES = {"": (), "address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}


def environment(sanitizer: str) -> dict[str, str]:
    """The variables to set, by the value of ``ANYCHIP_CUDA_SANITIZE``.

    A sanitizer's runtime must come before everything else that Python loads. Python itself leaks.
    """
    if not sanitizer:
        return {}
    return {
        "LD_PRELOAD": ":".join(_path(library) for library in RUNTIMES[sanitizer]),
        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "exitcode=66",
    }  # fmt: skip


def _path(library: str) -> str:
    words = ["g++", f"-print-file-name={library}"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
