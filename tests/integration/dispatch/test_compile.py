"""torch.compile(fullgraph=True): forward, backward, optimizer step, and when it compiles again.

torch.export, strict and not, and what the exported program computes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs

import anychip
from anychip import FallbackError, OperatorTable, ops
from tests.unit.dispatch.calls import DIFFERENTIABLE, SPECS, WRITING, bits, call, gradients, tensors
from tests.unit.dispatch.tables import Install

# Parts of torch's own compiler still use torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")

VOCABULARY, WIDTH, HEADS = 61, 32, 4


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _targets(graphs: EagerAndRecordGraphs) -> list[str]:
    return [str(n.target) for g in graphs.graphs for n in g.graph.nodes if n.op == "call_function"]


def _recorded(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    graphs = EagerAndRecordGraphs()
    result = torch.compile(function, backend=graphs, fullgraph=True)(*args)
    return result, _targets(graphs)


# a model, built from operators alone


def _parameters() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [
        (VOCABULARY, WIDTH), (WIDTH,), (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH,),
        (4 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH),
    ]  # fmt: skip
    made = [torch.randn(s) * 0.3 for s in shapes]
    return [p.requires_grad_() for p in made]


def _loss(tokens: Tensor, params: list[Tensor], rng: Tensor) -> Tensor:
    table, norm, qkv, out, scale, shift, up, down = params
    batch, length = tokens.shape
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    angles = positions / 100 ** torch.arange(0, 1, 2 / (WIDTH // HEADS))
    x = ops.embedding(tokens, table)
    y = ops.linear(ops.rms_norm(x, norm), qkv).view(batch, length, 3 * HEADS, WIDTH // HEADS)
    q, k, v = y.chunk(3, 2)
    q, k = ops.rope(q, k, angles.cos(), angles.sin())
    y = ops.attention(q, k, v, causal=True).reshape(batch, length, WIDTH)
    x = x + ops.dropout(ops.linear(y, out), rng, p=0.1)
    y = ops.linear(ops.layer_norm(x, scale, shift), up)
    x = x + ops.linear(ops.swiglu(*y.chunk(2, -1)), down)
    logits = ops.linear(ops.gelu(x), table)
    return ops.cross_entropy(logits[:, :-1], tokens[:, 1:], z_loss=1e-3)


def _update(params: list[Tensor], grads: list[Tensor], state: list[Any]) -> Tensor:
    firsts, seconds, rate, step = state
    norm = ops.l2_norm(grads)
    ops.clip(grads, norm, max_norm=1.0)
    ops.adamw(params, grads, firsts, seconds, rate, step)
    return norm


def _state(params: list[Tensor]) -> list[Any]:
    zeros = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    return [*zeros, torch.tensor(1e-2), torch.tensor(0.0)]


def _train(
    loss: Callable[..., Tensor], update: Callable[..., Tensor], steps: int
) -> tuple[list[float], list[Tensor]]:
    params = _parameters()
    state, generator, found = _state(params), torch.Generator().manual_seed(1), []
    for step in range(steps):
        shape = (2 + step % 5, 8 + 3 * (step % 4))
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        value = loss(tokens, params, torch.tensor([7, 1000 * step]))
        grads = list(torch.autograd.grad(value, params))
        norm = update(params, grads, state)
        found += [value.item(), norm.item()]
    return found, params


@pytest.mark.grid
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training_of_twenty_steps_with_varying_shapes_compiles_at_most_three_times(
    backend: str,
) -> None:
    """Forward, backward and step; at most two recompiles of each."""
    counts = [CompileCounterWithBackend(backend) for _ in range(2)]
    loss = torch.compile(_loss, backend=counts[0], fullgraph=True)
    update = torch.compile(_update, backend=counts[1], fullgraph=True)
    got, got_params = _train(loss, update, 20)
    want, want_params = _train(_loss, _update, 20)
    assert [c.frame_count <= 3 for c in counts] == [True, True], [c.frame_count for c in counts]
    assert not torch._dynamo.utils.counters["graph_break"]
    # inductor may fuse the additions between operators: a few float32 roundings per step, which
    # twenty AdamW steps of 1e-2 turn into differences far below the loss.
    assert got == pytest.approx(want, rel=1e-3)
    assert want[0] > want[-2]
    for one, other in zip(got_params, want_params, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    served = {r.operator: r.kind for r in anychip.provenance().rows() if r.direction == "forward"}
    assert {served[name] for name in SPECS if name in served} <= {"native", "mapped"}


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_operator_compiled_with_aot_gives_the_bits_of_eager(
    name: str, dtype: torch.dtype
) -> None:
    made, eager = call(name, dtype=dtype, grad=True), call(name, dtype=dtype, grad=True)
    compiled = torch.compile(made.__call__, backend="aot_eager", fullgraph=True)
    got, want = compiled(), eager()
    assert bits(got) == bits(want)
    assert bits(gradients(got, made.leaves())) == bits(gradients(want, eager.leaves()))


@pytest.mark.grid
@pytest.mark.parametrize("pin", ["cpu", "reference"])
@pytest.mark.parametrize("name", [
    "clip", "unscale_and_check", "adamw", "sgd", "lion", "lamb", "l2_norm", "sums_of_squares",
])  # fmt: skip
def test_list_operator_compiled_with_aot_gives_the_bits_of_eager(name: str, pin: str) -> None:
    made, eager = call(name, 1, grad=False), call(name, 1, grad=False)
    written = made.args[0][0]
    if name in ("adamw", "sgd", "lion", "lamb"):
        written.requires_grad_()
    with anychip.policy(pin={name: pin}):
        compiled = torch.compile(made.__call__, backend="aot_eager", fullgraph=True)
        assert bits([compiled(), list(made.args)]) == bits([eager(), list(eager.args)])
    assert written.is_leaf


# what is in the graph


@pytest.mark.grid
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_row_stays_opaque_and_a_reference_is_inlined(name: str) -> None:
    made = call(name, grad=False)
    want = bits(made())
    got, targets = _recorded(made.__call__)
    assert bits(got) == want
    assert targets == [f"anychip.{name}.default"] or targets[0] == f"anychip.{name}.default"
    torch._dynamo.reset()
    with anychip.policy(pin={name: "reference"}):
        eager = bits(made())
        got, targets = _recorded(made.__call__)
        assert bits(got) == eager
    assert targets
    assert not any("anychip" in t for t in targets), targets


def test_operator_without_any_row_is_inlined_and_recorded(install: Install) -> None:
    install(alone=True)
    anychip.provenance(reset=True)
    _, targets = _recorded(lambda: ops.gelu(torch.ones(3)))
    assert not any("anychip" in t for t in targets)
    (row,) = anychip.provenance().fallbacks()
    assert row.operator == "gelu"
    assert "inlined by the compiler" in str(row.fallback_reason)


def test_operator_pinned_to_a_row_that_is_not_there_is_an_error_not_the_reference(
    install: Install,
) -> None:
    install(alone=True)
    with anychip.policy(pin={"gelu": "cpu"}), pytest.raises(FallbackError, match="pinned to 'cpu'"):
        torch.compile(ops.gelu, backend="eager", fullgraph=True)(torch.ones(3))


def test_row_for_another_dtype_than_the_indices_stays_opaque() -> None:
    """embedding's first tensor is an index; what decides is the weight."""
    indices, weight = torch.tensor([1, 0]), torch.randn(3, 4)
    for pin in ({}, {"embedding": "cpu"}):
        with anychip.policy(pin=pin):
            _, targets = _recorded(ops.embedding, indices, weight)
        assert targets == ["anychip.embedding.default"]
        torch._dynamo.reset()


# when it compiles again


def test_policy_and_use_are_guarded_so_that_no_choice_is_stale() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: ops.gelu(x) + 1, backend=counter, fullgraph=True)
    x = torch.randn(5)
    want = ops.gelu(x) + 1
    anychip.provenance(reset=True)
    for _ in range(3):
        assert torch.equal(compiled(x), want)
    assert counter.frame_count == 1
    with anychip.policy(pin={"gelu": "reference"}):
        torch.testing.assert_close(compiled(x), want)
        assert counter.frame_count == 2
    assert torch.equal(compiled(x), want)
    anychip.use("cpu")
    assert torch.equal(compiled(x), want)
    assert counter.frame_count == 3
    assert {r.kind: r.calls for r in anychip.provenance().rows()} == {"native": 5, "reference": 1}


def test_policy_that_is_entered_on_every_step_compiles_once() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(ops.gelu, backend=counter, fullgraph=True)
    x = torch.randn(5)
    for _ in range(12):
        with anychip.policy(fallback="strict"):
            compiled(x)
        compiled(x)
    assert counter.frame_count == 2


def test_strict_policy_reaches_into_compiled_code(install: Install) -> None:
    install(alone=True)
    compiled = torch.compile(ops.gelu, backend="eager", fullgraph=True)
    x = torch.randn(5)
    compiled(x)
    with anychip.policy(fallback="strict"), pytest.raises(FallbackError, match="gelu"):
        compiled(x)
    compiled(x)


def test_limits_hold_on_every_call_of_compiled_code(install: Install) -> None:
    table, log = OperatorTable(), []

    @table.forward("gelu", limits={"numel": range(1, 9)})
    def small(x: Tensor, *, approximate: str) -> Tensor:
        log.append(x.numel())
        return SPECS["gelu"].forward(x, approximate=approximate)

    install(table)
    compiled = torch.compile(ops.gelu, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (4, 9, 8, 100, 5):
        compiled(torch.ones(count))
    assert log == [4, 8, 5]


# modes inside of compiled code


@pytest.mark.grid
@pytest.mark.parametrize("pin", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["linear", "swiglu", "attention", "rms_norm"])
def test_autocast_in_compiled_code_gives_the_dtype_and_bits_of_eager(name: str, pin: str) -> None:
    made = call(name, grad=False)
    if name == "swiglu":
        made = made._replace(args=(made.args[0].bfloat16(), made.args[1]))

    def function() -> Any:
        with torch.autocast("cpu"):
            return made()

    with anychip.policy(pin={name: pin}):
        want = function()
        got = torch.compile(function, backend="aot_eager", fullgraph=True)()
    assert bits(got) == bits(want)
    assert (tensors(got)[0].dtype == torch.bfloat16) == (SPECS[name].autocast == "lower")


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transform_in_compiled_code_gives_the_result_of_eager(transform: str) -> None:
    x, w = torch.randn(4, 8), torch.randn(8)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "vmap": lambda a: torch.func.vmap(lambda row: ops.rms_norm(row, w))(a),
        "grad": lambda a: torch.func.grad(lambda b: ops.rms_norm(b, w).square().sum())(a),
    }
    function = functions[transform]
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, function(x), rtol=1e-6, atol=1e-6)


def test_wrong_shapes_in_compiled_code_are_refused_with_our_message() -> None:
    compiled = torch.compile(ops.rms_norm, backend="eager", fullgraph=True)
    compiled(torch.ones(2, 8), torch.ones(8))
    with pytest.raises(Exception, match=r"weight must have shape \(8,\)"):
        compiled(torch.ones(2, 8), torch.ones(7))


class Block(nn.Module):
    """A norm, a product, an activation and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.Parameter(torch.rand(16))
        self.up = nn.Parameter(torch.randn(24, 16))
        self.down = nn.Parameter(torch.randn(16, 12))

    def forward(self, x: Tensor, rng: Tensor) -> Tensor:
        y = ops.linear(ops.rms_norm(x, self.norm), self.up)
        y = ops.linear(ops.swiglu(*y.chunk(2, -1)), self.down)
        return ops.gelu(x + ops.dropout(y, rng, p=0.2))


@pytest.mark.grid
@pytest.mark.parametrize("pinned", [False, True], ids=["rows", "references"])
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exported_module_computes_what_the_module_does(strict: bool, pinned: bool) -> None:
    names = ("rms_norm", "linear", "swiglu", "gelu", "dropout")
    pins = dict.fromkeys(names, "reference") if pinned else {}
    block, rng = Block(), torch.tensor([1, 2])
    x, other = torch.randn(3, 5, 16), torch.randn(7, 5, 16)
    batch = torch.export.Dim("batch", min=2, max=100)
    with anychip.policy(pin=pins):
        program = torch.export.export(
            block, (x, rng), dynamic_shapes=({0: batch}, None), strict=strict
        )
        for given in (x, other):
            torch.testing.assert_close(
                program.module()(given, rng), block(given, rng), rtol=1e-6, atol=1e-6
            )
    targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    ours = {t for t in targets if t.startswith("anychip")}
    assert bool(ours) != pinned, targets


class One(nn.Module):
    """One operator."""

    def __init__(self, name: str, attrs: dict[str, Any]) -> None:
        super().__init__()
        self.name, self.attrs = name, attrs

    def forward(self, *args: Any) -> Any:
        return getattr(ops, self.name)(*args, **self.attrs)


@pytest.mark.grid
@pytest.mark.parametrize("name", [n for n in SPECS if n not in WRITING])
def test_every_operator_without_writes_is_exported_and_keeps_its_bits(name: str) -> None:
    made = call(name, grad=False)
    program = torch.export.export(One(name, made.attrs), made.args, strict=False)
    assert bits(program.module()(*made.args)) == bits(made())
