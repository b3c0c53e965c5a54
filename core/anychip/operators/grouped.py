"""A product with one weight per group of rows: grouped_linear, as a mixture of experts needs it.

Group g is the rows from ``offsets[g - 1]`` (0 for the first one) to ``offsets[g] - 1``; it may be
empty. Rows from the last offset on belong to no group: their output and gradient are 0.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker, Sharding
from anychip.operators.extents import nbytes
from anychip.operators.linear import check_out_dtype
from anychip.operators.ragged import refuse_unsorted


def _groups(x: Tensor, offsets: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each group and a (T, 1) mask of its rows. Looks at no value on the host."""
    position = torch.arange(x.shape[0], device=x.device)[:, None]
    for group in range(offsets.shape[0]):
        inside = position < offsets[group]
        yield group, inside if not group else inside & (position >= offsets[group - 1])


def _forward(
    x: Tensor, weight: Tensor, offsets: Tensor, *, out_dtype: torch.dtype | None
) -> Tensor:
    refuse_unsorted("grouped_linear", "offsets", offsets, x.shape[0])
    y = x.new_zeros((x.shape[0], weight.shape[1]), dtype=torch.float32)
    # Every row times every weight, of which one is taken: the sizes of the groups are not known to
    # the host, and what is not finite in one group does not reach the others.
    for group, inside in _groups(x, offsets):
        y = torch.where(inside, x.float() @ weight[group].float().t(), y)
    return y.to(out_dtype or x.dtype)


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    dx = torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    dweights = []
    for group, inside in _groups(x, offsets):
        if needs[0]:
            dx = torch.where(inside, grad.float() @ weight[group].float(), dx)
        if needs[1]:
            rows = torch.where(inside, x.float(), 0.0)
            dweights.append(torch.where(inside, grad.float(), 0.0).t() @ rows)
    dweight = torch.stack(dweights) if dweights else torch.zeros_like(weight)
    return (dx.to(x.dtype) if needs[0] else None, dweight.to(weight.dtype) if needs[1] else None)


def _check(x: Tensor, weight: Tensor, offsets: Tensor, *, out_dtype: torch.dtype | None) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x must be (T, K) and weight (G, N, K); got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if offsets.dim() != 1 or offsets.shape[0] != weight.shape[0]:
        raise ValueError(
            f"offsets must be ({weight.shape[0]},), the ends of the groups; got "
            f"{tuple(offsets.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}")
    check_out_dtype(x, out_dtype)


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    for ends, rows, inputs, outputs in (
        ([3, 3, 8], 8, 8, 5), ([4, 5], 7, 33, 17), ([0, 6], 6, 16, 4), ([1], 1, 1, 1),
    ):  # fmt: skip
        x, weight = maker.normal(rows, inputs), maker.normal(len(ends), outputs, inputs)
        offsets = torch.tensor(ends, dtype=torch.int64, device=x.device)
        label = f"{'+'.join(map(str, ends))}of{rows},{inputs}->{outputs}"
        yield Sample((x, weight, offsets), {"out_dtype": None}, label)
        yield Sample((x, weight, offsets), {"out_dtype": torch.float32}, f"{label},float32")


grouped_linear = OperatorSpec(
    name="grouped_linear",
    signature=(
        "(Tensor x, Tensor weight, Tensor offsets, *, ScalarType? out_dtype=None) -> Tensor"),
    equation=(
        "y_t = weight[g] x_t for offsets[g - 1] <= t < offsets[g] (offsets[-1] = 0); 0 for rows "
        "from the last offset on; rounded once, to out_dtype; None: x's dtype"),
    source="Gale et al. 2022, arXiv:2211.15841 (MegaBlocks), section 4; torch._grouped_mm",
    forward=_forward, backward=_backward,
    fake=lambda x, weight, offsets, *, out_dtype: x.new_empty(
        (x.shape[0], weight.shape[1]), dtype=out_dtype),
    saved=("x", "weight", "offsets"), differentiable=("x", "weight"), deferrable=("weight",),
    check=_check, fixed_dtypes={"offsets": ("int64", "int32")}, indexes={"offsets": "ends of x[0]"},
    sizes=lambda x, weight, offsets, **_: {
        "groups": weight.shape[0], "rows": x.shape[0], "in": weight.shape[2],
        "out": weight.shape[1]},
    autocast="lower",
    # Not by rows: the offsets count those of the whole tensor.
    sharding=Sharding(
        lambda *_: [([1], [None, 1, None]), (["partial"], [1, 2, None])],
        lambda *_: [(["partial", 1], [1, None, 1, None]), ([1, 2], [None, 1, 2, None])],
    ),
    cost=lambda x, weight, offsets, *, out_dtype=None: Cost(
        nbytes(x, weight, offsets) + x.shape[0] * weight.shape[1] * (out_dtype or x.dtype).itemsize,
        2 * x.numel() * weight.shape[1]),
    backward_cost=lambda x, weight, offsets, **_: Cost(
        2 * nbytes(x, weight) + x.shape[0] * weight.shape[1] * x.element_size(),
        4 * x.numel() * weight.shape[1]),
    samples=_samples, bound=Bound(forward=2, backward=2, length=lambda x, *_, **__: x.shape[-1]),
)  # fmt: skip
