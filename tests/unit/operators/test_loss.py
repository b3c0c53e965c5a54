"""cross_entropy and linear_cross_entropy: chunks of rows, parts of a vocabulary, what is held."""

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
from anychip.operators.linear_cross_entropy import CHUNK
from anychip_cpu import linear_loss, native
from tests.unit.dispatch.calls import SPECS, bits

ALL: dict[str, Any] = {
    "reduction": "mean", "label_smoothing": 0.3, "z_loss": 0.05, "ignore_index": 3,
}  # fmt: skip


NAMES = ("cross_entropy", "linear_cross_entropy")


def test_reference_gives_losses_per_row_contiguous_however_logits_lie() -> None:
    logits = torch.randn(4, 3, 5).transpose(0, 1)
    target = torch.randint(5, (4, 3)).t()
    attrs = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "none"}
    for result in SPECS["cross_entropy"].forward(logits, target, **attrs):
        assert result.shape == (3, 4)
        assert result.is_contiguous()


# linear_cross_entropy


def product(rows: int, inputs: int, classes: int) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs), torch.randn(classes, inputs) * inputs**-0.5
    return x, weight, torch.randint(classes, (rows,)), torch.randn(classes)


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
    return linear_loss.linear_cross_entropy, linear_loss.linear_cross_entropy_backward


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
def test_linear_cross_entropy_over_chunks_equals_the_whole(reduction: Any, pin: str) -> None:
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


WAYS: dict[str, Any] = {
    "short cut": ops.linear_cross_entropy,
    "library": torch.ops.anychip.linear_cross_entropy,
    "compiled": lambda *args, **o: torch.compile(
        lambda *given: ops.linear_cross_entropy(*given, **o), backend="aot_eager", fullgraph=True
    )(*args),
}


def in_the_forward() -> int:
    """How many calls made their gradients there."""
    rows = anychip.provenance().rows()
    return sum(r.calls for r in rows if r.implementation.endswith("_forward_with_gradients"))


@pytest.mark.skipif(native.kernels is None, reason=str(native.problem))
@pytest.mark.parametrize("way", WAYS)
def test_linear_cross_entropy_makes_gradients_in_the_forward_where_all_are_wanted(way: str) -> None:
    x, weight, target, bias = product(700, 8, 4001)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    before, scale = in_the_forward(), 3.0
    with anychip.policy(pin={"linear_cross_entropy": "cpu"}):
        loss = WAYS[way](x, weight, target, bias, **ALL)
        found = [torch.autograd.grad(loss * scale, leaves, retain_graph=True) for _ in range(2)]
        assert in_the_forward() == before + 1
        with torch.no_grad():
            assert bits(WAYS[way](x, weight, target, bias, **ALL)) == bits(loss.detach())
        WAYS[way](x.detach(), weight, target, bias, **ALL)
        WAYS[way](x, weight, target, bias, **{**ALL, "reduction": "none"})
        few = x.detach()[:3].requires_grad_()
        WAYS[way](few, weight, target[:3], bias, **ALL)  # the gradients would be larger
    assert in_the_forward() == before + 1
    wide = [t.double() for t in leaves]
    want = torch.autograd.grad(by_torch(F.linear(wide[0], wide[1], wide[2]), target, **ALL), wide)
    for got, again, expected in zip(*found, want, strict=True):
        assert bits(got) == bits(again)
        torch.testing.assert_close(got / scale, expected.float(), rtol=1e-5, atol=1e-6)


def by_torch(logits: Tensor, target: Tensor, *, z_loss: float, reduction: str, **o: Any) -> Tensor:
    valid = target != o["ignore_index"]
    rows = F.cross_entropy(logits, target, reduction="none", **o)
    rows = rows + torch.where(valid, z_loss * logits.logsumexp(-1).square(), 0.0)
    return rows.sum() / valid.sum() if reduction == "mean" else rows


@pytest.mark.parametrize("target", [-1, 4001, 2**40])
def test_linear_cross_entropy_wrong_target_names_value_and_row_of_any_chunk(
    target: int, pin: str
) -> None:
    x, weight, labels, _ = product(700, 8, 4001)
    labels[650] = target
    message = f"linear_cross_entropy: target must be from 0 to 4000.*got {target} in row 650"
    with pytest.raises(IndexError, match=message):
        ops.linear_cross_entropy(x, weight, labels)


@pytest.mark.grid
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
