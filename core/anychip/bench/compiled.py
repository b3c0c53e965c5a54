"""torch.compile as a peer: with a backend's compiler, and with a reason where there is none."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from anychip.contract import Backend

F = TypeVar("F", bound=Callable[..., Any])
_REASON = 200
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class Compiler:
    """Compiles functions, and remembers why it could not.

    Args:
        backend: names the compiler, and the device on which it is tried.

    Attributes:
        notes: what was left out, and why.
    """

    def __init__(self, backend: Backend) -> None:
        self.name = backend.compile_backend
        self.notes: list[str] = []
        self._compile: Compile = partial(torch.compile, backend=self.name, dynamic=False)
        self._works = True
        # What cannot be compiled stands in a note, not in stack traces too; TORCH_LOGS goes first.
        torch._logging.set_logs(all=logging.CRITICAL)  # type: ignore[attr-defined]
        x = torch.ones(4, device=backend.device())
        tried = self.compile("everything", lambda compile: partial(compile(_triple), x))
        self._works = tried is not None

    def compile(
        self, what: str, make: Callable[[Compile], Callable[[], object]]
    ) -> Callable[[], object] | None:
        """A call that has been compiled, and run once; None when that failed, with a note.

        Args:
            what: for the note.
            make: given what compiles a function, makes the call.
        """
        if not self._works:
            return None
        torch.compiler.reset()
        try:
            call = make(self._compile)
            call()
        except Exception as error:
            reason = " ".join(str(error).split())[:_REASON]
            self.notes.append(
                f"torch.compile ({self.name}) is left out for {what}: "
                f"{type(error).__name__}: {reason}"
            )
            return None
        return call


def _triple(x: Tensor) -> Tensor:
    return x * 3
