"""The child process of ``--isolate``: runs the cases it reads, reports each over a pipe."""

from __future__ import annotations

import faulthandler
import json
import os
import sys


def main() -> None:
    """Argument: file descriptor of the pipe. stdin: ``{"backend", "level", "cases": [ids]}``."""
    faulthandler.enable()
    pipe = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    request = json.load(sys.stdin)

    from anychip.conformance.case import Context
    from anychip.conformance.chapters import all_cases
    from anychip.conformance.runner import activate, run_case

    backend = activate(request["backend"])
    by_id = {case.id: case for case in all_cases(Context(backend, request["level"]))}
    _send(pipe, {"ready": True})
    for id in request["cases"]:
        _send(pipe, run_case(by_id[id], backend, request["level"]).to_json())


def _send(pipe: object, message: object) -> None:
    print(json.dumps(message), file=pipe, flush=True)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
