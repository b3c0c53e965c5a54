"""Are the kernels of examples/opencl right, where they say that they serve a call? On one chip."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import anychip
from anychip import ops
from anychip.cabi import Library

X = torch.randn(6, 35, generator=torch.Generator().manual_seed(1))
TARGET = torch.tensor([3, 0, 34, -100, 7, 7])
INDEX = torch.tensor([5, 0, 0, 3])
Call = Callable[[Tensor], Tensor]


def moved(x: Tensor, other: Tensor) -> Tensor:
    """Indices keep their type, the others have x's."""
    return other.to(x.device, x.dtype if other.is_floating_point() else other.dtype)


ELEMENTWISE: dict[str, Call] = {
    name: getattr(torch, name)
    for name in "neg abs exp expm1 sin cos tanh erf floor ceil round sigmoid isnan".split()
} | {
    "positive": lambda x: x.abs().add(0.1).sqrt().rsqrt().reciprocal().log().log1p().log2(),
    "activations": lambda x: functional.silu(x) + functional.relu(x) + functional.gelu(x),
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "arithmetic": lambda x: (2 - x.mul(3).sub(x[:, :1], alpha=2)) / x[0].add(7, alpha=2),
    "powers": lambda x: x**2 + x.abs() ** 0.5 + 1.5**x + x.abs() ** x,
    "comparisons": lambda x: (x > 0.5) & ~(x[:1] <= x) | (x == x[1]) ^ (x.abs() >= 1),
    "choices": lambda x: torch.where(x > 0, x, x[0]).clamp(-0.5, 1.0).masked_fill(x < -1, 9.0),
    "least_and_most": lambda x: x.clamp(min=0.2).maximum(x[:1]) + x.clamp(max=0.2).minimum(x[:1]),
    "optimizer": lambda x: x.addcmul(x, x, value=2).addcdiv(x, x.abs() + 1).lerp(x[0], 0.3),
    "weights": lambda x: x.lerp(x[0], x.abs()),
    "integers": lambda x: ((x * 9).long() << 3 >> 1 ^ 5 & ~(x * 9).long() | 64) + 7,
    "types": lambda x: (x * 9).to(torch.int32).float().bfloat16().half().bool().to(x.dtype),
    "views": lambda x: x.t()[::2].contiguous() * x[:, :18].t()[:18:1],
    "two_numbers": lambda x: torch.where(x > 0, torch.tensor(1.5), torch.tensor(-2.5)),
    "filled": lambda x: x.clone().fill_(2).mul_(x[:, 3:4])[:, ::2].zero_().add(1),
    "many_dims": lambda x: (
        x[:, :32].view(2, 3, 2, 2, 2, 2, 2).permute(6, 0, 4, 2, 1, 3, 5) + x[0, 0]
    ),
}
ALONG: dict[str, Call] = {
    "sums": lambda x: x.sum() + x.sum(0).sum(0, keepdim=True) + x.t().sum(1).mean(),
    "sums_of_dims": lambda x: x.view(2, 3, 5, 7).transpose(1, 3).sum((0, 2)),
    "sum_of_integers": lambda x: (x > 0).sum(1) + (x * 9).long().sum(),
    "means": lambda x: x.mean(0) + x.mean((0, 1), keepdim=True)[0],
    "most": lambda x: x.amax(1) + x.amin() + x.max() + x.min(),
    "most_with_nan": lambda x: x.log().amax(0),
    "all_and_any": lambda x: (x > -9).all(1) & (x > 2).any(1) | (x > 9).any() | (x != 0).all(),
    "norms": lambda x: torch.linalg.vector_norm(x, dim=1) + torch.linalg.vector_norm(x),
    "softmax": lambda x: x.softmax(1) + x.softmax(0) - x.t().log_softmax(0).t(),
    "long_rows": lambda x: x.repeat(2, 40).softmax(1).sum(1),
    "mm": lambda x: x @ x.t() + x[:, ::2] @ x.t()[::2],
    "mm_large": lambda x: x.repeat(8, 3) @ x.repeat(9, 3).t(),
    "bmm": lambda x: x.view(2, 3, 35) @ x.view(2, 35, 3).transpose(1, 2).transpose(1, 2),
    "addmm": lambda x: torch.addmm(x[0, :6], x, x.t(), beta=2, alpha=0.5),
    "cat": lambda x: torch.cat([x, x[:, :3], x[:, :0]], 1),
    "triangles": lambda x: x.tril(2) - x.triu(-1),
    "arange": lambda x: torch.arange(2.0, 9, 0.5, device=x.device) + torch.arange(
        14, device=x.device),
    "rows": lambda x: x.index_select(0, moved(x, INDEX)).index_select(1, moved(x, INDEX)),
    "added_rows": lambda x: x.index_add(0, moved(x, INDEX), x[:4], alpha=2),
    "added_integers": lambda x: x.long().index_add(0, moved(x, INDEX), (x[:4] * 9).long()),
    "gathered": lambda x: x.gather(1, moved(x, TARGET.clamp(0))[:, None]),
    "scattered": lambda x: x.scatter_add(1, moved(x, TARGET.clamp(0))[:, None], x[:, :1]),
}  # fmt: skip
GRADIENTS: dict[str, Call] = {
    "activations": lambda x: functional.silu(x) * x.tanh() + functional.gelu(x) * x.sigmoid(),
    "relu": torch.relu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softmax": lambda x: x.softmax(1) * x[:1] + x.t().log_softmax(0).t() * x[1:2],
    "loss": lambda x: functional.cross_entropy(x, moved(x, TARGET)),
    "losses": lambda x: functional.cross_entropy(
        x, moved(x, TARGET), moved(x, X[0].abs()), reduction="none"),
    "loss_sum": lambda x: functional.cross_entropy(
        x, moved(x, TARGET), moved(x, X[0].abs()), reduction="sum"),
    "embedding": lambda x: functional.embedding(moved(x, INDEX), x).square(),
}  # fmt: skip
OWN: dict[str, tuple[Call, Call]] = {
    "rms_norm": (lambda x: ops.rms_norm(x, x[0] + 1), lambda x: functional.rms_norm(
        x, x.shape[1:], x[0] + 1, 1e-6)),
    "layer_norm": (lambda x: ops.layer_norm(x, x[0], x[1]), lambda x: functional.layer_norm(
        x, x.shape[1:], x[0], x[1])),
    "softmax": (lambda x: ops.softmax(x, x.detach() < 1, scale=0.4), lambda x: torch.softmax(
        (x * 0.4).masked_fill(x.detach() >= 1, -torch.inf), 1)),
    "causal": (lambda x: ops.softmax(x, bias=x[0].detach(), causal=True), lambda x: torch.softmax(
        (x + x[0].detach()).masked_fill(torch.ones(6, 35).triu(30) > 0, -torch.inf), 1)),
}  # fmt: skip
"""anychip's operators, and each written out in torch's."""


def compare(chip: Library, call: Call, written_out: Call, *, gradient: bool) -> None:
    """Results, or gradients too, with the host's in float64. Nothing may run on the host."""
    # OpenCL's worst functions err by 16 units in the last place, 2e-6; sums here have at most 1400
    # terms of some units, whose errors add up to 1400 / 2 x 6e-8 x the sum in the worst case.
    found = []
    on_chip, on_host = (chip.device(), torch.float32), (torch.device("cpu"), torch.float64)
    for f, (device, dtype) in ((call, on_chip), (written_out, on_host)):
        x = X.to(device, dtype, copy=True).requires_grad_(gradient)
        chip.host_calls(reset=True)
        y = f(x)
        if gradient:
            (y * moved(x, X.flatten()[: y.numel()].reshape(y.shape))).sum().backward()
            assert x.grad is not None
            found.append(x.grad)
        if device.type != "cpu":
            assert dict(chip.host_calls()) == {}
        found.append(y.detach())
    close = {"rtol": 2e-5, "atol": 2e-5, "equal_nan": True}
    for got, want in zip(found, found[len(found) // 2 :], strict=False):
        torch.testing.assert_close(got.cpu(), want.to(got.dtype), **close)


@pytest.mark.grid
@pytest.mark.parametrize("case", ELEMENTWISE)
def test_elementwise_kernel_equals_float64(chip: Library, case: str) -> None:
    compare(chip, ELEMENTWISE[case], ELEMENTWISE[case], gradient=False)


@pytest.mark.grid
@pytest.mark.parametrize("case", ALONG)
def test_kernel_along_dims_equals_float64(chip: Library, case: str) -> None:
    compare(chip, ALONG[case], ALONG[case], gradient=False)


@pytest.mark.grid
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradient_of_kernels_equals_float64s(chip: Library, case: str) -> None:
    compare(chip, GRADIENTS[case], GRADIENTS[case], gradient=True)


@pytest.mark.parametrize("case", OWN)
def test_own_operator_and_its_gradients_equal_float64s(chip: Library, case: str) -> None:
    anychip.provenance(reset=True)
    compare(chip, *OWN[case], gradient=True)
    served = {(r.direction, r.kind) for r in anychip.provenance().rows() if r.calls}
    assert served == {("forward", "native"), ("backward", "native")}


def test_adamw_moves_lists_as_the_host_does(chip: Library) -> None:
    found = []
    for device in (chip.device(), torch.device("cpu")):
        params, grads, averages, squares = (
            [(x * scale).to(device).square() for x in (X, X[0], X[0, 0])] for scale in (1, 2, 3, 4)
        )
        numbers = [torch.tensor(v, device=device) for v in (0.1, 4.0, 2.0, 0.5)]
        for found_inf in (0.0, 1.0):
            ops.adamw(params, grads, averages, squares, *numbers, torch.tensor(
                found_inf, device=device), [p.bfloat16() for p in params])  # fmt: skip
        found.append([t.cpu() for t in (*params, *averages, *squares, numbers[1])])
    assert chip.native_calls()["anychip::adamw"] == 2
    torch.testing.assert_close(*found, rtol=2e-6, atol=1e-7)


def test_call_that_the_library_declines_goes_to_the_reference(chip: Library) -> None:
    x = X.bfloat16()
    anychip.provenance(reset=True)
    got = ops.rms_norm(x.to(chip.device()), x[0].to(chip.device()))
    reasons = [row.fallback_reason for row in anychip.provenance().rows() if row.calls]
    assert reasons == ["libopencl.so.anychip::rms_norm: declined when it was called"]
    torch.testing.assert_close(got.cpu(), ops.rms_norm(x, x[0]), rtol=2**-8, atol=0)
    with pytest.raises(anychip.FallbackError), anychip.policy(fallback="strict"):
        ops.rms_norm(x.to(chip.device()), x[0].to(chip.device()))


def test_step_of_a_gpt_has_hardly_an_operator_on_the_host(
    chip: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = "model.width=32 model.layers=2 model.context=16 data.batch_size=4 run.sample_tokens=0"
    argv = ["anychip", "train", "--backend", str(chip.table.path), *words.split()]
    monkeypatch.setattr(sys, "argv", [*argv, "--steps", "2", "--out", str(tmp_path / "run")])
    chip.host_calls(reset=True)
    chip.native_calls(reset=True)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("anychip", run_name="__main__")
    on_host, native = chip.host_calls().total(), chip.native_calls().total()
    assert ended.value.code in (0, None)
    assert native > 1000
    assert on_host < 0.1 * (on_host + native), chip.host_calls()
