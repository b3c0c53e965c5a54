"""torch's own checks of a custom operator: schema, autograd registration, fake tensors, AOT."""

import pytest
import torch

import anychip
from tests.unit.dispatch import calls

CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")
ALL = (*CHEAP, "test_aot_dispatch_dynamic")


def _check(name: str, index: int, dtype: torch.dtype, utils: tuple[str, ...]) -> None:
    made = calls.call(name, index, dtype, grad=True)
    torch.library.opcheck(made.door(), made.args, made.attrs, test_utils=utils)


@pytest.mark.grid
@pytest.mark.parametrize(("name", "index"), calls.every_sample())
def test_operator_every_sample_passes_opcheck(name: str, index: int) -> None:
    _check(name, index, torch.float32, CHEAP if index else ALL)


@pytest.mark.parametrize("name", calls.SPECS)
def test_operator_in_bfloat16_passes_opcheck(name: str) -> None:
    _check(name, 0, torch.bfloat16, CHEAP)


@pytest.mark.grid
@pytest.mark.parametrize("name", calls.SPECS)
def test_operator_pinned_to_the_reference_passes_opcheck(name: str) -> None:
    with anychip.policy(pin={name: "reference"}):
        _check(name, 0, torch.float32, ALL)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pin", ["cpu", "reference"])
@pytest.mark.parametrize("name", calls.DIFFERENTIABLE)
def test_forward_and_backward_operators_pass_opcheck(
    name: str, pin: str, dtype: torch.dtype
) -> None:
    made = calls.call(name, 0, dtype, grad=True)
    with anychip.policy(pin={name: pin}):
        torch.library.opcheck(made.door("_forward"), calls.flat_arguments(made), test_utils=CHEAP)
        arguments = calls.backward_arguments(calls.call(name, 0, dtype, grad=False))
        torch.library.opcheck(made.door("_backward"), arguments, test_utils=CHEAP)


@pytest.mark.parametrize(
    "name",
    [
        "dropout", "bias_dropout_add", "gelu", "silu", "relu", "softplus", "bias_gelu", "swiglu",
        "geglu", "rms_norm", "layer_norm", "group_norm", "add_rms_norm", "add_layer_norm",
        "dropout_add_rms_norm", "dropout_add_layer_norm", "softmax", "rope", "conv1d", "conv2d",
    ],
)  # fmt: skip
def test_reference_of_a_transposed_tensor_has_the_layout_that_was_promised(name: str) -> None:
    made = calls.call(name, 0, grad=False)
    first = made.args[0]
    turned = first.transpose(-1, -2).contiguous().transpose(-1, -2)
    channels_last = first.dim() == 4
    if channels_last:
        turned = first.contiguous(memory_format=torch.channels_last)
    args = (turned, *made.args[1:])
    if name == "rope":
        args = (turned, turned, *made.args[2:])
    assert not turned.is_contiguous()
    with anychip.policy(pin={name: "reference"}):
        torch.library.opcheck(made.door(), args, made.attrs, test_utils=CHEAP)
