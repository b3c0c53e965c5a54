"""What is read from metadata, in which order, and that nothing is imported for it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anychip.registry import discovery


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Two directories at the front of sys.path, and nothing else that has metadata."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.setattr(sys, "path", [str(first), str(second)])
    discovery.installed.cache_clear()
    yield first, second
    discovery.installed.cache_clear()


def _add(site: Path, name: str, version: str, entry_points: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def _found() -> dict[str, list[str]]:
    claims = discovery.backend_plugins()
    return {name: [f"{p.module} of {p}" for p in plugins] for name, plugins in claims.items()}


TORCH = ["anychip.registry.torch_default of anychip 0.1.0"]


def test_backends_are_listed_by_name_with_who_brings_them(sites: tuple[Path, Path]) -> None:
    _add(sites[0], "acme_plugin", "1.2", "[anychip.backends]\nzeta = acme.z\nacme = acme:plugin\n")
    _add(sites[0], "unrelated", "9", "[console_scripts]\nacme = acme:main\n")
    assert _found() == {
        "acme": ["acme:plugin of acme_plugin 1.2"], "torch": TORCH,
        "zeta": ["acme.z of acme_plugin 1.2"],
    }  # fmt: skip
    assert "acme" not in sys.modules


def test_second_copy_of_a_distribution_is_hidden_by_the_first(sites: tuple[Path, Path]) -> None:
    _add(sites[0], "Acme_Plugin", "2.0", "[anychip.backends]\nacme = new\n")
    _add(sites[1], "acme.plugin", "1.0", "[anychip.backends]\nacme = old\n")
    assert _found()["acme"] == ["new of Acme_Plugin 2.0"]


def test_two_distributions_with_one_name_are_both_listed(sites: tuple[Path, Path]) -> None:
    _add(sites[0], "acme_a", "1", "[anychip.backends]\nacme = a\n")
    _add(sites[1], "acme_b", "1", "[anychip.backends]\nacme = b\ntorch = b\n")
    assert _found() == {
        "acme": ["a of acme_a 1", "b of acme_b 1"], "torch": ["b of acme_b 1", *TORCH],
    }  # fmt: skip


def test_kernel_packs_are_listed_for_their_backend_and_device(sites: tuple[Path, Path]) -> None:
    packs = "abc.x = d\nacme.y.z = c\nacme.x = a\nacmeter.x = b\n"
    _add(sites[0], "packs", "1", f"[anychip.kernels]\n{packs}")

    def found(name: str, device_type: str) -> list[str]:
        backend: Any = SimpleNamespace(name=name, device_type=device_type)
        return [pack.module for pack in discovery.kernel_pack_plugins(backend)]

    assert found("acme", "cpu") == ["a", "c"]
    assert found("acme", "abc") == ["a", "c", "d"]
    assert found("torch", "cpu") == []


def test_distribution_without_metadata_is_listed_as_unknown(sites: tuple[Path, Path]) -> None:
    _add(sites[0], "acme", "1", "[anychip.backends]\nacme = a\n")
    (sites[0] / "acme-1.dist-info" / "METADATA").unlink()
    assert _found()["acme"] == ["a of unknown unknown"]


def test_metadata_is_read_once_per_process(sites: tuple[Path, Path]) -> None:
    before = _found()
    _add(sites[0], "acme", "1", "[anychip.backends]\nacme = a\n")
    assert _found() == before
