"""The trainer on ranks as threads: the weight of every target, and the messages of a step."""

import math
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import CommunicationError, Communicator
from anychip.train import config, data, loop, optim, zero
from anychip.train.run import Texts
from tests.unit.train import small_runs
from tests.unit.train.small_runs import nothing, tiny

CONTEXT, WINDOWS = 16, 8
ENDS = 64
"""Of CONTEXT * WINDOWS targets: as many are left, and a mean over 64 integers is exact."""
build = partial(small_runs.build, "model.layers=1", f"model.context={CONTEXT}")
NOT_ACROSS = "data.cross_document_targets=false"


def uneven_tokens() -> Tensor:
    """An epoch of WINDOWS windows from any start: a period, and its beginning again.

    Most of the ends of documents are in its first part.
    """
    period = torch.arange(1, CONTEXT * WINDOWS + 1, dtype=torch.uint8)
    ends = torch.randperm(CONTEXT * WINDOWS * 5 // 8, generator=torch.Generator().manual_seed(2))
    period[ends[:ENDS]] = data.ByteTokenizer().end_of_document
    return torch.cat((period, period[:CONTEXT]))


class Counting(nn.Module):
    """A loss that is linear in the weights, with integer slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(256.0).remainder(5.0))

    def forward(self, tokens: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
        assert reduction == "sum"
        slopes = torch.where(targets == data.IGNORED_TARGET, 0, targets % 7 + 1)
        return (self.weight[tokens] * slopes).sum()


def counted(comm: Communicator, batch_size: int, parts: int, stage: int, out: Path) -> list[Tensor]:
    """The losses, then the weights, after three steps over an epoch each."""
    settings = (f"data.batch_size={batch_size}", f"data.accumulation={parts}", "run.steps=3")
    run = build(NOT_ACROSS, *settings, comm=comm)
    replicas = run.mesh.axis("data")
    run.loader = data.Loader(
        uneven_tokens(), context=CONTEXT, batch_size=batch_size, rank=replicas.rank,
        world_size=replicas.world_size, cross_document_targets=False,
    )  # fmt: skip
    model = Counting()
    run.model = model  # type: ignore[assignment]
    run.optimizer = zero.Optimizer(model, optim.sgd(64.0, momentum=0.0), replicas, stage=stage)
    rows = loop.train(run, out, nothing)
    return [torch.tensor([row.loss for row in rows]), model.weight.detach().clone()]


@pytest.mark.parametrize(("world_size", "parts", "stage"), [
    (1, 4, 0), (2, 1, 0), (2, 2, 1), (4, 1, 2), (4, 2, 0),
], ids=["1x4", "2x1-stage0", "2x2-stage1", "4x1-stage2", "4x2-stage0"])  # fmt: skip
def test_batches_with_uneven_targets_equal_one_batch_bit_for_bit(
    tmp_path: Path, world_size: int, parts: int, stage: int
) -> None:
    (tmp_path / "one").mkdir()
    want = counted(alone(), WINDOWS, 1, 0, tmp_path / "one")
    batch = WINDOWS // world_size // parts
    (tmp_path / "ranks").mkdir()
    out = tmp_path / "ranks"
    found = run_ranks(world_size, lambda comm: counted(comm, batch, parts, stage, out))
    assert not torch.equal(want[1], Counting().weight)
    for values in found:
        assert all(torch.equal(a, b) for a, b in zip(values, want, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_loss_and_gradient_are_those_of_the_mean_over_all_targets(
    tmp_path: Path, precision: str
) -> None:
    """Against torch on all rows at once: each target counts alike, whichever batch it is in."""
    text = tmp_path / "text.jsonl"
    lengths = [1, 2, 3, 40, 41, 5, 6, 50]
    text.write_text("".join(f'{{"text": "{"ab" * length}"}}\n' for length in lengths))
    settings = (NOT_ACROSS, "data.batch_size=1", "data.accumulation=6", "run.steps=1")
    run, twin = (
        build(*settings, f'data.files=["{text}"]', f"run.precision={precision}") for _ in "ab"
    )
    batches = [twin.loader.next_batch() for _ in range(6)]
    counts = [int((targets != data.IGNORED_TARGET).sum()) for _, targets in batches]
    assert min(counts) < max(counts)
    logits = torch.cat([twin.model(tokens) for tokens, _ in batches]).flatten(0, 1)
    targets = torch.cat([targets for _, targets in batches]).flatten()
    loss = nn.functional.cross_entropy(logits, targets)
    found = torch.autograd.grad(loss, list(twin.model.parameters()), allow_unused=True)
    grads = [grad.double().numpy() for grad in found if grad is not None]
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
    (row,) = loop.train(run, tmp_path, nothing)
    eps = float(np.finfo(np.float16 if precision == "fp16" else np.float32).eps)
    # Sums of about a hundred terms, through some matrix products.
    assert row.loss == pytest.approx(loss.item(), rel=100 * eps)
    assert row.grad_norm == pytest.approx(norm, rel=100 * eps)


def test_step_without_a_target_is_an_error(tmp_path: Path) -> None:
    run = build(NOT_ACROSS, "data.accumulation=2", "data.batch_size=2")
    end = data.ByteTokenizer().end_of_document
    run.loader = data.Loader(
        torch.full((100,), end, dtype=torch.uint8), context=CONTEXT, batch_size=2,
        cross_document_targets=False,
    )  # fmt: skip
    with pytest.raises(loop.TrainingError, match="step 1: no batch has a target"):
        loop.train(run, tmp_path, nothing)


@pytest.mark.parametrize(("stage", "calls"), [
    # Two groups of parameters are two buckets; and one message about gradients and the loss.
    (0, {"all_reduce": 2 + 1}),
    # One more for the norm's partial sums.
    (2, {"reduce_scatter": 2, "all_gather": 2, "all_reduce": 1 + 1}),
], ids=["stage0", "stage2"])  # fmt: skip
def test_loss_is_agreed_upon_without_a_message_of_its_own(
    tmp_path: Path, stage: int, calls: dict[str, int]
) -> None:
    def work(comm: Communicator, steps: int) -> Counter[str]:
        settings = (f"run.steps={steps}", f"optimizer.stage={stage}", "data.batch_size=2")
        out = tmp_path / f"{steps}"
        out.mkdir(exist_ok=True)
        run = build(*settings, comm=comm)
        loop.train(run, out, nothing)
        return comm.traffic.calls + run.mesh.axis("data").traffic.calls

    few, many = (run_ranks(2, lambda comm, n=n: work(comm, n)) for n in (1, 3))
    for before, after in zip(few, many, strict=True):
        assert after - before == Counter({name: 2 * count for name, count in calls.items()})


def test_ranks_with_other_tokens_are_refused_before_they_train() -> None:
    """Hosts have files of their own: a directory of the same name may have been prepared anew."""

    def read(comm: Communicator, settings: config.Config) -> Texts:
        return Texts(torch.full((400,), 65 + comm.rank, dtype=torch.uint8), data.ByteTokenizer())

    def work(comm: Communicator) -> None:
        loop.build(config.load(None, tiny()), anychip.use("cpu"), comm, read=partial(read, comm))

    with pytest.raises(CommunicationError, match="tokens"):
        run_ranks(2, work)
