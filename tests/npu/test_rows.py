"""Rows of the npu backend on the emulator: every one is taken, in each dtype, and reaches CANN.

Values are the conformance suite's business; here are provenance, and what rows adapt.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu")

import anychip  # noqa: E402
from anychip import ops  # noqa: E402
from anychip.contract import Row, SampleMaker  # noqa: E402
from anychip.operators import all_specs  # noqa: E402
from anychip_npu import activation, table  # noqa: E402
from tests.npu.documented_rows import NOT_RUN, pages  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:Cannot create tensor with internal format:UserWarning"
)
SPECS = {spec.name: spec for spec in all_specs()}
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
Calls = Callable[[str], int]


@pytest.fixture(scope="module")
def calls() -> Calls:
    """How often a function of CANN was called in this process so far."""
    function = ctypes.CDLL("libopapi.so").cann_operator_calls
    function.restype = ctypes.c_long
    return lambda name: int(function(name.encode()))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu reads it at each call: an operator that fails raises where it is called."""
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")


def run(operator: Any, args: Any, attrs: Any, *, gradient: bool) -> None:
    """One call, and its gradients where they are wanted."""
    names = operator.signature.positional
    wanted = [gradient and name in operator.spec.differentiable for name in names]
    given = [
        a.detach().requires_grad_() if want and a is not None else a
        for a, want in zip(args, wanted, strict=False)
    ]
    outputs = operator(*given, **attrs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if gradient:
        wide = [out.float().flatten() for out in outputs if out.requires_grad]
        # Each element with a weight of its own: a gradient of ones would hide what is exchanged.
        weights = [torch.linspace(0.5, 2.0, len(out), device=out.device) for out in wide]
        sum(out @ weight for out, weight in zip(wide, weights, strict=True)).backward()
    torch.npu.synchronize()


def kind_of(operator: Any, args: Any, attrs: Any) -> str:
    """The kind of the row that would serve a forward call."""
    return str(next(line.kind for line in operator.explain(*args, **attrs).lines if line.taken))


def key(row: Row) -> tuple[str, str]:
    return row.operator, row.direction


def identify(row: Row) -> str:
    return "-".join(key(row))


@pytest.mark.grid
@pytest.mark.parametrize(
    "row", [row for row in table.declared if key(row) not in NOT_RUN], ids=identify
)
def test_row_is_taken_in_each_dtype_and_reaches_its_functions_of_cann(
    row: Row, calls: Calls
) -> None:
    functions = {name for names in row.calls.values() for name in names.split(", ")}
    before = {name: calls(name) for name in functions}
    operator = getattr(ops, row.operator)
    for dtype in row.dtypes:
        anychip.provenance(reset=True)
        for sample in operator.spec.samples(SampleMaker(torch.device("npu"), dtype)):
            given = (operator, sample.args, sample.attrs)
            if row.direction == "backward" or kind_of(*given) == "mapped":
                run(*given, gradient="backward" in row.directions)

        found = {(r.direction, r.kind, r.provider) for r in anychip.provenance().rows()}
        assert {(direction, "mapped", "npu") for direction in row.directions} <= found, dtype
    assert [name for name in functions if calls(name) == before[name]] == []


def test_fourteen_operators_and_more_are_mapped_in_every_direction() -> None:
    served = {(row.operator, d) for row in table.declared for d in row.directions} - NOT_RUN
    both = {
        name for name, spec in SPECS.items()
        if (name, "forward") in served and (spec.backward is None or (name, "backward") in served)
    }  # fmt: skip

    named = "rms_norm layer_norm add_rms_norm add_layer_norm gelu bias_gelu swiglu geglu rope"
    assert {*named.split(), "embedding", "cross_entropy", "attention", "linear"} <= both
    assert len(both) >= 14


def test_every_operator_is_mapped_or_left_to_the_reference_with_a_reason() -> None:
    served = {(row.operator, d) for row in table.declared for d in row.directions}
    left = {
        (entry.operator, direction) for entry in table.reference_only
        for direction in ("forward", "backward")
        if not entry.part and entry.direction in ("both", direction)
    }  # fmt: skip
    wanted = {
        (name, direction) for name, spec in SPECS.items() for direction in ("forward", "backward")
        if direction == "forward" or spec.backward is not None
    }  # fmt: skip

    assert wanted - served - left == set()
    assert served & left == set()
    assert {entry.operator for entry in table.reference_only} <= SPECS.keys()


@pytest.mark.parametrize("row", list(table.declared), ids=identify)
def test_row_cites_a_page_of_the_vendor(row: Row) -> None:
    assert pages(row)


# What rows adapt


def on_npu(*shape: int, dtype: Any = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(dtype).npu()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_norms_of_sums_use_the_fused_call_for_float32_only(dtype: Any, calls: Calls) -> None:
    fused = ["aclnnAddRmsNorm", "aclnnAddLayerNorm"]
    before = [calls(name) for name in fused]
    x, residual, weight = (on_npu(*s, dtype=dtype) for s in ((3, 8), (3, 8), (8,)))

    ops.add_rms_norm(x, residual, weight)
    ops.add_layer_norm(x, residual, weight)
    torch.npu.synchronize()

    more = 1 if dtype == torch.float32 else 0
    assert [calls(name) for name in fused] == [count + more for count in before]


def test_halves_of_one_tensor_are_not_copied() -> None:
    fused = on_npu(3, 4, 16)
    gate, up = fused.chunk(2, -1)

    assert activation._side_by_side(gate, up).data_ptr() == fused.data_ptr()
    assert torch.equal(activation._side_by_side(gate, up).cpu(), fused.view(12, 16).cpu())


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda gate, up: (up, gate), lambda gate, up: (gate, up.clone()),
        lambda gate, up: (gate[:, :2], up[:, :2]), lambda gate, up: (gate[..., :4], up[..., :4]),
        lambda gate, up: (gate.transpose(0, 1), up.transpose(0, 1)),
    ],
    ids=["swapped", "of two tensors", "some rows", "quarters", "transposed"],
)  # fmt: skip
def test_what_are_not_halves_of_one_tensor_is_put_side_by_side(spoilt: Any) -> None:
    gate, up = spoilt(*on_npu(3, 4, 16).chunk(2, -1))

    size = gate.shape[-1]
    wanted = torch.cat((gate.cpu().reshape(-1, size), up.cpu().reshape(-1, size)), -1)
    assert torch.equal(activation._side_by_side(gate, up).cpu(), wanted)


def test_loss_of_a_target_that_is_no_class_is_nan_in_its_row_alone() -> None:
    logits = on_npu(3, 5).requires_grad_()
    loss = ops.cross_entropy(logits, torch.tensor([1, 7, 0]).npu(), reduction="none")
    loss.sum().backward()

    assert loss.isnan().tolist() == [False, True, False]
    assert logits.grad is not None
    assert logits.grad.isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    "attrs", [{"z_loss": 1e-3}, {"label_smoothing": 0.1}], ids=["z_loss", "label_smoothing"]
)
def test_loss_that_cann_has_not_is_not_mapped(attrs: Any) -> None:
    given = (on_npu(3, 5), torch.tensor([1, 2, 0]).npu())

    assert kind_of(ops.cross_entropy, given, attrs) == "reference"
    assert kind_of(ops.cross_entropy, given, {}) == "mapped"
