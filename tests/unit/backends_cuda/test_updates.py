"""Update rules of the CUDA kernels: lists of any sizes, types and places; scalars on the device."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from anychip.operators.lamb import trust_ratios
from anychip.operators.squares import root, rows_of
from tests.unit.backends_cuda.conftest import Chip, copied, same
from tests.unit.operators.exactness import assert_close

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
RULES = pytest.mark.parametrize("rule", ["adamw", "sgd", "sgd-plain", "lion", "lamb"])
NUMBERS: dict[str, dict[str, Any]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.999, "eps": 0.01, "weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.1, "decoupled": False},
    "sgd-plain": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.1, "decoupled": False},
    "lion": {"beta1": 0.3, "beta2": 0.95, "weight_decay": 0.1},
    "lamb": {"beta1": 0.9, "beta2": 0.999, "eps": 0.01, "weight_decay": 0.1},
}
STATES = {"adamw": 2, "sgd": 1, "sgd-plain": 0, "lion": 1, "lamb": 2}
# What the specs say of each rule, and a few that its bound counts as one.
ROUNDINGS = {"adamw": 16, "sgd": 10, "sgd-plain": 8, "lion": 10, "lamb": 24}
# Shorter than a vector; a chunk and its neighbours; two chunks and a tail.
SIZES = (0, 1, 3, 5, 1023, 16384, 16389, 33007)
LR = 0.5


class Step(NamedTuple):
    """The arguments of a rule. states has two lists, of which a rule takes some."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    step: Tensor
    scale: Tensor | None = None
    clip: Tensor | None = None
    found_inf: Tensor | None = None
    low: list[Tensor] | None = None

    def everything(self) -> list[Tensor]:
        """What a rule may write, and what it may not."""
        lists = [self.params, self.grads, *self.states, self.low or []]
        return [tensor for tensors in lists for tensor in tensors] + [self.step]


def _step(
    chip: Chip, sizes: Sequence[int], *, param: torch.dtype = FP32, grad: torch.dtype = FP32,
    low: torch.dtype | None = None, shifts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
    scalars: tuple[float | None, float | None, float | None] = (None, None, None),
    count: float = 3.0,
) -> Step:  # fmt: skip
    """Seeded tensors; shifts are of params, grads, both states and copies."""
    generator = torch.Generator().manual_seed(len(sizes))

    def normals(dtype: torch.dtype, shift: int) -> list[Tensor]:
        return [chip.at(torch.randn(n, generator=generator).to(dtype), shift) for n in sizes]

    def scalar(value: float) -> Tensor:
        return torch.tensor(value, device=chip.device)

    params, grads, first, second = (
        normals(dtype, shift)
        for dtype, shift in zip((param, grad, FP32, FP32), shifts[:4], strict=True)
    )
    for square in second:
        square.square_().add_(0.1)
    copies = None if low is None else [chip.at(p.cpu().to(low), shifts[4]) for p in params]
    given = [None if value is None else scalar(value) for value in scalars]
    return Step(params, grads, [first, second], scalar(count), given[0], given[1], given[2], copies)


def _run(
    chip: Chip, rule: str, given: Step, *, row: int = 0, trust: Tensor | None = None, **changes: Any
) -> None:
    name = rule.removesuffix("-plain")
    lr = torch.tensor(LR, device=chip.device)
    states: list[list[Tensor]] = given.states[: STATES[rule]]
    if name == "sgd" and not states:
        states = [[]]
    args = [given.params, given.grads, *states, lr, *given[3:]]
    if name == "lamb":
        args.append(trust)
    chip.table.rows(name, "forward")[row].function(*args, **{**NUMBERS[rule], **changes})


def _moved(rule: str, given: Step, index: int, **changes: Any) -> list[Tensor]:
    """The new parameter and states of one tensor, in float64, of lamb for a trust of 1."""
    n = {**NUMBERS[rule], **changes}
    p, g, m, v = (
        tensors[index].cpu().double() for tensors in (given.params, given.grads, *given.states)
    )
    g = g / (1.0 if given.scale is None else float(given.scale))
    g = g * (1.0 if given.clip is None else float(given.clip))
    decay = n["weight_decay"]
    if rule in ("adamw", "lamb"):
        t = float(given.step) + 1.0
        m = n["beta1"] * m + (1.0 - n["beta1"]) * g
        v = n["beta2"] * v + (1.0 - n["beta2"]) * g.square()
        root = (v / (1.0 - n["beta2"] ** t)).sqrt()
        u = m / (1.0 - n["beta1"] ** t) / (root + n["eps"])
        return [p - LR * (u + decay * p), m, v]
    if rule == "lion":
        u = torch.sign(n["beta1"] * m + (1.0 - n["beta1"]) * g)
        return [p * (1.0 - LR * decay) - LR * u, n["beta2"] * m + (1.0 - n["beta2"]) * g]
    kept = p * (1.0 - LR * decay) if n["decoupled"] else p
    u = g if n["decoupled"] else g + decay * p
    if rule == "sgd-plain":
        return [kept - LR * u]
    m = n["momentum"] * m + u
    return [kept - LR * (u + n["momentum"] * m if n["nesterov"] else m), m]


def _check(chip: Chip, rule: str, given: Step, **changes: Any) -> None:
    """Runs the rule and compares everything that it writes with float64."""
    trust = torch.ones(len(given.params), device=chip.device) if rule == "lamb" else None
    count = len(given.params)
    want = [_moved(rule, given, index, **changes) for index in range(count)]
    before = float(given.step)
    _run(chip, rule, given, trust=trust, **changes)
    assert float(given.step) == before + 1.0
    for index in range(count):
        states = [tensors[index] for tensors in given.states[: STATES[rule]]]
        for one, other in zip([given.params[index], *states], want[index], strict=True):
            assert_close(one.cpu(), other, ROUNDINGS[rule])
        if given.low is not None:
            copy = given.low[index]
            assert torch.equal(copy, given.params[index].to(copy.dtype))


# Rules against float64

SCALED = (1024.0, 0.25, 0.0)


@RULES
@pytest.mark.parametrize("grad", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("param", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_update_of_any_types_equals_float64(
    chip: Chip, rule: str, param: torch.dtype, grad: torch.dtype
) -> None:
    low = {FP32: BF16, BF16: FP16, FP16: FP32}[param]
    _check(chip, rule, _step(chip, (5, 1030), param=param, grad=grad, low=low, scalars=SCALED))


@RULES
@pytest.mark.parametrize("shifts", [
    (0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (3, 7, 3, 7, 3), (1, 2, 0, 0, 0), (0, 0, 0, 0, 1),
], ids=["aligned", "head-3", "head-1", "disagreeing", "copies-disagreeing"])  # fmt: skip
def test_update_of_any_sizes_and_places_equals_float64(
    chip: Chip, rule: str, shifts: tuple[int, int, int, int, int]
) -> None:
    _check(chip, rule, _step(chip, SIZES, grad=BF16, low=BF16, shifts=shifts))


@pytest.mark.parametrize("rule", ["sgd", "sgd-plain"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy-ball", "nesterov"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["coupled", "decoupled"])
def test_sgd_of_every_kind_equals_float64(
    chip: Chip, rule: str, nesterov: bool, decoupled: bool
) -> None:
    nesterov = nesterov and rule == "sgd"
    _check(chip, rule, _step(chip, (70,)), nesterov=nesterov, decoupled=decoupled)


@pytest.mark.parametrize("rule", ["adamw", "lamb"])
@pytest.mark.parametrize("count", [0.0, 1.0, 100.0, 1e5], ids=str)
def test_bias_correction_keeps_its_digits_at_any_step(chip: Chip, rule: str, count: float) -> None:
    given = _step(chip, (300,), count=count)
    for betas in ({}, {"beta1": 0.0, "beta2": 0.5}, {"beta2": 0.99999}):
        _check(chip, rule, copied(given), **betas)


@pytest.mark.parametrize("scalars", [(3.0, None, None), (None, 0.3, None)], ids=["scale", "clip"])
def test_scale_and_clip_are_applied_alone(
    chip: Chip, scalars: tuple[float | None, float | None, float | None]
) -> None:
    _check(chip, "sgd", _step(chip, (70,), scalars=scalars))


def test_lion_does_not_move_where_nothing_does(chip: Chip) -> None:
    given = _step(chip, (9,))
    for tensor in (given.grads[0], given.states[0][0]):
        tensor.zero_()
    before = copied(given.params)
    _run(chip, "lion", given, weight_decay=0.0)
    assert same(given.params, before)


# What must not be written


@RULES
@pytest.mark.parametrize("found", [1.0, math.inf, math.nan], ids=str)
def test_found_inf_leaves_every_bit(chip: Chip, rule: str, found: float) -> None:
    given = _step(chip, (5, 1030, 16390), param=BF16, low=FP16, scalars=(1024.0, None, found))
    before = copied(given)
    _run(chip, rule, given)
    assert same(given.everything(), before.everything())


@RULES
def test_update_writes_nothing_beside_its_tensors(chip: Chip, rule: str) -> None:
    rooms = [torch.ones(40_000, device=chip.device) for _ in range(5)]
    edges = ((1, 4), (7, 20_010), (20_011, 20_011), (20_016, 39_999))
    parts = [[room[a:b] for a, b in edges] for room in rooms]
    step = torch.tensor(3.0, device=chip.device)
    _run(chip, rule, Step(parts[0], parts[1], parts[2:4], step, low=parts[4]))
    touched = torch.zeros(40_000, dtype=torch.bool)
    for a, b in edges:
        touched[a:b] = True
    for room in [rooms[0], *rooms[2 : 2 + STATES[rule]], rooms[4]]:
        # A second average stays 1 for a gradient of 1; everything else moves.
        assert not bool((room.cpu() != 1.0)[~touched].any())
    assert torch.equal(rooms[0].cpu() != 1.0, touched)
    assert bool((rooms[1] == 1.0).all())


@pytest.mark.parametrize("rule", ["adamw", "sgd", "lion", "lamb"])
def test_step_is_counted_without_tensors(chip: Chip, rule: str) -> None:
    given = Step([], [], [[], []], torch.tensor(7.0, device=chip.device))
    _run(chip, rule, given)
    assert float(given.step) == 8.0


# Shards and layouts


@RULES
def test_pieces_of_a_tensor_move_like_the_whole_bit_for_bit(chip: Chip, rule: str) -> None:
    whole = _step(chip, (20_000,), grad=BF16, low=BF16, scalars=SCALED)
    one = copied(whole)

    def pieces(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0][a:b] for a, b in ((0, 1), (1, 777), (777, 16_390), (16_390, 20_000))]

    cut = Step(
        pieces(one.params), pieces(one.grads), [pieces(tensors) for tensors in one.states],
        *one[3:7], pieces(one.low or []),
    )  # fmt: skip
    ratios = [None, None] if rule != "lamb" else [torch.ones(n, device=chip.device) for n in (1, 4)]
    _run(chip, rule, whole, trust=ratios[0])
    _run(chip, rule, cut, trust=ratios[1])
    assert same(whole.everything(), one.everything())


# lamb's norms


def _sums(chip: Chip, given: Step) -> Tensor:
    args = (given.params, given.grads, *given.states, *given[3:6])
    row = chip.table.rows("lamb_sums_of_squares", "forward")[0].function
    return row(*args, **NUMBERS["lamb"])


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "shifted"])
def test_sums_of_steps_and_parameters(chip: Chip, shift: int) -> None:
    sizes = (0, 5, 1027, 9221, 20_001)
    shifts = (shift, shift, shift, shift, shift)
    given = _step(chip, sizes, param=BF16, grad=FP16, shifts=shifts, scalars=(64.0, 0.5, None))
    found = _sums(chip, given).cpu()
    params = [p.cpu() for p in given.params]
    assert torch.equal(found[0], rows_of(params))
    for index, param in enumerate(params):
        step = (param.double() - _moved("lamb", given, index)[0]) / LR
        assert_close(root(found[1, index]), step.norm(), 21)
    assert float(given.step) == 3.0


@pytest.mark.parametrize("low", [None, BF16], ids=["no-copies", "copies"])
def test_lamb_without_trust_has_the_bits_of_lamb_with_its_sums(
    chip: Chip, low: torch.dtype | None
) -> None:
    given = _step(chip, (0, 5, 1024, 5000, 20_001), low=low, scalars=SCALED)
    given.params[1].zero_()
    other = copied(given)
    trust = trust_ratios(_sums(chip, given).cpu()).to(chip.device)
    assert float(trust[1]) == 1.0
    _run(chip, "lamb", given, trust=trust)
    _run(chip, "lamb", other)
    assert same(given.everything(), other.everything())


def test_trust_multiplies_the_rate_of_its_tensor(chip: Chip) -> None:
    given = _step(chip, [20] * 130)
    want = [_moved("lamb", given, index)[0] for index in range(130)]
    before = [p.cpu().double() for p in given.params]
    trust = torch.arange(130, device=chip.device) / 64.0
    _run(chip, "lamb", given, trust=trust)
    for index in range(130):
        exact = before[index] + float(trust[index]) * (want[index] - before[index])
        assert_close(given.params[index].cpu(), exact, ROUNDINGS["lamb"])


# What is refused
