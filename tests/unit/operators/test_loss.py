"""cross_entropy and linear_cross_entropy: all options at once, and what is held in memory."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import anychip
from anychip import ops
from anychip.conformance.oracles.reference import InFloat64
from anychip.operators.linear_cross_entropy import CHUNK
from anychip_cpu import native, products
from tests.unit.dispatch.calls import SPECS, bits

OPTIONS: dict[str, dict[str, Any]] = {
    f"{reduction},ls={smoothing},z={z},ignore={ignored}": {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "z_loss": z,
        "ignore_index": 3 if ignored else -100,
    }
    for reduction, smoothing, z, ignored in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.3), (0.0, 0.05), (False, True)
    )
}
ALL = OPTIONS["mean,ls=0.3,z=0.05,ignore=True"]


@pytest.fixture(params=["cpu", "reference"])
def pin(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu" and native.kernels is None:
        pytest.skip(str(native.problem))
    names = ("cross_entropy", "linear_cross_entropy")
    with anychip.policy(pin=dict.fromkeys(names, request.param)):
        yield request.param


def by_probabilities(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> Tensor:
    """The definition with a target distribution: -sum_j t_j log p_j + z (log Z)^2, row by row."""
    rows = []
    for row, label in zip(logits, target.tolist(), strict=True):
        if label == ignore_index:
            rows.append(0.0 * torch.nan_to_num(row).sum())
            continue
        wanted = torch.full_like(row, label_smoothing / len(row))
        wanted[label] += 1.0 - label_smoothing
        total = row.exp().sum()
        rows.append(-(wanted * (row.exp() / total).log()).sum() + z_loss * total.log() ** 2)
    if reduction == "none":
        return torch.stack(rows)
    count = sum(label != ignore_index for label in target.tolist())
    return torch.stack(rows).sum() / (count if reduction == "mean" else 1)


def drawn(rows: int = 7, classes: int = 11) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    target = torch.randint(classes, (rows,))
    target[::3] = 3
    return torch.randn(rows, classes), target


@pytest.mark.parametrize("label", OPTIONS)
def test_cross_entropy_equals_the_definition_by_probabilities(label: str, pin: str) -> None:
    logits, target = drawn()
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = ops.cross_entropy(leaf, target, **OPTIONS[label])
    want = by_probabilities(exact, target, **OPTIONS[label])
    # Sums of 11 terms of size 1 to 10 in float32.
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(y.sum(), x)[0] for y, x in ((got, leaf), (want, exact))]
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-5, atol=1e-7)
    assert not grads[0][target == OPTIONS[label]["ignore_index"]].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_with_smoothing_and_ignored_rows_equals_torch(
    smoothing: float, reduction: Any, pin: str
) -> None:
    logits, target = drawn()
    options: dict[str, Any] = {
        "ignore_index": 3, "label_smoothing": smoothing, "reduction": reduction,
    }  # fmt: skip
    found = []
    for function in (ops.cross_entropy, F.cross_entropy):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, target, **options)
        found.append((loss.detach(), torch.autograd.grad(loss.square().sum(), leaf)[0]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_reference_gives_losses_per_row_contiguous_however_logits_lie() -> None:
    logits = torch.randn(4, 3, 5).transpose(0, 1)
    target = torch.randint(5, (4, 3)).t()
    attrs = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "none"}
    for result in SPECS["cross_entropy"].forward(logits, target, **attrs):
        assert result.shape == (3, 4)
        assert result.is_contiguous()


def test_cross_entropy_second_derivative_with_all_options_is_that_of_the_definition() -> None:
    logits, target = drawn(4, 5)
    hessians = []
    for function, x in ((ops.cross_entropy, logits), (by_probabilities, logits.double())):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf, target, **ALL), leaf, create_graph=True)
        rows = [
            torch.autograd.grad(g, leaf, retain_graph=True, allow_unused=True)[0]
            for g in first.flatten()
        ]
        hessians.append(torch.stack([torch.zeros_like(leaf) if r is None else r for r in rows]))
    got, want = hessians
    assert want.any()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


LEAVES: dict[str, Callable[[], list[Tensor]]] = {
    "cross_entropy": lambda: [torch.randn(5, 6).double()],
    "linear_cross_entropy": lambda: [
        torch.randn(5, 4).double(), torch.randn(6, 4).double(), torch.randn(6).double()
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("label", [k for k in OPTIONS if "ls=0.3,z=0.05" in k])
def test_reference_backward_is_the_derivative_of_the_forward_and_so_is_its_own(
    label: str, name: str
) -> None:
    torch.manual_seed(1)
    spec, attrs, target = SPECS[name], OPTIONS[label], torch.tensor([3, 0, 5, 3, 1])
    leaves = [x.requires_grad_() for x in LEAVES[name]()]

    def loss(*args: Tensor) -> Any:
        placed = (args[0], target) if len(args) == 1 else (*args[:2], target, args[2])
        with InFloat64():
            return spec.forward(*placed, **attrs)

    def gradients(*args: Tensor) -> tuple[Tensor, ...]:
        results = loss(*args)
        grad = torch.linspace(1, 2, results[0].numel()).double().view(results[0].shape)
        with InFloat64():
            saved = (*args[:2], target, args[2]) if len(args) > 1 else (*args, target)
            needs = (True,) * len(args)
            return tuple(spec.backward(grad, *saved, results[1], **attrs, needs=needs))

    total = loss(*leaves)[0]
    grad = torch.linspace(1, 2, total.numel()).double().view(total.shape)
    want = torch.autograd.grad(total, leaves, grad)
    torch.testing.assert_close(gradients(*leaves), want, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(gradients, leaves)


# linear_cross_entropy


def product(rows: int, inputs: int, classes: int) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs), torch.randn(classes, inputs) * inputs**-0.5
    return x, weight, torch.randint(classes, (rows,)), torch.randn(classes)


@pytest.mark.grid
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("label", OPTIONS)
def test_linear_cross_entropy_equals_linear_then_cross_entropy(
    label: str, bias: bool, pin: str
) -> None:
    x, weight, target, shift = product(9, 16, 21)
    target[::4] = 3
    found = []
    for fused in (True, False):
        leaves = [t.clone().requires_grad_() for t in ((x, weight, shift) if bias else (x, weight))]
        own = leaves[2] if bias else None
        if fused:
            loss = ops.linear_cross_entropy(*leaves[:2], target, own, **OPTIONS[label])
        else:
            logits = ops.linear(*leaves[:2], own)
            loss = ops.cross_entropy(logits, target, **OPTIONS[label])
        found.append((loss.detach(), torch.autograd.grad(loss.square().sum(), leaves)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Records the most elements that a result of any operator has."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))
        self.numel = max([self.numel, *sizes])
        return result


def _rows(which: str) -> tuple[Any, Any]:
    spec = SPECS["linear_cross_entropy"]
    if which == "reference":
        return spec.forward, spec.backward
    if native.kernels is None:
        pytest.skip(str(native.problem))
    return products.linear_cross_entropy, products.linear_cross_entropy_backward


@pytest.mark.parametrize("which", ["cpu", "reference"])
def test_linear_cross_entropy_never_holds_the_logits(which: str) -> None:
    rows, inputs, classes = 700, 8, 4001
    x, weight, target, bias = product(rows, inputs, classes)
    forward, backward = _rows(which)
    assert rows * classes > 2 * CHUNK  # or else one chunk would be all
    with Largest() as plain:
        F.linear(x, weight, bias)
    assert plain.numel == rows * classes  # the mode sees what there is to be seen
    with Largest() as seen:
        loss, lse = forward(x, weight, target, bias, **ALL)
    assert seen.numel <= CHUNK
    with Largest() as seen:
        saved = (x, weight, target, bias, lse)
        backward(torch.ones_like(loss), *saved, **ALL, needs=(True, True, True))
    assert seen.numel <= CHUNK


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy_over_several_chunks_equals_the_whole(
    reduction: Any, pin: str
) -> None:
    x, weight, target, bias = product(700, 8, 4001)
    options = {**ALL, "reduction": reduction}
    found = []
    for fused in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        if fused:
            loss = ops.linear_cross_entropy(leaves[0], leaves[1], target, leaves[2], **options)
        else:
            wide = [t.double() for t in leaves]
            loss = by_torch(F.linear(*wide), target, **options).float()
        found.append((loss.detach(), torch.autograd.grad(loss.sum(), leaves)))
    # 700 rows add up in float32: sqrt(700) roundings of the sum, at most 700 of each term.
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def by_torch(logits: Tensor, target: Tensor, *, z_loss: float, reduction: str, **o: Any) -> Tensor:
    valid = target != o["ignore_index"]
    rows = F.cross_entropy(logits, target, reduction="none", **o)
    rows = rows + torch.where(valid, z_loss * logits.logsumexp(-1).square(), 0.0)
    return rows.sum() / valid.sum() if reduction == "mean" else rows


def test_linear_cross_entropy_in_bfloat16_has_float32_logits(pin: str) -> None:
    """Logits near 1000, 0.25 apart: in bfloat16, where an ULP is 4 there, they would be equal."""
    x = torch.tensor([[1000.0, 1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 0.25 * i] for i in range(4)], dtype=torch.bfloat16)
    loss = ops.linear_cross_entropy(x, weight, torch.tensor([3]))
    want = math.log(sum(math.exp(0.25 * i) for i in range(4))) - 0.75
    assert loss.dtype == torch.float32
    # logits of 1000 have an ULP of 6e-5 in float32
    assert float(loss) == pytest.approx(want, abs=2e-4)


def test_linear_cross_entropy_of_a_padded_vocabulary_ignores_the_padding(pin: str) -> None:
    x, weight, target, bias = product(6, 8, 20)
    target %= 12
    bias[12:] = -math.inf
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    loss = ops.linear_cross_entropy(leaves[0], leaves[1], target, leaves[2])
    short = ops.linear_cross_entropy(x, weight[:12], target, bias[:12])
    torch.testing.assert_close(loss, short, rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(loss, leaves)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[1][12:].any()


def test_linear_cross_entropy_of_ignored_rows_does_not_depend_on_their_values(pin: str) -> None:
    x, weight, target, bias = product(4, 8, 5)
    target[1] = -100
    found = []
    for value in (0.0, math.nan):
        dirty = x.clone()
        dirty[1, 0] = value
        leaves = [dirty.requires_grad_(), bias.clone().requires_grad_()]
        loss = ops.linear_cross_entropy(leaves[0], weight, target, leaves[1], label_smoothing=0.1)
        found.append(bits([loss, torch.autograd.grad(loss, leaves)]))
    assert found[0] == found[1]


@pytest.mark.parametrize("target", [-1, 4001, 2**40])
def test_linear_cross_entropy_wrong_target_names_value_and_row_of_any_chunk(
    target: int, pin: str
) -> None:
    x, weight, labels, _ = product(700, 8, 4001)
    labels[650] = target
    message = f"linear_cross_entropy: target must be from 0 to 4000.*got {target} in row 650"
    with pytest.raises(IndexError, match=message):
        ops.linear_cross_entropy(x, weight, labels)


def test_linear_cross_entropy_mean_over_no_rows_is_nan_with_zero_gradient(pin: str) -> None:
    x, weight, target, _ = product(3, 4, 5)
    leaf = x.requires_grad_()
    loss = ops.linear_cross_entropy(leaf, weight, torch.full_like(target, -100))
    assert loss.isnan()
    (dx,) = torch.autograd.grad(loss, leaf)
    assert not dx.any()


@pytest.mark.parametrize("which", ["cpu", "reference"])
def test_linear_cross_entropy_compiles_once_for_all_numbers_of_rows(which: str) -> None:
    if which == "cpu" and native.kernels is None:
        pytest.skip(str(native.problem))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ops.linear_cross_entropy, fullgraph=True, backend=counter)
    with anychip.policy(pin={"linear_cross_entropy": which}):
        for rows in (6, 7, 9, 12, 20):
            x, weight, target, _ = product(rows, 8, 13)
            leaf = x.requires_grad_()
            losses = [f(leaf, weight, target) for f in (compiled, ops.linear_cross_entropy)]
            torch.testing.assert_close(*losses)
            torch.testing.assert_close(*(torch.autograd.grad(loss, leaf) for loss in losses))
    assert counter.frame_count <= 2  # one for the first size, one for every other


def test_parts_of_a_vocabulary_joined_by_lse_have_the_loss_and_gradients_of_all() -> None:
    smoothing, z, classes, cuts = 0.1, 1e-3, 90, (20, 30, 40)
    generator = torch.Generator().manual_seed(4)
    x, weight, bias, grad = (
        torch.randn(shape, generator=generator) for shape in ((7, 12), (classes, 12), (classes,), 7)
    )
    target = torch.tensor([0, 19, 20, 49, 50, 89, 33])
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    loss = ops.linear_cross_entropy(
        *whole[:2], target, whole[2], label_smoothing=smoothing, z_loss=z, reduction="none"
    )
    want = torch.autograd.grad(loss, whole, grad)

    places = [(first, first + count) for first, count in zip((0, 20, 50), cuts, strict=True)]
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    parts = [
        ops.linear_cross_entropy_partials(
            leaves[0], leaves[1][a:b], target, leaves[2][a:b], first=a
        )
        for a, b in places
    ]
    lse = torch.stack([part[0] for part in parts]).logsumexp(0)
    picked, total = (sum(part[i] for part in parts) for i in (1, 2))
    joined = lse - (1.0 - smoothing) * picked - smoothing / classes * total + z * lse.square()
    torch.testing.assert_close(joined, loss)
    for got, expected in zip(torch.autograd.grad(joined, leaves, grad), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    slopes = (grad * (1.0 + 2.0 * z * lse), grad * (smoothing - 1.0), -grad * smoothing / classes)
    found = [
        ops.linear_cross_entropy_partials.backward(
            *(s.detach() for s in slopes), x, weight[a:b], target, bias[a:b], lse.detach(), first=a
        )
        for a, b in places
    ]
    torch.testing.assert_close(sum(dx for dx, _, _ in found), want[0], rtol=1e-5, atol=1e-5)
    for i in (1, 2):
        got = torch.cat([part[i] for part in found])
        torch.testing.assert_close(got, want[i], rtol=1e-5, atol=1e-5)
