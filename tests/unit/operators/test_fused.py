"""Fused operators against the operators that they fuse: the same numbers, rounded once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anychip import ops
from tests.unit.dispatch.calls import DTYPES, bits

DROPPED = ["dropout_add_rms_norm", "dropout_add_layer_norm"]
FUSED = ["add_rms_norm", "add_layer_norm", "bias_dropout_add", "bias_gelu", "geglu", *DROPPED]
RNG = torch.tensor([5, 2**32 - 9])
PARTS = ["rms_norm", "layer_norm", "dropout", "gelu"]


NAMES = FUSED + PARTS
pytestmark = pytest.mark.usefixtures("pin")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


# A norm after the residual's sum


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_add_norm_has_the_bits_of_a_sum_and_a_norm(norm: str, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(*s, dtype=dtype) for s in ((7, 33), (7, 33), (33,)))
    y, total = getattr(ops, f"add_{norm}")(x, residual, weight, eps=1e-5)
    assert bits(total) == bits(x + residual)
    assert bits(y) == bits(getattr(ops, norm)(x + residual, weight, eps=1e-5))


@pytest.mark.parametrize("norm", ["add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("inner", [torch.bfloat16, torch.float16], ids=str)
def test_add_norm_keeps_a_float32_stream_and_gives_y_in_the_dtype_of_x(
    norm: str, inner: torch.dtype
) -> None:
    x, weight = normal(3, 16, dtype=inner), normal(16, dtype=inner)
    residual = normal(3, 16) * 2.0**-10  # below an ULP of x: lost if the sum were in 16 bits
    y, total = getattr(ops, norm)(x, residual, weight)
    assert (y.dtype, total.dtype) == (inner, torch.float32)
    assert bits(total) == bits(x.float() + residual)


def test_add_norm_gradients_of_x_and_residual_are_two_tensors() -> None:
    x, residual = normal(4, 8).requires_grad_(), normal(4, 8).requires_grad_()
    y, total = ops.add_rms_norm(x, residual, normal(8))
    dx, dresidual = torch.autograd.grad((y, total), (x, residual), (normal(4, 8), normal(4, 8)))
    assert bits(dx) == bits(dresidual)
    assert dx.data_ptr() != dresidual.data_ptr()


def test_add_norm_of_another_shape_is_refused() -> None:
    for norm in (ops.add_rms_norm, ops.add_layer_norm):
        with pytest.raises(ValueError, match=r"residual must have the shape of x \(2, 4\)"):
            norm(normal(2, 4), normal(4), normal(4))
        with pytest.raises(ValueError, match=r"weight must have shape \(4,\)"):
            norm(normal(2, 4), normal(2, 4), normal(3))
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\)"):
        ops.add_layer_norm(normal(2, 4), normal(2, 4), normal(4), normal(5))


# Dropout between a bias and the residual


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_bias_dropout_add_in_float32_has_the_bits_of_its_parts(p: float) -> None:
    x, residual, bias = normal(9, 31), normal(9, 31), normal(31)
    got = ops.bias_dropout_add(x, residual, RNG, bias, p=p)
    assert bits(got) == bits(residual + ops.dropout(x + bias, RNG, p=p))
    got = ops.bias_dropout_add(x, residual, RNG, p=p)
    assert bits(got) == bits(residual + ops.dropout(x, RNG, p=p))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bias_dropout_add_in_16_bits_is_the_float32_result_rounded_once(dtype: torch.dtype) -> None:
    args = [normal(9, 31, dtype=dtype), normal(9, 31, dtype=dtype), normal(31, dtype=dtype)]
    x, residual, bias = (t.float() for t in args)
    wide = ops.bias_dropout_add(x, residual, RNG, bias, p=0.3)
    assert bits(ops.bias_dropout_add(args[0], args[1], RNG, args[2], p=0.3)) == bits(wide.to(dtype))
    mixed = ops.bias_dropout_add(args[0], residual, RNG, args[2], p=0.3)
    assert bits(mixed) == bits(wide)


def test_bias_dropout_add_backward_has_the_mask_of_dropout() -> None:
    x, residual, bias = (normal(*s).requires_grad_() for s in ((6, 20), (6, 20), (20,)))
    grad = normal(6, 20)
    y = ops.bias_dropout_add(x, residual, RNG, bias, p=0.4)
    dx, dresidual, dbias = torch.autograd.grad(y, (x, residual, bias), grad)
    want = ops.dropout(grad, RNG, p=0.4)
    assert bits(dx) == bits(want)
    assert bits(dresidual) == bits(grad)
    torch.testing.assert_close(dbias, want.double().sum(0).float(), rtol=1e-6, atol=1e-6)


def test_bias_dropout_add_leaves_a_dropped_nan_out() -> None:
    x = torch.full((200,), float("nan"))
    kept = ops.dropout(torch.ones(200), RNG, p=0.5) != 0
    got = ops.bias_dropout_add(x, torch.ones(200), RNG, p=0.5)
    assert torch.equal(got.isnan(), kept)
    assert bool((got[~kept] == 1.0).all())


# Dropout before the residual's sum and a norm


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_dropout_add_norm_has_the_bits_of_its_parts(
    norm: str, dtype: torch.dtype, p: float
) -> None:
    x, residual, weight = (normal(*s, dtype=dtype) for s in ((7, 33), (7, 33), (33,)))
    y, total = getattr(ops, f"dropout_add_{norm}")(x, residual, weight, RNG, p=p, eps=1e-5)
    assert bits(total) == bits(ops.bias_dropout_add(x, residual, RNG, p=p))
    assert bits(y) == bits(getattr(ops, norm)(total, weight, eps=1e-5))


@pytest.mark.parametrize("inner", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", DROPPED)
def test_dropout_add_norm_does_not_round_what_it_adds_to_a_float32_stream(
    norm: str, inner: torch.dtype
) -> None:
    x, residual, weight = normal(3, 16, dtype=inner), normal(3, 16), normal(16, dtype=inner)
    y, total = getattr(ops, norm)(x, residual, weight, RNG, p=0.3)
    assert (y.dtype, total.dtype) == (inner, torch.float32)
    assert bits(total) == bits(residual + ops.dropout(x.float(), RNG, p=0.3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_dropout_add_norm_gradients_are_those_of_the_sum_and_x_has_its_mask(
    norm: str, dtype: torch.dtype
) -> None:
    """In 16 bits the sum's gradient is rounded once for each: dropped first, then rounded."""
    shapes = ((6, 20), (6, 20), (20,))
    x, residual, weight = (normal(*s, dtype=dtype).requires_grad_() for s in shapes)
    grads = (normal(6, 20, dtype=dtype), normal(6, 20, dtype=dtype))
    out = getattr(ops, f"dropout_add_{norm}")(x, residual, weight, RNG, p=0.4)
    found = torch.autograd.grad(out, (x, residual, weight), grads)
    # The same sum in float32, to which nothing is added.
    total = out[1].detach().float().requires_grad_()
    zero = torch.zeros(6, 20, dtype=dtype)
    apart = getattr(ops, f"add_{norm}")(zero, total, weight)
    want, dweight = torch.autograd.grad(apart, (total, weight), (grads[0], grads[1].float()))
    assert bits(found[0]) == bits(ops.dropout(want, RNG, p=0.4).to(dtype))
    assert bits(found[1]) == bits(want.to(dtype))
    assert bits(found[2]) == bits(dweight)


def test_dropout_add_norm_of_wrong_arguments_is_refused() -> None:
    x, weight = normal(2, 3), normal(3)
    for function in (ops.dropout_add_rms_norm, ops.dropout_add_layer_norm):
        with pytest.raises(ValueError, match=r"residual must have the shape of x \(2, 3\)"):
            function(x, normal(3), weight, RNG)
        with pytest.raises(ValueError, match=r"weight must have shape \(3,\)"):
            function(x, x, normal(2), RNG)
        with pytest.raises(ValueError, match=r"p must be from 0 to 1, got 1\.5"):
            function(x, x, weight, RNG, p=1.5)
        with pytest.raises(ValueError, match=r"rng must be int64\[2\]"):
            function(x, x, weight, RNG[:1])
    with pytest.raises(ValueError, match=r"bias must have shape \(3,\)"):
        ops.dropout_add_layer_norm(x, x, weight, RNG, normal(2))


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "residual": ((normal(2, 3), normal(3), RNG), {}, r"residual must have the shape of x \(2, 3\)"),
    "bias": ((normal(2, 3), normal(2, 3), RNG, normal(2)), {}, r"bias must have shape \(3,\)"),
    "bias of 0-dim": ((normal(), normal(), RNG, normal(1)), {}, "bias must have shape"),
    "p": ((normal(2, 3), normal(2, 3), RNG), {"p": 1.5}, "p must be from 0 to 1, got 1.5"),
    "narrow residual": (
        (normal(2, 3), normal(2, 3).bfloat16(), RNG),
        {},
        "residual must be torch.float32 like x, or float32; got torch.bfloat16",
    ),
}


@pytest.mark.parametrize("label", WRONG)
def test_bias_dropout_add_of_wrong_arguments_is_refused(label: str) -> None:
    args, attrs, message = WRONG[label]
    with pytest.raises(ValueError, match=message):
        ops.bias_dropout_add(*args, **attrs)


# Activations


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gelu_in_float32_has_the_bits_of_its_parts(approximate: Any) -> None:
    x, bias = normal(5, 40) * 3.0, normal(40)
    got = ops.bias_gelu(x, bias, approximate=approximate)
    assert bits(got) == bits(ops.gelu(x + bias, approximate=approximate))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bias_gelu_does_not_round_the_sum(dtype: torch.dtype, approximate: Any) -> None:
    x, bias = normal(5, 40, dtype=dtype), normal(40, dtype=dtype)
    wide = ops.gelu(x.float() + bias.float(), approximate=approximate)
    got = ops.bias_gelu(x, bias, approximate=approximate)
    assert bits(got) == bits(wide.to(dtype))
    assert bits(got) != bits(ops.gelu(x + bias, approximate=approximate))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_geglu_is_the_float32_product_rounded_once(dtype: torch.dtype, approximate: Any) -> None:
    gate, up = normal(5, 40, dtype=dtype), normal(5, 40, dtype=dtype)
    want = ops.gelu(gate.float(), approximate=approximate) * up.float()
    assert bits(ops.geglu(gate, up, approximate=approximate)) == bits(want.to(dtype))


def test_activations_of_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bias must have shape \(3,\), the last dim of x \(2, 3"):
        ops.bias_gelu(normal(2, 3), normal(2))
    with pytest.raises(ValueError, match="bias must have shape"):
        ops.bias_gelu(normal(), normal(1))
    with pytest.raises(ValueError, match="gate and up must have the same shape"):
        ops.geglu(normal(2, 3), normal(3))
    for call in (ops.bias_gelu, ops.geglu):
        with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', got 'fast'"):
            call(normal(3), normal(3), approximate="fast")  # type: ignore[arg-type]
