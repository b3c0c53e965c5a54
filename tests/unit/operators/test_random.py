"""The random stream and dropout: the same bits from the reference, the native row and numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anychip
from anychip import ops
from anychip.conformance.oracles import philox
from anychip.operators import philox as torch_philox
from anychip_cpu import native

STREAMS = [
    (0, 0), (1, 1), (-1, 0), (-(2**63), 3),
    (2**63 - 1, 2**32 - 2),  # the low word of the counter overflows within the stream
    (1234567890123, 2**40 + 7),
    (42, 2**63 - 2),  # past the largest int64, which is the lower half of the unsigned range
    (42, -2),  # past 2^64 - 1, to 0
]  # fmt: skip


def dropped_by_numpy(values: Any, seed: int, offset: int, p: float, which: Any = None) -> Any:
    """float32 dropout by these words: what is kept, times 1 / (1 - p) rounded to float32."""
    keep = philox.kept(seed, offset, values.size if which is None else which, p)
    keep = keep.reshape(values.shape)
    scale = np.float32(0.0 if p == 1.0 else 1.0 / (1.0 - p))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(keep, values * scale, np.float32(0.0))


def dropped_by_each(*args: torch.Tensor, **attrs: Any) -> list[torch.Tensor]:
    """Dropout by the native row, where it is built, and by the reference."""
    found = []
    for implementation in ("reference",) if native.kernels is None else ("cpu", "reference"):
        with anychip.policy(pin={"dropout": implementation}):
            found.append(ops.dropout(*args, **attrs))
    return found


@pytest.mark.parametrize(("seed", "offset"), STREAMS)
def test_torch_and_native_streams_equal_numpy(seed: int, offset: int) -> None:
    want = philox.words(seed, offset, 21).tolist()
    assert torch_philox.words(torch.tensor([seed, offset]), 21).tolist() == want
    if native.kernels is not None:
        unsigned = seed % 2**64, offset % 2**64
        assert list(native.kernels.philox(*unsigned, 21)) == want


@settings(max_examples=60)
@given(
    seed=st.integers(-(2**63), 2**63 - 1), offset=st.integers(-(2**63), 2**63 - 1),
    p=st.floats(0.0, 1.0), count=st.integers(0, 70),
)  # fmt: skip
def test_dropout_of_ones_equals_numpy_everywhere(
    seed: int, offset: int, p: float, count: int
) -> None:
    want = dropped_by_numpy(np.ones(count, dtype=np.float32), seed, offset, p)
    for got in dropped_by_each(torch.ones(count), torch.tensor([seed, offset]), p=p):
        assert got.numpy().tobytes() == want.tobytes()


INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=60)
@given(
    numbers=st.lists(st.integers(-9, 99) | INT64, min_size=1, max_size=5),
    columns=st.integers(0, 70), column=st.integers(0, 70), more=st.integers(0, 9), offset=INT64,
)  # fmt: skip
def test_dropout_of_numbered_rows_has_the_words_of_the_whole(
    numbers: list[int], columns: int, column: int, more: int, offset: int
) -> None:
    width = column + columns + more
    index = [n * width + column + j for n in numbers for j in range(columns)]
    index = [(i + 2**63) % 2**64 - 2**63 for i in index]  # as int64 wraps; // below rounds down
    ones = np.ones((len(numbers), columns), dtype=np.float32)
    want = dropped_by_numpy(ones, 3, offset, 0.4, np.array(index, dtype=np.int64))
    args = (torch.from_numpy(ones), torch.tensor([3, offset]), torch.tensor(numbers))
    for got in dropped_by_each(*args, p=0.4, width=width, column=column):
        assert got.numpy().tobytes() == want.tobytes()
