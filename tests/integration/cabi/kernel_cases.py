"""What a library's own operators, streams and events do: asked of ``kernelchip`` alone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from anychip.cabi import Library

CHIP = os.environ["ANYCHIP_TEST_CHIP"]
COUNTERS = ctypes.CDLL(CHIP)


def calls() -> int:
    return ctypes.c_int.in_dll(COUNTERS, "kernelchip_calls").value


@pytest.fixture
def device(chip: Library) -> Iterator[torch.device]:
    holds = ctypes.c_int.in_dll(COUNTERS, "kernelchip_holds")
    yield chip.device(0)
    holds.value = 0


X = torch.arange(12.0).reshape(3, 4)
SERVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same_shape": lambda x: x + x,
    "alpha": lambda x: torch.add(x, x, alpha=3),
    "number": lambda x: x + 2.5,
    "scalar_tensor": lambda x: x + torch.tensor(2.0),
    "broadcast": lambda x: x + x[:, :1],
    "strided": lambda x: x.t() + x[:, :3].repeat(2, 1)[2:6].contiguous()[:, :3],
    "in_place": lambda x: x.clone().add_(x),
    "in_place_view": lambda x: x.clone()[:, 1:].add_(1),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "out_is_argument": lambda x: torch.add(y := x.clone(), 1, out=y),
    "out_double": lambda x: torch.add(x, 1, out=torch.empty(3, 4, device=x.device).double()),
    "comparison": lambda x: x >= 5,
    "product": lambda x: x @ x.t(),
    "product_out": lambda x: torch.mm(x, x.t(), out=torch.empty(3, 3, device=x.device)),
    "product_of_columns": lambda x: x[:, ::2] @ x[:2],
    "list": lambda x: torch.cat([x, x[:1], x + 1]),
    "copy": lambda x: x.t().contiguous(),
    "empty": lambda x: x[:0] + x[:0],
}


@pytest.mark.parametrize("case", SERVED)
def test_operator_of_the_library_equals_the_hosts(
    chip: Library, device: torch.device, case: str
) -> None:
    there, before = X.to(device), calls()
    chip.host_calls(reset=True)
    got = SERVED[case](there)
    served, on_host = calls() - before, chip.host_calls()
    torch.testing.assert_close(got.cpu(), SERVED[case](X), rtol=0, atol=0)
    assert served >= (case != "empty")
    assert not {name for name in on_host if name.startswith(("aten::add", "aten::mm", "aten::ge"))}


@pytest.mark.parametrize(("case", "call"), [
    ("dtype", lambda x: x.double() + x.double()), ("integers", lambda x: x.long() + x.long()),
    ("promoted", lambda x: x + x.double()), ("list_other_dim", lambda x: torch.cat([x, x], 1)),
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
    text = r"aten::digamma\(device 0\) failed with ANYCHIP_EDEVICE \(-4\): the kernel hit a wall"
    with pytest.raises(RuntimeError, match=text):
        torch.digamma(X.to(device))


def test_scratch_memory_comes_from_the_cache_and_goes_back(
    chip: Library, device: torch.device
) -> None:
    x = X.to(device)
    (x @ x.t()).cpu()
    allocated = chip.memory.stats().allocated
    used = ctypes.c_int.in_dll(COUNTERS, "kernelchip_scratch_used")
    before = used.value
    (x @ x.t()).cpu()
    assert used.value == before + 1
    assert chip.memory.stats().allocated == allocated


def test_memory_is_not_reused_before_other_streams_are_done(
    chip: Library, device: torch.device
) -> None:
    holds = ctypes.c_int.in_dll(COUNTERS, "kernelchip_holds")
    side = chip.stream()

    def address() -> int:
        return torch.empty(5 << 20, dtype=torch.uint8, device=device).data_ptr()

    x = torch.empty(5 << 20, dtype=torch.uint8, device=device)
    first = x.data_ptr()
    x.record_stream(side)
    holds.value = 1
    del x
    assert address() != first, "a block was given out while a stream may still use it"
    with chip.use_stream(side):
        assert address() != first
    holds.value = 0
    kept = [torch.empty(5 << 20, dtype=torch.uint8, device=device) for _ in range(2)]
    assert first in {tensor.data_ptr() for tensor in kept}


def test_stream_has_its_own_cache(chip: Library, device: torch.device) -> None:
    x = torch.empty(7 << 20, dtype=torch.uint8, device=device)
    first = x.data_ptr()
    del x
    with chip.use_stream(chip.stream()):
        y = torch.empty(7 << 20, dtype=torch.uint8, device=device)
    assert y.data_ptr() != first


def test_streams_and_events_are_torchs(chip: Library, device: torch.device) -> None:
    side, event = chip.stream(), chip.event()
    assert side != chip.current_stream()
    assert event.query()
    event.record(side)
    event.wait(chip.current_stream())
    event.synchronize()
    side.synchronize()
    assert side.query()
    timed = [chip.event(timing=True) for _ in range(2)]
    for one in timed:
        one.record(side)
    with pytest.raises(RuntimeError, match="measures no time"):
        timed[0].elapsed_time(timed[1])
