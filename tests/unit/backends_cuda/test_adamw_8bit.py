"""adamw_8bit of the CUDA kernels: steps against float64, codes against a table, whole blocks."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from anychip.operators.adamw_8bit import BLOCK, SIGNED, UNSIGNED, StateCodes
from tests.unit.backends_cuda.conftest import Chip, copied, same
from tests.unit.operators.exactness import assert_close

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TYPES = [FP32, BF16, FP16]
NUMBERS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 0.01, "weight_decay": 0.1}
# Shorter than a vector and than a block; blocks, chunks and their neighbours.
SIZES = (0, 1, 3, 5, 127, 129, 255, 256, 257, 1023, 16384, 16389, 33007)
LR = 0.5
SCALED = (1024.0, 0.25, 0.0)


class Step(NamedTuple):
    """The arguments of the operator but for the learning rate."""

    params: list[Tensor]
    grads: list[Tensor]
    first: list[Tensor]
    first_scales: list[Tensor]
    second: list[Tensor]
    second_scales: list[Tensor]
    step: Tensor
    scale: Tensor | None = None
    clip: Tensor | None = None
    found_inf: Tensor | None = None
    low: list[Tensor] | None = None

    def everything(self) -> list[Tensor]:
        """What may be written, and what may not."""
        tensors = [tensor for tensors in self[:6] for tensor in tensors]
        return [*tensors, *(self.low or []), self.step]


def make(
    chip: Chip, sizes: Sequence[int], *, param: torch.dtype = FP32, grad: torch.dtype = FP32,
    low: torch.dtype | None = None, shifts: tuple[int, int, int, int] = (0, 0, 0, 0),
    scalars: tuple[float | None, float | None, float | None] = (None, None, None),
) -> Step:  # fmt: skip
    """Seeded tensors; shifts are of params, grads, codes and copies."""
    generator = torch.Generator().manual_seed(len(sizes))
    lists: list[list[Tensor]] = [[] for _ in range(6)]
    for size in sizes:
        p, g, m, v = (torch.randn(size, generator=generator) for _ in range(4))
        lists[0].append(chip.at(p.to(param), shifts[0]))
        lists[1].append(chip.at(g.to(grad), shifts[1]))
        for place, form, average in ((2, SIGNED, m), (4, UNSIGNED, v.square())):
            codes, scales = form.encode(average)
            lists[place].append(chip.at(codes, shifts[2]))
            lists[place + 1].append(chip.at(scales, shifts[2]))
    copies = None if low is None else [chip.at(p.cpu().to(low), shifts[3]) for p in lists[0]]
    given = [None if s is None else torch.tensor(s, device=chip.device) for s in scalars]
    return Step(*lists, torch.tensor(3.0, device=chip.device), *given, copies)  # type: ignore[arg-type]


def run(chip: Chip, given: Step, *, row: int = 0, **changes: Any) -> None:
    lr = torch.tensor(LR, device=chip.device)
    function = chip.table.rows("adamw_8bit", "forward")[row].function
    function(*given[:6], lr, *given[6:], **{**NUMBERS, **changes})


def averages(given: Step, index: int) -> list[Tensor]:
    """Both, in float64."""
    return [
        form.decode(codes[index].cpu(), scales[index].cpu()).double()
        for form, codes, scales in ((SIGNED, given.first, given.first_scales),
                                    (UNSIGNED, given.second, given.second_scales))
    ]  # fmt: skip


def moved(given: Step, index: int) -> list[Tensor]:
    """The new parameter and averages of one tensor, in float64."""
    p, g = (tensors[index].cpu().double() for tensors in (given.params, given.grads))
    m, v = averages(given, index)
    g = g / (1.0 if given.scale is None else float(given.scale))
    g = g * (1.0 if given.clip is None else float(given.clip))
    t = float(given.step) + 1.0
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g.square()
    update = m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 0.01)
    return [p * (1 - LR * 0.1) - LR * update, m, v]


def check_codes(form: StateCodes, codes: Tensor, scales: Tensor, want: Tensor) -> None:
    """Scales are those of float64's largest magnitudes, and codes the nearest to its quotients."""
    numbers = form.decode(torch.arange(256).to(torch.uint8), torch.ones(1)).double().numpy()
    for block, part in enumerate(want.split(BLOCK)):
        scale = float(part.abs().max()) / form.largest
        assert float(scales[block]) == pytest.approx(scale, rel=2e-6, abs=2e-7)
        steps = part.numpy() / scale
        taken = codes[block * BLOCK :][: len(part)].cpu().numpy()
        error = np.abs(numbers[taken] - steps)
        least = np.abs(numbers[None, :] - steps[:, None]).min(1) + 4e-6 * np.abs(steps) + 1e-12
        lifted = (taken == 1) & (steps > 0) & (not form.signed)
        assert (error <= np.where(lifted, np.maximum(least, 2.0**-18), least)).all()
        assert form.signed or ((taken > 0) == (steps > 0)).all()


def check(chip: Chip, given: Step) -> None:
    """Runs a step and compares everything that it writes with float64."""
    wanted = [moved(given, index) for index in range(len(given.params))]
    run(chip, given)
    assert float(given.step) == 4.0
    for index, (p, m, v) in enumerate(wanted):
        assert_close(given.params[index].cpu(), p, 16)
        if p.numel():
            check_codes(SIGNED, given.first[index], given.first_scales[index], m)
            check_codes(UNSIGNED, given.second[index], given.second_scales[index], v)
        if given.low is not None:
            copy = given.low[index]
            assert torch.equal(copy, given.params[index].to(copy.dtype))


# Steps against float64


@pytest.mark.parametrize("grad", TYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("param", TYPES, ids=["fp32", "bf16", "fp16"])
def test_step_of_any_types_equals_float64(
    chip: Chip, param: torch.dtype, grad: torch.dtype
) -> None:
    low = {FP32: BF16, BF16: FP16, FP16: FP32}[param]
    check(chip, make(chip, (5, 1030), param=param, grad=grad, low=low, scalars=SCALED))


@pytest.mark.parametrize("shifts", [
    (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1),
], ids=["aligned", "params", "grads", "codes", "copies"])  # fmt: skip
def test_step_of_any_sizes_and_places_equals_float64(
    chip: Chip, shifts: tuple[int, int, int, int]
) -> None:
    check(chip, make(chip, SIZES, grad=BF16, low=BF16, shifts=shifts))


# Codes


def test_every_code_is_its_number_and_becomes_itself_again(chip: Chip) -> None:
    """Averages that are halved keep their codes, and have half the scale."""
    given = make(chip, (256,))
    given.grads[0].zero_()
    for codes, scales in ((given.first, given.first_scales), (given.second, given.second_scales)):
        codes[0].copy_(torch.arange(256).to(torch.uint8))
        scales[0].fill_(0.75)
    before = given.params[0].cpu().double()
    m, v = (0.5 * average for average in averages(given, 0))
    t = float(given.step) + 1.0
    run(chip, given, beta1=0.5, beta2=0.5, weight_decay=0.0)
    update = m / (1 - 0.5**t) / ((v / (1 - 0.5**t)).sqrt() + 0.01)
    assert_close(given.params[0].cpu(), before - LR * update, 16)
    assert given.first_scales[0].tolist() == given.second_scales[0].tolist() == [0.375]
    # A negative zero has no code of its own.
    assert given.first[0].tolist() == [0 if code == 128 else code for code in range(256)]
    assert given.second[0].tolist() == list(range(256))


def _by_gradients(chip: Chip, grads: Tensor) -> Step:
    """A step that leaves the gradients as first averages, and their squares as second ones."""
    given = make(chip, (grads.numel(),))
    given.grads[0].copy_(grads)
    run(chip, given, beta1=0.0, beta2=0.0)
    return given


def test_halves_go_to_the_even_code(chip: Chip) -> None:
    for sign in (1.0, -1.0):
        ties = [1.0625, 1.1875, 1.8125, 2.0**-17 * 2.5, 2.0**-17 * 3.5, 2.0**-14 - 2.0**-18]
        found = _by_gradients(chip, sign * torch.tensor([1.875, *ties]))
        want = torch.tensor([127, 120, 122, 126, 2, 4, 8])
        assert found.first[0].tolist() == (want + (128 if sign < 0 else 0)).tolist()


def test_square_above_0_keeps_the_smallest_code(chip: Chip) -> None:
    found = _by_gradients(chip, torch.tensor([1.0, 1e-6, 1e-12, 0.0]))
    assert found.second[0].tolist() == [255, 1, 1, 0]
    assert found.first[0].tolist() == [127, 0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_block_that_is_not_finite_stays_so_alone(chip: Chip, bad: float) -> None:
    given = make(chip, (700,))
    given.grads[0][300] = bad
    run(chip, given)
    assert given.params[0].isfinite().sum() == 699
    for codes, scales in ((given.first, given.first_scales), (given.second, given.second_scales)):
        assert scales[0].isfinite().tolist() == [True, False, True]
        assert bool((codes[0][256:512] == 0).all())
        assert bool((codes[0][512:] != 0).any())
    run(chip, given)
    assert given.params[0].isfinite().tolist() == [not 256 <= i < 512 for i in range(700)]


# What must not be written


@pytest.mark.parametrize("found", [1.0, math.inf, math.nan], ids=str)
def test_found_inf_leaves_every_bit(chip: Chip, found: float) -> None:
    given = make(chip, (5, 1030), param=BF16, low=FP16, scalars=(1024.0, None, found))
    before = copied(given)
    run(chip, given)
    assert same(given.everything(), before.everything())
    assert float(given.step) == 3.0


@pytest.mark.parametrize("shift", [0, 1], ids=["vectors", "scalars"])
def test_step_writes_nothing_beside_its_tensors(chip: Chip, shift: int) -> None:
    size, blocks = 1000, 4
    given = make(chip, (size,), low=BF16, shifts=(shift, shift, shift, shift))
    assert given.low is not None
    run(chip, given)
    for tensor in (*given.params, *given.first, *given.second, *given.low):
        room = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage()
        )
        assert room.numel() == size + shift + 16
        assert bool((room[:shift] == 5).all())
        assert bool((room[shift + size :] == 5).all())
    for tensor in (*given.first_scales, *given.second_scales):
        room = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage()
        )
        assert bool((room[shift + blocks :] == 5).all())


def test_step_is_counted_without_tensors(chip: Chip) -> None:
    given = Step([], [], [], [], [], [], torch.tensor(7.0, device=chip.device))
    run(chip, given)
    assert float(given.step) == 8.0


# Shards and layouts


def test_shards_of_whole_blocks_move_like_the_whole_bit_for_bit(chip: Chip) -> None:
    whole = make(chip, (20_000,), grad=BF16, low=BF16, scalars=SCALED)
    one = copied(whole)

    def parts(tensors: list[Tensor], block: int = 1) -> list[Tensor]:
        cuts = (0, 256, 1024, 16_640, 20_000)
        return [tensors[0][a // block : -(-b // block)] for a, b in pairwise(cuts)]

    lists = [parts(tensors, BLOCK if place in (3, 5) else 1) for place, tensors in
             enumerate(one[:6])]  # fmt: skip
    run(chip, whole)
    run(chip, Step(*lists, *one[6:10], parts(one.low or [])))  # type: ignore[arg-type]
    assert same(whole.everything(), one.everything())


# What is refused
