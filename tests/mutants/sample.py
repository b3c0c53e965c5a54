"""Which mutants exist, and which of them are tried?

As many of each class of mistake for each backend: dropped arguments, which mostly end in a
TypeError, would else be half of all. Within a class the order is that of a hash of the seed and the
mutant, so that an edit of one line changes the sample by the mutants of that line.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping

from tests.mutants.generation import Mutant, mutants_of
from tests.mutants.subjects import FOLDERS, ROOT, Backend, Subjects

BACKENDS: tuple[Backend, ...] = tuple(FOLDERS)


def all_mutants(subjects: Mapping[Backend, Subjects]) -> list[Mutant]:
    """Every mutant of every subject, by file and place."""
    return [
        mutant
        for found in subjects.values()
        for file, functions in found.items()
        for mutant in mutants_of(file, (ROOT / file).read_text(encoding="utf-8"), functions)
    ]


def backend_of(mutant: Mutant) -> Backend:
    """Through whose rows a mutant is seen."""
    return next(name for name, folder in FOLDERS.items() if mutant.file.startswith(folder))


def sample(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """About ``count`` of them, in turn from each backend and class while it has any."""
    groups: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in sorted(mutants, key=lambda m: order(m, seed), reverse=True):
        groups[backend_of(mutant), mutant.kind].append(mutant)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(groups.values()):
        chosen += [groups[key].pop() for key in sorted(groups) if groups[key]]
    return chosen


def spread(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """The ``count`` first ones of the hash's order, at most one of each function."""
    first: dict[tuple[str, str], Mutant] = {}
    for mutant in sorted(mutants, key=lambda m: order(m, seed)):
        first.setdefault((mutant.file, mutant.function), mutant)
    by_file: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in reversed(first.values()):
        by_file[mutant.file].append(mutant)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(by_file.values()):
        chosen += [found.pop() for found in by_file.values() if found]
    return chosen[:count]


def order(mutant: Mutant, seed: int) -> str:
    """A hash to sort by."""
    return hashlib.sha256(f"{seed}/{mutant.id}".encode()).hexdigest()
