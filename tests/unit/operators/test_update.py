"""Operators over lists: what is written and what is not, and the bits of all rows.

That they are their equations is asked of the rows and references by the conformance suite.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from tests.unit.dispatch.calls import bits
from tests.unit.operators.exactness import assert_close

SHAPES = ((33,), (), (0,), (4, 5), (1000,))
NAMES = ("adamw", "sgd", "lion", "lamb", "clip", "unscale_and_check", "l2_norm")


pytestmark = pytest.mark.usefixtures("pin")


def _tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]


def test_adamw_of_no_tensors_still_counts_the_step() -> None:
    step = torch.tensor(4.0)
    ops.adamw([], [], [], [], torch.tensor(1e-2), step)
    assert step.item() == 5.0


def test_adamw_empty_low_precision_is_none() -> None:
    found = []
    for low in (None, []):
        args: list[Any] = [_tensors(seed=i) for i in range(3)] + [[t.square() for t in _tensors()]]
        ops.adamw(*args, torch.tensor(1e-2), torch.tensor(0.0), None, None, None, low)
        found.append(bits(args))
    assert found[0] == found[1]


RULES: dict[str, tuple[int, dict[str, Any]]] = {
    "sgd": (3, {"momentum": 0.9}),
    "sgd-nesterov": (3, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd-decoupled": (3, {"momentum": 0.9, "weight_decay": 0.1, "decoupled": True}),
    "lion": (3, {"weight_decay": 0.1}), "lamb": (4, {}),
}  # fmt: skip
"""Lists of tensors, and attributes."""


def _moved_by(label: str, pinned: str) -> list[list[Tensor]]:
    """The lists after a step of tensors of one chunk of a row, of several, and of none."""
    count, attrs = RULES[label]
    generator = torch.Generator().manual_seed(3)
    sizes = (0, 5, 1 << 14, (1 << 17) + 1, 300_001)
    lists = [[torch.randn(n, generator=generator) for n in sizes] for _ in range(count)]
    lists[3:] = [[v.square() for v in tensors] for tensors in lists[3:]]
    name = label.split("-")[0]
    scalars = (1e-2, 2.0, 3.0, 0.3)
    with anychip.policy(pin={name: pinned, "lamb_sums_of_squares": pinned}):
        getattr(ops, name)(*lists, *map(torch.tensor, scalars), **attrs)
    return lists


@pytest.mark.parametrize("label", [name for name in RULES if name != "lamb"])
def test_rule_has_the_same_bits_whatever_serves_it(label: str) -> None:
    assert bits(_moved_by(label, "cpu")) == bits(_moved_by(label, "reference"))


def test_lamb_differs_from_its_reference_by_the_square_root_alone() -> None:
    """torch's own root is that of a library, which need not be the nearest number."""
    got, want = _moved_by("lamb", "cpu"), _moved_by("lamb", "reference")
    assert bits(got[1:]) == bits(want[1:])
    for one, other in zip(got[0], want[0], strict=True):
        assert_close(one, other.double(), 16)


# norm, clip, unscale


def test_clip_by_a_norm_that_is_nan_leaves_nothing_that_looks_right() -> None:
    x = torch.ones(50)
    ops.clip([x], torch.tensor(float("nan")))
    assert x.isnan().all()


@pytest.mark.parametrize("before", [1.0, 2.0, float("nan")])
def test_unscale_never_takes_found_inf_back(before: float) -> None:
    found = torch.tensor(before)
    ops.unscale_and_check([torch.ones(3)], torch.tensor(2.0), found)
    assert bits(found) == bits(torch.tensor(before))
