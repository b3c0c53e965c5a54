"""Are some of the generated mutants killed, and is what is published about all of them true?

``make mutants`` tries 600 of them in a quarter of an hour; here are 25, a slice of them per
commit, one of each function at most, in turn from all files.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

import anychip
from anychip.operators import all_specs
from tests.mutants import equivalents, page
from tests.mutants.__main__ import COUNT, LEAST_RATE, SEED
from tests.mutants.campaign import Campaign, about
from tests.mutants.generation import Identity, Mutant, mutants_of
from tests.mutants.pool import Pool
from tests.mutants.sample import BACKENDS, all_mutants, sample, spread
from tests.mutants.subjects import ROOT, Backend, Subjects

TRIED, PARTS = 25, 5
"""Mutants that are tried here, and in how many cases: finding them all takes longer than trying."""

FUNCTION = '''\
def norm(x, eps, needs):
    """A docstring with 1."""
    if x.dim() == 0:
        raise ValueError(f"got {x.dim() + 1}")
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    rstd = rstd if eps is None else rstd.to(x.dtype)
    return rstd[1:] if needs[0] else None
'''


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(1)


@pytest.fixture(scope="module")
def subjects(pool: Pool) -> dict[Backend, Subjects]:
    return {backend: pool.subjects(backend) for backend in BACKENDS}


@pytest.fixture(scope="module")
def every(subjects: dict[Backend, Subjects]) -> list[Mutant]:
    return all_mutants(subjects)


def test_mutants_of_a_function_are_the_mistakes_one_would_make() -> None:
    found = {(m.change, m.kind) for m in mutants_of("f.py", FUNCTION, {"norm"})}
    mean = "x.float().square().mean(-1, keepdim=True)"
    assert found >= {
        ("== 0 -> != 0", "comparison"), ("is -> is not", "comparison"),
        ("x.dim() == 0 -> not (x.dim() == 0)", "logic"), ("1 -> 2", "dim"), ("1 -> 2", "index"),
        ("True -> False", "dim"), ("x.float() -> x.bfloat16()", "dtype"),
        ("x.float() -> x", "missing call"),
        (f"{mean} -> {mean.replace('mean', 'sum')}", "function"),
        (f"{mean} -> {mean.replace(', keepdim=True', ', ')}", "argument"),
        (f"{mean} + eps -> {mean}", "arithmetic"), ("1: -> :", "index"),
    }  # fmt: skip
    changes = {change for change, _ in found}
    assert not any("docstring" in change or "got" in change for change in changes)
    assert "needs[0] -> True" not in changes


def test_mutant_changes_one_place_and_nothing_else() -> None:
    (mutant,) = [m for m in mutants_of("f.py", FUNCTION, {"norm"}) if m.change == "== 0 -> != 0"]
    assert mutant.apply(FUNCTION) == FUNCTION.replace("== 0", "!= 0")
    assert (mutant.number, mutant.line) == (3, "if x.dim() == 0:")


@pytest.mark.grid
def test_mutants_have_ids_of_their_own_and_reach_every_operator(
    every: list[Mutant], subjects: dict[Backend, Subjects]
) -> None:
    assert len({mutant.id for mutant in every}) == len(every)
    reached = {
        name for file in subjects["reference"].values() for ops in file.values() for name in ops
    }
    assert reached == {spec.name for spec in all_specs()}


def test_equivalents_are_mutants_of_today() -> None:
    listed = equivalents.load()
    equivalents.check_fresh(listed, mutants_named_in(listed))
    with pytest.raises(ValueError, match="no longer have"):
        equivalents.check_fresh([("f.py", "f", "gone", "mutmut.number", "1 -> 2", 0)], [])


def mutants_named_in(listed: Iterable[Identity]) -> list[Mutant]:
    """Every mutant of the functions, found without running an operator: every commit asks it."""
    named: dict[str, set[str]] = {}
    for file, function, *_ in listed:
        named.setdefault(file, set()).add(function)
    return [m for file in named for m in mutants_of(file, (ROOT / file).read_text(), named[file])]


@pytest.fixture(scope="module")
def chosen(every: list[Mutant]) -> list[Mutant]:
    return spread(sample(every, COUNT, SEED), TRIED, SEED)


@pytest.mark.grid
def test_mutants_that_are_tried_here_are_of_many_files(chosen: list[Mutant]) -> None:
    assert len(chosen) == TRIED
    assert len({mutant.file for mutant in chosen}) > 20


@pytest.mark.grid
@pytest.mark.parametrize("part", range(PARTS))
def test_mutant_is_killed_or_listed_or_published(
    pool: Pool, subjects: dict[Backend, Subjects], chosen: list[Mutant], part: int
) -> None:
    campaign, listed = Campaign(pool, partial(about, subjects=subjects)), equivalents.load()
    verdicts = campaign.run(chosen[part::PARTS], listed)
    campaign.check_killers(verdicts)
    known = page.published_survivors()
    wrong = [
        v.to_json()
        for v in verdicts
        if v.mutant.id not in known and v.survived == (v.mutant.identity not in listed)
    ]
    assert wrong == []


def test_page_publishes_a_run_of_this_version() -> None:
    version, rate, tried, equivalent, survived = page.published()
    assert version == anychip.__version__, "make mutants: the table is of another version"
    assert tried >= 500
    assert rate >= LEAST_RATE
    assert equivalent + survived <= tried
    assert 20 * equivalent <= tried


def test_page_without_a_table_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "mutants.md"
    empty.write_text("nothing")
    with pytest.raises(ValueError, match="no table"):
        page.published(empty)
