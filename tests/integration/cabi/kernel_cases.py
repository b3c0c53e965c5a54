"""What operators of a library do: asked of ``asyncchip``, which has some."""

import ctypes
import os
from collections.abc import Callable

import pytest
import torch

from anychip.cabi import Library

CALLS = ctypes.CDLL(os.environ["ANYCHIP_TEST_CHIP"]).asyncchip_calls
FAIL = ctypes.CDLL(os.environ["ANYCHIP_TEST_CHIP"]).asyncchip_fail


@pytest.fixture
def device(chip: Library) -> torch.device:
    return chip.device(0)


X = torch.arange(12.0).reshape(3, 4)
SERVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same_shape": lambda x: x + x, "alpha": lambda x: torch.add(x, x, alpha=3),
    "number": lambda x: x + 2.5, "scalar_tensor": lambda x: x + torch.tensor(2.0),
    "broadcast": lambda x: x + x[:, :1],
    "strided": lambda x: x.t() + x[:, :3].repeat(2, 1)[2:6].contiguous()[:, :3],
    "in_place": lambda x: x.clone().add_(x), "in_place_view": lambda x: x.clone()[:, 1:].add_(1),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "out_is_argument": lambda x: torch.add(y := x.clone(), 1, out=y),
    "out_double": lambda x: torch.add(x, 1, out=torch.empty(3, 4, device=x.device).double()),
    "comparison": lambda x: x >= 5, "product": lambda x: x @ x.t(),
    "product_out": lambda x: torch.mm(x, x.t(), out=torch.empty(3, 3, device=x.device)),
    "product_of_columns": lambda x: x[:, ::2] @ x[:2],
    "list": lambda x: torch.cat([x, x[:1], x + 1]),
    "list_of_columns": lambda x: torch.cat([x, x[:, 1:3]], -1),
    "filled": lambda x: torch.full_like(x, 2.5),
    "zeros": lambda x: torch.zeros(2, 3, dtype=torch.int64, device=x.device),
    "converted": lambda x: x.t().to(torch.bfloat16), "copy": lambda x: x.t().contiguous(),
    "empty": lambda x: x[:0] + x[:0],
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED)
def test_operator_of_the_library_equals_the_hosts(
    chip: Library, device: torch.device, case: str
) -> None:
    there, before = X.to(device), CALLS()
    chip.host_calls(reset=True)
    got = SERVED[case](there)
    served, on_host = CALLS() - before, chip.host_calls()
    torch.testing.assert_close(got.cpu(), SERVED[case](X), rtol=0, atol=0)
    assert served >= (case != "empty")
    assert not {name for name in on_host if name.startswith(("aten::add", "aten::mm", "aten::ge"))}


@pytest.mark.parametrize(("case", "call"), [
    ("dtype", lambda x: x.double() + x.double()), ("integers", lambda x: x.long() + x.long()),
    ("promoted", lambda x: x + x.double()),
    ("list_of_types", lambda x: torch.cat([x, x.double()], 1)),
])  # fmt: skip
def test_call_that_the_library_refuses_is_made_on_the_host(
    chip: Library, device: torch.device, case: str, call: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    there = X.to(device)
    chip.host_calls(reset=True)
    got = call(there)
    assert any(name.startswith(("aten::add", "aten::cat")) for name in chip.host_calls())
    torch.testing.assert_close(got.cpu(), call(X), rtol=0, atol=0)
    assert got.dtype == call(X).dtype


def test_gradients_go_through_the_librarys_operators(device: torch.device) -> None:
    a, b = X.to(device).requires_grad_(), X.clone().requires_grad_()
    for x in (a, b):
        ((x @ x.t() + 1) + x[:, :3]).sum().backward()
    torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=0, atol=0)


def test_wrong_arguments_get_torchs_own_words(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        X.to(device) + torch.ones(5, device=device)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        X.to(device) @ X.to(device)
    with pytest.raises(RuntimeError, match="single memory location"):
        X.to(device)[:1].expand(3, 4).add_(1)


def test_failure_of_a_kernel_names_it_and_what_the_library_says(device: torch.device) -> None:
    x = X.to(device)
    FAIL(-2)
    text = r"aten::mul.Tensor\(device 0\) failed with ANYCHIP_EINVAL \(-2\): the kernel hit a wall"
    with pytest.raises(RuntimeError, match=text):
        x * x


def test_kernel_without_memory_is_asked_again(device: torch.device) -> None:
    x = X.to(device)
    FAIL(-3)
    torch.testing.assert_close((x * x).cpu(), X * X, rtol=0, atol=0)


def test_scratch_memory_comes_from_the_cache_and_goes_back(
    chip: Library, device: torch.device
) -> None:
    x = X.to(device)

    def product() -> torch.Tensor:
        for _ in range(9):  # the work of one is still queued when the next one asks
            y = x @ x.t()
        return y.cpu()

    product()
    before = chip.memory.stats()
    torch.testing.assert_close(product(), X @ X.t(), rtol=0, atol=0)
    after = chip.memory.stats()
    assert (after.allocated, after.reserved) == (before.allocated, before.reserved)
