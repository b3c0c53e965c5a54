"""Does memory stay within a limit while shards are trained on that are larger than it?

Makes shards of made-up text; reads every window of an epoch as a stream, while a process beside it
and workers prepare them, of which none may have more than `--limit` MiB (RLIMIT_DATA: what it
writes to, not the files that it reads); prepares them, and reads the epoch behind that. Says the
peak of all processes together (the sum of their Pss, every tenth of a second). Then how long a step
waits for a source of which every read takes 50 ms, by the number of batches made ahead.

    python -m benchmarks.streaming [--mib 2048] [--limit 1024] [--workers 2] [--filter length]
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anychip.train import data
from anychip.train.preparing import Growing, Request, prepare
from tests.unit.train import shards

ENDS = (".jsonl", ".jsonl.gz", ".tar", ".parquet")
LATENCY_S, STEP_S, READS = 0.05, 0.01, 60
BUFFER = 8192
"""Windows that a stream shuffles at once."""


def write_shards(folder: Path, mib: int) -> int:
    """Shards of 32 MiB of text each; the bytes of the text."""
    generator, nbytes = np.random.default_rng(0), 0
    words = np.array([f"{word:x}" for word in generator.integers(1 << 20, size=4096)])
    for number in range(max(1, mib // 32)):
        sizes = generator.integers(200, 1200, size=(32 << 20) // 4000)
        texts = [" ".join(words[generator.integers(4096, size=size)]) for size in sizes]
        nbytes += sum(map(len, texts))
        end = ENDS[number % len(ENDS)]
        if end == ".jsonl.gz":  # at a quick level; what is measured is reading
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / f"{number:04}{end}").write_bytes(gzip.compress(lines.encode(), 1))
        else:
            shards.write(folder / f"{number:04}{end}", texts)
    return nbytes


def read_epoch(tokens: data.Tokens) -> dict[str, Any]:
    """All but the last batch, which the next epoch would fill; the seconds to the first one."""
    begun, buffer = time.perf_counter(), BUFFER if isinstance(tokens, Growing) else 0
    row = data.join([tokens], 0)
    loader = data.Loader(row, context=1024, batch_size=16, prefetch=2, shuffle_buffer=buffer)
    loader.next_batch()
    first_s = time.perf_counter() - begun
    while not row.extent().is_whole or loader.position + 16 <= loader.num_windows:
        loader.next_batch()
    loader.close()
    return {"tokens": loader.position * 1024, "first_s": first_s}


def done(what: str, source: str, out: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a child does."""
    if what == "read":
        return read_epoch(data.Prepared(Path(out)))
    request = Request(sources=(source,), filters=tuple(options.filter))
    if what == "prepare":
        return prepare(request, Path(out), num_workers=options.workers)
    return read_epoch(Growing(request, Path(out), num_workers=options.workers))


def limited(words: list[str], limit_mib: int) -> tuple[dict[str, Any], float, float]:
    """What a child of this script says, its seconds, and the peak of it and its children in MiB."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mib << 20, limit_mib << 20))

    begun, peak = time.perf_counter(), 0
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.streaming", *words],
        stdout=subprocess.PIPE,
        preexec_fn=limit,
    )
    while child.poll() is None:
        peak = max(peak, sum(map(pss, family(child.pid))))
        time.sleep(0.1)
    assert child.stdout is not None
    said = child.stdout.read()
    assert child.returncode == 0, child.returncode
    return json.loads(said), time.perf_counter() - begun, peak / 1024


def family(pid: int) -> list[int]:
    found = [pid]
    for number in found:
        for task in Path(f"/proc/{number}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:  # it has ended
                continue
    return found


def pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


class Far(data.InMemory):
    """A source of which every read takes 50 ms."""

    def read(self, begin: int, end: int) -> Any:
        time.sleep(LATENCY_S)
        return super().read(begin, end)


def waited(prefetch: int) -> float:
    """Milliseconds of a step beyond its own, of batches of one read."""
    row = data.join([Far(torch.arange(1 << 16))], None)
    loader = data.Loader(row, context=64, batch_size=1, prefetch=prefetch)
    loader.next_batch()
    time.sleep(2 * LATENCY_S)
    begun = time.perf_counter()
    for _ in range(READS):
        loader.next_batch()
        threading.Event().wait(STEP_S)
    took = time.perf_counter() - begun
    loader.close()
    return (took / READS - STEP_S) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--limit", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--filter", action="append", default=[])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(done(*options.child, options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        source, stream, out = (Path(folder) / name for name in ("shards", "stream", "out"))
        for made in (source, stream):
            made.mkdir()
        mib = write_shards(source, options.mib) / 2**20
        print(f"{mib:.0f} MiB of text in {len(list(source.iterdir()))} shards", flush=True)
        words = ["--workers", str(options.workers)]
        words += [word for name in options.filter for word in ("--filter", name)]
        words += ["--child"]
        told, took, peak = limited([*words, "stream", str(source), str(stream)], options.limit)
        print(
            f"an epoch as a stream, {told['tokens']:,} tokens, with {options.workers} workers "
            f"within {options.limit} MiB each: {took:.0f} s, {mib / took:.0f} MiB/s; the first "
            f"batch after {told['first_s']:.1f} s; peak of all processes {peak:.0f} MiB",
            flush=True,
        )
        shutil.rmtree(stream)
        told, took, peak = limited([*words, "prepare", str(source), str(out)], options.limit)
        print(
            f"prepared with {options.workers} workers within {options.limit} MiB each: "
            f"{told['tokens']:,} tokens of {told['documents']:,} documents in {took:.0f} s, "
            f"{mib / took:.0f} MiB/s; peak of all processes {peak:.0f} MiB; {told['report']}",
            flush=True,
        )
        told, took, peak = limited(["--child", "read", "-", str(out)], options.limit)
        print(f"an epoch, {told['tokens']:,} tokens: {took:.0f} s, peak {peak:.0f} MiB", flush=True)
    for prefetch in (0, 1, 2, 6, 8):
        print(
            f"every read takes {LATENCY_S * 1e3:.0f} ms, a step {STEP_S * 1e3:.0f}; prefetch = "
            f"{prefetch}: the step waits {waited(prefetch):.1f} ms"
        )


if __name__ == "__main__":
    main()
