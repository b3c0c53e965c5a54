"""Every call has a row per size; what both sides send is what the formula says, or more."""

import pytest

import anychip
from anychip.bench import collectives
from anychip.contract import CALLS


@pytest.mark.grid
def test_bench_collectives_measures_calls_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYCHIP_TRANSPORT", "sockets")  # memory sends no bytes
    report = collectives.run(
        anychip.use("cpu"), rounds=3, progress=lambda _: None, sizes=(4, 1 << 20), window=1e-3
    )
    rows = {row.name: row for row in report.rows}
    assert {name.split()[0] for name in rows} == set(CALLS) - {"recv"}
    # Of calls with a part per rank, four bytes are two times four.
    assert {"all_reduce 4 B", "all_gather 8 B", "send 1 MiB", "barrier"} <= rows.keys()
    assert len(rows) == 2 * (len(CALLS) - 2) + 1
    large = [row for row in report.rows if row.facts["bytes"] == 1 << 20]
    assert {row.name.split()[0]: row.facts["wire B"] >> 20 for row in large} == {
        "all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1, "all_to_all": 1,
        "send": 1,
    }  # fmt: skip
    for row in large:
        # Other programs may send as well: only less would be wrong. gloo scatters twice as much.
        assert row.facts["ours x wire"] >= 0.99, row.name
        least = 1.99 if row.name.startswith("reduce_scatter") else 0.99
        assert row.facts["torch x wire"] >= least, row.name
        for who in ("ours", "torch", "copy"):
            assert row.facts[f"{who} GB/s"] > 0


@pytest.mark.parametrize(("arguments", "message"), [
    ({"rounds": 1}, "rounds must be at least 3, got 1"),
    ({"rounds": 3, "names": ("gather",)}, "no call gather; there are all_reduce, "),
], ids=["rounds", "call"])  # fmt: skip
def test_bench_collectives_with_a_wrong_argument_is_refused(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        collectives.run(anychip.use("cpu"), progress=lambda _: None, **arguments)  # type: ignore[arg-type]


def test_loopback_nbytes_on_a_system_that_does_not_say_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert collectives.loopback_nbytes() is not None
    monkeypatch.setattr(collectives.Path, "exists", lambda self: False)
    assert collectives.loopback_nbytes() is None
