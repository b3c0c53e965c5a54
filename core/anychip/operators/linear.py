"""Matrix products with weights: linear, embedding."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anychip.contract import (
    HOST,
    Bound,
    Cost,
    OperatorSpec,
    Placement,
    Placements,
    Sample,
    SampleMaker,
    Sharding,
)
from anychip.operators.extents import nbytes
from anychip.operators.values import has_values


def _rows(x: Tensor) -> Tensor:
    """(..., N) as (rows, N). Not reshape(-1, N), which cannot tell the rows when N is 0."""
    return x.unsqueeze(0).flatten(0, -2)


# linear


def _linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None
) -> Tensor:
    out_dtype = out_dtype or x.dtype
    wide = _widening(x, out_dtype)
    dense = None if bias is None else wide(bias.to(out_dtype)).contiguous()
    x, weight = (wide(t.to(out_dtype)).contiguous() for t in (x, weight))
    return torch.nn.functional.linear(x, weight, dense).to(out_dtype)


def _widening(x: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What the operands of a product of a dtype go through: on a host none is made in 16 bits.

    There torch's of strided operands may round more than once; and by AMX, where K is no multiple
    of 32, one row is NaN where the next one is (torch 2.13; oneDNN's issue 5717).
    """
    is_widened = x.device.type == HOST and dtype.itemsize == 2
    return Tensor.float if is_widened else lambda t: t


def _linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    out_dtype: torch.dtype | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grad = _widening(x, grad.dtype)(grad)
    rows = _rows(grad)
    dx = (grad @ weight.to(grad.dtype)).to(x.dtype) if needs[0] else None
    dweight = (rows.t() @ _rows(x).to(grad.dtype)).to(x.dtype) if needs[1] else None
    dbias = rows.float().sum(0).to(x.dtype) if needs[2] else None
    return dx, dweight, dbias


def check_out_dtype(x: Tensor, out_dtype: torch.dtype | None) -> None:
    """Raises ValueError for a result that is neither of the operands' dtype nor float32."""
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(
            f"out_dtype must be {x.dtype}, which the operands have, or float32; got {out_dtype}"
        )


def _linear_check(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None
) -> None:
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x must be (..., K) and weight (N, K); got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_bias(x, weight, bias)
    check_out_dtype(x, out_dtype)


def check_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError for a bias that does not fit the weight, and for several dtypes."""
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(f"bias must be ({weight.shape[0]},), got {tuple(bias.shape)}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"x, weight and bias must have one dtype, got {x.dtype}, {weight.dtype} and "
            f"{None if bias is None else bias.dtype}"
        )


def _linear_samples(maker: SampleMaker) -> Iterator[Sample]:
    for rows, inputs, outputs in (((3,), 8, 5), ((2, 4), 33, 17), ((1,), 1, 1), ((2, 3, 2), 64, 8)):
        x, weight = maker.normal(*rows, inputs), maker.normal(outputs, inputs)
        for bias in (maker.normal(outputs), None):
            label = f"{'x'.join(map(str, rows))},{inputs}->{outputs},bias={bias is not None}"
            yield Sample((x, weight, bias), {"out_dtype": None}, label)
        wide = {"out_dtype": torch.float32}
        yield Sample((x, weight, maker.normal(outputs)), wide, f"{label},float32")


def _linear_shards(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Placements:
    last = x.dim() - 1
    rest: list[Placement] = [] if bias is None else [None]
    rows: Placements = [([batch], [batch, None, *rest]) for batch in range(last)]
    rows = [*rows, ([last], [None, 0, *(0 for _ in rest)])]
    return rows if bias is not None else [*rows, (["partial"], [last, 1])]


def _linear_backward_shards(
    grad: Tensor, x: Tensor, weight: Tensor, out_dtype: torch.dtype | None, needs: list[bool]
) -> Placements:
    last = x.dim() - 1
    rows: Placements = [([b, "partial", "partial"], [b, b, None]) for b in range(last)]
    return [*rows, (["partial", 0, 0], [last, None, 0])]


linear = OperatorSpec(
    name="linear",
    signature=(
        "(Tensor x, Tensor weight, Tensor? bias=None, *, ScalarType? out_dtype=None) -> Tensor"),
    equation="y = x weight^T + bias, rounded once, to out_dtype; None: x's dtype",
    source="torch.nn.functional.linear",
    forward=_linear_forward, backward=_linear_backward,
    fake=lambda x, weight, bias, *, out_dtype: x.new_empty(
        (*x.shape[:-1], weight.shape[0]), dtype=out_dtype),
    saved=("x", "weight"), differentiable=("x", "weight", "bias"), deferrable=("weight", "bias"),
    shaped_like={"bias": "weight[0]"}, check=_linear_check,
    sizes=lambda x, weight, bias, **_: {"in": weight.shape[1], "out": weight.shape[0]},
    autocast="lower", sharding=Sharding(_linear_shards, _linear_backward_shards),
    cost=lambda x, weight, bias, *, out_dtype=None: Cost(
        nbytes(x, weight, bias)
        + x.numel() // x.shape[-1] * weight.shape[0] * (out_dtype or x.dtype).itemsize,
        2 * x.numel() * weight.shape[0]),
    backward_cost=lambda x, weight, bias, **_: Cost(
        2 * nbytes(x, weight, bias), 4 * x.numel() * weight.shape[0]),
    samples=_linear_samples,
    bound=Bound(forward=2, backward=2, length=lambda x, *_, **__: x.shape[-1]),
)  # fmt: skip


# embedding


def check_indices(indices: Tensor, num_embeddings: int) -> None:
    """Raises IndexError for an index that is no row of the weight; on a host only.

    A device cannot look without a synchronisation.
    """
    if indices.device.type != HOST or not indices.numel() or not has_values(indices):
        return
    low, high = indices.min().item(), indices.max().item()
    if low < 0 or high >= num_embeddings:
        raise IndexError(
            f"embedding: indices must be from 0 to {num_embeddings - 1}, got {low} to {high}"
        )


def _embedding_forward(indices: Tensor, weight: Tensor) -> Tensor:
    check_indices(indices, weight.shape[0])
    # Not weight[indices], which is a view of the weight when the index has no dims.
    rows = torch.index_select(weight, 0, indices.reshape(-1))
    return rows.reshape(*indices.shape, weight.shape[1])


def _embedding_backward(
    grad: Tensor, indices: Tensor, weight: Tensor, *, needs: tuple[bool]
) -> tuple[Tensor]:
    rows = _rows(grad).float()
    total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    return (total.index_add(0, indices.reshape(-1), rows).to(weight.dtype),)


def _embedding_check(indices: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2:
        raise ValueError(f"weight must be (num_embeddings, width), got {tuple(weight.shape)}")


def _embedding_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, count, width in (((4,), 10, 8), ((2, 3), 5, 17), ((1,), 1, 1)):
        args = (maker.integers(count, *shape), maker.normal(count, width))
        yield Sample(args, {}, f"{'x'.join(map(str, shape))} of {count}x{width}")


embedding = OperatorSpec(
    name="embedding", signature="(Tensor indices, Tensor weight) -> Tensor",
    equation="y = weight[indices]",
    source="torch.nn.functional.embedding",
    forward=_embedding_forward, backward=_embedding_backward,
    fake=lambda indices, weight: weight.new_empty((*indices.shape, weight.shape[1])),
    saved=("indices", "weight"), differentiable=("weight",), deferrable=("weight",),
    check=_embedding_check, fixed_dtypes={"indices": "int64"}, indexes={"indices": "weight[0]"},
    sizes=lambda indices, weight: {"rows": weight.shape[0], "width": weight.shape[1]},
    sharding=Sharding(
        lambda indices, weight: [([d], [d, None]) for d in range(indices.dim())],
        lambda grad, indices, weight, needs: [
            (["partial"], [d, d, None]) for d in range(indices.dim())]),
    cost=lambda indices, weight: Cost(
        indices.numel() * (8 + 2 * weight.shape[1] * weight.element_size()), 0),
    backward_cost=lambda indices, weight: Cost(
        indices.numel() * (8 + weight.shape[1] * weight.element_size()) + nbytes(weight),
        indices.numel() * weight.shape[1]),
    samples=_embedding_samples,
    bound=Bound(forward=0, backward=1, length=lambda indices, *_, **__: max(indices.numel(), 1)),
)  # fmt: skip
