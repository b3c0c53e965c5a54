"""One rank of :mod:`.ranks`: reads questions, and answers each over a pipe."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from anychip.contract import HOST_LIBRARY

if TYPE_CHECKING:
    from anychip.conformance.rank_questions import RankJob


def main() -> None:
    """Argument: file descriptor of the pipe.

    stdin: where modules are, what the rank is, then a question per line.
    """
    faulthandler.enable()
    pipe = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    sys.path[:] = json.loads(sys.stdin.readline())["path"]

    # It takes seconds, and needs nothing of the job: done before the rank is told what it is.
    from anychip.conformance import rank_failures, rank_questions, rank_rules

    questions = vars(rank_questions) | vars(rank_rules) | vars(rank_failures)
    job: RankJob | None = None

    def join(request: dict[str, Any]) -> None:
        nonlocal job
        job = _join(request, job)

    for line in sys.stdin:
        asked = json.loads(line)
        if "question" in asked:
            assert job is not None, "a question to no rank of a job"
            ask = questions[asked["question"]]
            _answer(pipe, partial(_ask, job, ask, asked["arguments"]))
        else:
            _answer(pipe, partial(join, asked))
    # Taking torch and connections down may wait for ranks that have gone.
    os._exit(0)


def _join(request: dict[str, Any], former: RankJob | None) -> RankJob:
    """Makes the backend, where its communicator finds a job of so many ranks.

    Args:
        former: the job that this process was a rank of before, which it leaves.
    """
    import torch
    import torch.distributed as distributed

    from anychip.comm import job
    from anychip.conformance.rank_questions import RankJob
    from anychip.conformance.ranks import backend_of

    dist: Any = distributed  # its stores are not among the names that it exports
    if former is not None:
        if former.found is not None:
            former.found.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    torch.set_num_threads(1)
    backend = backend_of(request["backend"])
    rank, world_size, limit = request["rank"], request["world_size"], timedelta(seconds=60)
    backend.set_device(rank % backend.device_count())
    store: Any = dist.TCPStore("127.0.0.1", request["port"], None, False, limit)
    store = dist.PrefixStore(f"job {request['number']}", store)
    # The host's process group is only how the job is found; the backend makes what it needs.
    place = dist.PrefixStore("start", store)
    dist.init_process_group(
        HOST_LIBRARY, store=place, rank=rank, world_size=world_size, timeout=limit
    )
    # Ranks of a job count its communicators alike; these have been in unlike numbers of jobs.
    job.count_anew()
    return RankJob(backend, rank, world_size, dist.PrefixStore("words", store))


def _ask(job: RankJob, question: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return question(job, **arguments)
    except Exception as error:
        # Another rank may be waiting for this one.
        if job.found is not None and not job.found.is_closed:
            job.found.abort(f"a check failed: {error}")
        raise


def _answer(pipe: IO[str], call: Callable[[], Any]) -> None:
    start = time.monotonic()
    fields: dict[str, Any]
    try:
        fields = {"value": call()}
    except Exception as error:
        kind = type(error).__name__
        fields = {"error": f"{kind}: {error}", "kind": kind}
        fields["ranks"] = list(getattr(error, "ranks", ()))
    print(json.dumps({**fields, "seconds": time.monotonic() - start}), file=pipe, flush=True)


if __name__ == "__main__":
    main()
