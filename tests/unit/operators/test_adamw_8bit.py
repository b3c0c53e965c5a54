"""adamw_8bit: its codes against a table in numpy, shards of whole blocks, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anychip
from anychip import operators, ops
from anychip.operators.adamw_8bit import SIGNED, UNSIGNED, StateCodes
from tests.unit.dispatch.calls import bits

FORMS = pytest.mark.parametrize("form", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
NUMBERS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def cpu() -> None:
    anychip.use("cpu")


def table(form: StateCodes) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The number of each of 256 codes, by the sentence that defines it."""
    found = []
    for code in range(256):
        size = code % 128 if form.signed else code
        e, f = divmod(size, 2**form.fraction_bits)
        fraction = f / 2**form.fraction_bits
        number = 2.0 ** (e - 15) * (1.0 + fraction) if e else 2.0**-14 * fraction
        found.append(-number if form.signed and code > 127 else number)
    return np.array(found)


# Codes


@FORMS
def test_every_code_is_its_number_and_becomes_itself_again(form: StateCodes) -> None:
    codes = torch.arange(256).to(torch.uint8)
    numbers = form.decode(codes, torch.ones(1))
    assert numbers.tolist() == table(form).tolist()
    again, scales = form.encode(numbers)
    assert scales.tolist() == [1.0]
    # A negative zero has no code of its own.
    assert again.tolist() == [0 if code == 128 and form.signed else code for code in range(256)]


# The step


def _step(dtype: torch.dtype, shapes: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(1)

    def normals() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes]

    firsts = [SIGNED.encode(0.1 * m) for m in normals()]
    seconds = [UNSIGNED.encode(v.square()) for v in normals()]
    states = [[s[i] for s in given] for given in (firsts, seconds) for i in (0, 1)]
    grads = [g.to(dtype) for g in normals()]
    return [normals(), grads, *states, torch.tensor(1e-2), torch.tensor(3.0)]


def test_shards_of_whole_blocks_have_the_bits_of_the_whole() -> None:
    whole, parts = _step(torch.float32, ((1000,),)), _step(torch.float32, ((1000,),))
    cuts, blocks = (256, 512, 232), (1, 2, 1)
    shards: list[Any] = [
        list(tensors[0].split(cuts if tensors[0].numel() == 1000 else blocks))
        for tensors in parts[:6]
    ]
    ops.adamw_8bit(*whole, **NUMBERS)
    ops.adamw_8bit(*shards, *parts[6:], **NUMBERS)
    assert bits(whole) == bits(parts)


# Bytes, and what is refused


def test_bytes_of_a_step_are_those_of_codes_and_scales() -> None:
    cost = operators.adamw_8bit.cost(*_step(torch.bfloat16, ((1024,), (100,))), **NUMBERS)
    written = 1124 * (4 + 1 + 1) + 2 * 4 * (4 + 1)
    assert cost.nbytes == 2 * written + 2 * 1124
