"""The hook that hands a C library over as the backend ``asyncchip``."""

from pathlib import Path

import anychip
from anychip.cabi import Library


@anychip.hookimpl
def anychip_backend() -> Library:
    """The library that was built beside this file."""
    return Library(Path(__file__).with_name("libasyncchip.so"))
