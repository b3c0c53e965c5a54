"""``nn.CrossEntropyLoss``, fused, against itself: shapes, reductions, dtypes and odd calls."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip

CLASSES = 11
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((CLASSES,), ()), "rows": ((5, CLASSES), (5,)), "positions": ((2, CLASSES, 3), (2, 3)),
    "images": ((2, CLASSES, 3, 4), (2, 3, 4)),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {}, "sum": {"reduction": "sum"}, "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.2}, "ignoring": {"ignore_index": 3},
}  # fmt: skip


def call(module: nn.Module, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = module(leaf, target)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), grad


def example(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    target = torch.randint(CLASSES, shapes[1], generator=generator)
    if target.dim():
        target.view(-1)[0] = 3
    return 3 * torch.randn(shapes[0], generator=generator), target


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_fused_loss_equals_float64(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], options: dict[str, Any]
) -> None:
    module = nn.CrossEntropyLoss(**options)
    logits, target = example(shapes)
    want = call(copy.deepcopy(module), logits.double(), target)
    report = anychip.fuse(module)
    got = call(module, logits, target)
    # 10 roundings of terms as large as the logits, a sum over the classes, and one over rows.
    roundings = 10 + CLASSES + target.numel()
    for ours, exact in zip(got, want, strict=True):
        top = max(float(logits.abs().max()), float(exact.abs().max()))
        assert float((ours - exact).abs().max()) <= roundings * 2.0**-24 * top
        assert ours.shape == exact.shape
    assert report.fallbacks() == ()


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_loss_has_the_dtype_that_it_had(dtype: torch.dtype, autocast: bool) -> None:
    module = nn.CrossEntropyLoss()
    logits, target = example(SHAPES["rows"])
    logits = logits.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        want = module(logits, target)
        anychip.fuse(module)
        got = module(logits, target)
    assert got.dtype == want.dtype
    limit = 3 * float(logits.abs().max()) * torch.finfo(dtype).eps
    assert float((got - want).abs()) <= limit


def test_fused_loss_over_no_row_is_nan_as_before() -> None:
    module = nn.CrossEntropyLoss()
    target = torch.full((4,), -100)
    logits = torch.ones(4, CLASSES)
    assert module(logits, target).isnan()
    anychip.fuse(module)
    assert module(logits, target).isnan()


def test_fused_loss_with_class_probabilities_runs_torchs_code_and_counts_it() -> None:
    module = nn.CrossEntropyLoss()
    logits, _ = example(SHAPES["rows"])
    probabilities = torch.softmax(-logits, -1)
    want = module(logits, probabilities)
    report = anychip.fuse(module)
    assert torch.equal(module(input=logits, target=probabilities), want)
    (row,) = report.fallbacks()
    assert row.fallback_reason == "targets are torch.float32"


def test_fused_loss_with_a_wrong_class_or_none_is_an_error() -> None:
    module = nn.CrossEntropyLoss()
    anychip.fuse(module)
    with pytest.raises(IndexError):
        module(torch.ones(2, CLASSES), torch.tensor([0, CLASSES]))
    with pytest.raises(TypeError, match="target"):
        module(torch.ones(2, CLASSES))
