"""What does it cost to split a backward into I and W, in time and in memory?

A Llama on one rank, one microbatch: B in one, and I then W, in turns. Prints medians, the ratio of
their time within a round, and the bytes that F saves and that wait between I and W; exits with 1
when I and W take more than 1.05 of B, or keep more than F has saved.

    python benchmarks/split_backward.py [--layers 4] [--width 256] [--rounds 31]
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

import anychip
from anychip.comm import alone
from anychip.train import parallel
from anychip.train.models import Llama, LlamaConfig


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in {"layers": 4, "width": 256, "rounds": 31, "context": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    chip = anychip.use("cpu")
    torch.set_num_threads(1)
    sizes = {"context": options.context, "layers": options.layers, "width": options.width}
    model = Llama(LlamaConfig(vocab_size=8192, heads=4, kv_heads=4, **sizes)).to(chip.device())
    stage = parallel.make_stage(model, range(parallel.num_layers(model)))
    tokens, targets = torch.randint(8192, (2, 4, options.context)).to(chip.device())
    texts = {"B": "0F0,0B0", "I, W": "0F0,0I0,0W0"}
    pipelines = {
        kind: parallel.Pipeline(stage, alone(), parallel.parse(text), measure=chip.synchronize)
        for kind, text in texts.items()
    }
    found: dict[str, list[float]] = {kind: [] for kind in texts}
    for _ in range(options.rounds + 1):
        for kind, pipeline in pipelines.items():
            pipeline.run(tokens, targets)
            spans = pipeline.timeline().rows[0][1:]
            found[kind].append(sum(float(span.end - span.start) for span in spans))
    whole, split = (times[1:] for times in found.values())
    ratio = statistics.median(s / w for s, w in zip(split, whole, strict=True))
    counting = parallel.Pipeline(stage, alone(), parallel.parse(texts["I, W"]), count_bytes=True)
    counting.run(tokens, targets)
    saved, kept = counting.bytes_in_use[:2]
    once, twice = (statistics.median(times) * 1e3 for times in (whole, split))
    print(f"B {once:.1f} ms, I and W {twice:.1f}")
    print(f"I and W are {ratio:.3f} of B; kept {kept:,} of {saved:,} bytes saved")
    return int(ratio > 1.05 or kept > saved)


if __name__ == "__main__":
    sys.exit(main())
