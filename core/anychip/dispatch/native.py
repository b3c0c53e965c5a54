"""Is door 2 taken in C? The native module of csrc/dispatch, or why there is none.

Without it every call goes the same way in Python, which takes some microseconds more:
``anychip doctor`` and ``anychip bench dispatch`` say so.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

_MODULE = "anychip.dispatch._native"
_ABI = 1


def load() -> tuple[Any, str]:
    """The module, or None and why there is none."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        return None, f"{error}; pip install . builds {_MODULE} where a C compiler is"
    if module.ABI != _ABI:
        return None, f"{_MODULE} has ABI {module.ABI}, and {_ABI} is expected: build it again"
    return module, ""


module, problem = load()
"""The module or None; the reason for None."""


class _InPython:
    """What an operator inherits without the module."""

    def prepare(self, *facts: Any) -> None:
        """With the module: keeps what a call needs of the operator."""

    def take(self, *args: Any, **kwargs: Any) -> Any:
        """With the module: ``short_cut`` in C, which takes no call that Python would not."""
        return self.short_cut(*args, **kwargs)  # type: ignore[attr-defined]


if TYPE_CHECKING or module is None:
    ShortCut = _InPython
else:
    ShortCut = module.ShortCut


def connect(operator: type, given: Callable[[Any], Mapping[str, Any]]) -> None:
    """Lets calls of operators take the module, if torch has what that asks torch for."""
    global module, problem
    if module is None:
        return
    try:
        module.connect(**given(module))
    except (AttributeError, TypeError, ValueError) as error:
        module, problem = None, f"this torch has not what {_MODULE} asks for: {error}"
    else:
        module.take_calls(operator)
