"""adamw_8bit: its codes against a table in numpy, its step against float64, and whole blocks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anychip
from anychip import operators, ops
from anychip.operators.adamw_8bit import BLOCK, SIGNED, UNSIGNED, Codes
from tests.unit.dispatch.calls import DTYPES, bits
from tests.unit.operators.exactness import assert_close

FORMS = pytest.mark.parametrize("form", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
NUMBERS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
SIZES = ((33,), (), (0,), (4, 5), (3, 256), (1000,))


@pytest.fixture(autouse=True)
def cpu() -> None:
    anychip.use("cpu")


def table(form: Codes) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The number of each of 256 codes, by the sentence that defines it."""
    found = []
    for code in range(256):
        size = code % 128 if form.signed else code
        e, f = divmod(size, 2**form.fraction_bits)
        fraction = f / 2**form.fraction_bits
        number = 2.0 ** (e - 15) * (1.0 + fraction) if e else 2.0**-14 * fraction
        found.append(-number if form.signed and code > 127 else number)
    return np.array(found)


def one_block(form: Codes, *values: float) -> Tensor:
    """Values of a block whose scale is 1."""
    return torch.tensor([form.largest, *values])


# Codes


@FORMS
def test_every_code_is_its_number_and_becomes_itself_again(form: Codes) -> None:
    codes = torch.arange(256).to(torch.uint8)
    numbers = form.decode(codes, torch.ones(1))
    assert numbers.tolist() == table(form).tolist()
    again, scales = form.encode(numbers)
    assert scales.tolist() == [1.0]
    # A negative zero has no code of its own.
    assert again.tolist() == [0 if code == 128 and form.signed else code for code in range(256)]


@FORMS
def test_code_is_the_nearest_number(form: Codes) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(-20 * torch.rand(1000, generator=generator))
    x = torch.randn(1000, generator=generator) * sizes
    x = x if form.signed else x.square()
    codes, scales = form.encode(x)
    each = scales.double().repeat_interleave(BLOCK)[:1000].numpy()
    assert scales.tolist() == [float(b.abs().max() / form.largest) for b in x.split(BLOCK)]
    steps, numbers = x.double().numpy() / each, table(form)
    error = np.abs(numbers[codes.numpy()] - steps)
    least = np.abs(numbers[None, :] - steps[:, None]).min(1)
    lifted = (codes.numpy() == 1) & (not form.signed)
    assert (error <= np.where(lifted, 2.0**-18, least * (1 + 1e-6))).all()


@FORMS
def test_halves_go_to_the_even_code(form: Codes) -> None:
    step = 2.0**-form.fraction_bits
    ties = [1 + step / 2, 1 + 3 * step / 2, 2 - step - step / 2, 2.0**-14 * 2.5 * step]
    codes, _ = form.encode(one_block(form, *ties))
    one = 15 << form.fraction_bits
    assert codes.tolist() == [form.top, one, one + 2, form.top - 1, 2]


def test_square_above_0_keeps_the_smallest_code() -> None:
    codes, _ = UNSIGNED.encode(one_block(UNSIGNED, 1e-12, 1e-30, 0.0))
    assert codes.tolist() == [255, 1, 1, 0]
    codes, _ = SIGNED.encode(one_block(SIGNED, 1e-12, -1e-12))
    assert codes.tolist() == [127, 0, 0]


def test_blocks_are_of_the_flattened_tensor_and_know_nothing_of_each_other() -> None:
    x = torch.ones(3, 200)
    x[1, 0], x[2, 0] = 100.0, float("inf")
    codes, scales = SIGNED.encode(x.t().contiguous().t())
    assert codes.shape == x.shape
    flat = codes.reshape(-1)
    # 200 is in the first block, 400 in the second, and the third has nothing of either.
    assert scales.tolist()[0] == pytest.approx(100 / 1.875)
    assert scales[1].isinf()
    assert scales.tolist()[2] == pytest.approx(1 / 1.875)
    assert (flat[512:] == SIGNED.top).all()
    assert (flat[256:512] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_block_that_is_not_finite_stays_so(bad: float) -> None:
    x = torch.ones(2 * BLOCK)
    x[3] = bad
    codes, scales = UNSIGNED.encode(x)
    decoded = UNSIGNED.decode(codes, scales)
    assert decoded[:BLOCK].isnan().all()
    assert (decoded[BLOCK:] == 1.0).all()


def test_block_below_the_smallest_normal_number_is_zero() -> None:
    codes, scales = SIGNED.encode(torch.full((5,), 2.0**-127))
    assert codes.tolist() == [0] * 5
    assert scales.tolist() == [0.0]


# The step


def _step(dtype: torch.dtype, shapes: Any = SIZES, count: float = 3.0) -> list[Any]:
    generator = torch.Generator().manual_seed(1)

    def normals() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes]

    firsts = [SIGNED.encode(0.1 * m) for m in normals()]
    seconds = [UNSIGNED.encode(v.square()) for v in normals()]
    states = [[s[i] for s in given] for given in (firsts, seconds) for i in (0, 1)]
    grads = [g.to(dtype) for g in normals()]
    return [normals(), grads, *states, torch.tensor(1e-2), torch.tensor(count)]


def _decoded(args: list[Any]) -> list[list[Tensor]]:
    return [
        [form.decode(*pair) for pair in zip(codes, scales, strict=True)]
        for form, codes, scales in ((SIGNED, args[2], args[3]), (UNSIGNED, args[4], args[5]))
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step_moves_by_the_decoded_averages_and_encodes_the_new_ones(dtype: torch.dtype) -> None:
    args = _step(dtype)
    wide = [[t.double() for t in tensors] for tensors in (args[0], args[1], *_decoded(args))]
    scale, clip = torch.tensor(8.0), torch.tensor(0.5)
    low = [p.bfloat16() for p in args[0]]
    args += [scale, clip, torch.tensor(0.0), low]
    ops.adamw_8bit(*args, **NUMBERS)
    assert float(args[7]) == 4.0
    for index, (p, g, m, v) in enumerate(zip(*wide, strict=True)):
        g = g / 16.0
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g.square()
        update = m / (1 - 0.9**4) / ((v / (1 - 0.95**4)).sqrt() + 1e-3)
        assert_close(args[0][index], p * (1 - 1e-3) - 1e-2 * update, 16)
        assert bits(low[index]) == bits(args[0][index].bfloat16())
        for form, place, want in ((SIGNED, 2, m), (UNSIGNED, 4, v)):
            got = form.decode(args[place][index], args[place + 1][index]).double()
            room = 2.0**-form.fraction_bits / 2 * want.abs()
            each = args[place + 1][index].repeat_interleave(BLOCK)[: want.numel()]
            floor = 2.0**-18 * each.double().view(want.shape)
            assert ((got - want).abs() <= room * (1 + 1e-4) + 2 * floor).all()


def test_step_with_found_inf_leaves_every_bit() -> None:
    args = _step(torch.float32)
    low = [p.half() for p in args[0]]
    args += [None, None, torch.tensor(1.0), low]
    before = bits([*args[:6], args[7], low])
    ops.adamw_8bit(*args, **NUMBERS)
    assert bits([*args[:6], args[7], low]) == before


def test_shards_of_whole_blocks_have_the_bits_of_the_whole() -> None:
    whole, parts = _step(torch.float32, ((1000,),)), _step(torch.float32, ((1000,),))
    cuts, blocks = (256, 512, 232), (1, 2, 1)
    shards: list[Any] = [
        list(tensors[0].split(cuts if tensors[0].numel() == 1000 else blocks))
        for tensors in parts[:6]
    ]
    ops.adamw_8bit(*whole, **NUMBERS)
    ops.adamw_8bit(*shards, *parts[6:], **NUMBERS)
    assert bits(whole) == bits(parts)


def test_strided_parameter_has_the_bits_of_a_contiguous_one() -> None:
    plain, other = _step(torch.float32, ((40, 30),)), _step(torch.float32, ((40, 30),))
    strided: list[Any] = [[t.t().contiguous().t() for t in other[i]] for i in (0, 1, 2)]
    ops.adamw_8bit(*plain, **NUMBERS)
    ops.adamw_8bit(*strided, *other[3:], **NUMBERS)
    assert bits(strided[0][0].contiguous()) == bits(plain[0][0])
    assert bits(strided[2][0].contiguous()) == bits(plain[2][0])


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_average_of_steady_gradients_arrives(beta2: float) -> None:
    """By the scale, which is no code: no code could follow a beta2 of 0.999 from step to step."""
    grad = torch.logspace(-3, 0, 300)
    args = _step(torch.float32, ((300,),), count=0.0)
    for state in args[2:6]:
        state[0].zero_()
    args[1] = [grad]
    for _ in range(400):
        ops.adamw_8bit(*args, **{**NUMBERS, "beta2": beta2})
    first, second = (tensors[0] for tensors in _decoded(args))
    # An error of half a step comes with each encoding, and what is kept of the ones before.
    assert ((first / grad - 1).abs() <= 2.0**-4 * 1.01).all()
    want = grad.square() * (1 - beta2**400)
    near = grad > grad.max() * 2.0**-7
    assert ((second / want - 1).abs()[near] <= 2.0**-4).all()


def test_squares_that_fade_are_followed_where_equal_steps_would_stand_still() -> None:
    args = _step(torch.float32, ((BLOCK,),), count=0.0)
    for state in args[2:6]:
        state[0].zero_()
    grad = torch.ones(BLOCK)
    args[1] = [grad]
    ops.adamw_8bit(*args, **NUMBERS)
    grad[1:] = 0.0  # the first keeps the scale where it is
    for _ in range(60):
        ops.adamw_8bit(*args, **NUMBERS)
    second = _decoded(args)[1][0]
    want = 0.05 * 0.95**60
    assert second[1] / second[0] < 0.01
    assert ((second[1:] / want - 1).abs() < 1.0).all()


# Bytes, and what is refused


def test_bytes_of_a_step_are_those_of_codes_and_scales() -> None:
    args = _step(torch.bfloat16, ((1024,), (100,)))
    cost = operators.adamw_8bit.cost(*args, **NUMBERS)
    written = 1124 * (4 + 1 + 1) + 2 * 4 * (4 + 1)
    assert cost.nbytes == 2 * written + 2 * 1124


@pytest.mark.parametrize(("place", "change", "message"), [
    (2, lambda t: [t[0][:3]], r"exp_avgs\[0\] must have the shape of params\[0\] \(300,\)"),
    (3, lambda t: [t[0][:1]], r"exp_avg_scales\[0\] .* shape \(2,\), got \(1,\)"),
    (5, lambda t: [], r"exp_avg_sq_scales must be as long as params \(1\), got 0"),
    (6, lambda t: t.view(1), "lr must be a 0-dim tensor"),
], ids=["codes", "scales", "no-scales", "lr"])  # fmt: skip
def test_step_with_wrong_arguments_is_refused(place: int, change: Any, message: str) -> None:
    args = _step(torch.float32, ((300,),))
    args[place] = change(args[place])
    with pytest.raises(ValueError, match=message):
        ops.adamw_8bit(*args, **NUMBERS)


def test_step_with_averages_of_another_type_is_refused() -> None:
    args = _step(torch.float32, ((300,),))
    args[2] = [args[2][0].float()]
    with pytest.raises(ValueError, match="exp_avgs must be uint8, got float32"):
        ops.adamw_8bit(*args, **NUMBERS)
