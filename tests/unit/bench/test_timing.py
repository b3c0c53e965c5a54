"""The protocol: everything runs in every round, and ratios are taken within a round."""

import pytest

from anychip.bench import timing
from anychip.bench.timing import Samples, interleave


def test_samples_compare_within_a_round() -> None:
    base = Samples(name="base", seconds=(1.0, 10.0, 2.0))
    ours = Samples(name="ours", seconds=(3.0, 11.0, 8.0))
    assert ours.median == 8.0
    assert ours.best == 3.0
    assert ours.over(base) == 2.0  # of 2, 1 and 6
    assert ours.ratio(base) == 3.0  # of 3, 1.1 and 4


def test_interleave_runs_every_candidate_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that a call advances: the figures are then exact.
    now = [0.0]
    order: list[str] = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def candidate(name: str, seconds: float) -> timing.Timed:
        def call() -> None:
            now[0] += seconds
            order.append(name)

        return call

    rounds: list[int] = []
    taken = interleave(
        {"slow": candidate("slow", 2.0), "fast": candidate("fast", 0.5)}, rounds=4, window=1.0,
        synchronize=lambda: None, progress=rounds.append,
    )  # fmt: skip
    assert taken["slow"].seconds == (2.0,) * 4
    assert taken["fast"].seconds == (0.5,) * 4
    assert rounds == [1, 2, 3, 4]
    # After the calibration: one slow and two fast calls, four times, in turns; not in one order.
    calls = [" ".join(order[end - 3 : end]) for end in range(len(order) - 9, len(order) + 1, 3)]
    assert set(calls) == {"slow fast fast", "fast fast slow"}


def test_interleave_waits_for_the_device_before_it_stops_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, queued = [0.0], [0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def queue() -> None:
        queued[0] += 1

    def synchronize() -> None:
        now[0] += 0.25 * queued[0]
        queued[0] = 0

    taken = interleave({"async": queue}, rounds=3, window=1.0, synchronize=synchronize)
    assert taken["async"].seconds == (0.25,) * 3


def test_interleave_with_too_few_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 3, got 2"):
        interleave({}, rounds=2, window=1.0, synchronize=lambda: None)
