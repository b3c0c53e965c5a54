"""Rows of the emulated operator table, called through the real torch_npu, against float64 on a CPU.

It runs in an environment with torch_npu and the emulator's libraries on LD_LIBRARY_PATH, not on
Ascend silicon: agreement says that arguments arrive where they should.
"""

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

from anychip_npu.operators import table  # noqa: E402
from tests.npu.aclnn_case import Case  # noqa: E402
from tests.npu.aclnn_cases import CASES  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:Cannot create tensor with internal format:UserWarning"
)


@pytest.fixture(scope="module")
def calls() -> Callable[[str], int]:
    """How often a row was called in this process so far."""
    function = ctypes.CDLL("libopapi.so").cann_operator_calls
    function.restype = ctypes.c_long
    return lambda name: function(name.encode())


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The tensors of a result."""
    return tuple(value) if isinstance(value, Sequence) else (value,)


def inputs_of(case: Case, dtype: Any) -> list[Any]:
    """Tensors of the case's shapes, the same at each call."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for shape in case.shapes:
        value = torch.randn(shape, generator=generator)
        made.append((value if case.low is None else value.abs() + case.low).to(dtype))
    return made


def assert_near(got: Any, wanted: Any, dtype: Any, units: float) -> None:
    """Equal, or within ``units`` epsilons of the dtype times the largest reference value."""
    got = got.detach().cpu()
    assert got.shape == wanted.shape
    if not wanted.is_floating_point():
        assert torch.equal(got, wanted.to(got.dtype))
        return
    wide = got.double()
    bound = units * torch.finfo(dtype).eps * wanted.abs().max().clamp(min=1)
    assert (wide - wanted).abs().max() <= bound, f"{wide} is not {wanted}"


def run_on(case: Case, function: Any, inputs: list[Any], device: str, dtype: Any) -> Any:
    """Outputs and gradients, of a weighted sum of the outputs, on a device in a dtype."""
    with_grad = bool(case.backward)
    moved = [x.to(dtype).to(device).requires_grad_(with_grad) for x in inputs]
    outputs = as_tuple(function(*moved, *[x.to(device) for x in case.extra]))
    if not with_grad:
        return outputs, ()
    weights = torch.linspace(0.5, 2, outputs[0].numel()).reshape(outputs[0].shape)
    # Exact in each dtype, so that all see the same.
    weights = weights.to(torch.bfloat16).to(outputs[0].dtype).to(device)
    return outputs, torch.autograd.grad(outputs[0], moved, weights)


@pytest.mark.grid
@pytest.mark.parametrize(("case", "dtype"), [
    pytest.param(case, dtype, id=f"{case.name}-{str(dtype).removeprefix('torch.')}")
    for case in CASES for dtype in (case.dtypes if case.shapes else case.dtypes[:1])
])  # fmt: skip
def test_row_through_adapter_matches_float64(case: Case, dtype: Any, calls: Any) -> None:
    inputs = inputs_of(case, dtype)
    before = [calls(row) for row in case.functions]

    outputs, grads = run_on(case, case.call, inputs, "npu", dtype)
    wanted, wanted_grads = run_on(case, case.reference or case.call, inputs, "cpu", torch.float64)

    for got, reference in zip((*outputs, *grads), (*wanted, *wanted_grads), strict=True):
        assert_near(got, reference, dtype, case.units)
    pairs = zip(case.functions, before, strict=True)
    missing = [row for row, count in pairs if calls(row) == count]
    assert not missing, f"{missing} was not reached"


SOURCES = Path(__file__).parents[1] / "native" / "cann_emulator" / "operators"
# Rows that tests of their own below call.
OTHERS = {
    "aclnnApplyAdamWV2", "aclnnAmpUpdateScale", "aclnnGeluV2", "aclnnGeluBackwardV2",
    "aclnnInplaceNormal", "aclnnInplaceUniform", "aclnnInplaceRandom", "aclnnRandperm",
    "aclnnDropoutGenMaskV2", "aclnnDropoutDoMask",
}  # fmt: skip
# Rows that torch_npu 2.13.0 does not call on the emulated chip: it takes a newer form.
UNREACHED = {"aclnnMeanV2", "aclnnRotaryPositionEmbedding"}


def test_table_every_row_is_called_or_listed() -> None:
    rows = set()
    for source in SOURCES.glob("*.cpp"):
        rows |= set(re.findall(r"^[A-Z_]+\((aclnn\w+)", source.read_text(), re.MULTILINE))
    called = {row for case in CASES for row in case.functions}
    # What rows of the backend reach is asked by the conformance suite, by the rules for every chip.
    asked = {f for row in table for names in row.calls.values() for f in names.split(", ") if f}

    assert rows == called | OTHERS | UNREACHED | (rows & asked)
    assert not called & (OTHERS | UNREACHED)


@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
def test_fused_adamw_three_steps_matches_float64(amsgrad: bool, calls: Any) -> None:
    start, grads = torch.randn(6, 4), [torch.randn(6, 4) for _ in range(3)]
    before = calls("aclnnApplyAdamWV2")

    def trained(device: str, dtype: Any, fused: bool) -> Any:
        weight = torch.nn.Parameter(start.to(dtype).to(device))
        options = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": amsgrad, "fused": fused}
        optimizer = torch.optim.AdamW([weight], **options)
        for grad in grads:
            weight.grad = grad.to(dtype).to(device)
            optimizer.step()
        return weight

    assert_near(
        trained("npu", torch.float32, True), trained("cpu", torch.float64, False).detach(),
        torch.float32, 16,
    )  # fmt: skip
    assert calls("aclnnApplyAdamWV2") > before


def test_grad_scaler_grows_backs_off_and_skips_as_on_the_cpu(calls: Any) -> None:
    before = calls("aclnnAmpUpdateScale")

    def scales(device: str) -> list[Any]:
        weight = torch.nn.Parameter(torch.ones(4, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
        seen = []
        for factor in (1.0, 1.0, float("inf"), 1.0, 2.0):
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append((scaler.get_scale(), weight.tolist()))
        return seen

    assert scales("npu") == scales("cpu")
    assert calls("aclnnAmpUpdateScale") == before + 5


def test_apply_adam_w_by_name_matches_float64(calls: Any) -> None:
    start, grad = torch.randn(10), torch.randn(10)
    state = [x.npu() for x in (start, torch.zeros(10), torch.zeros(10))]
    scalars = (0.9, 0.999, 0.01, 0.1, 0.9, 0.999, 1e-8)
    before = calls("ApplyAdamW")

    torch_npu.npu_apply_adam_w(*scalars, grad.npu(), None, False, False, out=tuple(state))

    weight = torch.nn.Parameter(start.double())
    weight.grad = grad.double()
    torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1).step()
    assert_near(state[0], weight.detach(), torch.float32, 16)
    assert calls("ApplyAdamW") == before + 1


def test_scaled_masked_softmax_by_name_both_ways_matches_float64(calls: Any) -> None:
    x, upstream = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)
    mask = torch.ones(2, 1, 32, 32, dtype=torch.bool).triu(1)
    before = calls("ScaledMaskedSoftmax")

    moved = x.npu().requires_grad_()
    got = torch_npu.npu_scaled_masked_softmax(moved, mask.npu(), 0.5, False)
    (grad,) = torch.autograd.grad(got, moved, upstream.npu())

    reference = x.double().requires_grad_()
    wanted = (reference * 0.5).masked_fill(mask, float("-inf")).softmax(-1)
    (wanted_grad,) = torch.autograd.grad(wanted, reference, upstream.double())
    assert_near(got, wanted, torch.float32, 16)
    assert_near(grad, wanted_grad, torch.float32, 16)
    assert calls("ScaledMaskedSoftmax") == before + 1


@pytest.mark.parametrize(("row", "draw", "low", "high", "mean"), [
    ("aclnnInplaceNormal", lambda x: x.normal_(1, 2), -20, 20, 1),
    ("aclnnInplaceUniform", lambda x: x.uniform_(-1, 2), -1, 2, 0.5),
    ("aclnnInplaceRandom", lambda x: x.random_(3, 8), 3, 7, 5),
], ids=["normal", "uniform", "random"])  # fmt: skip
def test_random_row_same_seed_same_numbers_in_range(
    row: str, draw: Any, low: float, high: float, mean: float, calls: Any
) -> None:
    before = calls(row)

    def drawn(seed: int) -> Any:
        torch.npu.manual_seed(seed)
        return draw(torch.empty(4096, device="npu")).cpu()

    first = drawn(3)

    assert torch.equal(first, drawn(3))
    assert not torch.equal(first, drawn(4))
    assert low <= first.min()
    assert first.max() <= high
    # Six standard errors of the mean.
    assert abs(first.mean() - mean) < 6 * first.std() / 64
    assert calls(row) == before + 3


def test_randperm_row_is_a_permutation(calls: Any) -> None:
    got = torch.randperm(50, device="npu").cpu()

    assert not torch.equal(got, torch.arange(50))
    assert torch.equal(got.sort().values, torch.arange(50))
    assert calls("aclnnRandperm") > 0


def test_dropout_rows_keep_or_scale_and_mask_the_gradient(calls: Any) -> None:
    x = torch.full((64, 64), 3.0, device="npu", requires_grad=True)

    out = torch.nn.functional.dropout(x, 0.25)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))

    kept = out.detach().cpu() != 0
    assert torch.equal(out.detach().cpu(), kept * 4.0)
    assert torch.equal(grad.cpu() != 0, kept)
    # Six standard deviations of 4096 draws.
    assert abs(kept.double().mean() - 0.75) < 6 * (0.75 * 0.25 / 4096) ** 0.5
    assert calls("aclnnDropoutGenMaskV2") > 0
    assert calls("aclnnDropoutDoMask") > 1


def test_operator_without_row_names_itself() -> None:
    with pytest.raises(RuntimeError, match="aclnnErfinv: the emulator does not implement"):
        torch.erfinv(torch.ones(2, device="npu")).cpu()


def test_dtype_outside_the_documented_is_refused() -> None:
    numbers = torch.ones(2, 2, dtype=torch.int32, device="npu")

    with pytest.raises(RuntimeError, match=r"161002[\s\S]*data type 3"):
        torch.mm(numbers, numbers).cpu()


# torch_npu looks at the setting once, at the first gelu of a process. In this mode autograd's own
# thread finds no stream on the emulator, so the gradient is called directly.
COMPATIBLE_GELU = """
import torch, torch_npu
torch_npu.npu.use_compatible_impl(True)
f = torch.nn.functional
x = torch.linspace(-4, 4, 33)
for form in ("none", "tanh"):
    sides = []
    for device, dtype in (("npu", torch.float32), ("cpu", torch.float64)):
        moved = x.to(dtype).to(device)
        out = f.gelu(moved, approximate=form)
        grad = torch.ops.aten.gelu_backward(moved / 2, moved, approximate=form)
        sides.append((out.cpu().double(), grad.cpu().double()))
    print(*[float((got - ref).abs().max()) for got, ref in zip(*sides)])
"""


def test_gelu_in_compatible_mode_keeps_both_forms() -> None:
    command = [sys.executable, "-c", COMPATIBLE_GELU]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert run.returncode == 0, run.stderr
    errors = [float(number) for number in run.stdout.split()[-4:]]
    # Eight epsilons of float32 times the largest value; the forms are 4e-4 apart.
    assert max(errors) <= 8 * 4 * 2**-23
