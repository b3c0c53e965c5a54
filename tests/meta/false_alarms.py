"""Does the suite leave correct backends alone, whatever the seed of its inputs?

``python -m tests.meta.false_alarms 0 20``: seeds from 0 up to 20, one after the other, over every
correct backend of the catalogue, the toy of examples/third_party_backend and cpu, at level quick:
everything for seed 0, and for the others what a seed can change. A line per seed and backend; exit
code 1 when a case failed. CI runs two seeds (``test_catalogue.py``).
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from anychip import conformance
from anychip.conformance.asking import activate
from anychip.contract import Backend
from tests.meta.asynchronous import AsynchronousBackend
from tests.meta.honest import HonestRows

TOY = Path(__file__).parents[2] / "examples" / "third_party_backend"
VALUES = ("memory", "random", "operators", "gradients", "optimizer")
"""Chapters whose answers have bounds, or histories, that a seed changes; of the operators the
values, since rules compare bits. Sums over ranks have bounds that hold for all numbers."""
WITHOUT_RULES = "not rule"


def toy() -> Backend:
    """The example's backend, from its folder."""
    sys.path.append(str(TOY))
    from anychip_toy.backend import ToyBackend

    made: Backend = ToyBackend()
    return made


CORRECT: dict[str, Callable[[], Backend]] = {
    "honest": HonestRows, "asynchronous": AsynchronousBackend, "toy": toy,
    "cpu": lambda: activate("cpu"),
}  # fmt: skip


def alarms(backend: Backend, seed: int, chapters: tuple[str, ...] = (), k: str = "") -> list[str]:
    """Failures of a correct backend, explained."""
    report = conformance.run(backend, seed=seed, chapters=chapters, select=k)
    return [report.explain(result) for result in report.failures]


def main(first: int, last: int) -> int:
    """Prints a line per seed and backend, and every false alarm."""
    torch.set_num_threads(1)
    total = 0
    for seed in range(first, last):
        for name, make in CORRECT.items():
            found = alarms(make(), seed, VALUES, WITHOUT_RULES) if seed else alarms(make(), seed)
            total += len(found)
            print(f"seed {seed}, {name}: {len(found)} false alarms", flush=True)
            print("\n".join(found), end="\n" if found else "", flush=True)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
