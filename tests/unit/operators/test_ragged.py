"""How often a host reads the numbers of a tensor."""

import threading

import pytest
import torch
from torch import Tensor

from anychip.operators.ragged import ReadOnce


class Reads(list[Tensor]):
    """A way of reading that counts."""

    def __call__(self, numbers: Tensor) -> list[int]:
        self.append(numbers)
        found: list[int] = numbers.tolist()
        return found


@pytest.fixture
def reads() -> Reads:
    return Reads()


def test_one_tensor_is_read_once(reads: Reads) -> None:
    once, numbers = ReadOnce(reads), torch.tensor([0, 3, 8])
    assert [once(numbers) for _ in range(3)] == [[0, 3, 8]] * 3
    assert once(numbers.detach()) == [0, 3, 8]
    assert len(reads) == 1


def test_what_was_written_to_is_read_again(reads: Reads) -> None:
    once, numbers = ReadOnce(reads), torch.tensor([0, 3, 8])
    once(numbers)
    numbers[1] = 5
    assert once(numbers) == [0, 5, 8]
    numbers.detach().zero_()
    assert once(numbers) == [0, 0, 0]
    assert len(reads) == 3


@pytest.mark.parametrize("other", [
    lambda memory: memory[2:4], lambda memory: memory[:3], lambda memory: memory[::2][:2],
    lambda memory: memory.view(torch.int32)[:2],
], ids=["elsewhere", "longer", "with gaps", "of another type"])  # fmt: skip
def test_other_numbers_in_the_same_memory_are_read_too(other: object, reads: Reads) -> None:
    assert callable(other)
    once, memory = ReadOnce(reads), torch.tensor([0, 2, 5, 7])
    once(memory[:2])
    assert once(other(memory)) == other(memory).tolist()
    assert len(reads) == 2


def test_new_tensor_at_an_old_address_is_read() -> None:
    once = ReadOnce(Tensor.tolist)
    for end in range(50):
        assert once(torch.tensor([0, end])) == [0, end]


def test_inference_tensor_is_read_at_every_call(reads: Reads) -> None:
    once = ReadOnce(reads)
    with torch.inference_mode():
        numbers = torch.tensor([0, 3])
        assert once(numbers) == [0, 3]
        numbers[1] = 4
        assert once(numbers) == [0, 4]


def test_each_thread_remembers_its_own(reads: Reads) -> None:
    once, mine, other = ReadOnce(reads), torch.tensor([1]), torch.tensor([2])
    once(mine)
    thread = threading.Thread(target=once, args=(other,))
    thread.start()
    thread.join()
    assert once(mine) == [1]
    assert len(reads) == 2
