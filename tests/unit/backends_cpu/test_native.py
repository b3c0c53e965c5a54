"""The cpu backend's rows by every thread count and instruction set, and what they leave to others.

Their values are the conformance suite's business.
"""

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import anychip
import anychip_cpu
from anychip import ops
from anychip.operators.adamw_8bit import SIGNED, UNSIGNED
from anychip_cpu import native
from anychip_cpu.backend import CpuBackend
from tests.unit.dispatch import calls
from tests.unit.operators.exactness import assert_close

needs_native = pytest.mark.skipif(native.kernels is None, reason=str(native.problem))


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """A test of a row must not be served by the reference."""
    with anychip.policy(fallback="strict"):
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("name", calls.SPECS)
def test_row_of_every_operator_is_there_in_both_directions(name: str) -> None:
    assert CpuBackend.operators.rows(name, "forward")
    assert bool(CpuBackend.operators.rows(name, "backward")) == (name in calls.DIFFERENTIABLE)


# OpenMP


@needs_native
def test_openmp_runtime_is_torchs_and_the_only_one(threads: None) -> None:
    assert native.kernels is not None
    same, sentence = native.kernels.openmp_status()
    assert same, sentence
    mapped = Path("/proc/self/maps").read_text()
    runtimes = set(re.findall(r"(/\S*lib(?:gomp|iomp5|omp)[^\s/]*\.so[^\s/]*)", mapped))
    assert len({Path(r).resolve() for r in runtimes}) == 1, runtimes
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        assert native.kernels.num_threads() == number


def test_native_module_of_another_interface_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(build_info=lambda: {"abi": "1"}, openmp_status=lambda: (True, ""))
    monkeypatch.setitem(sys.modules, "anychip_cpu._native", older)
    monkeypatch.setattr(anychip_cpu, "_native", older, raising=False)
    kernels, problem = native._load()
    assert kernels is None
    assert problem == (
        f"the native kernels have interface 1, and this version calls {native.INTERFACE}; this "
        f"builds them again: {native.BUILD_COMMAND}"
    )


ATTRIBUTES = ("dequantize", "group_norm", "hadamard", "permute", "top_k")
"""Not without attributes; tests/unit/operators runs them with one thread and with two."""

NATIVE = [n for n in calls.SPECS if n == "attention" or n not in (*ATTRIBUTES, *calls.PRODUCTS)]


def _large(name: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Enough work for several threads, with odd sizes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, rng = normal(301, 1027), torch.tensor([3, 2**32 - 5])
    angles = torch.rand(75, 48, generator=generator)
    return {
        **_steps(normal), "rms_norm": (x, normal(1027)),
        "layer_norm": (x, normal(1027), normal(1027)),
        "add_rms_norm": (x, normal(301, 1027), normal(1027)),
        "add_layer_norm": (x, normal(301, 1027), normal(1027), normal(1027)), "dropout": (x, rng),
        "bias_dropout_add": (x, normal(301, 1027), rng, normal(1027)),
        "dropout_add_rms_norm": (x, normal(301, 1027), normal(1027), rng),
        "dropout_add_layer_norm": (x, normal(301, 1027), normal(1027), rng, normal(1027)),
        **dict.fromkeys(("gelu", "silu", "relu", "relu2", "sigmoid", "tanh", "softplus"), (x,)),
        "bias_gelu": (x, normal(1027)), "geglu": (x, normal(301, 1027)), "softmax": (x,),
        "attention": (normal(2, 130, 4, 24), normal(2, 150, 2, 24), normal(2, 150, 2, 24)),
        "swiglu": (x, normal(301, 1027)),
        "rope": (normal(9, 75, 8, 96), normal(9, 75, 4, 96), angles.cos(), angles.sin()),
        "cross_entropy": (x, torch.randint(1027, (301,), generator=generator)),
        "l2_norm": ([x, normal(7), normal(123, 77)],),
        "sums_of_squares": ([x, normal(7), normal(123, 77)],),
        "clip": ([x, normal(7), normal(123, 77)], torch.tensor(3.0)),
        "unscale_and_check": ([x, normal(7)], torch.tensor(3.0), torch.tensor(0.0)),
        "quantize": (x, rng), "embedding": (torch.randint(301, (99, 11), generator=generator), x),
        "unpermute": (x, torch.randperm(301, generator=generator).view(43, 7), normal(43, 7)),
    }[name]  # fmt: skip


def _steps(normal: Callable[..., Tensor]) -> dict[str, tuple[Any, ...]]:
    """Of rules of optimizers."""
    x, wide, small = normal(301, 1027), normal(301, 1027).float(), normal(5).float()

    def rates() -> tuple[Tensor, Tensor]:
        return torch.tensor(1e-2), torch.tensor(1.0)

    lamb = ([wide, small], [x, normal(5)], [wide * 0.1, small + 1], [wide.square(), small.abs()])
    return {
        "adamw": (
            *([normal(301, 1027).float().abs(), normal(5).float().abs()] for _ in range(4)),
            *rates(),
        ),
        "adamw_8bit": (
            [wide, small], [x, normal(5)],
            *(list(t) for form in (SIGNED, UNSIGNED)
              for t in zip(form.encode(wide.square()), form.encode(small.abs()), strict=True)),
            *rates(),
        ),
        "sgd": ([wide, small], [x, normal(5)], [], *rates()),
        "lion": ([wide, small], [x, normal(5)], [normal(301, 1027).float(), small + 1], *rates()),
        "lamb_sums_of_squares": (*lamb, torch.tensor(1.0)), "lamb": (*lamb, *rates()),
    }  # fmt: skip


def _results(name: str, dtype: torch.dtype) -> Any:
    args = _large(name, dtype)
    leaves = []
    for label, arg in zip(calls.SPECS[name].signature[1:].split(", "), args, strict=False):
        if label.split()[-1].split("=")[0] in calls.SPECS[name].differentiable:
            leaves.append(arg.requires_grad_())
    outputs = getattr(ops, name)(*args)
    return calls.bits([outputs, list(args), calls.gradients(outputs, leaves) if leaves else []])


@pytest.mark.grid
@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_native_row_has_the_same_bits_for_every_number_of_threads_and_instruction_set(
    name: str, dtype: torch.dtype, threads: None
) -> None:
    assert native.kernels is not None
    torch.set_num_threads(1)
    want = _results(name, dtype)
    for number in (2, 3):
        torch.set_num_threads(number)
        assert _results(name, dtype) == want, f"{number} threads"
    used = native.kernels.build_info()["isa"]
    try:
        for isa in native.kernels.available_isas():
            native.kernels.set_isa(isa)
            assert _results(name, dtype) == want, isa
            native.kernels.set_last_cache(1)
            assert _results(name, dtype) == want, f"{isa}, stored past the caches"
            native.kernels.set_last_cache(-1)
    finally:
        native.kernels.set_isa(used)
        native.kernels.set_last_cache(-1)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_turned_matrices_are_transposed_and_nothing_behind_is_written(dtype: torch.dtype) -> None:
    kernels: Any = native.kernels
    used = kernels.build_info()["isa"]
    shapes = [(1, 1, 1), (2, 3, 5), (3, 16, 64), (1, 17, 65), (2, 31, 130), (1, 400, 300)]
    try:
        for isa, shape in itertools.product(kernels.available_isas(), shapes):
            kernels.set_isa(isa)
            x = torch.arange(math.prod(shape)).remainder(251).to(dtype).view(shape)
            y = torch.full((x.numel() + 1,), -1.0).to(dtype)
            kernels.turn(x.data_ptr(), y.data_ptr(), *shape, native.CODES[dtype])
            assert torch.equal(y[:-1].view_as(x.mT), x.mT), (isa, shape)
            assert y[-1] == -1.0
    finally:
        kernels.set_isa(used)


# layouts of gradients: what a row does not copy it must read where it is


@needs_native
@pytest.mark.parametrize(
    ("name", "width"), [("rms_norm", 8), ("layer_norm", 8), ("cross_entropy", 11)]
)
def test_backward_reads_residuals_that_are_not_contiguous(name: str, width: int) -> None:
    rows = 64
    spec = calls.SPECS[name]
    x = torch.randn(rows, width)
    if name == "cross_entropy":
        saved: list[Tensor] = [x, torch.randint(width, (rows,)), x.logsumexp(-1)]
        tail: tuple[Any, ...] = (-100, 0.0, 0.0, "none", [True])
        grad = torch.randn(rows)
    else:
        extra = [torch.randn(rows)] if name == "layer_norm" else []
        saved = [x, torch.randn(width), *extra, torch.rand(rows) + 0.5]
        tail = (1e-5, [True] * len(spec.differentiable))
        grad = torch.randn(rows, width)

    def spread(t: Tensor) -> Tensor:
        return torch.stack([t, torch.full_like(t, 77)], -1)[..., 0]

    backward = getattr(torch.ops.anychip, f"{name}_backward")
    want = backward(grad, *saved, *tail)
    for _ in range(20):  # memory that is freed too early is not overwritten every time
        assert calls.bits(backward(spread(grad), *map(spread, saved), *tail)) == calls.bits(want)


# attention and linear, of which torch computes some


@pytest.mark.parametrize(("scale", "queries"), [(-0.7, 5), (0.0, 5), (-0.7, 20), (0.0, 20)])
def test_attention_with_a_scale_that_is_not_positive_has_its_values(
    scale: float, queries: int
) -> None:
    """Torch's kernel has none: few queries are left to the reference."""
    q = torch.randn(1, queries, 2, 8, requires_grad=True)
    with anychip.policy(fallback="record"):
        y = ops.attention(q, q, q, causal=True, scale=scale)
        y.sum().backward()
    weights = torch.einsum("bqhd,bkhd->bhqk", q, q).double().mul(scale).exp().tril()
    want = torch.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdim=True), q.double())
    assert_close(y.detach(), want.detach(), 40)
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_in_16_bits_accumulates_in_float32(dtype: torch.dtype) -> None:
    """4096 ones and one small number: in 16 bits the sum would stop growing at 2^8 or 2^11."""
    x = torch.ones(3, 4096, dtype=dtype)
    weight = torch.full((5, 4096), 1.0, dtype=dtype)
    weight[1] = 0.25
    got = ops.linear(x, weight)
    assert torch.equal(
        got, torch.tensor([4096.0, 1024.0, 4096.0, 4096.0, 4096.0]).to(dtype).expand(3, 5)
    )
    leaves = [torch.ones(4096, 8, dtype=dtype).requires_grad_() for _ in range(2)]
    ops.linear(leaves[0], leaves[1][:5]).sum().backward()
    assert leaves[1].grad is not None
    assert torch.equal(leaves[1].grad[:5].float(), torch.full((5, 8), 4096.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [65536.0, 2.0**126, 2.0**127, 2.0**-126, 2.0**-130, 3.0])
def test_unscaling_by_a_power_of_two_rounds_as_a_division(dtype: torch.dtype, scale: float) -> None:
    exponents = torch.arange(-149.0, 128.0).repeat_interleave(7)
    numbers = (torch.rand(len(exponents)) + 1.0) * torch.exp2(exponents)
    grads = torch.cat((numbers, -numbers)).to(dtype)
    want, found = (grads.float() / scale).to(dtype), torch.tensor(0.0)
    ops.unscale_and_check([grads], torch.tensor(scale), found)
    assert torch.equal(grads, want)
    assert found.item() == float(not want.isfinite().all())


def test_embedding_gradient_of_a_frequent_row_accumulates_in_float32() -> None:
    weight = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    ops.embedding(torch.full((1024,), 1), weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad[1].float(), torch.full((4,), 1024.0))


# mixed dtypes, values that are not finite, wrong indices
