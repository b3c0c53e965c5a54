"""Two doors, one operator: equal bits, and the short cut is taken only for plain tensors."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import anychip
from anychip import OperatorTable, ops
from tests.unit.dispatch import calls
from tests.unit.dispatch.tables import Install


class Seen(TorchDispatchMode):
    """Records the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(Tensor):
    """A subclass with nothing of its own."""


def spy_table(operator: str = "gelu") -> tuple[OperatorTable, list[Tensor]]:
    """A row that takes an address, and insists on getting a real one."""
    table, seen = OperatorTable(), []

    def look(*args: Any) -> None:
        for tensor in calls.tensors(list(args)):
            assert type(tensor) in (Tensor, Parameter), type(tensor)
            assert tensor.data_ptr() or not tensor.numel()
            assert not tensor.is_neg()
            assert tensor.layout is torch.strided
            seen.append(tensor)

    @table.forward(operator)
    def forward(*args: Any, **attrs: Any) -> Any:
        look(*args)
        return calls.SPECS[operator].forward(*args, **attrs)

    @table.backward(operator)
    def backward(*args: Any, **attrs: Any) -> Any:
        look(*args)
        return calls.SPECS[operator].backward(*args, **attrs)

    return table, seen


# equal bits


@pytest.mark.parametrize("served", ["cpu", "reference"])
@pytest.mark.parametrize("name", calls.SPECS)
def test_doors_give_equal_bits_in_both_directions(name: str, served: str) -> None:
    second, first = calls.call(name, grad=True), calls.call(name, grad=True)
    with anychip.policy(pin={name: "reference"} if served == "reference" else {}):
        through_library = calls.run(first, lambda: first.door()(*first.args, **first.attrs))
        assert calls.bits(calls.run(second)) == calls.bits(through_library)
    kinds = {row.kind for row in anychip.provenance().rows()}
    assert served != "reference" or kinds == {"reference"}


@pytest.mark.parametrize("name", calls.SPECS)
def test_doors_short_cut_is_invisible_to_the_dispatcher_until_a_mode_is_active(name: str) -> None:
    plain, watched = calls.call(name, grad=False), calls.call(name, grad=False)
    want = calls.bits([plain(), list(plain.args)])
    with Seen() as seen:
        got = calls.bits([watched(), list(watched.args)])
    assert got == want
    inner = f"anychip.{name}_forward" if name in calls.DIFFERENTIABLE else f"anychip.{name}."
    assert any(inner in n for n in seen.names), seen.names


@pytest.mark.parametrize("name", calls.DIFFERENTIABLE)
def test_parts_of_an_operator_by_hand_are_those_of_its_doors(name: str) -> None:
    made = calls.call(name, grad=False)
    operator = getattr(ops, name)
    *tensors_and_attrs, needs = calls.backward_arguments(made)
    given = tensors_and_attrs[: len(operator.gradient.kernel.names)]
    want = calls.tensors(made.door("_backward")(*tensors_and_attrs, needs))
    names = [n for n, need in zip(made.spec.differentiable, needs, strict=True) if need]

    assert calls.bits(operator.forward(*made.args, **made.attrs)) == calls.bits(
        made.door("_forward")(*calls.flat_arguments(made))
    )
    found = operator.backward(*given, needs=names, **made.attrs)
    assert [g is not None for g in found] == needs
    assert calls.bits(found) == calls.bits([g for g, need in zip(want, needs, strict=True) if need])
    assert not any(g.requires_grad for g in calls.tensors(found))


@pytest.mark.parametrize(("ask", "error", "says"), [
    (lambda x: ops.linear.backward(x), TypeError, r"takes grad0, x, weight; got 1"),
    (lambda x: ops.linear.backward(x, x, x, needs=["y"]), ValueError, r"needs names \['y'\]"),
    (lambda x: ops.gelu.backward(x, x, form="tanh"), TypeError, "unknown argument .form."),
    (lambda x: ops.gelu.backward(x, x[:1]), ValueError, "gelu_backward: grad0 must be"),
    (lambda x: ops.clip.forward([x], x), TypeError, "clip has no gradient"),
    (lambda x: ops.gelu.forward(1.0), TypeError, "x must be a tensor"),
])  # fmt: skip
def test_parts_of_an_operator_that_do_not_fit_are_refused(
    ask: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        ask(torch.ones(2, 2))


def test_autograd_result_without_a_needed_gradient_has_no_graph() -> None:
    x, w = torch.randn(3, 8), torch.randn(8)
    assert not ops.rms_norm(x, w).requires_grad
    with torch.no_grad():
        assert not ops.rms_norm(x.requires_grad_(), w).requires_grad
    with torch.inference_mode():
        assert ops.rms_norm(x, w).is_inference()


def test_gradient_of_an_argument_that_has_none_is_refused() -> None:
    q, table = torch.randn(1, 2, 2, 8, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    for rope in (ops.rope, torch.ops.anychip.rope):
        y, _ = rope(q, q, table, table.detach())
        with pytest.raises(RuntimeError, match=r"rope has no gradient for cos.*cos\.detach\(\)"):
            y.sum().backward()


def test_backward_of_batched_gradients_equals_a_loop() -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    y, batch = ops.rms_norm(x, w), torch.randn(3, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # vmap loops over what it cannot look into
        (got,) = torch.autograd.grad(y, x, batch, is_grads_batched=True, retain_graph=True)
    want = torch.stack([torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in batch])
    assert torch.equal(got, want)


def test_rope_with_one_used_output_gives_the_gradient_of_that_output() -> None:
    q, k, cos, sin = calls.call("rope", grad=True).args
    for rope in (ops.rope, torch.ops.anychip.rope):
        dq, dk = torch.autograd.grad(rope(q, k, cos, sin)[0].sum(), (q, k))
        want, _ = calls.SPECS["rope"].backward(
            torch.ones_like(q), torch.zeros_like(k), cos, sin, interleaved=False, needs=(True, True)
        )
        torch.testing.assert_close(dq, want, rtol=1e-6, atol=1e-6)
        assert not dk.any()


# tensors that are not plain


def test_kernel_never_sees_what_has_no_address(install: Install) -> None:
    table, seen = spy_table()
    install(table)
    x = torch.randn(4, 8)
    want = calls.SPECS["gelu"].forward(x, approximate="none")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert isinstance(ops.gelu(fake), FakeTensor)
    assert isinstance(ops.gelu(fake), FakeTensor)  # outside of its mode, too
    assert ops.gelu(x.to("meta")).device.type == "meta"
    assert not seen
    negative = torch.complex(x, -x).conj().imag
    assert negative.is_neg()
    assert torch.equal(ops.gelu(negative), want)
    assert torch.equal(ops.gelu(torch._efficientzerotensor(4)), torch.zeros(4))
    assert torch.equal(torch.vmap(ops.gelu)(x), want)
    assert torch.equal(ops.gelu(x.as_subclass(Named)).as_subclass(Tensor), want)
    x.requires_grad_()
    ops.gelu(x).sum().backward()
    torch.ops.anychip.gelu(x).sum().backward()
    torch.autograd.grad(ops.gelu(x), x, torch._efficientzerotensor(4, 8))
    assert seen


def test_subclass_without_methods_keeps_its_class_and_gradient() -> None:
    x, w = torch.randn(3, 8), torch.randn(8)
    named = x.clone().as_subclass(Named).requires_grad_()
    y = ops.rms_norm(named, w)
    assert type(y) is Named
    plain = x.clone().requires_grad_()
    assert calls.bits(y) == calls.bits(ops.rms_norm(plain, w))
    y.sum().backward()
    ops.rms_norm(plain, w).sum().backward()
    assert calls.bits(named.grad) == calls.bits(plain.grad)


def test_subclass_in_a_list_is_written_and_its_version_counted() -> None:
    base = torch.ones(4)
    named = base.as_subclass(Named)
    version = named._version
    ops.clip([named], torch.tensor(2.0), max_norm=1.0)
    assert torch.equal(base, torch.full((4,), 1.0 / (2.0 + 1e-6)))
    assert named._version > version


def test_subclass_with_torch_function_is_asked() -> None:
    asked = []

    class Asked(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(str(func))
            return super().__torch_function__(func, types, args, kwargs)

    ops.gelu(torch.randn(3).as_subclass(Asked))
    assert "anychip.gelu.default" in asked


@pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensor_without_strides_is_refused_by_name(convert: str) -> None:
    x = getattr(torch.randn(4, 8), convert)()
    with pytest.raises(TypeError, match=r"gelu: strided tensors with data expected, got Tensor"):
        ops.gelu(x)
    with pytest.raises(TypeError, match=r"clip: strided tensors with data expected"):
        ops.clip([x], torch.tensor(1.0))


@pytest.mark.parametrize("name", ["complex64", "float64", "int64", "bool"])
def test_dtype_that_no_operator_takes_is_refused(name: str) -> None:
    x = torch.ones(4, dtype=getattr(torch, name))
    for gelu in (ops.gelu, torch.ops.anychip.gelu):
        with pytest.raises(ValueError, match=f"gelu: x must be float32.*got {name}"):
            gelu(x)


@pytest.mark.parametrize("name", calls.DIFFERENTIABLE)
def test_meta_tensors_every_operator_give_shapes_in_both_directions(name: str) -> None:
    real, made = calls.call(name, grad=True), calls.call(name, grad=True)
    args = [
        a.detach().to("meta").requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
        for a in made.args
    ]
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    with anychip.policy(fallback="strict"):
        got = calls.floats(getattr(ops, name)(*args, **made.attrs))
        grads = torch.autograd.grad([t.sum() for t in got], leaves)
    want = calls.floats(real())
    assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want]
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    assert all(g.device.type == "meta" for g in grads)


# layouts


# tracers and copies of the operator itself


@pytest.mark.parametrize("door", [ops, torch.ops.anychip], ids=["short cut", "library"])
def test_devices_that_differ_are_refused_by_name(door: Any) -> None:
    x, w = torch.randn(3, 8), torch.randn(8, device="meta")
    with pytest.raises(ValueError, match="one device, got x on cpu, weight on meta"):
        door.rms_norm(x, w)
    with pytest.raises(ValueError, match="one device, got tensors on cpu, norm on meta"):
        door.clip([x], torch.tensor(1.0, device="meta"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torch_jit_trace_records_the_operator() -> None:
    weight, first, second = torch.randn(8), torch.randn(4, 8), torch.randn(4, 8)
    traced = torch.jit.trace(lambda x: ops.rms_norm(x, weight), (first,), check_trace=False)
    assert torch.equal(traced(second), ops.rms_norm(second, weight))


def test_symbolic_trace_records_the_operator() -> None:
    graph = torch.fx.symbolic_trace(lambda x: ops.gelu(x, approximate="tanh"))
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert targets == [torch.ops.anychip.gelu.default]
    x = torch.randn(5)
    assert torch.equal(graph(x), ops.gelu(x, approximate="tanh"))


def test_symbolic_trace_records_an_attribute_that_is_an_argument() -> None:
    graph = torch.fx.symbolic_trace(lambda x, scale: ops.softmax(x, scale=scale))
    x = torch.randn(5)
    assert torch.equal(graph(x, 0.5), ops.softmax(x, scale=0.5))


@pytest.mark.parametrize("name", calls.SPECS)
def test_copy_or_pickle_of_an_operator_is_the_operator(name: str) -> None:
    operator = getattr(ops, name)
    assert copy.deepcopy(operator) is operator
    assert pickle.loads(pickle.dumps(operator)) is operator
