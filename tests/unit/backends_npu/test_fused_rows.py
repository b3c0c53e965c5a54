"""What the rows hand to the fused calls, with spies in place of torch_npu, on tensors of the CPU.

Values are the business of the conformance suite on the emulator; here it is what no result shows.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anychip.operators import all_specs
from anychip_npu import attention, lists, products, updates

SPECS = {spec.name: spec for spec in all_specs()}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.ops.npu of the rows' modules; functions are set on it."""
    found = SimpleNamespace()
    monkeypatch.setattr(torch.ops, "npu", found, raising=False)
    return found


def test_attention_backward_runs_deterministic_kernels(fused: Any) -> None:
    seen = []

    def grad(q: Tensor, k: Tensor, v: Tensor, *_: Any, **named: Any) -> tuple[Tensor, ...]:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return q, k, v, q, q

    fused.npu_fusion_attention_grad = grad
    q = torch.zeros(1, 2, 1, 4)
    lse = torch.zeros(1, 1, 2)
    attention.attention_backward(
        q, q, q, q, q, lse, causal=False, scale=None, out_dtype=None, needs=(True, True, True)
    )
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_attention_causal_hands_over_no_query_that_sees_nothing(fused: Any) -> None:
    given = {}

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **named: Any) -> tuple[Tensor, ...]:
        given.update(named, queries=q.shape[1])
        largest = torch.full((1, 1, q.shape[1], 8), 2.0)
        return q + 1.0, largest, torch.exp(largest)

    fused.npu_fusion_attention = forward
    q, k = torch.zeros(1, 5, 1, 4), torch.zeros(1, 3, 1, 4)
    y, lse = attention.attention(q, k, k, causal=True, scale=None, out_dtype=None)
    assert given["queries"] == 3
    assert given["sparse_mode"] == 3
    assert given["scale"] == 0.5
    assert torch.equal(y[0, :, 0, 0], torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]))
    assert lse.tolist() == [[[-math.inf, -math.inf, 4.0, 4.0, 4.0]]]


def test_attention_mask_hides_what_comes_later_and_is_made_once() -> None:
    mask = attention.triangle(torch.device("cpu"))
    assert mask.shape == (2048, 2048)
    assert mask[3, 4]
    assert not mask[4, 4]
    assert not mask[4, 3]
    assert attention.triangle(torch.device("cpu")) is mask


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "off"])
def test_linear_multiplies_without_hf32_and_puts_the_switch_back(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = SimpleNamespace(allow_hf32=allowed)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(matmul=switch), raising=False)
    seen = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append(switch.allow_hf32) or product(a, b))
    y = products.linear(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None, out_dtype=None)
    assert seen == [False]
    assert switch.allow_hf32 is allowed
    assert torch.equal(y, torch.tensor([[1.0, 3.0], [2.0, 4.0]]))


def test_grouped_linear_hands_over_every_row_and_clears_those_of_no_group(fused: Any) -> None:
    given = {}

    def grouped(x: list[Tensor], weight: list[Tensor], **named: Any) -> list[Tensor]:
        given.update(named)
        return [x[0] @ weight[0][0]]

    fused.npu_grouped_matmul = grouped
    offsets = torch.tensor([2], dtype=torch.int32)
    y = products.grouped_linear(torch.ones(4, 3), torch.ones(1, 2, 3), offsets, out_dtype=None)
    assert given["group_list"].tolist() == [4]
    assert given["group_list"].dtype == torch.int64
    assert offsets.tolist() == [2]
    assert torch.equal(y, torch.tensor([[3.0, 3.0]] * 2 + [[0.0, 0.0]] * 2))


def test_grouped_linear_backward_clears_what_an_empty_group_left(fused: Any) -> None:
    def grouped(x: list[Tensor], weight: list[Tensor], **named: Any) -> list[Tensor]:
        return [torch.full((2, 2, 3), float("nan"))]

    fused.npu_grouped_matmul = grouped
    offsets = torch.tensor([0, 4])
    _, dweight = products.grouped_linear_backward(
        torch.ones(4, 2), torch.ones(4, 3), torch.ones(2, 2, 3), offsets, out_dtype=None,
        needs=(False, True),
    )  # fmt: skip
    assert dweight is not None
    assert torch.equal(dweight[0], torch.zeros(2, 3))
    assert dweight[1].isnan().all()


def test_lists_of_one_dtype_leave_out_tensors_without_elements() -> None:
    halves = [torch.zeros(2, dtype=torch.float16), torch.zeros((), dtype=torch.float16)]
    single, empty = torch.zeros(3), torch.zeros(0, 4)
    found = lists.by_dtype([halves[0], single, empty, halves[1]])
    assert [[id(t) for t in same] for same in found] == [[id(t) for t in halves], [id(single)]]


def test_adamw_reads_nothing_on_the_host() -> None:
    # Of tensors without data nothing can be read.
    tensors = [[torch.zeros(2, device="meta")] for _ in range(4)]
    lr, step, found_inf = (torch.zeros((), device="meta") for _ in range(3))
    given: list[Any] = [*tensors, lr, step, lr, lr, found_inf, None]
    updates.adamw(*given, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
    with pytest.raises(RuntimeError, match="meta"):
        float(lr)


RULES: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw": (2, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}),
    "lion": (1, {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
    "sgd": (1, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "decoupled": False}),
}
"""Lists of states, and attributes."""


@pytest.mark.parametrize("found", [None, 0.0, 1.0], ids=["unchecked", "finite", "infinite"])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_update_of_more_tensors_than_one_call_takes_is_the_reference(
    rule: str, found: float | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    count, (states, attrs) = updates._TOGETHER + 2, RULES[rule]

    def made(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        # Positive, as an average of squares is.
        return [torch.rand(3, generator=generator).to(dtype) for _ in range(count)]

    given = [made(), made(torch.float16), *(made() for _ in range(states))]
    low, results = made(torch.bfloat16), []
    for function in (getattr(updates, rule), SPECS[rule].forward):
        lists = [[t.clone() for t in same] for same in given]
        step, copies = torch.tensor(3.0), [t.clone() for t in low]
        scalars = [torch.tensor(8.0), torch.tensor(0.5)]
        function(
            *lists, torch.tensor(0.01), step, *scalars,
            None if found is None else torch.tensor(found), copies, **attrs,
        )  # fmt: skip
        results.append([*lists[0], *(t for state in lists[2:] for t in state), step, *copies])
    for got, wanted in zip(*results, strict=True):
        # Each is a few roundings away from the same number.
        bound = 1e-5 if got.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got, wanted, rtol=bound, atol=1e-6)
