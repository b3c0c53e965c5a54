"""What the environment variables say, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anychip.registry import environment


@pytest.mark.parametrize(("variables", "expected"), [
    ({"ANYCHIP_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
    ({"XDG_CACHE_HOME": "/b"}, "/b/anychip"), ({"HOME": "/c"}, "/c/.cache/anychip"),
], ids=["own", "xdg", "home"])  # fmt: skip
def test_cache_directory_follows_the_variables_in_order(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.cache_directory() == Path(expected)


@pytest.mark.parametrize(("name", "text", "read", "message"), [
    *(("ANYCHIP_PROBE_TIMEOUT", text, environment.probe_timeout_s, f"got '{text}'")
      for text in ("0", "-1", "nan", "inf", "1 s")),
    ("ANYCHIP_TRANSPORT", "carrier pigeons", environment.host_transport,
     "shared_memory or sockets expected, got 'carrier pigeons'"),
    ("ANYCHIP_SECRET", "short", environment.secret, "at least 16 characters expected, got 5"),
    ("LOCAL_RANK", "-1", environment.local_rank, "got '-1'"),
])  # fmt: skip
def test_variable_that_cannot_be_raises_with_its_value(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, read: Callable[[], Any], message: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=message):
        read()


@pytest.mark.parametrize(("name", "text", "read", "expected"), [
    ("ANYCHIP_PROBE_TIMEOUT", "", environment.probe_timeout_s, 20.0),
    ("ANYCHIP_PROBE_TIMEOUT", "2.5", environment.probe_timeout_s, 2.5),
    ("ANYCHIP_FLIGHT_RECORD", "", environment.flight_record, None),
    ("ANYCHIP_FLIGHT_RECORD", "some/where", environment.flight_record, Path("some/where")),
    ("ANYCHIP_TRANSPORT", "", environment.host_transport, None),
    ("ANYCHIP_TRANSPORT", " sockets ", environment.host_transport, "sockets"),
    ("ANYCHIP_BACKEND", "  ", environment.backend_name, None),
    ("ANYCHIP_BACKEND", " acme ", environment.backend_name, "acme"),
])  # fmt: skip
def test_variable_that_is_blank_counts_as_unset(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, read: Callable[[], Any], expected: Any
) -> None:
    monkeypatch.setenv(name, text)
    assert read() == expected


@pytest.mark.parametrize(
    ("world_size", "local_rank", "expected"),
    [
        ("4", "0", True), ("1", "0", False), ("4", None, False), (None, "0", False),
        ("x", "0", False),
    ],
)  # fmt: skip
def test_worker_is_one_of_several_that_a_launcher_started(
    monkeypatch: pytest.MonkeyPatch, world_size: str | None, local_rank: str | None, expected: bool
) -> None:
    for name, value in (("WORLD_SIZE", world_size), ("LOCAL_RANK", local_rank)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert environment.is_worker() is expected


@pytest.mark.parametrize(("told", "expected"), [
    ("", None), ("WORLD_SIZE=1", None), ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a", None),
    ("MASTER_ADDR=a MASTER_PORT=1", None),
    ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", (1, 2, "a", 1, False)),
    ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 TORCHELASTIC_USE_AGENT_STORE=True",
     (0, 2, "a", 1, True)),
    ("RANK=7", "RANK=7, WORLD_SIZE=(not set)"), ("RANK=0", "RANK=0, WORLD_SIZE=(not set)"),
    ("WORLD_SIZE=4", "RANK=(not set), WORLD_SIZE=4"),
    ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "RANK below WORLD_SIZE"),
    ("RANK=x WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "RANK=x"),
    ("RANK=1 WORLD_SIZE=2 MASTER_PORT=1", "MASTER_ADDR=(not set)"),
    ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a", "MASTER_PORT=(not set)"),
])  # fmt: skip
def test_place_in_a_job_is_whole_or_none_or_named(
    monkeypatch: pytest.MonkeyPatch, told: str, expected: tuple[object, ...] | str | None
) -> None:
    for text in told.split():
        monkeypatch.setenv(*text.split("=", 1))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match="neither alone nor a rank of a job") as caught:
            environment.launched()
        assert expected in str(caught.value)
    else:
        assert environment.launched() == expected


def test_secret_is_the_variable_or_the_file_and_not_a_short_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert environment.secret() == b""
    (tmp_path / "secret").write_text("of sixteen letters\n")
    monkeypatch.setenv("ANYCHIP_SECRET_FILE", str(tmp_path / "secret"))
    assert environment.secret() == b"of sixteen letters"
    monkeypatch.setenv("ANYCHIP_SECRET", "another of sixteen")
    assert environment.secret() == b"another of sixteen"
    monkeypatch.setenv("ANYCHIP_SECRET", "short")  # which was read, though there is a file too
    with pytest.raises(ValueError, match=r"^ANYCHIP_SECRET: a secret of at least 16 characters"):
        environment.secret()


def test_flight_record_without_its_variable_is_none() -> None:
    assert environment.flight_record() is None
