"""The hook that hands a C library over as the backend ``minichip``."""

from pathlib import Path

from anychip.cabi import Library
from anychip.contract import hookimpl


@hookimpl
def anychip_backend() -> Library:
    """The library that was built beside this file."""
    return Library(Path(__file__).with_name("libminichip.so"))
