"""dropout and bias_dropout_add of the CUDA kernels: the mask of every chip, rows of any length."""

import pytest
import torch
from torch import Tensor

from anychip import operators as specs
from anychip.operators import philox
from anychip.operators.dropout import keep_threshold
from tests.unit.backends_cuda.conftest import Chip, drawn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MATRICES = ((1, 1), (3, 7), (5, 8), (600, 24), (17, 264), (33, 516))


def _rng(seed: int = 1234, offset: int = 5) -> Tensor:
    return torch.tensor([seed, offset])


@pytest.mark.parametrize("numel", [0, 1, 3, 7, 8, 9, 4096, 4099])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_of_any_length_has_the_mask_of_every_chip(
    chip: Chip, dtype: torch.dtype, numel: int
) -> None:
    x = drawn(numel, dtype=dtype)
    y = chip.call("dropout", "forward", x, _rng(), p=0.3)
    (dx,) = chip.call("dropout", "backward", x, _rng(), p=0.3, needs=(True,))
    assert torch.equal(y.cpu(), specs.dropout.forward(x, _rng(), p=0.3))
    assert torch.equal(dx, y)


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 6, 7, 264])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_of_rows_of_a_whole_has_their_mask(
    chip: Chip, dtype: torch.dtype, columns: int
) -> None:
    rows = torch.tensor([0, 7, 3, -1, -(2**40) - 3, 2**62 + 5, 11, 12, 13])
    x, place = drawn(9, columns, dtype=dtype), {"p": 0.3, "width": columns + 3, "column": 2}
    given, bias = (_rng(), rows), drawn(columns, dtype=dtype)
    y = chip.call("dropout", "forward", x, *given, **place)
    (dx,) = chip.call("dropout", "backward", x, *given, **place, needs=(True,))
    assert torch.equal(y.cpu(), specs.dropout.forward(x, *given, **place))
    assert torch.equal(dx, y)
    total = chip.call("bias_dropout_add", "forward", x, x, _rng(), bias, rows, **place)
    assert torch.equal(
        total.cpu(), specs.bias_dropout_add.forward(x, x, _rng(), bias, rows, **place)
    )
    found = chip.call("bias_dropout_add", "backward", x, *given, **place, needs=(True, True, True))
    want = specs.bias_dropout_add.backward(x, *given, **place, needs=(True, True, True))
    assert torch.equal(found[0].cpu(), want[0])
    assert torch.equal(found[1].cpu(), x)
    torch.testing.assert_close(found[2].cpu(), want[2])


@pytest.mark.parametrize("p", [0.0, 2.0**-32, 0.5, 1.0 - 2.0**-20, 1.0])
def test_dropout_keeps_what_the_threshold_says(chip: Chip, p: float) -> None:
    # The last block of the stream before the counter's lower half runs over, and a negative seed.
    rng = _rng(-3, 2**32 - 2)
    x = torch.ones(1001)
    x[::5] = torch.nan
    y = chip.call("dropout", "forward", x, rng, p=p).cpu()
    keep = philox.words(rng, 1001) >= keep_threshold(p)
    assert torch.equal(y == 0.0, ~keep)
    assert torch.equal(y.isnan(), keep & x.isnan())


@pytest.mark.parametrize("element", [0, 3, 6, 17])
def test_dropout_keeps_an_element_whose_word_is_the_threshold(chip: Chip, element: int) -> None:
    word = int(philox.words(_rng(), 18)[element])
    x = torch.ones(18)
    kept = chip.call("dropout", "forward", x, _rng(), p=word / 2**32)
    dropped = chip.call("dropout", "forward", x, _rng(), p=(word + 1) / 2**32)
    assert kept[element] > 0.0
    assert dropped[element] == 0.0


@pytest.mark.parametrize("shape", MATRICES, ids=str)
@pytest.mark.parametrize("stream", [None, torch.float32], ids=["own", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_dropout_add_of_any_matrix_is_the_reference(
    chip: Chip, dtype: torch.dtype, stream: torch.dtype | None, shape: tuple[int, int]
) -> None:
    x, residual = drawn(*shape, dtype=dtype), drawn(*shape, dtype=stream or dtype, seed=1)
    for own in (drawn(shape[1], dtype=torch.float16, seed=2), None):
        y = chip.call("bias_dropout_add", "forward", x, residual, _rng(), own, p=0.25).cpu()
        want = specs.bias_dropout_add.forward(
            x.double(), residual.double(), _rng(), own, p=0.25
        ).double()
        half = torch.finfo(y.dtype).eps / 2
        inner = x.double().abs() + (0.0 if own is None else own.double().abs())
        rounding = 4 * 2**-24 * (inner / 0.75 + residual.double().abs())
        assert y.dtype == residual.dtype
        assert torch.all((y.double() - want).abs() <= half * want.abs() + rounding)


@pytest.mark.parametrize("shape", MATRICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_dropout_add_gradients_are_the_reference(
    chip: Chip, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    # p = 1/2 and small integers: the sums for the bias have no rounding in any order.
    grad = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    name = "bias_dropout_add"
    made = chip.call(name, "backward", grad, _rng(), p=0.5, needs=(True, True, True))
    alone = [
        chip.call(name, "backward", grad, _rng(), p=0.5, needs=needs)
        for needs in ((True, False, False), (False, True, False), (False, False, True))
    ]
    reference = specs.bias_dropout_add.backward
    assert reference is not None
    want = reference(grad, _rng(), p=0.5, needs=(True, True, True))
    for index in range(3):
        assert made[index].dtype == want[index].dtype
        assert torch.equal(made[index].cpu(), want[index])
        assert torch.equal(alone[index][index], made[index])
        assert sum(t is not None for t in alone[index]) == 1


def test_wrong_arguments_are_refused(chip: Chip) -> None:
    native, place = chip.kernels.native, chip.kernels.place(torch.empty(0, device=chip.device))
    rng = _rng().to(chip.device)
    for numel, p in ((-1, 0.5), (4, 1.5), (4, float("nan"))):
        with pytest.raises(RuntimeError, match="dropout: CUDA error 1"):
            native.dropout(0, rng.data_ptr(), 0, numel, p, 0, *place)
    # A stream of another 16-bit type than x.
    with pytest.raises(RuntimeError, match="bias_dropout_add_forward: CUDA error 1"):
        native.bias_dropout_add_forward(0, 0, rng.data_ptr(), 0, 0, 1, 1, 0.5, 1, 2, 1, *place)
    with pytest.raises(RuntimeError, match="dropout_rows: CUDA error 1"):
        native.dropout_rows(0, rng.data_ptr(), 0, 0, 1, 1, 1, 0, 0.5, 0, *place)
