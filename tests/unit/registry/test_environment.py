"""What the environment variables say, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from anychip.registry import environment


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ANYCHIP_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/anychip"),
        ({"HOME": "/c"}, "/c/.cache/anychip"),
    ],
    ids=["own", "xdg", "home"],
)
def test_cache_directory_follows_the_variables_in_order(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.cache_directory() == Path(expected)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1 s"])
def test_probe_timeout_that_is_no_positive_number_raises_with_its_value(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("ANYCHIP_PROBE_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"got '{text}'"):
        environment.probe_timeout_s()


@pytest.mark.parametrize(("text", "expected"), [("", 20.0), ("2.5", 2.5)])
def test_probe_timeout_is_the_variable_or_the_default(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: float
) -> None:
    monkeypatch.setenv("ANYCHIP_PROBE_TIMEOUT", text)
    assert environment.probe_timeout_s() == expected


@pytest.mark.parametrize(
    ("world_size", "local_rank", "expected"),
    [
        ("4", "0", True),
        ("1", "0", False),
        ("4", None, False),
        (None, "0", False),
        ("x", "0", False),
    ],
)
def test_worker_is_one_of_several_that_a_launcher_started(
    monkeypatch: pytest.MonkeyPatch, world_size: str | None, local_rank: str | None, expected: bool
) -> None:
    for name, value in (("WORLD_SIZE", world_size), ("LOCAL_RANK", local_rank)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert environment.is_worker() is expected


def test_backend_name_that_is_blank_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYCHIP_BACKEND", "  ")
    assert environment.backend_name() is None
    monkeypatch.setenv("ANYCHIP_BACKEND", " acme ")
    assert environment.backend_name() == "acme"


def test_local_rank_that_is_no_number_raises_with_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "-1")
    with pytest.raises(ValueError, match="got '-1'"):
        environment.local_rank()
