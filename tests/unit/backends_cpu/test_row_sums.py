"""embedding and unpermute by native kernels: sums in the order of the references."""

import pytest
import torch

from anychip import operators
from anychip_cpu import embedding, native, permutation
from tests.unit.dispatch.calls import bits
from tests.unit.operators.exactness import assert_close

pytestmark = pytest.mark.skipif(native.kernels is None, reason=str(native.problem))

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTH = 1100  # of more than one tile, and no whole vectors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (700,)], ids=str)
def test_embedding_has_the_bits_of_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(9, shape, generator=generator)
    weight = torch.randn(11, WIDTH, generator=generator).to(dtype)
    y = embedding.embedding(indices, weight)
    assert bits([y]) == bits([weight[indices]])
    grad = torch.randn(y.shape, generator=generator).to(dtype)
    (got,) = embedding.embedding_backward(grad, indices, weight, needs=(True,))
    reference = operators.embedding.backward
    assert reference is not None
    (want,) = reference(grad, indices, weight, needs=(True,))
    assert bits([got]) == bits([want])
    assert not got[9:].any()  # rows that none asked for


@pytest.mark.parametrize("index", [-1, 11])
def test_index_that_is_no_row_is_refused_in_both_directions(index: int) -> None:
    indices, weight = torch.tensor([3, index]), torch.zeros(11, 4)
    low, high = sorted(indices.tolist())
    with pytest.raises(IndexError, match=f"from 0 to 10, got {low} to {high}"):
        embedding.embedding(indices, weight)
    with pytest.raises(IndexError, match=f"from 0 to 10, got {low} to {high}"):
        embedding.embedding_backward(torch.zeros(2, 4), indices, weight, needs=(True,))


@pytest.mark.parametrize("weights_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpermute_has_the_bits_of_the_reference(
    dtype: torch.dtype, weights_dtype: torch.dtype | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    row_map = torch.randperm(21, generator=generator).view(7, 3)
    x = torch.randn(21, WIDTH, generator=generator).to(dtype)
    grad = torch.randn(7, WIDTH, generator=generator).to(dtype)
    weights = None if weights_dtype is None else torch.rand(7, 3).to(weights_dtype)
    want = operators.unpermute.forward(x, row_map, weights)
    assert bits([permutation.unpermute(x, row_map, weights)]) == bits([want])
    needs = (True, weights is not None)
    dx, dweights = permutation.unpermute_backward(grad, x, row_map, weights, needs=needs)
    reference = operators.unpermute.backward
    assert reference is not None
    wanted = reference(grad, x, row_map, weights, needs=needs)
    assert bits([dx]) == bits([wanted[0]])
    if weights is not None:
        assert dweights is not None
        exact = torch.einsum("th,tjh->tj", grad.double(), x.double()[row_map])
        # A sum of 1100 products passes 27 roundings; it is about as large as 33 of its terms.
        assert_close(dweights, exact, 27, ulps=0.51)


@pytest.mark.parametrize(
    ("index", "is_one"),
    [([], True), ([0], True), ([2, 0, 1], True), ([1], False), ([0, 0], False), ([-1, 0], False)],
)
def test_permutation_holds_each_number_once(index: list[int], is_one: bool) -> None:
    assert native.kernels is not None
    held = torch.tensor(index, dtype=torch.int64)
    assert native.kernels.is_permutation(held.data_ptr(), held.numel()) is is_one
