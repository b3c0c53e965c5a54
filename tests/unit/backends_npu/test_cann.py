"""What CANN's libraries, files and scripts say: read from small stand-ins, and from none at all."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anychip_npu import cann
from anychip_npu.cann import DeviceFiles

WHOLE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
int aclsysGetVersionStr(char* package, char* version) {
  strcpy(version, strcmp(package, "CANN") ? "wrong package" : " 8.5.1 "); return 0;
}
const char* aclrtGetSocName(void) { return "Ascend910B3"; }
int aclrtGetDeviceCount(uint32_t* count) { *count = 8; return 0; }
const char* aclGetRecentErrMsg(void) { return "EZ9999: inner error"; }
int aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
  *can = peer == device + 1; return 0;
}
"""
FAILING = """
#include <stddef.h>
#include <stdint.h>
int aclsysGetVersionStr(char* package, char* version) { return 500000; }
const char* aclrtGetSocName(void) { return 0; }
int aclrtGetDeviceCount(uint32_t* count) { *count = 8; return 107002; }
const char* aclGetRecentErrMsg(void) { return 0; }
int aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) { return 107001; }
"""
OLDER = """
#include <string.h>
int aclsysGetCANNVersion(int package, char* version) { strcpy(version, "7.0.0"); return package; }
"""
Load = Callable[[str], None]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Makes a C source the library that is asked."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def compiled(source: str) -> None:
        (tmp_path / "cann.c").write_text(source)
        library = tmp_path / "libascendcl.so"
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "cann.c")]
        subprocess.run(command, check=True)
        monkeypatch.setattr(cann, "LIBRARIES", (str(library), "libc.so.6"))

    yield compiled
    cann._opened.cache_clear()


def everything() -> list[object]:
    """Every question that is asked of the library."""
    asked = [cann.version(), cann.part(), cann.device_count()]
    return [*asked, cann.recent_message(), cann.can_reach(0, 1), cann.can_reach(0, 2)]


def test_library_that_answers_is_understood(load: Load) -> None:
    load(WHOLE)
    assert cann.missing_library(cann.LIBRARIES) == ""
    assert everything() == ["8.5.1", "Ascend910B3", 8, "EZ9999: inner error", True, False]


def test_library_that_refuses_gives_no_figures(load: Load) -> None:
    load(FAILING)
    assert everything() == [None, None, None, "", None, None]


def test_older_library_lacks_symbols_and_tells_its_version_in_the_older_way(load: Load) -> None:
    load(OLDER)
    assert everything() == ["7.0.0", None, None, "", None, None]


def test_missing_library_is_the_loaders_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cann, "LIBRARIES", ("libabsent_for_test.so",))
    found = cann.missing_library(("libc.so.6", "libabsent_for_test.so"))
    assert "libabsent_for_test.so: cannot open shared object file" in found
    assert "\n" not in found
    assert "ctypes" not in found
    assert everything() == [None, None, None, "", None, None]


def test_device_files_are_counted_without_the_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager", "davinci_x", "null"):
        (tmp_path / name).touch()
    assert cann.device_files(tmp_path) == DeviceFiles(2, ())
    monkeypatch.setattr(cann.os, "access", lambda path, mode: path.name != "davinci_manager")
    assert cann.device_files(tmp_path) == DeviceFiles(2, (str(tmp_path / "davinci_manager"),))
    assert cann.device_files(tmp_path / "absent") == DeviceFiles(0, ())


def test_environment_script_is_of_the_first_installation_that_has_one(tmp_path: Path) -> None:
    places = tuple(tmp_path / name for name in ("one", "two", "three"))
    assert cann.environment_script(places) is None
    for place in places[1:]:
        place.mkdir()
        (place / "set_env.sh").touch()
    assert cann.environment_script(places) == places[1] / "set_env.sh"


@pytest.mark.parametrize(("text", "found"), [
    ("Version=24.1.rc3\nascendhal_version=7.35\n", "24.1.rc3"), ("nothing\n", None), (None, None),
], ids=["version", "other lines", "no file"])  # fmt: skip
def test_driver_version_is_read_from_the_installers_file(
    tmp_path: Path, text: str | None, found: str | None
) -> None:
    file = tmp_path / "version.info"
    if text is not None:
        file.write_text(text)
    assert cann.driver_version(file) == found
