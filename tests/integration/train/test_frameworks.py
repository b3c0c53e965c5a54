"""In other frameworks' loops: are 20 steps theirs, on one rank and two, and what passes between?"""

import fcntl
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anychip.comm import wire_nbytes
from tests.integration import quiet_network
from tests.integration.train.forked import Server

pytest.importorskip("transformers")
HAS_LIGHTNING = importlib.util.find_spec("pytorch_lightning") is not None
ROOT = Path(__file__).parents[3]
needs_lightning = pytest.mark.skipif(not HAS_LIGHTNING, reason="pip install 'anychip[lightning]'")
# The jobs of a framework take half a minute: each has a slice, but for one that every commit asks.
TRAINER, TORCH = (pytest.param(name, marks=pytest.mark.grid(name)) for name in ("trainer", "torch"))
LIGHTNING = pytest.param("lightning", marks=[needs_lightning, pytest.mark.grid("lightning")])
FRAMEWORKS = [TRAINER, "accelerate", LIGHTNING]
IN_DDP = "is in torch's DistributedDataParallel, and zero.Optimizer averages its gradients too"
NUMEL = (1 << 20) // 96 * 96


Found = Callable[[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What so many ranks have written of a framework; once for all processes that ask tests."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def of(size: int, framework: str) -> dict[str, Any]:
        folder = shared / f"frameworks-{size}-{framework}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done.json").exists():
                run_ranks(folder, size, framework)
        written: dict[str, Any] = json.loads((folder / "done.json").read_text())
        return written[framework]  # type: ignore[no-any-return]

    return of


def run_ranks(folder: Path, size: int, framework: str) -> None:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": paths, "ANYCHIP_TRANSPORT": "sockets", "ANYCHIP_BACKEND": "cpu"}
    # In a network of their own, so that the counters of loopback are theirs.
    server = Server({**os.environ, **variables}, prefix=quiet_network.prefix() or ())
    script = str(Path(__file__).with_name("framework_ranks.py"))
    ended = server.run(script, "out.json", framework, world_size=size, cwd=folder)
    server.close()
    assert [rank.code for rank in ended] == [0] * size, ended[0].err
    (folder / "out.json").rename(folder / "done.json")


CASES = [
    *[(name, 1, "", stage) for name in FRAMEWORKS for stage in (2,)],
    *[(name, 2, "", stage) for name in FRAMEWORKS for stage in (0, 3)],
    *[(name, 2, "accumulating", stage) for name in FRAMEWORKS for stage in (1, 2)],
    (TORCH, 2, "", 0), (TORCH, 2, "ddp", 0),
]  # fmt: skip


def as_params(cases: list[tuple[Any, ...]]) -> list[Any]:
    """With the marks of a framework."""
    return [
        pytest.param(first.values[0], *rest, marks=first.marks)
        if not isinstance(first, str)
        else pytest.param(first, *rest)
        for first, *rest in cases
    ]


@pytest.mark.parametrize(("framework", "ranks", "how", "stage"), as_params(CASES))
def test_twenty_steps_are_those_of_their_own_adamw(
    found: Found, framework: str, ranks: int, how: str, stage: int
) -> None:
    """Losses in float32 of about 4.6: 1e-6 are two units in the last place; the same rates."""
    theirs, ours = (found(ranks, framework)[how][str(kind)] for kind in (None, stage))
    assert len(ours) == len(theirs) >= 20
    assert [rate for _, rate in ours] == [rate for _, rate in theirs]
    assert len({rate for _, rate in ours}) >= 20
    assert max(abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True)) <= 1e-6
    assert len({loss for loss, _ in ours}) > 15


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_steps_in_bfloat16_are_those_of_their_own_adamw_but_for_rounding(
    found: Found, framework: str
) -> None:
    """A weight that differs in its last place may round to another bfloat16, by 2^-9 of it: of a
    loss of 4.6, a mean over 24 tokens, less than 1e-3. Without autocast it differs as well.
    """
    theirs, ours = (found(2, framework)["bf16"][str(kind)] for kind in (None, 3))
    assert max(abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True)) <= 1e-3
    assert ours != found(2, framework)[""]["3"]
    assert ours[0] == theirs[0]


@pytest.mark.parametrize(("framework", "ranks", "stage"), as_params([
    *[(name, ranks, stage) for name in FRAMEWORKS for ranks, stage in ((1, 0), (2, 1), (2, 3))],
    (TORCH, 2, 0),
]))  # fmt: skip
def test_run_that_goes_on_from_their_checkpoint_has_the_same_bits(
    found: Found, framework: str, ranks: int, stage: int
) -> None:
    whole, resumed = found(ranks, framework)[f"resumed {stage}"]
    assert len(resumed) == 10
    assert whole[10:] == resumed


@pytest.mark.skipif(quiet_network.prefix() is None, reason="no network namespaces here")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gradients_pass_once_per_step(found: Found, framework: str) -> None:
    """ZeRO-2 sends gradients once and weights once, after two batches; DDP's average would make it
    twice as much, a reduction of each batch half as much again. 10 % for headers, and packets that
    are sent twice.
    """
    formula = sum(wire_nbytes(call, 4 * NUMEL, 2) for call in ("reduce_scatter", "all_gather"))
    assert 0.9 < found(2, framework)["nbytes"] / float(formula * 2 * 3) < 1.1


@pytest.mark.parametrize("framework", [*FRAMEWORKS, TORCH])
def test_example_learns_on_two_ranks(found: Found, framework: str) -> None:
    losses = found(2, framework)["example"]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("framework", "what", "sentence"), as_params([
    *[(name, "their own", IN_DDP) for name in FRAMEWORKS],
    ("accelerate", "deepspeed", "leave its plugin out; stages 1 to 3 of zero.Optimizer"),
    ("accelerate", "fsdp", "leave its plugin out; stages 1 to 3 of zero.Optimizer"),
    ("accelerate", "fp16", "mixed_precision='bf16' needs no scale"),
    ("accelerate", "some gradients", "clip_grad_norm_(model.parameters(), max_norm) clips all"),
    ("accelerate", "two optimizers", "make one, with a group for each"),
    ("accelerate", "compiled", "compile its blocks, block.compile(), or take stage 2"),
    (LIGHTNING, "AdamW", "return one zero.Optimizer(self, rule, chip.communicator())"),
    (LIGHTNING, "values", "To clip: opt.clip_grad_norm_(max_norm)"),
    (LIGHTNING, "fp16", "precision='bf16-mixed' needs no scale"),
    (LIGHTNING, "part", "zero.Optimizer(self, ...)"),
    (LIGHTNING, "compiled", "compile its blocks, block.compile(), or take stage 2"),
    (TORCH, "several ranks", "give anychip.comm.alone(device=...)"),
    (TORCH, "8bit", "take states in float32, or zero.Optimizer(stage=3)"),
    (TORCH, "partly", "fully_shard(model) after its blocks"),
    (TORCH, "scaled", "compute in bfloat16"),
]))  # fmt: skip
def test_what_cannot_work_is_refused_with_what_does(
    found: Found, framework: str, what: str, sentence: str
) -> None:
    told = found(2, framework)["refused"][what]
    assert sentence in told
    assert told.startswith(("UnsupportedError: ", "RuntimeError: "))
