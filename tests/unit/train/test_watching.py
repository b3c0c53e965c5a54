"""A step is divided into its parts by the device's clock, and has the bits of one unwatched."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import anychip
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import loop, report, watching
from anychip.train.watching import PARTS, Clock, Watch, part
from tests.meta.honest import HonestBackend
from tests.unit.train.small_runs import build, nothing


def trained(
    out: Path, *settings: str, comm: Communicator | None = None
) -> tuple[loop.Run, list[report.StepRecord]]:
    own = ("run.steps=3", "model.dropout=0.1", "data.batch_size=4", "data.accumulation=2")
    run = build(*own, *settings, comm=comm)
    out.mkdir(exist_ok=True)
    return run, loop.train(run, out, nothing)


class Queueing(HonestBackend):
    """Work that is queued: an event has its time when the device has come to it."""

    capabilities: Mapping[str, int] = {"streams": 1}

    def __init__(self, *, measures: bool = True) -> None:
        super().__init__()
        self.measures, self.times, self.waited = measures, itertools.count(0, 2), 0

    def current_stream(self, index: int | None = None) -> Any:
        return "the stream"

    def event(self, *, timing: bool = False) -> Any:
        return Event(self, timing)


class Event:
    """Comes 2 ms behind the event before it."""

    def __init__(self, chip: Queueing, timing: bool) -> None:
        self.chip, self.timing = chip, timing

    def record(self, stream: Any) -> None:
        assert stream == "the stream"
        self.time = next(self.chip.times)

    def synchronize(self) -> None:
        self.chip.waited += 1

    def elapsed_time(self, end: Any) -> float:
        if not self.chip.measures or not self.timing:
            raise RuntimeError("measures no time between events")
        return float(end.time - self.time)


def test_part_within_another_does_not_count_in_it() -> None:
    watch, times = Watch(), iter([10.0, 11.0, 13.0, 17.0, 20.0, 29.0, 45.0, 50.0])
    watch.clock = Clock(lambda: next(times), lambda start, end: float(end - start))
    with watch.step():
        with part("data"):
            pass
        with part("update"), part("exchange"):
            pass
        with part("data"):
            pass
    found = {"data_s": 1.0 + 5.0, "update_s": 4.0 + 9.0, "exchange_s": 3.0}
    assert watch.times(100.0) == {f"{name}_s": 0.0 for name in PARTS} | found


def test_part_that_ends_by_an_error_leaves_the_next_step_as_it_is() -> None:
    watch = Watch(HonestBackend())
    with pytest.raises(ZeroDivisionError), watch.step(), part("update"), part("exchange"):
        raise ZeroDivisionError
    with part("forward"):  # outside of a step: nobody listens
        pass
    with watch.step(), part("data"):
        pass
    assert [span.part for span in watch.spans()] == ["data"]


def test_device_with_streams_is_timed_by_its_events_and_not_waited_for_within_the_step() -> None:
    chip = Queueing()
    watch, waited = Watch(chip), chip.waited
    with watch.step(), part("update"), part("exchange"):
        pass
    assert chip.waited == waited
    # Marks: update, exchange, update again, the end: three stretches of 2 ms.
    assert watch.times(1.0) == {f"{name}_s": 0.0 for name in PARTS} | {
        "update_s": 4e-3, "exchange_s": 2e-3,
    }  # fmt: skip


def test_what_a_device_does_not_measure_is_absent() -> None:
    watch = Watch(Queueing(measures=False))
    with watch.step(), part("data"):
        pass
    assert watch.times(1.0) == watch.memory() == {}
    assert Watch(HonestBackend()).memory().keys() == {"allocated_nbytes", "peak_nbytes"}


def test_memory_is_what_the_backend_counts() -> None:
    chip = HonestBackend()
    watch, storage = Watch(chip), chip.memory.allocate(1000)
    assert watch.memory() == {"allocated_nbytes": 1000, "peak_nbytes": 1000}
    del storage
    assert watch.memory() == {"allocated_nbytes": 0, "peak_nbytes": 1000}


def test_run_has_the_same_bits_watched_and_unwatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows = trained(tmp_path / "watched")
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps(measured(1.0)))
    run_of_rates, rows_of_rates = trained(tmp_path / "rates", f"parallel.rates={rates}")

    @contextmanager
    def nothing(*asked: Any) -> Iterator[None]:
        yield

    for where in ("loop", "zero.optimizer", "parallel.pipeline"):
        monkeypatch.setattr(f"anychip.train.{where}.part", nothing)
    monkeypatch.setattr(watching, "clock_of", lambda chip: None)
    plain, plain_rows = trained(tmp_path / "plain")
    losses = [[(row.loss, row.grad_norm) for row in r] for r in (rows, plain_rows, rows_of_rates)]
    assert losses[0] == losses[1] == losses[2]
    for one in (run, run_of_rates):
        for mine, its in zip(one.model.parameters(), plain.model.parameters(), strict=True):
            assert mine.detach().numpy().tobytes() == its.detach().numpy().tobytes()
    assert all(getattr(row, f"{name}_s") > 0 for row in rows for name in PARTS)
    assert all(row.data_s is None for row in plain_rows)
    assert all(row.mfu is None for row in (*rows, *plain_rows))
    assert all(row.mfu for row in rows_of_rates)


def measured(teraflops: float) -> dict[str, Any]:
    """What ``anychip bench device`` would write of this host."""
    facts = {"copy": {"GB/s": 10.0}, "product, float32": {"TFLOP/s": teraflops}}
    return {
        "backend": "cpu", "device": anychip.use("cpu").identity(), "date": "2026-01-01",
        "rows": [{"name": name, "facts": fact} for name, fact in facts.items()],
    }  # fmt: skip


def test_mfu_is_the_models_operations_over_the_measured_rate(tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps(measured(0.5)))
    run, rows = trained(tmp_path / "out", f"parallel.rates={rates}", "model.dropout=0")
    tokens = 4 * 2 * 16
    assert run.watch.ideal_s is not None
    flops = run.watch.ideal_s * 0.5e12
    # Of each matrix a product forward, two backward; embeddings are looked up, but for the head.
    matrices = [p for n, p in run.model.named_parameters() if p.dim() == 2 and "position" not in n]
    products = 6 * tokens * sum(p.numel() for p in matrices)
    # Attention and all that is elementwise come to less than a third of that in so small a model.
    assert products <= flops <= 4 / 3 * products
    for row in rows:
        assert row.mfu is not None
        # The same quotient of the same numbers, rounded a few times.
        assert math.isclose(row.mfu, flops / (0.5e12 * tokens / row.tokens_per_s), rel_tol=1e-12)


@pytest.mark.parametrize("settings", [("optimizer.stage=3",), ("parallel.pipeline=2",)])
def test_every_rank_has_its_own_times_and_two_have_half_the_ideal(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps(measured(0.5)))
    alone, _ = trained(tmp_path / "alone", f"parallel.rates={rates}")

    def work(comm: Communicator) -> tuple[float | None, list[dict[str, Any]]]:
        run, rows = trained(tmp_path / "out", f"parallel.rates={rates}", *settings, comm=comm)
        return run.watch.ideal_s, [asdict(row) for row in rows]

    assert alone.watch.ideal_s is not None
    # Replicas compute twice as much in all, stages of one replica the same; on two devices.
    whole = alone.watch.ideal_s * (1.0 if "stage=3" in settings[0] else 0.5)
    for ideal_s, rows in run_ranks(2, work):
        assert ideal_s is not None
        assert math.isclose(ideal_s, whole, rel_tol=1e-12)
        assert all(row[f"{name}_s"] > 0 for row in rows for name in PARTS)
