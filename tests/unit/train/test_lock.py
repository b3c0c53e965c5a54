"""One writer for a directory, until its end, whichever that is."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from anychip.train import lock
from anychip.train.lock import DirectoryInUseError

HOLD = """
import sys, pathlib
from anychip.train import lock
with lock.hold(pathlib.Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def test_second_is_told_who_has_it_and_takes_it_after_a_kill(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        said = rf"{tmp_path} is in use: process {process.pid} on \S+ writes into it"
        with pytest.raises(DirectoryInUseError, match=said), lock.hold(tmp_path):
            pass
        process.kill()
        process.wait()
        assert (tmp_path / ".lock").exists()
        with lock.hold(tmp_path):
            assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_ask_one_has_it_at_a_time(tmp_path: Path) -> None:
    """Each removes the file that the next ones have opened already."""
    inside: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            with lock.hold(tmp_path, wait_s=60.0):
                inside.append(number)
                assert inside == [number]
                inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\xff\x1b[31m", b"process 1 on a\nb", b"x" * 9999])
def test_holder_is_named_only_in_our_own_words(tmp_path: Path, content: bytes) -> None:
    with lock.hold(tmp_path):
        (tmp_path / ".lock").write_bytes(content)
        with (
            pytest.raises(DirectoryInUseError, match="another process writes"),
            lock.hold(tmp_path),
        ):
            pass


def test_directory_that_became_read_only_hides_no_error_and_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lock.hold(tmp_path):
            raise ZeroDivisionError


def test_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="Too many levels of symbolic links"), lock.hold(tmp_path):
        pass
    assert not (tmp_path / "victim").exists()
