"""Rows against what the torch_npu wheel registers: schemas, and functions of shapes and dtypes.

Rows are called with tensors without data (``meta``), so that the wheel's own code answers, and no
emulator: which operators a row calls, with which arguments, and what comes back.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from anychip.contract import OperatorSpec, Row, SampleMaker  # noqa: E402
from anychip.operators import all_specs  # noqa: E402
from anychip_npu import operators, table  # noqa: E402, F401 - operators declares the rows

SPECS = {spec.name: spec for spec in all_specs()}
META = torch.device("meta")
FAMILIES = (
    "activation", "attention", "embedding", "loss", "norm", "permutation", "rope", "softmax",
)  # fmt: skip
"""Modules whose rows are called here; the others' have tests of their own."""
ROWS = [row for row in table.declared if row.function.__module__.split(".")[-1] in FAMILIES]
BROKEN = {("geglu", "backward")}
"""Rows whose operator gives two tensors on meta in this wheel, and one by its schema."""
WHOLE = [row for row in ROWS if (row.operator, row.direction) not in BROKEN]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Named(TorchDispatchMode):
    """Notes the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(f"{func.namespace}::{func._opname}")
        return func(*args, **(kwargs or {}))


class Trial(NamedTuple):
    """A call of a row's function, and what shall come back: (shape, dtype) or None each."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    attrs: dict[str, Any]
    wanted: list[Any]


def described(results: Any) -> list[Any]:
    """(shape, dtype) of each tensor, None for None."""
    results = results if isinstance(results, (tuple, list)) else (results,)
    return [None if t is None else (tuple(t.shape), t.dtype) for t in results]


def positional(spec: OperatorSpec, args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments by name, None for those that are left out."""
    words = (
        spec.signature[1 : spec.signature.index("*,")]
        if "*," in spec.signature
        else (spec.signature[1 : spec.signature.index(") ->")])
    )
    names = [part.split("=")[0].split()[-1] for part in words.split(",") if part.strip()]
    return dict(zip(names, [*args, *[None] * (len(names) - len(args))], strict=True))


def trials(row: Row, dtype: Any) -> Iterator[Trial]:
    """Each sample of the operator that the row takes, in each of its directions."""
    spec = SPECS[row.operator]
    pair = row.paired
    for sample in spec.samples(SampleMaker(META, dtype)):
        named, attrs = positional(spec, sample.args), dict(sample.attrs)
        args = tuple(named.values())
        made = spec.fake(*args, **attrs)
        made = made if isinstance(made, tuple) else (made,)
        outputs = made[: len(made) - len(spec.residuals)]
        if row.direction == "forward":
            accepts = row.accepts
            if accepts is not None and not accepts(*args, **attrs):
                continue
            own = pair.fake_residuals(*args, **attrs) if pair else made[len(outputs) :]
            yield Trial(row.function, args, attrs, described((*outputs, *own)))
        if pair or row.direction == "backward":
            yield _backward(row, named, attrs, outputs, made[len(outputs) :])


def _backward(
    row: Row, named: dict[str, Any], attrs: dict[str, Any], outputs: Any, residuals: Any
) -> Trial:
    spec, pair = SPECS[row.operator], row.paired
    single = len(outputs) == 1
    known = {**named, **{"y" if single else f"y{i}": t for i, t in enumerate(outputs)}}
    known |= {r.name: t for r, t in zip(spec.residuals, residuals, strict=True)}
    saved = [known[name] for name in spec.saved]
    needs = tuple(named[name] is not None for name in spec.differentiable)
    assert spec.backward is not None
    wanted = described(spec.backward(*outputs, *saved, **attrs, needs=needs))
    function = row.function
    if pair:
        own = {r.name for r in spec.residuals}
        saved = [known[name] for name in spec.saved if name not in own]
        saved += pair.fake_residuals(*named.values(), **attrs)
        function = pair.backward
    return Trial(function, (*outputs, *saved), {**attrs, "needs": needs}, wanted)


@pytest.fixture(autouse=True)
def on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are for chips of some series; ``meta`` is none, and shall be taken here."""
    for row in ROWS:
        monkeypatch.setitem(row.function.__globals__, "is_a2_or_a3", lambda _: True)


def identify(row: Row) -> str:
    return f"{row.operator}-{row.direction}"


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("row", WHOLE, ids=identify)
def test_row_on_meta_gives_the_shapes_and_dtypes_of_the_specification(row: Row, dtype: Any) -> None:
    found = list(trials(row, dtype))

    assert found
    for trial in found:
        assert described(trial.function(*trial.args, **trial.attrs)) == trial.wanted


@pytest.mark.parametrize("row", [row for row in ROWS if row not in WHOLE], ids=identify)
def test_row_with_a_broken_function_of_the_wheel_still_needs_its_exception(row: Row) -> None:
    trial = next(trials(row, torch.float32))

    with pytest.raises(RuntimeError, match="Unable to cast"):
        trial.function(*trial.args, **trial.attrs)


@pytest.mark.parametrize("row", WHOLE, ids=identify)
def test_row_calls_what_it_declares_and_no_other_operator_of_the_vendor(row: Row) -> None:
    with Named() as called:
        for dtype in DTYPES:
            for trial in trials(row, dtype):
                trial.function(*trial.args, **trial.attrs)

    assert set(row.calls) <= called.names
    assert {name for name in called.names if name.startswith("npu::")} <= set(row.calls)


@pytest.mark.parametrize("row", list(table.declared), ids=identify)
def test_declared_operators_are_registered(row: Row) -> None:
    assert row.calls
    for called in row.calls:
        name, _, overload = called.partition(".")
        known = [s.overload_name for s in torch._C._jit_get_schemas_for_operator(name)]
        assert overload in known if overload else known, f"{called} is not registered"


@cache
def wheel() -> bytes:
    """The adapter's libraries, in which the names of CANN's functions stand."""
    folder = Path(torch_npu.__file__).parent / "lib"
    return b"".join(path.read_bytes() for path in sorted(folder.glob("lib*.so")))


@pytest.mark.parametrize("row", list(table.declared), ids=identify)
def test_declared_functions_of_cann_are_named_by_the_wheel(row: Row) -> None:
    functions = {name for names in row.calls.values() for name in names.split(", ") if name}

    assert functions
    for name in functions:
        assert f"{name}\0".encode() in wheel(), f"the wheel does not know {name}"
