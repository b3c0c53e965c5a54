"""Are random calls the same for the same seed, and is a failing one led back to a simple one?"""

import math
from typing import Any

import pytest
import torch

from anychip.conformance.calls import Draw, place_call, with_equal_numbers
from anychip.conformance.choices import SIMPLER, Choices, search
from anychip.conformance.oracles.drawn import DRAWN
from anychip.operators import all_specs


def drawn(seed: int, examples: int = 20) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    search(lambda choose: found.append(tuple(choose.shape(2))), examples=examples, seed=seed)
    return found


def test_search_with_one_seed_makes_the_same_choices_and_with_another_others() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(set(drawn(1))) > 10


def test_failing_choice_is_led_back_to_the_smallest_that_fails() -> None:
    def check(choose: Choices) -> None:
        size, flag = choose.size(), choose.of("plain", "rare", "rarer")
        if size > 100:
            raise ValueError(f"{size} {flag}")

    with pytest.raises(ValueError, match=r"^127 plain$"):
        search(check, examples=30, seed=3)


def test_search_ends_soon_after_a_failure() -> None:
    calls: list[int] = []

    def check(choose: Choices) -> None:
        calls.append(sum(choose.size() for _ in range(200)))
        raise ValueError(str(calls[-1]))

    with pytest.raises(ValueError, match=r"^\d+$"):
        search(check, examples=30, seed=0)
    assert len(calls) <= SIMPLER + 2


def test_shape_has_about_as_many_elements_as_asked_for() -> None:
    def check(choose: Choices) -> None:
        shape = choose.shape(3, elements=500)
        assert len(shape) == 3
        assert math.prod(shape) <= 500

    search(check, examples=100, seed=5)


def test_every_operator_of_ours_is_called_at_random() -> None:
    assert set(DRAWN) == {spec.name for spec in all_specs()}


@pytest.mark.parametrize("layout", ["offset", "strided", "transposed", "padded"])
def test_placed_tensor_has_its_layout_and_its_numbers(layout: Any) -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    y = torch.ones(5)
    placed = place_call(("x", "y"), ((x, y), {}), torch.device("cpu"), {"x": layout})
    assert torch.equal(placed.args[0], x)
    assert placed.args[0].is_contiguous() == (layout == "offset")
    assert (placed.args[0].data_ptr() % 16 == 0) == (layout != "offset")
    assert placed.args[0].stride(-1) == {"strided": 2, "transposed": 6}.get(layout, 1)
    assert placed.args[1].is_contiguous()
    assert placed.touched(()) is None


@pytest.mark.parametrize(("layout", "dim"), [("expanded", 0), ("repeated", -1)])
def test_expanded_tensor_has_one_place_per_number(layout: Any, dim: int) -> None:
    x = torch.arange(6.0).view(2, 3)
    (equal,) = with_equal_numbers(("x",), ((x,), {}), {"x": layout})
    placed = place_call(("x",), ((equal,), {}), torch.device("cpu"), {"x": layout})
    assert placed.args[0].stride(dim) == 0
    assert torch.equal(placed.args[0], x.narrow(dim, 0, 1).expand(2, 3))
    placed.args[0].view_as(x)[0, 0] = 7.0
    assert placed.touched(()) is not None


def test_packed_tensors_are_parts_of_one_and_guarded_together() -> None:
    gate, up = torch.arange(6.0).view(2, 3), torch.arange(8.0).view(2, 4)
    layout: Any = {"gate": "packed", "up": "packed"}
    placed = place_call(("gate", "up"), ((gate, up), {}), torch.device("cpu"), layout)
    assert [t.stride() for t in placed.args] == [(7, 1), (7, 1)]
    assert torch.equal(placed.args[0], gate)
    assert torch.equal(placed.args[1], up)
    assert placed.touched(()) is None
    placed.args[1][1, 0] = 9.0
    assert placed.touched(()) is not None


def test_tensor_that_is_given_twice_is_placed_once() -> None:
    x = torch.ones(3)
    placed = place_call(("x", "y"), ((x, x), {}), torch.device("cpu"))
    assert placed.args[0].data_ptr() == placed.args[1].data_ptr()


def test_draw_with_seed_zero_is_the_plain_one_and_with_another_differs() -> None:
    plain = Draw(torch.float32, "a").normal(9)
    assert torch.equal(plain, Draw(torch.float32, "a", 0).normal(9))
    assert not torch.equal(plain, Draw(torch.float32, "a", 1).normal(9))
    assert not torch.equal(plain, Draw(torch.float32, "b").normal(9))
