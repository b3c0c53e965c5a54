"""What do extras like ``anychip[data]`` bring, and what to say when one is not installed?"""

from importlib import import_module
from typing import Any

from anychip.contract import AnychipError


class MissingExtraError(AnychipError, ImportError):
    """A distribution of an extra is needed and not installed."""


def require(module: str, purpose: str, *, extra: str = "data") -> Any:
    """A module of an extra; its types are not ours to know, so it is Any.

    Raises:
        MissingExtraError: its distribution is not installed. An installed one that cannot be
            imported raises its own error.
    """
    distribution = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != distribution:
            raise
        raise MissingExtraError(
            f"{purpose} needs {distribution!r}, which is not installed; to install it: "
            f"pip install 'anychip[{extra}]'",
            name=distribution,
        ) from error
