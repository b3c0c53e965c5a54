"""The child process of ``--isolate``: runs the cases it reads, reports each over a pipe."""

import faulthandler
import json
import os
import sys


def main() -> None:
    """Argument: file descriptor of the pipe. stdin: what :mod:`.isolation` tells it."""
    faulthandler.enable()
    pipe = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    request = json.loads(sys.stdin.readline())

    import anychip
    from anychip.conformance.asking import activate, run_case, settle
    from anychip.conformance.case import Context
    from anychip.conformance.chapters import all_cases

    backend = activate(request["backend"])
    level, seed = request["level"], request["seed"]
    by_id = {case.id: case for case in all_cases(Context(backend, level, seed))}
    settle()
    _send(pipe, {"ready": True})
    for line in sys.stdin:
        anychip.provenance(reset=True)
        result = run_case(by_id[json.loads(line)], backend, level, seed).to_json()
        _send(pipe, {"result": result, "served": anychip.provenance().to_json()})


def _send(pipe: object, message: object) -> None:
    print(json.dumps(message), file=pipe, flush=True)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
