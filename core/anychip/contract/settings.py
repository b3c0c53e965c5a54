"""torch's settings of the whole process: did a plugin change one, and the same bits for one call.

A default dtype that a plugin leaves changed shows up later, as somebody else's error.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anychip.contract.errors import ContractError

_DTYPE, _THREADS, _SAME = "default dtype", "number of threads", "deterministic algorithms"


def _read() -> dict[str, Any]:
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
        ContractError: the block changed one; an error of the block's own is then its context.
    """
    before, turned = _read(), SameBits.turns
    try:
        yield
    finally:
        after = _read()
        if after and not before:  # torch was imported by the block, and starts with these
            before = {**after, _DTYPE: sys.modules["torch"].float32, _SAME: False}
        if SameBits.turns != turned:
            before[_SAME] = after[_SAME]
        wrong = [name for name in before if before[name] != after[name]]
        if wrong:
            torch: Any = sys.modules["torch"]
            torch.set_default_dtype(before[_DTYPE])
            torch.set_num_threads(before[_THREADS])
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            torch.use_deterministic_algorithms(before[_SAME], warn_only=warn_only)
            changes = " and ".join(f"{n} from {before[n]} to {after[n]}" for n in wrong)
            raise ContractError(
                f"{who} changed torch's {changes}, which belongs to the user's program and is put "
                "back; leave it, or put it back before returning"
            )


class SameBits:
    """Within it torch, and an adapter that reads its switch, take deterministic kernels.

    For rows that call kernels of torch or of its adapters, and promise what those give only if
    asked. The switch is put back as it was found. While a call is being queued other threads see it
    too, which can only make their results the same on every run, or their kernels slower. Nothing
    is filled: that would cost a pass over every tensor that the call allocates.
    """

    turns = 0
    """How often the switch was turned, which other threads see and which is no change."""

    def __enter__(self) -> None:
        self._C: Any = sys.modules["torch"]._C
        SameBits.turns += 1
        self._mode = self._C._get_deterministic_algorithms()
        self._warns = self._C._get_deterministic_algorithms_warn_only()
        self._fills = self._C._get_deterministic_fill_uninitialized_memory()
        self._C._set_deterministic_fill_uninitialized_memory(False)
        self._C._set_deterministic_algorithms(True, warn_only=False)

    def __exit__(self, *exception: object) -> None:
        SameBits.turns += 1
        self._C._set_deterministic_algorithms(self._mode, warn_only=self._warns)
        self._C._set_deterministic_fill_uninitialized_memory(self._fills)
