"""Is a message that never comes late, to the millisecond that its transport does not count?"""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from anychip.comm import progress
from anychip.contract import TransportError


def test_message_that_never_comes_is_late_by_a_clock_of_whole_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    class Message:
        def wait(self, limit: timedelta) -> None:
            nonlocal now
            now += limit // timedelta(milliseconds=1) / 1000
            raise RuntimeError("Timed out")

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    call = progress.StepwiseCall(iter([[(1, Message())]]), [], 0.0105)
    with pytest.raises(TransportError) as caught:
        call.wait()
    assert (caught.value.peers, caught.value.how) == ((1,), "late")
