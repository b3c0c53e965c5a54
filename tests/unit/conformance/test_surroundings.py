"""Are a chapter's questions asked from elsewhere too, and does a failure say from where?"""

import threading

from anychip import conformance
from tests.meta.honest import HonestBackend


class NamelessInThreads(HonestBackend):
    def identity(self) -> str:
        main = threading.current_thread() is threading.main_thread()
        return super().identity() if main else ""


def test_failure_from_elsewhere_names_question_place_and_call() -> None:
    report = conformance.run(NamelessInThreads(), chapters=["device"], select="again")
    failure, on_device = report.failures
    assert (failure.case, on_device.case) == ("device/again/thread", "device/again/device")
    assert on_device.reason.startswith("device/any_thread, asked on the last device: ")
    assert "asked in another thread: " in failure.reason
    assert failure.reason.startswith("device/identity")
    assert failure.call
    assert ".py:" in failure.call
