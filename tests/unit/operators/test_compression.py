"""hadamard and top_k: ties, threads, and what is refused."""

import torch

from anychip import ops
from tests.unit.dispatch.calls import bits


def test_top_k_has_the_same_bits_for_any_number_of_threads() -> None:
    x = torch.randn(40, 4096, generator=torch.Generator().manual_seed(9))
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(bits([ops.top_k(x, k=100), ops.top_k(x.flatten(), k=5000)]))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]
