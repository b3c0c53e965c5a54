"""A backward in two parts: the bits of one, whatever shares, freezes, casts, recomputes weights."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from anychip import ops
from anychip.dispatch import deferral
from anychip.dispatch.deferral import Deferred, deferring


class Case(nn.Module):
    """A part of a model; its parameters are what a call uses, and ``num_deferred`` what may wait.

    Attributes:
        call: gives the output of an input (2, 3, 4).
    """

    def __init__(
        self, num_deferred: int, call: Callable[[Any, Tensor], Tensor], *, is_frozen: bool = False
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.num_deferred, self.call = num_deferred, call
        self.weight, self.bias, self.other = drawn(4, 4), drawn(4), drawn(4, 4)
        self.scale = drawn(4)
        self.weight.requires_grad_(not is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def _of_words(m: Any, x: Tensor) -> Tensor:
    """The weight is an embedding and, later, a head: tied within the part."""
    words = ops.embedding(torch.arange(12).reshape(2, 6)[:, :3] % 4, m.weight)
    return ops.linear(x + words, m.weight)


CASES = {
    "linear": Case(1, lambda m, x: ops.linear(x, m.weight, m.bias)),
    "no bias": Case(1, lambda m, x: ops.linear(x, m.weight)),
    "frozen weight": Case(1, lambda m, x: ops.linear(x, m.weight, m.bias), is_frozen=True),
    "weight used three times":
        Case(3, lambda m, x: ops.linear(ops.linear(ops.linear(x, m.weight), m.weight), m.weight)),
    "tied": Case(2, _of_words),
    "waits and does not": Case(1, lambda m, x: linear(ops.linear(x, m.weight), m.weight)),
    "norm between": Case(2, lambda m, x: ops.linear(
        ops.rms_norm(ops.linear(x, m.weight, m.bias), m.scale, eps=1e-6), m.other)),
    "checkpoint": Case(2, lambda m, x: checkpoint(
        lambda y: ops.linear(ops.linear(y, m.weight, m.bias), m.other), x, use_reentrant=False)),
    "weight that is no leaf": Case(0, lambda m, x: ops.linear(x, m.weight * 2, m.bias * 1)),
    "input in the place of the weight": Case(0, lambda m, x: ops.linear(m.weight * 1, x[0])),
    "torch alone": Case(0, lambda m, x: linear(x, m.weight, m.bias)),
}  # fmt: skip


def batch() -> list[Tensor]:
    """Inputs (2, 3, 4) of two micro-batches."""
    return list(torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(6)))


def whole(case: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> list[Tensor]:
    """Gradients of the inputs, then of the parameters."""
    case.zero_grad()
    inputs = [x.requires_grad_() for x in batch()]
    for x in inputs:
        with context():
            y = case(x)
        (y.float() ** 2).sum().backward()
    return [g for t in (*inputs, *case.parameters()) if (g := t.grad) is not None]


def split(
    case: nn.Module, context: Callable[[], AbstractContextManager[Any]]
) -> tuple[list[Tensor], list[int]]:
    """The same by I, then W, and the number of calls that each I has put off."""
    case.zero_grad()
    inputs, counts = [x.requires_grad_() for x in batch()], []
    params = [param for param in case.parameters() if param.requires_grad]
    for x in inputs:
        with context():
            y = case(x)
        with deferring() as deferred:
            found = torch.autograd.grad((y.float() ** 2).sum(), [x, *params], allow_unused=True)
        x.grad = found[0]
        counts.append(len(deferred))
        edges, gradients = deferred.compute()
        for param, gradient in zip(params, found[1:], strict=True):
            if gradient is not None:
                edges.append(param)  # type: ignore[arg-type]
                gradients.append(gradient)
        if edges:
            torch.autograd.backward(edges, gradients)
    assert not deferral.active
    return [g for t in (*inputs, *case.parameters()) if (g := t.grad) is not None], counts


CONTEXTS = {"plain": nullcontext, "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
@pytest.mark.parametrize("name", CASES)
def test_backward_in_two_parts_has_the_bits_of_one(
    name: str, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    case = CASES[name]
    wanted = whole(case, context)
    found, counts = split(case, context)
    assert counts == [case.num_deferred] * 2
    assert len(found) == len(wanted) > 2
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_nothing_of_a_weight_is_computed_before_it_is_asked_for() -> None:
    case = CASES["linear"]
    case.zero_grad()
    x = batch()[0].requires_grad_()
    with deferring() as deferred:
        found = torch.autograd.grad(case(x).sum(), [x, case.weight, case.bias], allow_unused=True)
    assert found[0] is not None
    assert found[1:] == (None, None)
    assert deferred.parameters == {case.weight, case.bias}
    assert case.weight.grad is None
    torch.autograd.backward(*deferred.compute())
    assert case.weight.grad is not None
    assert len(deferred) == 0
    assert deferred.compute() == ([], [])


def test_hooks_of_a_parameter_run_once_when_its_gradient_is_there() -> None:
    """So that what reduces gradients over ranks sees those that were put off."""
    case, calls = Case(1, lambda m, x: ops.linear(x, m.weight)), list[Tensor]()
    case.weight.register_post_accumulate_grad_hook(lambda param: calls.append(param.grad.clone()))
    with deferring() as deferred:
        torch.autograd.grad(case(batch()[0]).sum(), [case.weight], allow_unused=True)
    assert not calls
    torch.autograd.backward(*deferred.compute())
    assert len(calls) == 1
    assert torch.equal(calls[0], case.weight.grad)  # type: ignore[arg-type]


def test_what_will_be_differentiated_again_is_not_put_off() -> None:
    case, x = CASES["linear"], batch()[0].requires_grad_()
    wanted = [x, case.weight]
    plain = torch.autograd.grad(case(x).square().sum(), wanted, create_graph=True)
    with deferring() as deferred:
        found = torch.autograd.grad(case(x).square().sum(), wanted, create_graph=True)
    assert len(deferred) == 0
    for got, want in zip(found, plain, strict=True):
        second, again = (
            torch.autograd.grad(g.sum(), [x], retain_graph=True)[0] for g in (got, want)
        )
        assert torch.equal(got, want)
        assert torch.equal(second, again)


def test_other_threads_compute_everything_at_once() -> None:
    """Ranks may be threads: what one puts off is not the other one's."""
    case, found = CASES["linear"], list[Any]()
    graph = case(batch()[0]).sum()

    def elsewhere() -> None:
        found.extend(torch.autograd.grad(graph, [case.weight, case.bias]))

    with deferring() as deferred:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(deferred) == 0
    assert len(found) == 2


def test_blocks_within_each_other_and_errors_leave_what_was_before() -> None:
    with deferring() as outer:
        with pytest.raises(ArithmeticError), deferring():
            raise ArithmeticError
        case = CASES["linear"]
        torch.autograd.grad(case(batch()[0]).sum(), [case.weight], allow_unused=True)
    assert len(outer) == 1
    assert not deferral.active
    assert isinstance(outer, Deferred)
