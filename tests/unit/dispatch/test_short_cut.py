"""The short cut in C does what its reference in Python does; where it is missing, that is said."""

import gc
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import anychip
from anychip import OperatorTable, ops
from anychip.dispatch import native
from anychip.dispatch.operator import Operator, registered
from tests.unit.dispatch.calls import PRODUCTS, SPECS, bits, call, every_sample, tensors
from tests.unit.dispatch.tables import Install, deterministic

needs_native = pytest.mark.skipif(native.module is None, reason=native.problem)


def in_python(operator: Operator[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call as it is without the native module."""
    return Operator.__call__(operator, *args, **kwargs)


def in_c(operator: Operator[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


# what may be different from call to call


class Own(Tensor):
    pass


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


FORMS: Mapping[str, Callable[[Tensor], Any]] = {
    "as it is": lambda x: x,
    "parameter": lambda x: Parameter(x, requires_grad=x.is_floating_point()),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand(x.shape), "empty": lambda x: x[:0],
    "negative": lambda x: torch._neg_view(-x), "subclass": lambda x: x.as_subclass(Own),
    "double": lambda x: x.double(), "half": lambda x: x.half(), "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"), "None": lambda x: None, "number": lambda x: 1.5,
    "list": lambda x: [x, x],
}  # fmt: skip
CONTEXTS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "function mode": BaseTorchFunctionMode, "dispatch mode": Passing,
    "deterministic": deterministic, "forward AD": forward_ad.dual_level,
}  # fmt: skip
POLICIES: tuple[dict[str, Any], ...] = (
    {}, {"fallback": "strict"}, {"pin": "reference"}, {"pin": "native"}, {"pin": "nobody"},
    {"forbid": ["native"]}, {"fallback": "strict", "forbid": ["native"]},
)  # fmt: skip
STYLES: Mapping[str, Callable[[tuple[Any, ...], dict[str, Any], list[str]], Any]] = {
    "as the samples": lambda args, attrs, names: (args, attrs),
    "no attributes": lambda args, attrs, names: (args, {}),
    "last by name":
        lambda args, attrs, names: (args[:-1], {**attrs, names[len(args) - 1]: args[-1]}),
    "last left out": lambda args, attrs, names: (args[:-1], attrs),
    "one too many": lambda args, attrs, names: ((*args, *args), attrs),
    "unknown name": lambda args, attrs, names: (args, {**attrs, "epsilon": 1e-6}),
    "ints for floats": lambda args, attrs, names: (
        args, {n: int(v) if type(v) is float else v for n, v in attrs.items()},
    ),
    "texts": lambda args, attrs, names: (args, dict.fromkeys(attrs, "1")),
}  # fmt: skip


def _no(*args: Any, **attrs: Any) -> bool:
    return False


def _leave(*args: Any, **attrs: Any) -> Any:
    raise SystemExit(3)


CONDITIONS: tuple[dict[str, Any] | None, ...] = (
    None, {}, {"accepts": _no}, {"accepts": _leave}, {"contiguous": True}, {"alignment": 64},
    {"dtypes": {torch.bfloat16}}, {"deterministic": False}, {"limits": {"nothing": {1}}},
)  # fmt: skip
ROWS: Mapping[str, Callable[[Any], Any]] = {
    "right": lambda found: found, "wrong dtype": lambda found: [t.double() for t in tensors(found)],
    "too few": lambda found: (),
    "list": lambda found: list(found) if isinstance(found, tuple) else found,
    "raises": lambda found: 1 / 0, "ends": lambda found: _leave(),
}  # fmt: skip


USUAL = {
    "dtype": torch.float32, "grad": False, "forms": ["as it is"], "style": "as the samples",
    "context": "nothing",
}  # fmt: skip


def scene_of(conditions: dict[str, Any], **change: Any) -> dict[str, Any]:
    """A usual call and another, for which a row with conditions is not the same one."""
    calls = [USUAL, USUAL | change]
    rest = {"index": 0, "policy": {}, "row": "right", "conditions": conditions}
    return {"name": "rms_norm", "calls": calls, **rest}


@st.composite
def scenes(draw: st.DrawFn) -> dict[str, Any]:
    """Calls of one operator in a row, and what is in force. Half of the choices are the usual ones.

    An earlier call leaves a row that a later one, which differs, must not be given.
    """

    def mostly(usual: Any, others: Any) -> Any:
        return draw(st.one_of(st.just(usual), st.sampled_from(list(others))))

    name = draw(st.sampled_from(sorted(SPECS)))
    calls = [
        {
            "dtype": mostly(torch.float32, (torch.bfloat16, torch.float16)),
            "grad": draw(st.booleans()), "forms": [mostly("as it is", FORMS) for _ in range(3)],
            "style": mostly("as the samples", STYLES), "context": mostly("nothing", CONTEXTS),
        }
        for _ in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    return {
        "name": name,
        "index": draw(st.integers(0, len(every_sample([name])) - 1)),
        "calls": [USUAL, *calls], "policy": mostly({}, POLICIES),
        "conditions": draw(st.sampled_from(CONDITIONS)), "row": mostly("right", ROWS),
    }  # fmt: skip


def formed(form: str, arg: Any) -> Any:
    try:
        if isinstance(arg, list):
            return [formed(form, a) for a in arg]
        leaf = isinstance(arg, Tensor) and arg.requires_grad
        made = FORMS[form](arg.detach()) if isinstance(arg, Tensor) else arg
        return made.detach().requires_grad_() if leaf and type(made) is Tensor else made
    except (RuntimeError, IndexError):  # this tensor has no such form
        return arg


def outcome(caller: Callable[..., Any], name: str, index: int, scene: Mapping[str, Any]) -> Any:
    """What a call gives and leaves behind: results, gradients, versions, counts, or the error."""
    made = call(name, index, scene["dtype"], grad=scene["grad"])
    operator = registered()[name]
    forms = scene["forms"] * len(made.args)
    args = tuple(formed(form, arg) for form, arg in zip(forms, made.args, strict=False))
    names = [*operator.signature.positional, "nothing"]
    args, attrs = STYLES[scene["style"]](args, made.attrs, names)
    anychip.provenance(reset=True)
    found: list[Any] = []
    try:
        with CONTEXTS[scene["context"]]():
            results = caller(operator, *args, **attrs)
        found += [type(results).__name__, [type(t).__name__ for t in tensors(results)], results]
        leaves = [t for t in tensors(list(args)) if t.requires_grad and t.is_leaf]
        outputs = [t for t in tensors(results) if t.requires_grad]
        found.append([str(t.grad_fn)[:12] for t in outputs])
        if leaves and outputs:
            total = sum(t.float().sum() for t in outputs)
            found.append(torch.autograd.grad(total, leaves, allow_unused=True))
    except (Exception, SystemExit) as error:
        found += [type(error).__name__, str(error), repr(error.__cause__)]
    written = [t for t in tensors(list(args)) if not t.is_inference()]
    versions = [t._version for t in written]
    counts = anychip.provenance().to_json()
    return found, [t for t in written if t.layout == torch.strided], versions, counts


def compared(found: Any, *, exactly: bool) -> Any:
    """In a form that ``==`` compares: bits of tensors, or numbers where bits may differ."""
    if isinstance(found, Tensor):
        if found.device.type == "meta" or not exactly:
            return found.dtype, tuple(found.shape)
        return bits(found.resolve_neg().clone(memory_format=torch.contiguous_format))
    if isinstance(found, (list, tuple)):
        return [compared(f, exactly=exactly) for f in found]
    return found


def install_row(install: Install, scene: Mapping[str, Any]) -> None:
    spec, change = SPECS[scene["name"]], ROWS[scene["row"]]
    table = OperatorTable()
    if scene["conditions"] is not None:

        def row(*args: Any, **attrs: Any) -> Any:
            return change(spec.forward(*args, **attrs))

        table.forward(spec.name, **scene["conditions"])(row)
    install(table)


@needs_native
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(scene=scenes())
@example(scene=scene_of({"alignment": 64}, forms=["offset"]))
@example(scene=scene_of({"contiguous": True}, forms=["transposed"]))
@example(scene=scene_of({"deterministic": False}, context="deterministic"))
def test_call_in_c_gives_and_leaves_what_the_reference_does(
    scene: dict[str, Any], install: Install
) -> None:
    install_row(install, scene)
    name, policy = scene["name"], dict(scene["policy"])
    chosen = {key: {name: value} for key, value in policy.items() if key != "fallback"}
    exactly = name not in PRODUCTS
    for caller in (in_python, in_c):
        with anychip.policy(fallback=policy.get("fallback"), **chosen):
            found = [outcome(caller, name, scene["index"], made) for made in scene["calls"]]
        if caller is in_python:
            want = found
    assert compared(found, exactly=exactly) == compared(want, exactly=exactly)
    for one, other in zip(
        tensors([f[0] for f in found]), tensors([w[0] for w in want]), strict=True
    ):
        if not exactly and one.device.type != "meta":
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2, equal_nan=True)


# what is taken in C, and what is left to Python


@pytest.mark.grid
@needs_native
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize(("name", "index"), every_sample())
def test_plain_call_is_taken_in_c(name: str, index: int, grad: bool) -> None:
    made = call(name, index, grad=grad)
    empty = any(not t.numel() for t in tensors(list(made.args)))
    kinds = registered()[name].signature.attr_types
    odd = any(type(value) is not kinds[attr] for attr, value in made.attrs.items())
    take = registered()[name].take
    with anychip.policy(pin={name: "reference"}):
        # One call in 1,024 is left to Python, which looks at what the row gives.
        found = [take(*made.args, **made.attrs) is NotImplemented for _ in range(2)]
    assert all(found) == (empty or odd)


@needs_native
@pytest.mark.parametrize("context", [c for c in CONTEXTS if c not in ("nothing", "deterministic")])
def test_mode_is_left_to_python(context: str) -> None:
    with CONTEXTS[context]():
        taken = ops.gelu.take(torch.ones(3)) is not NotImplemented
    assert taken == (context in ("no_grad", "inference"))


@needs_native
@pytest.mark.parametrize(
    "form", ["empty", "negative", "subclass", "sparse", "opaque", "meta", "number"]
)
def test_argument_that_is_not_plain_is_left_to_python(form: str) -> None:
    made = torch.ones(3).to_mkldnn() if form == "opaque" else FORMS[form](torch.ones(3))
    assert ops.gelu.take(made) is NotImplemented
    assert ops.l2_norm.take([torch.ones(3), made]) is NotImplemented
    # And nothing else is: one call in 1,024 may be, which Python looks at.
    assert any(ops.gelu.take(torch.ones(3)) is not NotImplemented for _ in range(2))


@needs_native
def test_compiler_and_transforms_are_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    def look(x: Tensor) -> Tensor:
        taken.append(ops.gelu.take(x) is not NotImplemented)
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    look(torch.ones(3))
    assert taken == [False] * 3


@needs_native
def test_class_shows_the_reference_and_its_instances_are_called_in_c() -> None:
    """A compiler looks into what the class has; without the flag every call would pass there."""
    assert isinstance(Operator.__call__, type(in_python))
    assert Operator.__flags__ & 1 << 11, "Py_TPFLAGS_HAVE_VECTORCALL"


# references, threads, interpreters


@needs_native
@pytest.mark.parametrize("end", ["result", "gradient", "error", "special"])
def test_thousand_calls_leave_no_reference_behind(end: str) -> None:
    x, w = torch.ones(2, 8), torch.ones(8 if end != "error" else 3)
    leaf, attrs = x.clone().requires_grad_(end == "gradient"), {"eps": 1e-5}

    def calls(count: int) -> None:
        for _ in range(count):
            if end == "error":
                with pytest.raises(ValueError, match="weight"):
                    ops.rms_norm(leaf, w, **attrs)
            elif end == "special":
                ops.rms_norm.take(leaf.as_subclass(Own), w, **attrs)
            else:
                ops.rms_norm(leaf, w, **attrs)

    def held() -> list[int]:
        gc.collect()
        known = (leaf, w, attrs["eps"], ops.rms_norm, ops.rms_norm.kernel, ops.rms_norm.gradient)
        things = [*known, torch.float32, None, native.module, leaf.device, ops.rms_norm._attrs]
        return [sys.getrefcount(thing) for thing in things] + [len(gc.get_objects())]

    calls(100)
    for _ in range(3):  # what tests before have left may go meanwhile: a leak shows each time
        before = held()
        calls(1000)
        grown = max(abs(a - b) for a, b in zip(held(), before, strict=True))
        if grown < 50:
            return
    raise AssertionError(grown)


NUM_THREADS, NUM_CALLS = 8, 400


@needs_native
def test_eight_threads_under_changing_policies_count_every_call_and_get_their_own_results() -> None:
    def work(number: int) -> None:
        x, w = torch.full((2, 8), float(number + 1)), torch.ones(8)
        leaf = x.clone().requires_grad_()
        want = bits(SPECS["rms_norm"].forward(x, w, eps=1e-6)[0])
        for step in range(NUM_CALLS):
            tensor = x if step % 2 else leaf
            if step % 10 == number:
                with anychip.policy(pin={"rms_norm": "reference"}):
                    found = ops.rms_norm(tensor, w)
            else:
                found = ops.rms_norm(tensor, w)
            assert bits(found) == want
            assert found.requires_grad == (tensor is leaf)

    with anychip.policy(pin={"rms_norm": "reference"}), ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, range(NUM_THREADS)))
    assert sum(row.calls for row in anychip.provenance().rows()) == NUM_THREADS * NUM_CALLS


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("absent", "why"), [
    ("sys.modules['anychip.dispatch._native'] = None", "pip install . builds"),
    ("sys.modules['anychip.dispatch._native'] = types.SimpleNamespace(ABI=0)", "has ABI 0"),
], ids=["not built", "another ABI"])  # fmt: skip
def test_without_the_module_calls_go_in_python_and_the_reason_is_kept(
    absent: str, why: str
) -> None:
    code = f"""
import sys, types
{absent}
import torch, anychip
from anychip import ops
from anychip.dispatch import native
y = ops.rms_norm(torch.ones(2, 8, requires_grad=True), torch.ones(8))
torch.ops.anychip.rms_norm(torch.ones(2, 8), torch.ones(8))
y.sum().backward()
print(native.module, sum(r.calls for r in anychip.provenance().rows()), native.problem)
"""
    found = _python(code)
    assert found.startswith("None 3 ")
    assert why in found


@needs_native
def test_sub_interpreter_is_refused() -> None:
    interpreters = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    code = f"""
import importlib, sys
import {interpreters} as interpreters
loaded = {native.module.__spec__.origin!r}
code = '''
import importlib.util
spec = importlib.util.spec_from_file_location("anychip.dispatch._native", {{!r}})
try:
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print("loaded")
except ImportError as error:
    print(error)
'''.format(loaded)
interpreters.run_string(interpreters.create(), code)
"""
    assert "serves no sub-interpreter" in _python(code) or "not support" in _python(code)
