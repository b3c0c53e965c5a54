"""Wrong backends whose grouped products and fused loss the two chapters have to find."""

from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import Row
from tests.meta.wrong import Attr, wrong, wrong_arguments, wrong_backward, wrong_gradients
from tests.meta.wrong_attention import read_as_int64
from tests.unit.conformance.lower_precision import tf32

BOTH = frozenset({torch.bfloat16, torch.float32})


@wrong("rest-not-zero", "output never written", operator="grouped_linear")
def unwritten_rest(row: Row, x: Tensor, weight: Tensor, offsets: Tensor, **attrs: Attr) -> Any:
    y = row(x, weight, offsets, **attrs)
    whole = torch.empty_like(y)
    end = int(offsets[-1]) if len(offsets) else 0
    whole[:end] = y[:end]
    return whole


@wrong("empty-groups-skipped", "empty group moves the next ones", operator="grouped_linear")
def skips_empty(row: Row, x: Tensor, weight: Tensor, offsets: Tensor, **attrs: Attr) -> Any:
    lengths = torch.diff(offsets, prepend=torch.zeros(1, dtype=torch.int64))
    order = torch.argsort((lengths == 0).int(), stable=True)
    return row(x, weight, lengths[order].cumsum(0), **attrs)


@wrong("last-row-twice", "chunks that overlap", operator="linear_cross_entropy")
def twice(
    row: Row, x: Tensor, weight: Tensor, target: Tensor, bias: Any, *, reduction: str, **attrs: Attr
) -> Any:
    loss, *rest = row(x, weight, target, bias, reduction=reduction, **attrs)
    if reduction == "sum" and target.numel():
        own = (x.reshape(-1, x.shape[-1])[-1:], weight, target.reshape(-1)[-1:], bias)
        loss = loss + row(*own, reduction="sum", **attrs)[0]
    return loss, *rest


@wrong("mean-of-chunk-means", "ignored rows of a chunk", operator="linear_cross_entropy")
def mean_of_means(
    row: Row, x: Tensor, weight: Tensor, target: Tensor, bias: Any, *, reduction: str, **attrs: Attr
) -> Any:
    loss, *rest = row(x, weight, target, bias, reduction=reduction, **attrs)
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    if reduction == "mean" and len(labels) > 1:
        halves = zip(rows.tensor_split(2), labels.tensor_split(2), strict=True)
        parts = [row(a, weight, b, bias, reduction="mean", **attrs)[0] for a, b in halves]
        loss = torch.stack(parts).mean()
    return loss, *rest


@wrong_backward("chunk-overwrites", "= for +=", operator="linear_cross_entropy")
def last_chunk_only(
    row: Row, grad: Tensor, x: Tensor, weight: Tensor, target: Tensor, *rest: Tensor, **attrs: Attr
) -> Any:
    dx, dweight, dbias = row(grad, x, weight, target, *rest, **attrs)
    if dweight is None or target.dim() != 1 or len(target) < 2 or grad.dim():
        return dx, dweight, dbias
    hidden = x.clone()
    hidden[: len(x) // 2] = 0.0
    return dx, row(grad, hidden, weight, target, *rest, **attrs)[1], dbias


ARGUMENTS = (
    # A mask of 0 and 1 as a factor: what is not finite comes through it.
    wrong_arguments("padding-multiplied", "NaN of another group", "grouped_linear",
        y=lambda y, x, weight: y + 0.0 * (x @ weight.sum(0).t())),
    wrong_gradients("last-rows-of-no-group", "off by one", "grouped_linear",
        offsets=lambda offsets, x: torch.cat((offsets[:-1], 0 * offsets[-1:] + x.shape[0]))),
    wrong_gradients("order-of-the-sum-by-needs", "other bits when it is asked later", "linear",
        grad=lambda grad, needs: grad if needs[0] else grad.flip(0),
        x=lambda x, needs: x if needs[0] else x.flip(0)),
    wrong_arguments("float32-of-a-rounded-product", "intermediate result in the storage type",
        "linear", select="/linear/bf16", dtypes=BOTH, out_dtype=None,
        y=lambda y, x, out_dtype: y.to(out_dtype or x.dtype)),
    wrong_arguments("logits-in-bfloat16", "intermediate result in the storage type",
        "linear_cross_entropy", select="linear_cross_entropy and bf16", dtypes=BOTH, bias=None,
        x=lambda x, weight, bias: torch.nn.functional.linear(
            x.contiguous(), weight.contiguous(), bias).float(),
        weight=lambda weight: torch.eye(weight.shape[0])),
    wrong_arguments("target-wraps", "missing check of an index", "linear_cross_entropy",
        target=lambda target, weight, ignore_index: torch.where(
            target == ignore_index, target, target.remainder(len(weight)))),
    wrong_arguments("groups-shifted", "off by one", "grouped_linear",
        weight=lambda weight: weight.roll(1, 0)),
    wrong_gradients("bias-left-out", "an argument without effect", "linear_cross_entropy",
        bias=lambda bias: None if bias is None else torch.zeros_like(bias)),
    wrong_gradients("weight-gradient-of-all-rows", "sum over too much", "grouped_linear",
        dweight=lambda grad, x, weight: (grad.t() @ x).expand_as(weight).clone()),
    wrong_arguments("groups-in-tf32", "lower precision of factors", "grouped_linear",
        x=lambda x: tf32(x), weight=lambda weight: tf32(weight)),
    wrong_arguments("offsets-of-32-bits-read-as-64", "wrong width of an index", "grouped_linear",
        offsets=lambda offsets, x: read_as_int64(offsets, x.shape[0])),
    wrong_gradients("gradient-rounded-to-the-operands", "intermediate result in the storage type",
        "linear", select="/linear/bf16", dtypes=BOTH,
        grad=lambda grad, x: grad.to(x.dtype)),
    wrong_arguments("bias-left-out", "an argument without effect", "linear_cross_entropy",
        bias=lambda bias: None if bias is None else torch.zeros_like(bias)),
    wrong_gradients("mean-forgotten", "missing factor", "linear_cross_entropy",
        reduction=lambda reduction: "sum" if reduction == "mean" else reduction),
)  # fmt: skip
