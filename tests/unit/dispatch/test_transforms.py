"""Function transforms and forward-mode AD: right, or refused, never a gradient or tangent lost."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import anychip
from anychip import FallbackError, ops
from tests.unit.dispatch.calls import DIFFERENTIABLE, call, floats, tensors
from tests.unit.dispatch.plain import PLAIN

# torch's own decompositions for forward mode are still compiled by torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

# A float32 formula against another one of the same function: some tens of roundings of 2^-24.
close = dict(rtol=1e-4, atol=1e-5)


def _pair(name: str) -> tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]:
    """Ours and plain torch's, as functions of the differentiable arguments; those arguments."""
    made = call(name, grad=True)
    places = [i for i, a in enumerate(made.args) if isinstance(a, Tensor) and a.requires_grad]

    def bound(function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*given: Tensor) -> Any:
            args = list(made.args)
            for place, value in zip(places, given, strict=True):
                args[place] = value
            return function(*args, **made.attrs)

        return inner

    return (
        bound(getattr(ops, name)),
        bound(PLAIN[name]),
        [made.args[i].detach().clone() for i in places],
    )


def _total(function: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args: sum((y.square().sum() for y in tensors(function(*args))), torch.zeros(()))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_grad_of_every_operator_equals_plain_torch(name: str) -> None:
    ours, plain, args = _pair(name)
    places = tuple(range(len(args)))
    got = torch.func.grad(_total(ours), places)(*args)
    want = torch.func.grad(_total(plain), places)(*args)
    torch.testing.assert_close(got, want, **close)
    (reason,) = {r.fallback_reason for r in anychip.provenance().rows() if r.operator == name}
    assert reason == "a function transform is active"


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_jvp_of_every_operator_equals_plain_torch(name: str) -> None:
    ours, plain, args = _pair(name)
    tangents = tuple(torch.sin(torch.arange(a.numel()).float()).view(a.shape) for a in args)
    got = torch.func.jvp(_total(ours), tuple(args), tangents)
    want = torch.func.jvp(_total(plain), tuple(args), tangents)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3 * float(want[0].abs()) * 0.1)
    assert got[1].abs() > 0


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_vmap_of_every_operator_equals_a_loop(name: str) -> None:
    ours, _, args = _pair(name)
    batch = [torch.stack([a, a * 0.5, -a]) for a in args]
    got = tensors(torch.vmap(ours)(*batch))
    want = [tensors(ours(*(b[i] for b in batch))) for i in range(3)]
    for place, stacked in enumerate(got):
        torch.testing.assert_close(stacked, torch.stack([w[place] for w in want]), **close)


@pytest.mark.parametrize("name", ["embedding", "cross_entropy"])
def test_vmap_over_indices_equals_a_loop(name: str) -> None:
    values, indices = torch.randn(6, 5), torch.tensor([[0, 4, 2, 2, 1, 3], [3, 0, 1, 4, 4, 0]])
    if name == "embedding":
        got = torch.vmap(ops.embedding, in_dims=(0, None))(indices, values[:5])
        want = torch.stack([values[:5][row] for row in indices])
    else:
        got = torch.vmap(ops.cross_entropy, in_dims=(None, 0))(values, indices)
        want = torch.stack([torch.nn.functional.cross_entropy(values, row) for row in indices])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["gelu", "rms_norm", "cross_entropy"])
def test_hessian_equals_plain_torch(name: str) -> None:
    ours, plain, args = _pair(name)
    got = torch.func.hessian(_total(ours))(*args)
    want = torch.func.hessian(_total(plain))(*args)
    scale = float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * scale)


def test_vmap_over_grad_gives_gradients_per_sample() -> None:
    x, w = torch.randn(5, 8), torch.randn(8)
    loss = lambda a, b: ops.rms_norm(a, b).square().sum()  # noqa: E731
    got = torch.vmap(torch.func.grad(loss, 1), in_dims=(0, None))(x, w)
    for row, gradient in zip(x, got, strict=True):
        leaf = w.clone().requires_grad_()
        (want,) = torch.autograd.grad(ops.rms_norm(row, leaf).square().sum(), leaf)
        torch.testing.assert_close(gradient, want, **close)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transform_under_strict_policy_is_refused(transform: str) -> None:
    x = torch.randn(4)
    run = {
        "grad": lambda: torch.func.grad(lambda a: ops.gelu(a).sum())(x),
        "vmap": lambda: torch.vmap(ops.gelu)(x),
        "jvp": lambda: torch.func.jvp(ops.gelu, (x,), (x,)),
    }[transform]
    with (
        anychip.policy(fallback="strict"),
        pytest.raises(FallbackError, match="gelu: a function transform is active"),
    ):
        run()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_dual_number_keeps_its_tangent(name: str) -> None:
    ours, plain, args = _pair(name)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(a, torch.ones_like(a)) for a in args]
        for got, want in zip(floats(ours(*duals)), floats(plain(*duals)), strict=True):
            tangent = forward_ad.unpack_dual(got).tangent
            assert tangent is not None
            torch.testing.assert_close(
                tangent, forward_ad.unpack_dual(want).tangent, rtol=1e-4, atol=1e-4
            )


def _without_gradient() -> dict[str, Callable[[Any, Tensor], Any]]:
    one = torch.tensor(1.0)
    return {
        "l2_norm": lambda home, x: home.l2_norm([x]), "clip": lambda home, x: home.clip([x], one),
        "unscale_and_check": lambda home, x: home.unscale_and_check([x], one, torch.tensor(0.0)),
        "adamw": lambda home, x: home.adamw([x], [torch.ones(4)], [torch.zeros(4)],
                                            [torch.zeros(4)], one, torch.tensor(0.0)),
        "sums_of_squares": lambda home, x: home.sums_of_squares([x]),
        "sgd": lambda home, x: home.sgd([x], [torch.ones(4)], [], one, torch.tensor(0.0)),
        "lion": lambda home, x: home.lion([x], [torch.ones(4)], [torch.zeros(4)], one,
                                          torch.tensor(0.0)),
    }  # fmt: skip


@pytest.mark.parametrize("home", [ops, torch.ops.anychip], ids=["short cut", "library"])
@pytest.mark.parametrize("name", _without_gradient())
def test_operator_without_a_gradient_refuses_to_be_differentiated(name: str, home: Any) -> None:
    function, x = _without_gradient()[name], torch.ones(4)
    message = re.escape(f"{name} has no gradient")
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(lambda a: (function(home, a), a.sum())[1])(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
        function(home, forward_ad.make_dual(x, torch.ones(4)))
    assert torch.equal(x, torch.ones(4))
    with pytest.raises(RuntimeError, match=r"Batching rule not implemented"):
        torch.vmap(lambda a: (function(home, a), a)[1])(torch.ones(2, 4))


def test_result_of_an_operator_without_a_gradient_requires_none() -> None:
    x = torch.ones(4, requires_grad=True)
    for home in (ops, torch.ops.anychip):
        assert not home.l2_norm([x]).requires_grad
        assert home.l2_norm([x]).item() == 2.0


def test_plain_tensors_inside_of_a_transform_are_still_served() -> None:
    """Only what is differentiated is refused: an optimizer may run within a dual level."""
    x = torch.ones(4)
    with forward_ad.dual_level():
        ops.clip([x], torch.tensor(2.0), max_norm=1.0)
        assert ops.l2_norm([x]).item() == pytest.approx(1.0)
