"""Do calls of ranks survive what happens to one of them, or end as the communicator promises?

In each trial 2 to 4 processes make random calls of all kinds, each compared with numpy bit for bit,
in the job and in groups of it; at a random moment one is killed, stopped, stopped for less than the
limit, or sleeps now and then. The others must end within the limit with an error that names it, or
go on with right results; no process may keep a segment of shared memory. Prints what was wrong and
a table; exits with 1 when something was.

    python -m benchmarks.strike_ranks [--trials 1000] [--seed 0] [--transport shared_memory]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.integration.collectives import striking  # noqa: E402 - found by the line above
from tests.integration.collectives.processes import Server  # noqa: E402
from tests.integration.collectives.striking import Trial  # noqa: E402


def table(trials: list[Trial]) -> list[str]:
    """A row per kind."""
    lines = [
        "| kind | trials | of them too late | others ended after: median, at most (s) "
        "| wrong endings | wrong results | segments left |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in striking.KINDS:
        found = [trial for trial in trials if trial.kind == kind]
        times = [trial.seconds for trial in found if not trial.came_too_late]
        is_ending = kind in ("killed", "stopped")
        columns = [
            kind,
            len(found),
            sum(trial.came_too_late for trial in found) if is_ending else "",
            f"{statistics.median(times):.2f}, {max(times):.2f}" if is_ending and times else "",
            sum(bool(trial.ending) for trial in found),
            sum(bool(trial.results) for trial in found),
            sum(bool(trial.left) for trial in found),
        ]
        lines.append(f"| {' | '.join(map(str, columns))} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument(
        "--transport", default="shared_memory", choices=("shared_memory", "sockets")
    )
    options = parser.parse_args()
    # Of the process that forks ranks; what torch says of a lost store is of no interest here.
    os.environ |= {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    server, trials = Server(options.transport), []
    for seed in range(options.seed, options.seed + options.trials):
        trials.append(trial := striking.attempt(server, seed))
        if not trial.is_right:
            print(f"{seed}: {trial}", flush=True)
    server.close()
    print("\n".join(table(trials)))
    return int(not all(trial.is_right for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
