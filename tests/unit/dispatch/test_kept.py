"""What a graph holds between forward and backward, and that a second derivative needs no more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from anychip import OperatorTable, ops
from anychip.dispatch.operator import Operator
from tests.unit.dispatch.calls import DIFFERENTIABLE, call, tensors
from tests.unit.dispatch.specs import polynomial
from tests.unit.dispatch.tables import Install

DOORS = ["short cut", "library"]


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """The tensors that nodes made in the block keep."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_graph_keeps_what_the_backward_is_given_and_no_other_argument(name: str, door: str) -> None:
    made = call(name, grad=True)
    function = made if door == "short cut" else lambda: made.door()(*made.args, **made.attrs)
    with recorded() as kept:
        outputs = tensors(function())
    names = [a.name for a in torch._C.parse_schema(f"x::y{made.spec.signature}").arguments]
    known = {address(t): n for n, t in zip(names, made.args, strict=False) if t is not None}
    known |= {address(t): f"y{i}" if len(outputs) > 1 else "y" for i, t in enumerate(outputs)}
    found = {known[address(t)] for t in kept if address(t) in known}
    given = {n for n in made.spec.saved if n in known.values()}
    residuals = {r.name for r in made.spec.residuals} & {*made.spec.saved}
    # Where the forward alone can give the residuals again, it needs every argument for that.
    again = {*names} & {*known.values()} if residuals and not made.spec.restore else set()
    assert found == given | again
    assert sum(address(t) not in known for t in kept) == len(residuals)


@pytest.mark.parametrize("door", [ops.softmax, torch.ops.anychip.softmax], ids=DOORS)
def test_scores_of_a_softmax_are_gone_after_the_forward(door: Callable[..., Tensor]) -> None:
    leaf, mask = torch.randn(64, 64, requires_grad=True), torch.rand(64, 64) < 0.9
    scores = leaf * 2.0
    held = [StorageWeakRef(t.untyped_storage()) for t in (scores, mask)]
    y = door(scores, mask)
    assert not any(storage.expired() for storage in held)
    del scores, mask
    assert all(storage.expired() for storage in held)
    (first,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    assert second.any()


def test_output_that_is_changed_is_noticed_in_both_orders_of_derivatives() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    for create_graph in (False, True):
        y = ops.softmax(x)
        total = y.sum()
        with torch.no_grad():
            y.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(total, x, create_graph=create_graph)


# Residuals that the spec restores; x^2 + x^3 has the derivatives 33, 20 and 6 at 3


def _restored(calls: list[str]) -> Operator[..., Any]:
    """x^2 is a residual; ``calls`` hears of the forward and of ``restore``."""

    def forward(x: Tensor, unused: Tensor | None) -> tuple[Tensor, Tensor]:
        _HEARD[0].append("forward")
        return x**2 + x**3, x**2

    def restore(x: Tensor) -> Tensor:
        _HEARD[0].append("restore")
        return x**2

    _HEARD[0] = calls
    return polynomial(
        "poly_restored", "residual", signature="(Tensor x, Tensor? unused=None) -> Tensor",
        forward=forward, fake=lambda x, unused: (torch.empty_like(x), torch.empty_like(x)),
        restore=restore,
    )  # fmt: skip


_HEARD: list[list[str]] = [[]]


def _derivatives(function: Callable[..., Tensor]) -> list[float]:
    x = torch.tensor(3.0, requires_grad=True)
    found, y = [], function(x, torch.tensor(1.0))
    for _ in range(3):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(y.item())
    return found


@pytest.mark.parametrize("door", DOORS)
def test_residual_is_restored_without_the_forward(door: str) -> None:
    calls: list[str] = []
    operator = _restored(calls)
    function = operator if door == "short cut" else torch.ops.polynomials.poly_restored
    assert _derivatives(function) == [33.0, 20.0, 6.0]
    assert calls == ["forward", "restore"]
    assert operator.gradient is not None
    assert operator.gradient.kept == ("x", "square")


@pytest.mark.parametrize("door", DOORS)
def test_residual_of_a_paired_row_is_restored_in_its_canonical_form(
    door: str, install: Install
) -> None:
    operator = _restored([])
    table = OperatorTable()
    table.pair(
        "poly_restored", forward=lambda x, unused: (x**2 + x**3, 7 * x),
        backward=lambda grad, x, own, needs: (grad * (2 * own / 7 + 3 * (own / 7) ** 2),),
        num_residuals=1, fake_residuals=lambda x, unused: torch.empty_like(x),
    )  # fmt: skip
    install(table)
    function = operator if door == "short cut" else torch.ops.polynomials.poly_restored
    assert _derivatives(function) == [33.0, 20.0, 6.0]


@pytest.mark.parametrize("pair", [False, True], ids=["split", "pair"])
@pytest.mark.parametrize("door", DOORS)
def test_output_leads_back_to_its_own_node_in_every_order(
    door: str, pair: bool, install: Install
) -> None:
    operator = polynomial("poly_output", "output")
    if pair:
        table = OperatorTable()
        table.pair(
            "poly_output", forward=lambda x: (x**2 + x**3, 5 * x),
            backward=lambda grad, x, y, own, needs: (grad * (15 * y / own - own / 5),),
            num_residuals=1, fake_residuals=lambda x: torch.empty_like(x),
        )  # fmt: skip
        install(table)
    library = torch.ops.polynomials.poly_output
    function = operator if door == "short cut" else library
    found = _derivatives(lambda x, _: function(x))
    assert found == pytest.approx([33.0, 20.0, 6.0], rel=1e-6)  # quotients, so not exact
    assert operator.gradient is not None
    assert operator.gradient.kept == ("x", "y")


def test_second_derivative_through_a_checkpoint_with_a_saved_output() -> None:
    x = torch.randn(3, 5, dtype=torch.float32)
    found = []
    for function in (ops.softmax, lambda a: checkpoint(ops.softmax, a, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.pow(3).sum(), leaf)[0])
    assert torch.equal(*found)
    assert found[0].any()


def test_backward_operator_takes_none_for_an_argument_that_may_be_none() -> None:
    for name in ("softmax", "linear_cross_entropy"):
        schema = getattr(torch.ops.anychip, f"{name}_backward").default._schema
        assert [str(a.type) for a in schema.arguments if a.name == "bias"] == ["Optional[Tensor]"]
    y, grad = torch.softmax(torch.randn(3, 5), -1), torch.randn(3, 5)
    dx, dbias = torch.ops.anychip.softmax_backward(grad, y, None, 0.5, False, [True, False])
    assert dx.shape == (3, 5)
    assert dbias.numel() == 0
