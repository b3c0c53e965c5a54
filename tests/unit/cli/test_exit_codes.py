"""How each kind of error ends the command line."""

import errno
from collections.abc import Callable

import click
import pytest
import torch

from anychip import contract
from anychip.cli import exit_codes


@pytest.mark.parametrize(("error", "code", "message"), [
    (contract.BackendUnavailableError("acme", "broken", "why", "do"), 3, "'acme' cannot run"),
    (contract.ContractError("a pack is wrong"), 3, "a pack is wrong"),
    (contract.UnknownBackendError("no such"), 2, "no such"),
    (contract.AmbiguousBackendError("two"), 2, "two"),
    (contract.UnsupportedError("not yet"), 2, "not yet"),
    (contract.DeviceError("acme: sync", 7, "ACME_ERROR"), 1, "ACME_ERROR"),
    (contract.FallbackError("strict"), 1, "strict"),
    (click.UsageError("no such option"), 2, "no such option"),
    (ValueError("lr must be positive"), 2, "lr must be positive"),
    (FileNotFoundError(errno.ENOENT, "No such file", "x.txt"), 2, "x.txt"),
    (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left"),
    (torch.OutOfMemoryError("3 bytes free"), 1, "3 bytes free"),
    (KeyboardInterrupt(), 130, "interrupted"), (click.Abort(), 130, "interrupted"),
    (ZeroDivisionError("by\nzero"), 1, "ZeroDivisionError: by zero\n  the traceback: anychip"),
], ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "")  # fmt: skip
def test_error_ends_with_its_code_and_message(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_codes.protect(_raising(error), debug=False) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("anychip: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_error_with_debug_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_codes.protect(_raising(ZeroDivisionError()), debug=True)


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (1, 1), (3, 3), ("text", 0)])
def test_result_that_is_an_int_is_the_exit_code(result: object, code: int) -> None:
    assert exit_codes.protect(lambda: result, debug=False) == code


def _raising(error: BaseException) -> Callable[[], object]:
    def work() -> object:
        raise error

    return work
