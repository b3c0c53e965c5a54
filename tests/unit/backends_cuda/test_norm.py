"""Norms of the CUDA kernels: rows of any length and place, any number of rows, sums over rows."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from anychip import operators as specs
from anychip_cuda import norm
from tests.unit.backends_cuda.conftest import Chip, drawn
from tests.unit.operators.exactness import assert_close

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPS = 0.01
"""As large as it has to be to show in every row."""


class Given(NamedTuple):
    """A call of add_layer_norm and its gradients; without residual and bias of the other norms."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    grad: Tensor
    dtotal: Tensor | None


def _given(chip: Chip, rows: int, hidden: int, x: torch.dtype, residual: Any, bias: bool) -> Given:
    generator = torch.Generator().manual_seed(hidden)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(chip.device)

    return Given(
        normal(rows, hidden, dtype=x) + 1.0,
        None if residual is None else normal(rows, hidden, dtype=residual), normal(hidden, dtype=x),
        normal(hidden, dtype=FP32) if bias else None, normal(rows, hidden, dtype=x),
        None if residual is None else normal(rows, hidden, dtype=residual),
    )  # fmt: skip


def _run(
    chip: Chip, given: Given, *, needs: Any = (True,) * 4, drop: Any = None
) -> list[Tensor | None]:
    """y and the stored sum, then gradients of x, residual, weight and bias."""
    centred = given.bias is not None
    y, total, mean, rstd = norm._normed(chip.kernels, *given[:4], EPS, centred=centred, drop=drop)
    normed = given.x if total is None else total
    gradients = norm._gradients(
        chip.kernels, given.grad, normed, given.dtotal, given.weight, (mean, rstd), needs, drop
    )
    return [y, total, *gradients]


def _exact(given: Given) -> list[Tensor]:
    """The same by autograd in float64, from the sum as stored."""
    x, residual, weight, bias, grad, dtotal = (None if t is None else t.cpu() for t in given)
    total = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
    v = total.double().requires_grad_()
    w = weight.double().requires_grad_()
    b = torch.zeros_like(w) if bias is None else bias.double()
    b.requires_grad_()
    mean = 0.0 if bias is None else v.mean(-1, keepdim=True)
    y = (v - mean) / ((v - mean).square().mean(-1, keepdim=True) + EPS).sqrt() * w + b
    dv, dw, db = torch.autograd.grad(y, (v, w, b), grad.double())
    dv = dv if dtotal is None else dv + dtotal.double()
    return [y.detach(), total.double(), dv, dv, dw, db]


def _check(got: list[Tensor | None], want: list[Tensor], hidden: int) -> None:
    # A thread adds up to 32 numbers of a tile one by one, and a tile has at least 4,096 columns;
    # then come trees over 512 threads, and what layer_norm's equations round besides: 18.
    count = 32 * (1 + hidden // 4096) + 10 + 18
    for one, other in zip(got, want, strict=True):
        if one is not None:
            # A NaN is no farther from anything than is allowed.
            assert bool(one.isfinite().all())
            assert_close(one.cpu(), other, count)


# One warp to a row ends at 128 float32 and 256 16-bit elements, and with four vectors a thread at
# 512 and 1,024; a tile of 512 threads at 8,192 and 16,384, with a float32 residual at half of that;
# element by element at 256 and 4,096. The sums of a row of more than 28,032 columns do not fit into
# shared memory. Row counts: fewer than blocks, not a multiple of them, several steps of each.
CASES = [
    (5, 1, FP32, FP32), (70, 17, FP32, None), (33, 128, FP32, FP32), (9, 132, FP32, None),
    (17, 512, FP32, FP32), (6, 516, FP32, FP32), (3, 1023, FP32, FP32), (2, 8192, FP32, None),
    (2, 8196, FP32, FP32), (1, 16388, FP32, FP32), (2, 28036, FP32, FP32), (2, 8193, FP32, FP32),
    (130, 8, BF16, BF16), (37, 256, BF16, None), (7, 264, BF16, BF16), (40, 1024, BF16, BF16),
    (13, 1032, BF16, FP32), (3, 255, BF16, FP32), (2, 257, FP16, FP32), (9, 2048, FP16, FP16),
    (5, 4104, FP16, FP32), (1, 4097, BF16, BF16), (2, 8200, BF16, FP32), (2, 16384, BF16, BF16),
    (1, 16392, BF16, None), (1, 28037, BF16, FP32),
]  # fmt: skip


def _label(case: Any) -> str:
    rows, hidden, x, residual = case
    return f"{rows}x{hidden}-{'-'.join(str(d).removeprefix('torch.') for d in (x, residual))}"


@pytest.mark.parametrize("case", CASES, ids=_label)
@pytest.mark.parametrize("bias", [False, True], ids=["rms_norm", "layer_norm"])
def test_norm_and_gradients_equal_float64(chip: Chip, case: Any, bias: bool) -> None:
    rows, hidden, x, residual = case
    given = _given(chip, rows, hidden, x, residual, bias)
    _check(_run(chip, given), _exact(given), hidden)


def _shifted(tensor: Tensor) -> Tensor:
    """The same values one element behind a 16-byte boundary."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    assert flat.data_ptr() % 16
    return flat.copy_(tensor.flatten()).view(tensor.shape)


@pytest.mark.parametrize("which", [f for f in Given._fields])
def test_argument_that_is_not_aligned_changes_no_more_than_roundings(
    chip: Chip, which: str
) -> None:
    given = _given(chip, 6, 264, BF16, FP32, True)
    moved = given._replace(**{which: _shifted(getattr(given, which))})
    _check(_run(chip, moved), _exact(given), 264)


@pytest.mark.parametrize("hidden", [96, 97, 28036], ids=str)
def test_wanted_gradients_do_not_depend_on_what_else_is_wanted(chip: Chip, hidden: int) -> None:
    given = _given(chip, 7 if hidden < 100 else 2, hidden, FP32, FP32, True)
    whole = _run(chip, given)[2:]
    for needs in itertools.product((False, True), repeat=4):
        found = _run(chip, given, needs=needs)[2:]
        for need, one, other in zip(needs, found, whole, strict=True):
            assert one is None if not need else torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 4, 9, 200], ids=str)
def test_scratch_is_used_within_its_bounds_whatever_it_holds(chip: Chip, rows: int) -> None:
    given = _given(chip, rows, 300, BF16, None, True)
    _, _, mean, rstd = norm._normed(chip.kernels, *given[:4], EPS, centred=True)
    blocks, found = 6, []
    for content in (float("nan"), 3e38):
        scratch = torch.full((2 * blocks * 300 + 64,), content, device=chip.device)
        sums = torch.empty(2, 300, dtype=BF16, device=chip.device)
        arrays = (given.grad, given.x, None, given.weight, mean, rstd, None, None, *sums, scratch)
        codes = [chip.kernels.codes[BF16]] * 3
        chip.kernels.native.norm_backward(
            *(0 if a is None else a.data_ptr() for a in arrays), blocks, rows, 300, *codes,
            *chip.kernels.place(given.x),
        )  # fmt: skip
        found.append(sums)
        assert torch.equal(scratch[-64:], torch.full_like(scratch[-64:], content)) or (
            content != content and bool(scratch[-64:].isnan().all())
        )
    assert torch.equal(*found)
    _check([*found[0]], _exact(given)[4:], 300)


def test_residual_narrower_than_x_is_left_to_the_reference(chip: Chip) -> None:
    (row,) = chip.table.rows("add_rms_norm", "forward")
    x, weight = torch.ones(2, 8, dtype=BF16), torch.ones(8)
    assert row.accepts is not None
    taken = {dtype: row.accepts(x, x.to(dtype), weight, eps=EPS) for dtype in (FP32, BF16, FP16)}
    assert taken == {FP32: True, BF16: True, FP16: False}


def _rng(chip: Chip) -> Tensor:
    # The counter's lower half runs over behind element 40.
    return torch.tensor([3, 2**32 - 10], device=chip.device)


# With dropout a thread holds half as much: a tile of 512 threads ends at 4,096 float32 and 8,192
# 16-bit elements, with a float32 residual at half of that.
DROPPED = [
    (5, 1, FP32, FP32), (33, 128, FP32, FP32), (6, 516, FP32, FP32), (2, 4100, FP32, FP32),
    (2, 8196, FP32, FP32), (3, 1023, FP32, FP32), (130, 8, BF16, BF16), (40, 1024, FP16, FP16),
    (13, 1032, BF16, FP32), (3, 255, BF16, FP32), (2, 8200, FP16, FP32), (1, 16392, BF16, BF16),
    (1, 28037, BF16, FP32),
]  # fmt: skip


@pytest.mark.parametrize("case", DROPPED, ids=_label)
@pytest.mark.parametrize("bias", [False, True], ids=["rms_norm", "layer_norm"])
def test_norm_of_a_dropped_sum_and_gradients_equal_float64(
    chip: Chip, case: Any, bias: bool
) -> None:
    rows, hidden, x, residual = case
    given, rng, p = _given(chip, rows, hidden, x, residual, bias), _rng(chip).cpu(), 0.25
    assert given.residual is not None
    total = specs.bias_dropout_add.forward(given.x.cpu(), given.residual.cpu(), rng, None, p=p)
    y, _, dx, *others = _exact(given._replace(x=total, residual=None))
    scale = specs.dropout.forward(torch.ones(rows, hidden), rng, p=p).double()
    got = _run(chip, given, drop=norm.Drop(_rng(chip), p))
    assert got[1] is not None
    assert torch.equal(got[1].cpu(), total)
    _check([got[0], *got[2:]], [y, dx * scale, *others], hidden)


# Batch, groups, channels of each, their numbers: one each, by vectors, by ones, over tiles; vectors
# within a channel, across some, behind a row's last whole one; more pieces of a channel than one.
GROUPED = [
    (9, 4, 256, 1, BF16), (70, 2, 5, 1, FP32), (2, 3, 8200, 1, FP16), (3, 40, 8, 1, FP32),
    (2, 3, 4, 16, FP16), (3, 2, 2, 12, BF16), (3, 2, 10, 6, FP32), (2, 2, 8, 3, BF16),
    (2, 1, 2, 5000, BF16), (1, 2, 1, 4003, FP32), (700, 1, 3, 8, BF16),
]  # fmt: skip


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_groups_of_channels_equal_float64_whatever_is_wanted(chip: Chip, case: Any) -> None:
    batch, groups, channels, spatial, dtype = case
    x, grad = (drawn(batch, groups * channels, spatial, dtype=dtype, seed=s) for s in (0, 1))
    x += 3.0  # a variance by the mean of squares would lose digits
    weight, bias = (drawn(groups * channels, seed=s) for s in (2, 3))
    attrs = {"num_groups": groups, "eps": EPS}
    y, *saved = chip.call("group_norm", "forward", x, weight.to(dtype), bias, **attrs)
    leaves = [t.double().requires_grad_() for t in (x, weight.to(dtype), bias)]
    exact = torch.nn.functional.group_norm(leaves[0], groups, *leaves[1:], EPS)
    given, whole = (grad, x, weight.to(dtype), *saved), None
    for needs in itertools.product((True, False), repeat=3):
        found = chip.call("group_norm", "backward", *given, **attrs, needs=needs)
        whole = whole or found
        for need, one, other in zip(needs, found, whole, strict=True):
            assert torch.equal(one, other) if need else one is None
    gradients = torch.autograd.grad(exact, leaves, grad.double())
    _check([y, *(whole or ())], [exact.detach(), *gradients], channels * spatial)


ARGUMENTS = {
    "forward": "x residual weight bias y total mean rstd rows hidden eps dtype residual_dtype"
    " weight_dtype bias_dtype",
    "backward": "grad v dtotal weight mean rstd dx dresidual dweight dbias partials blocks rows"
    " hidden dtype residual_dtype weight_dtype",
}
NUMBERS: dict[str, float] = {
    "rows": 4, "hidden": 8, "eps": EPS, "blocks": 1, "p": 0.5, "groups": 2, "channels": 4,
    "spatial": 2, "parts": 1, **dict.fromkeys("bias mean dtotal dx dresidual dbias".split(), 0),
}  # fmt: skip
"""All that is no address of a tensor."""
WRONG: dict[str, list[dict[str, float]]] = {
    "norm_forward": [
        {"rows": -1}, {"hidden": -8}, {"hidden": (1 << 30) + 1}, {"x": 0}, {"weight": 0}, {"y": 0},
        {"rstd": 0}, {"total": 0}, {"residual_dtype": 2},
    ],
    "norm_backward": [{"rstd": 0}, {"partials": 0}, {"blocks": 0}, {"grad": 0}, {"rows": -1}],
    "dropout_add_norm_forward": [{"rng": 0}, {"p": 1.5}, {"p": -0.1}, {"residual": 0}],
    "dropout_add_norm_backward": [{"rng": 0}, {"p": 1.5}],
    "group_norm_forward": [{"groups": 0}, {"groups": 3}, {"channels": 2}, {"rows": 0}],
    "group_norm_backward": [{"spatial": 3}, {"parts": 0}, {"partials": 0}, {"dx": 8}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wrong"), [(n, w) for n, changes in WRONG.items() for w in changes], ids=str
)
def test_wrong_numbers_are_refused(chip: Chip, name: str, wrong: dict[str, float]) -> None:
    tensor = torch.ones(8, 8, device=chip.device)
    names = ARGUMENTS[name.rpartition("_")[2]].split()
    names += ["rng", "p"] if name.startswith("dropout") else []
    if name.startswith("group"):
        names += "groups channels spatial parts".split()[: 3 if "forward" in name else 4]
    given = {n: 0 if n.endswith("dtype") else NUMBERS.get(n, tensor.data_ptr()) for n in names}
    with pytest.raises(RuntimeError, match=f"^{name}: CUDA error 1"):
        getattr(chip.kernels.native, name)(*(given | wrong).values(), *chip.kernels.place(tensor))
