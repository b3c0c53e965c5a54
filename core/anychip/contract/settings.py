"""Which of torch's settings belong to the whole process, and did a plugin's code change one?

A plugin shares them with the user's program: a default dtype that it leaves changed shows up later,
as somebody else's error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anychip.contract.errors import ContractError

_DTYPE, _THREADS, _SAME = "default dtype", "number of threads", "deterministic algorithms"
turns = 0
"""How often :class:`SameBits` turned its switch, which other threads see and which is no change."""


def _read() -> Mapping[str, Any]:
    """The settings by name; none before torch is imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    same, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    return {_DTYPE: torch.get_default_dtype(), _THREADS: threads, _SAME: same}


@contextmanager
def unchanged(who: str) -> Iterator[None]:
    """Puts torch's settings back if the block changes one.

    Args:
        who: whose code the block runs, for the message.

    Raises:
        ContractError: the block changed one; also in place of an error of the block's own, which is
            then the context of this one.
    """
    before, turned = _read(), turns
    try:
        yield
    finally:
        after = _read()
        if after and not before:  # torch was imported by the block, and starts with these
            before = {**after, _DTYPE: sys.modules["torch"].float32, _SAME: False}
        wrong = [n for n in before if before[n] != after[n] and (n != _SAME or turns == turned)]
        if wrong:
            _put_back(before)
            changes = " and ".join(f"{n} from {before[n]} to {after[n]}" for n in wrong)
            raise ContractError(
                f"{who} changed torch's {changes}, which belongs to the user's program and is put "
                "back; leave it, or put it back before returning"
            )


def _put_back(settings: Mapping[str, Any]) -> None:
    import torch

    torch.set_default_dtype(settings[_DTYPE])
    torch.set_num_threads(settings[_THREADS])
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(settings[_SAME], warn_only=warn_only)
