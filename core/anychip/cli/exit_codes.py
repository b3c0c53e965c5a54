"""How does the command line end? Every exception becomes an exit code and a message here.

=====  =============================================================================
0      done
1      a check failed, or the work did
2      wrong use: the message says what to write instead
3      the backend that was asked for cannot run here
130    interrupted; 143 when it was by SIGTERM
=====  =============================================================================
"""

from collections.abc import Callable

import click

from anychip.contract import (
    AmbiguousBackendError,
    BackendUnavailableError,
    ContractError,
    UnknownBackendError,
    UnsupportedError,
)
from anychip.torch_extension import BuildError

DONE = 0
FAILED = 1
WRONG_USE = 2
CANNOT_RUN = 3
INTERRUPTED = 130
TERMINATED = 143

# First match counts. By the house's rule a ValueError is the user's input.
_CODES: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
    ((BackendUnavailableError, BuildError, ContractError), CANNOT_RUN),
    ((UnknownBackendError, AmbiguousBackendError, UnsupportedError), WRONG_USE),
    ((FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError), WRONG_USE),
    ((PermissionError, ValueError), WRONG_USE),
)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def ending(error: BaseException) -> tuple[int, str]:
    """Exit code and message for an exception that a command raised."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        code = TERMINATED if isinstance(error, Terminated) else INTERRUPTED
        return code, "interrupted"
    if isinstance(error, click.ClickException):
        return error.exit_code, _usage_message(error)
    for types, code in _CODES:
        if isinstance(error, types):
            return code, _message(error)
    if isinstance(error, (OSError, MemoryError)) or type(error).__name__ == "OutOfMemoryError":
        return FAILED, _message(error)
    return FAILED, _failure_message(error)


def protect(work: Callable[[], object], *, debug: bool) -> int:
    """Runs ``work`` and returns the exit code; an error prints its message and no traceback.

    Args:
        debug: let the error through, with its traceback.
    """
    try:
        result = work()
    except (Exception, KeyboardInterrupt) as error:
        if debug and not isinstance(error, click.ClickException):
            raise
        code, message = ending(error)
        click.echo(f"anychip: {message}", err=True)
        return code
    return result if isinstance(result, int) else DONE


def _message(error: BaseException) -> str:
    """The error in words; an error number says nothing to a person."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _usage_message(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    where = f"\n  usage: {context.command_path} --help" if context else ""
    return error.format_message() + where


def _failure_message(error: BaseException) -> str:
    """For errors of the work and for our own mistakes; the type tells them apart."""
    from anychip.contract import AnychipError

    if isinstance(error, AnychipError):
        return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}\n  the traceback: anychip --debug ..."
