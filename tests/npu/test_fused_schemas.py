"""What torch_npu registers for the fused calls of the rows: names of arguments, and shapes and
dtypes of results by its own functions for tensors without data.

Nothing here runs on the emulator: its rows have the same hand as the mapping, and this has not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu")

from anychip_npu import attention  # noqa: E402
from anychip_npu.operators import table  # noqa: E402

HALF, FLOAT = torch.bfloat16, torch.float32


def empty(*shape: int, dtype: Any = HALF) -> Any:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


# Of what rows call: arguments in the order in which they are given; and those given by name.
ARGUMENTS = {
    "npu_fusion_attention": "query key value head_num input_layout; "
    "atten_mask scale actual_seq_qlen actual_seq_kvlen sparse_mode",
    "npu_fusion_attention_grad": "query key value dy head_num input_layout; atten_mask softmax_max "
    "softmax_sum attention_in scale_value actual_seq_qlen actual_seq_kvlen sparse_mode",
    "npu_grouped_matmul": "x weight; group_list split_item group_type",
    "npu_moe_token_permute": "tokens indices;",
    "npu_moe_token_permute_grad": "tokens grad_permuted_tokens indices sorted_indices;",
    "_npu_moe_token_unpermute": "permuted_tokens sorted_indices probs;",
    "npu_moe_token_unpermute_grad": "permuted_tokens grad_unpermuted_tokens sorted_indices probs;",
}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_fused_call_arguments_are_those_that_the_adapter_registers(name: str) -> None:
    positional, named = (text.split() for text in ARGUMENTS[name].split(";"))
    schema = getattr(torch.ops.npu, name).default._schema

    known = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert known[: len(positional)] == positional
    assert set(named) <= {argument.name for argument in schema.arguments}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_fused_call_has_a_kernel_below_autograd(name: str) -> None:
    # Rows run below autograd: what has a kernel for autograd alone cannot be called there.
    has = torch._C._dispatch_has_kernel_for_dispatch_key

    assert has(f"npu::{name}", "PrivateUse1")
    assert has(f"npu::{name}", "Meta")


class Call(NamedTuple):
    """A call of a fused operator without data, and the results it must have; None: any."""

    name: str
    make: Callable[[], Any]
    results: tuple[Any, ...]


def attended(layout: str, q: Any, k: Any, **named: Any) -> Any:
    """npu_fusion_attention, causal to the last key."""
    mask = empty(2048, 2048, dtype=torch.bool)
    heads = q.shape[-2]
    return torch.ops.npu.npu_fusion_attention(
        q, k, k, heads, layout, atten_mask=mask, scale=0.5, sparse_mode=3, **named
    )[:3]


def by_groups(x: Any, weight: Any, group_type: int) -> Any:
    """npu_grouped_matmul of three groups, one tensor each."""
    ends = empty(3, dtype=torch.int64)
    return torch.ops.npu.npu_grouped_matmul(
        [x], [weight], group_list=ends, split_item=3, group_type=group_type
    )


Q, K = (2, 6, 4, 8), (2, 9, 2, 8)
CALLS = [
    Call("attention_varlen",
         lambda: attended("TND", empty(9, 4, 8), empty(9, 2, 8), actual_seq_qlen=[3, 9],
                          actual_seq_kvlen=[3, 9]),
         (((9, 4, 8), HALF), ((9, 4, 8), FLOAT), ((9, 4, 8), FLOAT))),
    Call("grouped_by_rows", lambda: by_groups(empty(6, 4), empty(3, 4, 5), 0),
         (((6, 5), HALF),)),
    Call("grouped_by_rows_turned",
         lambda: by_groups(empty(6, 4), empty(3, 5, 4).transpose(1, 2), 0), (((6, 5), HALF),)),
    Call("grouped_by_columns", lambda: by_groups(empty(6, 4).t(), empty(6, 5), 2),
         (((3, 4, 5), HALF),)),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])
def test_fused_call_without_data_has_the_results_that_the_row_takes(call: Call) -> None:
    found = [(tuple(result.shape), result.dtype) for result in call.make()]

    assert found == list(call.results)


def test_lse_stands_for_the_statistics_of_attention_in_both_directions() -> None:
    q, k = empty(*Q), empty(*K)
    found = attended("BSND", q, k)[1:]

    lse = attention.lse_of(*found)
    assert (lse.shape, lse.dtype) == (torch.Size((*Q[:1], Q[2], Q[1])), FLOAT)
    back = attention.statistics_of(lse)
    assert [(t.shape, t.dtype) for t in back] == [(t.shape, t.dtype) for t in found]
    scores = torch.tensor([[1.0, -2.0, 40.0]])
    largest = scores.amax(-1, keepdim=True)
    total = (scores - largest).exp().sum(-1, keepdim=True)
    torch.testing.assert_close(attention.lse_of(largest, total), scores.logsumexp(-1))


def test_every_fused_call_of_these_rows_is_looked_at() -> None:
    modules = ("attention", "varlen", "products", "permutation")
    called = {
        call.removeprefix("npu::") for row in table
        if row.function.__module__.removeprefix("anychip_npu.") in modules for call in row.calls
        if call.startswith("npu::")
    }  # fmt: skip

    assert called == set(ARGUMENTS)


@pytest.mark.parametrize(
    "name", ["_foreach_norm.Scalar", "_fused_adamw_", "_amp_foreach_non_finite_check_and_unscale_"]
)
def test_list_operator_has_a_kernel_of_the_adapter(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "PrivateUse1")


def test_list_product_with_a_number_on_the_device_has_none() -> None:
    # The reason why clip stays with the reference.
    has = torch._C._dispatch_has_kernel_for_dispatch_key

    assert not has("aten::_foreach_mul_.Tensor", "PrivateUse1")
