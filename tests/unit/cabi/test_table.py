"""Is the C interface laid out alike for all, and is every wrong library refused in one sentence?

Libraries of each minor are made with the header as it was then: that of today, and those before it
from ``snapshots/MINOR``; a newer one with a header that has grown.
"""

import hashlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from anychip import registry
from anychip.cabi import Library, include_directory, table
from anychip.cabi.sources import header
from anychip.cabi.spent import listed_as
from anychip.contract import BackendUnavailableError
from anychip.registry import choice
from tests.unit.cabi.conftest import Compile

ROOT = Path(__file__).parents[3]
MINICHIP = (ROOT / "examples" / "minichip" / "minichip.c").read_text(encoding="utf-8")
HEADERS = [include_directory(), *sorted(Path(__file__).with_name("snapshots").glob("*"))]
DECLARED = {"1.0": "d6b5e2efa3ec1ad4"}
"""By minor, of what its header declares: the first digits of the SHA-256."""


def structs() -> dict[str, list[str]]:
    """Each struct of the header, and its fields."""
    ffi = table.interface()
    names = [name for name in ffi.list_types()[0] if ffi.typeof(name).kind == "struct"]
    return {name: [field for field, _ in ffi.typeof(name).fields] for name in names}


def offsets_of_cffi() -> dict[str, int]:
    ffi = table.interface()
    found = {f"{name}.{field}": ffi.offsetof(name, field)
             for name, fields in structs().items() for field in fields}  # fmt: skip
    return found | {name: ffi.sizeof(name) for name in structs()}


@pytest.mark.parametrize("language", ["c", "c++"])
def test_layout_is_the_same_for_compilers_and_cffi(language: str, tmp_path: Path) -> None:
    assert len(structs()) == 7
    lines = [
        f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));'
        for name, fields in structs().items() for field in fields
    ] + [f'printf("{name} %zu\\n", sizeof({name}));' for name in structs()]  # fmt: skip
    source = tmp_path / "layout"
    source.write_text(
        "#include <anychip/abi.h>\n#include <stddef.h>\n#include <stdio.h>\n"
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
    )
    compiler = ["gcc", "-xc", "-std=c99"] if language == "c" else ["g++", "-xc++", "-std=c++11"]
    strict = ["-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{include_directory()}"]
    subprocess.run([*compiler, *strict, str(source), "-o", str(tmp_path / "out")], check=True)
    told = subprocess.run([tmp_path / "out"], capture_output=True, text=True, check=True).stdout
    pairs = (line.split() for line in told.splitlines())
    assert {name: int(number) for name, number in pairs} == offsets_of_cffi()


@pytest.mark.parametrize("folder", HEADERS, ids=lambda path: path.name)
def test_header_only_adds_to_what_was_released(folder: Path) -> None:
    """Fields stand where they stood; values of enumerations and macros are what they were."""
    import cffi

    text = "\n".join(declarations((folder / "anychip" / "abi.h").read_text()))
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    old = cffi.FFI()
    kept = (line for line in text.splitlines() if not re.match(r"#(?!define \w+ \d)", line))
    old.cdef("\n".join(kept))
    now = table.interface()
    for name in (n for n in old.list_types()[0] if old.typeof(n).kind == "struct"):
        for field, described in old.typeof(name).fields:
            assert now.offsetof(name, field) == described.offset, f"{name}.{field} has moved"
    before, after = (dict(re.findall(r"\b(ANYCHIP_\w+) = (-?\d+)", t))
                     for t in (text, header().read_text()))  # fmt: skip
    assert before.items() <= after.items()


def declarations(text: str) -> list[str]:
    lines = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).splitlines()
    return [line.rstrip() for line in lines if line.strip()]


def test_header_declares_what_is_known_of_its_minor() -> None:
    """Who declares more raises the minor, and adds its line; if the one before was released, its
    header goes into ``snapshots``, where the other tests find it.
    """
    text = header().read_text()
    (minor,) = re.findall(r"#define ANYCHIP_ABI_MINOR (\d+)\n", text)
    declared = hashlib.sha256("\n".join(declarations(text)).encode()).hexdigest()[:16]
    assert DECLARED[f"1.{minor}"] == declared


@pytest.mark.parametrize("folder", HEADERS, ids=lambda path: path.name)
def test_library_of_a_released_minor_is_ready(compiled: Compile, folder: Path) -> None:
    found = Library(compiled(MINICHIP, f"-I{folder}"))
    assert (found.name, found.device_count(), found.probe().status) == ("minichip", 2, "ready")
    assert "streams" not in found.capabilities


def test_library_that_is_newer_than_the_host_is_ready(compiled: Compile, tmp_path: Path) -> None:
    """Its table is longer, and ends in functions that nobody here knows."""
    grown = header().read_text()
    for old, new in (
        ("ANYCHIP_ABI_MINOR 0", "ANYCHIP_ABI_MINOR 7"),
        ("} anychip_library;", "int (*later)(void); void *more[9];\n} anychip_library;"),
        ("} anychip_device_properties;", "double later[4];\n} anychip_device_properties;"),
    ):
        assert old in grown
        grown = grown.replace(old, new)
    (tmp_path / "anychip").mkdir()
    (tmp_path / "anychip" / "abi.h").write_text(grown)
    found = Library(compiled(MINICHIP, f"-I{tmp_path}"))
    assert (found.probe().device_count, found.properties(1).name) == (2, "Minichip 1")
    assert found.table.functions.abi_minor == 7


ENTRY = "anychip_status anychip_entry("


def changed(old: str, new: str) -> str:
    assert MINICHIP.count(old) == 1, old
    return MINICHIP.replace(old, new)


WRONG: dict[str, tuple[str, str, str]] = {
    "no_entry": (changed(ENTRY, "anychip_status other("), "broken",
                 "it does not export anychip_entry"),
    "wrong_major": (changed(".abi_major = ANYCHIP_ABI_MAJOR", ".abi_major = 2"), "incompatible",
                    "it was made for version 2 of the C interface, this is 1"),
    "refuses": (changed("if (abi_major != ANYCHIP_ABI_MAJOR) return", "return"), "incompatible",
                "it does not offer major 1 (status -1)"),
    "no_table": (changed("*found = &library;", ""), "broken", "succeeded, and set no table"),
    "size_zero": (changed("= sizeof(anychip_library)", "= 0"), "broken", "struct_size is 0"),
    "size_garbage": (changed("= sizeof(anychip_library)", "= 0xdeadbeef"), "broken",
                     "struct_size is 3735928559, which no table has"),
    "size_odd": (changed("= sizeof(anychip_library)", "= sizeof(anychip_library) - 1"), "broken",
                 "which no table has"),
    "truncated": (changed("= sizeof(anychip_library)", "= 48"), "broken",
                  "its table ends after 48 bytes, before the required device_properties"),
    "nulls": (changed("    .mem_free = mem_free,\n    .host_to_device = host_to_device,\n", ""),
              "broken", "NULL for mem_free, host_to_device, which are required"),
    "no_name": (changed('    .name = "minichip",\n', ""), "broken", "NULL for name"),
    "bad_name": (changed('"minichip"', '"Mini Chip"'), "broken", "its name is 'Mini Chip'"),
    "undefined": (changed("(void)host;", "extern void nowhere(void); nowhere();"), "broken",
                  "it cannot be loaded: undefined symbol: nowhere"),
    "crashes": (changed("(void)host;", "*(volatile int *)0 = 1;"), "broken", "died with SIGSEGV"),
    "exits": (changed("(void)host;", "exit(0);"), "broken", "ended with exit code 0"),
    "wild": (changed("*found = &library", "*found = (const anychip_library *)64"), "broken",
             "died with SIGSEGV"),
    "no_device": (changed("*count = NUM_DEVICES", "*count = 0"), "unavailable", "finds no device"),
    "count_fails": (
        changed("*count = NUM_DEVICES;\n  return ANYCHIP_OK;",
                '*count = 1; return fail(ANYCHIP_EDEVICE, "no driver");'),
        "unavailable", "device_count gave status -4: no driver"),
}  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("case", WRONG)
def test_wrong_library_is_refused_in_one_sentence(compiled: Compile, case: str) -> None:
    source, status, reason = WRONG[case]
    with pytest.raises(BackendUnavailableError) as caught:
        registry.choose(str(compiled(source)))
    assert (caught.value.status, "\n" in caught.value.reason) == (status, False)
    assert reason in caught.value.reason


@pytest.mark.parametrize(("content", "reason"), [
    (None, "there is no such file"), (b"", "it cannot be loaded"), (b"#!/bin/sh", "cannot be load"),
])  # fmt: skip
def test_file_that_is_no_library_is_refused(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "libacme.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BackendUnavailableError, match=reason):
        registry.choose(str(path))


def test_half_of_the_stream_functions_is_none_of_them(compiled: Compile) -> None:
    half = "static anychip_status s(int32_t d, anychip_stream t) { return 0 * d * (int)t; }\n"
    source = changed("static const anychip_library", half + "static const anychip_library")
    with_half = source.replace("    .mem_alloc =", "    .stream_synchronize = s,\n    .mem_alloc =")
    assert "streams" not in Library(compiled(with_half)).capabilities


def test_choice_of_a_path_is_in_the_table_of_backends(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(compiled(MINICHIP))
    monkeypatch.setenv("ANYCHIP_BACKEND", path)
    decision = choice.forecast([])
    assert (decision.name, decision.asked_by) == (path, "environment")


def test_library_without_a_compiler_says_what_to_install(
    compiled: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anychip import torch_extension
    from anychip.cabi import bridge

    found: Any = Library(compiled(MINICHIP))
    monkeypatch.setenv("PATH", str(tmp_path))
    bridge.loaded.cache_clear()
    monkeypatch.setattr(torch_extension, "cache_directory", lambda: tmp_path)
    with pytest.raises(BackendUnavailableError, match=r"no C\+\+ compiler here\n.*install g\+\+"):
        found.attach()
    for path in tmp_path.glob("anychip-bridge*.so"):
        pytest.fail(f"{path} was left")
    assert "torch 2." in bridge.extension().key()


def test_compile_error_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anychip.cabi import bridge
    from anychip.torch_extension import BuildError, TorchExtension

    bad = tmp_path / "bad.cpp"
    bad.write_text("int f( {\n")
    monkeypatch.setattr(TorchExtension, "units", lambda extension: [bad])
    with pytest.raises(BuildError, match=r"g\+\+ failed: .*bad.cpp:1.*error"):
        bridge.extension().build(tmp_path / "bridge.so")
    assert not (tmp_path / "bridge.so").exists()


LISTED = {
    "aten::add.Tensor": "add.Tensor", "aten::add.out": "add.Tensor",
    "aten::add_.Tensor": "add.Tensor", "aten::sum.IntList_out": "sum.dim_IntList",
    "aten::_softmax.out": "_softmax", "aten::fill_.Scalar": "fill.Scalar",
    "aten::_copy_from": "copy",
    "aten::normal_": None,  # it draws numbers
    "aten::_fused_adamw_": None,  # it changes lists
    "aten::_foreach_add.List": None,  # it returns one
    "vendor::own": None,
}  # fmt: skip


@pytest.mark.parametrize("called", LISTED)
def test_name_to_list_is_that_of_the_functional_operator(called: str) -> None:
    assert listed_as(called) == LISTED[called]
