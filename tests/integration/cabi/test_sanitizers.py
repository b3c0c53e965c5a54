"""Is the bridge clean under sanitizers, beside a chip whose streams are threads?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anychip.cabi import bridge, include_directory
from tests.cuda_emulated import sanitizers

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ASYNCCHIP = ROOT / "examples" / "asyncchip" / "asyncchip.c"
TORCH = Path(torch.__file__).parent
FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer")
OPTIONS = {
    # What a host's read of device memory does is for the tests to see.
    "address,undefined": {
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
    # torch is not instrumented: what its own code touches is not watched, and locks are.
    "thread": {"TSAN_OPTIONS": "exitcode=66:ignore_noninstrumented_modules=1"},
}


def run(*words: str | Path, **environment: str) -> None:
    done = subprocess.run(
        list(map(str, words)), env={**os.environ, **environment}, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:6000]


@pytest.mark.grid
@pytest.mark.timeout(1200)  # two minutes of two cores, of which a busy machine has none to spare
@pytest.mark.parametrize("sanitizer", list(OPTIONS))
def test_bridge_is_clean_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    """Both: eight threads without Python. Addresses: also the tests of devices and of streams."""
    chip, driver = tmp_path / "libasync.so", tmp_path / "driver"
    built = bridge.extension().kept_in(tmp_path)
    flags = [*FLAGS, f"-fsanitize={sanitizer}"]
    run("gcc", "-std=c11", *flags, "-shared", "-fPIC", "-pthread", f"-I{include_directory()}",
        ASYNCCHIP, "-o", chip)  # fmt: skip
    includes = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}", "-ldl"]
    run("g++", "-std=c++20", "-w", *flags, *includes, HERE / "driver.cpp", "-o", driver,
        f"-L{TORCH / 'lib'}", "-Wl,--no-as-needed", *libraries, "-pthread")  # fmt: skip
    bridge.extension().build(built, flags)
    run(driver, built, chip, OMP_NUM_THREADS="1", **OPTIONS[sanitizer])
    if sanitizer != "thread":
        cases = [HERE / f"{name}_cases.py" for name in ("stream", "kernel", "device")]
        environment = {**sanitizers.environment(sanitizer), **OPTIONS[sanitizer]}
        environment |= {"ANYCHIP_TEST_CHIP": str(chip), "ANYCHIP_CACHE_DIR": str(tmp_path)}
        run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases, **environment)
