"""The native adamw_8bit next to the reference: states have the same bits, parameters nearly so."""

import math

import pytest
import torch
from torch import Tensor

from anychip import operators
from anychip.operators.adamw_8bit import SIGNED, UNSIGNED
from anychip_cpu import native, updates
from tests.unit.dispatch.calls import bits

pytestmark = pytest.mark.skipif(native.kernels is None, reason=str(native.problem))

NUMBERS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def _call(gradient: Tensor) -> list[list[Tensor]]:
    average = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1))
    average[:300] = 0.0  # a block without a scale, and a part of one
    lists = [[torch.ones(gradient.shape)], [gradient]]
    for form, values in ((SIGNED, average), (UNSIGNED, average.square())):
        lists += [[made] for made in form.encode(values)]
    return lists


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5001])
@pytest.mark.parametrize("kind", ["normal", "far apart", "zero", "not finite"])
def test_states_have_the_bits_of_the_reference(kind: str, numel: int) -> None:
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    if kind == "far apart":
        gradient *= torch.exp2(-(torch.arange(numel) % 140).float())
    if kind == "zero":
        gradient *= 0.0
    if kind == "not finite":
        gradient[numel // 2], gradient[numel // 3] = math.inf, math.nan
    got, want = _call(gradient), _call(gradient)
    for function, lists in ((updates.adamw_8bit, got), (operators.adamw_8bit.forward, want)):
        step = torch.tensor(3.0)
        function(*lists, torch.tensor(0.01), step, None, None, None, None, **NUMBERS)
        assert step.item() == 4.0
    for one, other in zip(got[2:], want[2:], strict=True):
        assert bits([t.nan_to_num(7.0) for t in one]) == bits([t.nan_to_num(7.0) for t in other])
    # The step is one number with other roundings: 10 of them, of at most 0.1 of the parameter.
    assert torch.allclose(got[0][0], want[0][0], rtol=0.0, atol=10 * 2.0**-24, equal_nan=True)
