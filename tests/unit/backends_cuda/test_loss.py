"""cross_entropy and linear_cross_entropy of the CUDA kernels: any length, place and value."""

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from anychip_cuda import linear_loss
from anychip_cuda.loss import Options, divisor, gradient_of_rows, loss_of_rows, reduced
from tests.unit.backends_cuda.conftest import Chip
from tests.unit.operators.exactness import U, assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = Options(-100, 0.0, 0.0)
FULL = Options(3, 0.1, 0.01)
# Short rows end at 512 float32 and 1,024 16-bit elements; a round of a block's threads is 4,096
# and 8,192. 9 rows are more than the 8 of a block for short ones.
VOCABULARIES = (1, 7, 8, 9, 67, 511, 512, 513, 1023, 1024, 1025, 4099, 8195)


def _inputs(chip: Chip, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[1])
    logits = 3.0 * torch.randn(shape, generator=generator)
    target = torch.randint(shape[1], (shape[0],), generator=generator)
    target[0], target[-1] = 0, shape[1] - 1
    return logits.to(dtype).to(chip.device), target.to(chip.device)


def _want(logits: Tensor, target: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, lse and the gradient of their sum, by float64 autograd."""
    wide = logits.cpu().double().requires_grad_()
    target = target.cpu()
    lse = torch.logsumexp(wide, -1)
    kept = target != options.ignore_index
    picked = wide.gather(-1, torch.where(kept, target, 0)[:, None])[:, 0]
    losses = (1 - options.label_smoothing) * (lse - picked)
    losses = losses + options.label_smoothing * (lse - wide.mean(-1)) + options.z_loss * lse**2
    losses = torch.where(kept, losses, 0.0)
    (gradient,) = torch.autograd.grad(losses.sum(), wide)
    return losses.detach(), lse.detach(), gradient


def _forward(chip: Chip, logits: Tensor, target: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    loss = torch.empty(target.shape, dtype=torch.float32, device=target.device)
    lse = torch.empty_like(loss)
    loss_of_rows(chip.kernels, logits, target, loss, lse, options)
    return loss, lse


def _gradient(
    chip: Chip, logits: Tensor, target: Tensor, options: Options, out: Tensor | None = None
) -> Tensor:
    _, lse = _forward(chip, logits, target, options)
    one = torch.ones((), device=logits.device)
    out = torch.empty_like(logits).contiguous() if out is None else out
    gradient_of_rows(chip.kernels, one, None, logits, target, lse, out, options)
    return out


Direction = Literal["forward", "backward"]


def _call(chip: Chip, direction: Direction, *args: Any, options: Options, **attrs: Any) -> Any:
    (row,) = chip.table.rows("cross_entropy", direction)
    return row.function(*args, **options._asdict(), **attrs)


@pytest.mark.parametrize("options", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_rows_of_any_length_are_those_of_float64(
    chip: Chip, vocabulary: int, dtype: torch.dtype, options: Options
) -> None:
    rows = 9 if vocabulary < 1025 else 2
    logits, target = _inputs(chip, (rows, vocabulary), dtype)
    losses, lses, gradient = _want(logits, target, options)
    loss, lse = _forward(chip, logits, target, options)
    # A thread adds up to vocabulary / 32 terms; the rest are the steps behind the sum.
    count = 12 + vocabulary / 32
    assert_close(loss.cpu(), losses, count)
    assert_close(lse.cpu(), lses, count)
    # exp(x - lse) carries the roundings of x - lse and lse, each below 32 here.
    assert_close(_gradient(chip, logits, target, options).cpu(), gradient, 70, ulps=0.51)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [5, 67, 1100])
def test_gradient_in_place_and_in_other_dtypes_has_the_same_bits(
    chip: Chip, vocabulary: int, dtype: torch.dtype
) -> None:
    logits, target = _inputs(chip, (4, vocabulary), dtype)
    target[1] = FULL.ignore_index
    apart = _gradient(chip, logits, target, FULL)
    wide = logits.to(torch.float32, copy=True)
    rounded = torch.empty_like(logits)
    _gradient(chip, wide, target, FULL, out=rounded)
    _gradient(chip, logits, target, FULL, out=logits)
    assert torch.equal(logits, apart)
    assert torch.equal(rounded, _gradient(chip, wide, target, FULL).to(dtype))


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_gradient_at_another_place_of_a_vector_has_the_same_bits(chip: Chip, offset: int) -> None:
    logits, target = _inputs(chip, (3, 64), torch.bfloat16)
    shifted = torch.zeros(3 * 64 + 8, dtype=torch.bfloat16, device=chip.device)
    out = shifted[offset : offset + 3 * 64].view(3, 64)
    _gradient(chip, logits, target, PLAIN, out=out)
    assert torch.equal(out, _gradient(chip, logits, target, PLAIN))
    assert not shifted[:offset].any()
    assert not shifted[offset + 3 * 64 :].any()


def test_ignored_rows_are_exactly_zero_whatever_their_logits_are(chip: Chip) -> None:
    logits, target = _inputs(chip, (4, 40), torch.float32)
    logits[1], logits[2, 7] = math.inf, math.nan
    target[1:3] = PLAIN.ignore_index
    loss, _ = _forward(chip, logits, target, PLAIN)
    gradient = _gradient(chip, logits, target, PLAIN)
    assert loss[1:3].tolist() == [0.0, 0.0]
    assert loss.isfinite().all()
    assert torch.equal(gradient[1:3], torch.zeros_like(gradient[1:3]))
    assert gradient[[0, 3]].abs().min() > 0


@pytest.mark.parametrize("vocabulary", [40, 700])
def test_lse_of_infinite_logits_is_that_of_torch(chip: Chip, vocabulary: int) -> None:
    logits, target = _inputs(chip, (8, vocabulary), torch.float32)
    logits[0, 3] = math.inf
    logits[1] = -math.inf
    logits[2, vocabulary // 2 :] = -math.inf
    logits[3, 5] = math.nan
    logits[4, 1], logits[4, 9] = math.inf, -math.inf
    logits[5] *= 1e38
    logits[6] -= 300.0
    want = torch.logsumexp(logits.cpu().double(), -1)
    _, lse = _forward(chip, logits, target, PLAIN)
    torch.testing.assert_close(lse.cpu().double(), want, rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("wrong", [11, -1, 2**40])
def test_target_that_is_no_class_gives_nan_in_its_row_alone(chip: Chip, wrong: int) -> None:
    logits, target = _inputs(chip, (3, 11), torch.float32)
    target[1] = wrong
    loss, lse = _forward(chip, logits, target, PLAIN)
    gradient = _gradient(chip, logits, target, PLAIN)
    assert loss.isnan().tolist() == [False, True, False]
    assert gradient.isnan().all(-1).tolist() == [False, True, False]
    assert not gradient[[0, 2]].isnan().any()
    assert lse.isfinite().all()


# One tile, its end, the next one; several tiles.
@pytest.mark.parametrize("rows", [0, 1, 300, 8192, 8193, 30_000])
def test_reduction_over_rows_is_that_of_float64(chip: Chip, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    losses = torch.rand(rows, generator=generator)
    target = torch.randint(-2, 5, (rows,), generator=generator)
    losses[target == -1] = 0.0
    device = (losses.to(chip.device), target.to(chip.device))
    total = reduced(chip.kernels, *device, -1, "sum")
    mean = reduced(chip.kernels, *device, -1, "mean")
    count = divisor(chip.kernels, device[1], -1, "mean")
    kept = int((target != -1).sum())
    # 32 of a thread, then two trees of 8 levels, and the division.
    assert abs(total.item() - losses.double().sum().item()) <= 60 * 2**-24 * rows
    assert count is not None
    assert count.item() == kept
    want = losses.double().sum().item() / kept if kept else math.nan
    torch.testing.assert_close(mean.item(), want, rtol=60 * 2**-24, atol=0, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradient_is_weighted_as_the_loss_is_reduced(chip: Chip, reduction: str) -> None:
    logits, target = _inputs(chip, (5, 30), torch.float32)
    target[2] = FULL.ignore_index
    _, lse = _forward(chip, logits, target, FULL)
    grad = torch.linspace(0.5, 2.5, 5, device=chip.device) if reduction == "none" else 0.75
    grad = torch.as_tensor(grad, device=chip.device)
    (got,) = _call(
        chip, "backward", grad, logits, target, lse, options=FULL, reduction=reduction,
        needs=(True,),
    )  # fmt: skip
    kept = int((target != FULL.ignore_index).sum()) if reduction == "mean" else 1
    _, _, gradient = _want(logits, target, FULL)
    weight = grad.cpu().double().expand(5)[:, None] / kept
    assert_close(got.cpu(), gradient * weight, 70)


def test_rows_that_are_2_to_the_31_elements_apart_are_found(chip: Chip) -> None:
    # 4 GiB of addresses, of which a few pages are touched.
    stride, vocabulary = 2**31 + 8, 33
    buffer = torch.empty(stride + vocabulary, dtype=torch.bfloat16, device=chip.device)
    logits = buffer.as_strided((2, vocabulary), (stride, 1))
    near, target = _inputs(chip, (2, vocabulary), torch.bfloat16)
    logits.copy_(near)
    loss, _ = _forward(chip, logits, target, PLAIN)
    _gradient(chip, logits, target, PLAIN, out=logits)
    # Rows that start at other places of a vector are added up in another order.
    assert_close(loss, _forward(chip, near, target, PLAIN)[0].double(), 12)
    torch.testing.assert_close(logits, _gradient(chip, near, target, PLAIN), rtol=2**-7, atol=0)


# linear_cross_entropy


@pytest.mark.parametrize(
    ("logits", "steps"), [(1 << 26, [300]), (100 * 260, [256, 44]), (150, [1])]
)
def test_chunks_hold_no_more_than_the_limit_in_whole_tiles(
    monkeypatch: pytest.MonkeyPatch, logits: int, steps: list[int]
) -> None:
    monkeypatch.setattr(linear_loss, "LOGITS", logits)
    made = [len(range(300)[chunk]) for chunk in linear_loss.chunks(300, 100)]
    assert made[: len(steps)] == steps
    assert sum(made) == 300


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_in_chunks_is_that_of_float64(
    chip: Chip, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, reduction: str
) -> None:
    monkeypatch.setattr(linear_loss, "LOGITS", 4 * 37)  # 4, 4 and 2 of 10 rows
    generator = torch.Generator().manual_seed(7)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 5, 24), (37, 24), (37,))
    )
    target = torch.randint(37, (2, 5), generator=generator)
    target[0, 2] = FULL.ignore_index
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    logits = torch.nn.functional.linear(*leaves)
    flat = logits.reshape(10, 37)
    losses, _, dlogits = _want(flat.detach(), target.reshape(-1), FULL)
    kept = int((target != FULL.ignore_index).sum()) if reduction == "mean" else 1
    want = torch.autograd.grad(flat, leaves, dlogits / kept)
    device = [t.to(chip.device) for t in (x, weight, target, bias)]
    (forward,) = chip.table.rows("linear_cross_entropy", "forward")
    (backward,) = chip.table.rows("linear_cross_entropy", "backward")
    attrs = {**FULL._asdict(), "reduction": reduction}
    loss, lse = forward.function(*device, **attrs)
    grad = torch.ones_like(loss)
    got = backward.function(grad, *device, lse, **attrs, needs=(True, True, True))
    expected = losses.sum() / kept if reduction == "mean" else losses.view(2, 5)
    assert_close(loss.cpu(), expected, 12 + 24 + 37)
    # The gradient of the logits may be rounded to the tensors' type; then every term of a sum has
    # the roundings of a float32 sum of up to 37 terms.
    unit = torch.finfo(dtype).eps / 2
    error = (unit + 40 * U) * dlogits.abs() / kept + 70 * U / kept
    wide = x.reshape(10, 24).abs().double()
    errors = (error @ weight.abs().double(), error.t() @ wide, error.sum(0))
    for name, mine, theirs, terms in zip(
        ("dx", "dweight", "dbias"), got, want, errors, strict=True
    ):
        allowed = terms.reshape(theirs.shape) + 1.02 * unit * theirs.abs()
        assert mine.dtype == dtype, name
        assert torch.all((mine.cpu().double() - theirs).abs() <= allowed), name
