"""dropout, bias_dropout_add: the mask is a function of (seed, offset, logical index) alone.

An element's logical index is its place in the whole tensor. A part of one says which rows of the
whole its rows are, how wide those are, and at which column it begins: its mask is then that of the
whole, however the whole is cut, and whoever computes it again.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Placements, Sample, SampleMaker, Sharding
from anychip.operators import philox
from anychip.operators.extents import batch_dims, empty_like, nbytes


def keep_threshold(p: float) -> int:
    """An element is kept when its 32-bit word is at least this: floor(p * 2^32), in integers."""
    return int(p * 4294967296.0)  # p * 2^32 is exact in float64, int() floors


def _dropped(
    x: Tensor, rng: Tensor, rows: Tensor | None, p: float, width: int, column: int
) -> Tensor:
    """Dropout of x in float32."""
    if x.is_meta:  # whose ``where`` imports a compiler, in a first training step
        return torch.empty_like(x, dtype=torch.float32)
    if rows is None:
        words = philox.words(rng, x.numel()).reshape(x.shape)
    else:
        columns = torch.arange(column, column + x.shape[-1], device=x.device)
        words = philox.words_at(rng, rows.unsqueeze(-1) * width + columns)
    # 1 / (1 - p) is rounded to float32 once, on the host, so that every chip multiplies by the
    # same number. p = 1 keeps nothing.
    scale = torch.tensor(0.0 if p == 1.0 else 1.0 / (1.0 - p), dtype=torch.float32)
    return torch.where(words >= keep_threshold(p), x.float() * scale.to(x.device), 0.0)


def _forward(
    x: Tensor, rng: Tensor, rows: Tensor | None = None, *, p: float, width: int = 0, column: int = 0
) -> Tensor:
    return _dropped(x, rng, rows, p, width, column).to(x.dtype)


def check_rng(rng: Tensor, p: float) -> None:
    """Raises ValueError unless these are a stream and a probability."""
    if rng.dim() != 1 or rng.shape[0] != 2:
        raise ValueError(f"rng must be int64[2] (seed, offset), got shape {tuple(rng.shape)}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be from 0 to 1, got {p}")


def _check(
    x: Tensor, rng: Tensor, rows: Tensor | None = None, *, p: float, width: int = 0, column: int = 0
) -> None:
    check_rng(rng, p)
    if rows is None:
        if width or column:
            raise ValueError(
                f"width and column say where rows lie; got {width=} and {column=} without rows"
            )
        return
    if x.dim() == 0 or rows.shape != x.shape[:-1]:
        raise ValueError(
            f"rows must be int64, a number for each row of x {tuple(x.shape)}, so of shape "
            f"{tuple(x.shape[:-1])}; got {tuple(rows.shape)}"
        )
    if column < 0 or width < column + x.shape[-1]:
        raise ValueError(
            f"rows of the whole must be at least as wide as column, which is not negative, and the "
            f"{x.shape[-1]} columns of x; got {width=}, {column=}"
        )


def need_index(operator: str, named: str, *index: Tensor | None) -> None:
    """Raises ValueError where no tensor says which part of the whole a shard is."""
    if all(given is None for given in index):
        raise ValueError(
            f"anychip.{operator} of a DTensor needs {named}, sharded like it: without them a shard "
            "does not know which elements of the whole it has, and so not their mask"
        )


def _shards(x: Tensor, _: Tensor, rows: Tensor | None, *__: object) -> Placements:
    need_index("dropout", "rows and width", rows)
    return [([d], [d, None, d]) for d in batch_dims(x)]


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, p in (((7, 9), 0.1), ((64,), 0.5), ((3, 4, 5), 0.0), ((8, 8), 1.0)):
        rng = maker.rng(seed=1234, offset=5)
        label = f"{'x'.join(map(str, shape))},p={p}"
        yield Sample((maker.normal(*shape), rng, None), _attrs(p), label)
    args = (maker.normal(3, 4, 5), maker.rng(7, 2**32 - 3), maker.integers(100, 3, 4))
    yield Sample(args, _attrs(0.3, width=11, column=2), "3x4x5,rows")


def _attrs(p: float, width: int = 0, column: int = 0) -> dict[str, float]:
    return {"p": p, "width": width, "column": column}


def _cost(x: Tensor, _: Tensor, rows: Tensor | None = None, **__: object) -> Cost:
    return Cost(2 * x.numel() * x.element_size() + nbytes(rows), 30 * x.numel())


dropout = OperatorSpec(
    name="dropout",
    signature=(
        "(Tensor x, Tensor rng, Tensor? rows=None, *, float p=0.5, int width=0, int column=0)"
        " -> Tensor"),
    equation=(
        "y_i = x_i / (1 - p) if u_n >= floor(p 2^32) else 0; u_n = word n of Philox(rng); n = i, "
        "with rows: of element j of row i it is rows_i width + column + j"),
    source="Srivastava et al. 2014, JMLR 15; Salmon et al. 2011 (Philox4x32-10)",
    forward=_forward,
    backward=lambda grad, *saved, needs, **attrs: (_forward(grad, *saved, **attrs),),
    fake=lambda x, *_, **__: empty_like(x), saved=("rng", "rows"), differentiable=("x",),
    shaped_like={"x": "grad0"}, check=_check, fixed_dtypes={"rng": "int64", "rows": "int64"},
    sizes=lambda x, *_, **__: {"numel": x.numel()}, sharding=Sharding(_shards, _shards), cost=_cost,
    backward_cost=_cost, samples=_samples,
    bound=Bound(forward=1, backward=1, length=lambda *_, **__: 1), random=True,
)  # fmt: skip


# bias_dropout_add


def _add_forward(
    x: Tensor, residual: Tensor, rng: Tensor, bias: Tensor | None, rows: Tensor | None = None, *,
    p: float, width: int = 0, column: int = 0,
) -> Tensor:  # fmt: skip
    inner = x.float() if bias is None else x.float() + bias.float()
    total = residual.float() + _dropped(inner, rng, rows, p, width, column)
    return total.to(residual.dtype).contiguous()


def _add_backward(
    grad: Tensor, rng: Tensor, rows: Tensor | None = None, *, p: float, width: int = 0,
    column: int = 0, needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    dropped = _dropped(grad, rng, rows, p, width, column) if needs[0] or needs[2] else None
    dx = dresidual = dbias = None
    if dropped is not None and needs[0]:
        # In the residual's dtype, which is never narrower than x's; autograd casts it to x's.
        dx = dropped.to(grad.dtype)
    if needs[1]:
        dresidual = grad.clone(memory_format=torch.contiguous_format)
    if dropped is not None and needs[2]:
        dbias = dropped.unsqueeze(0).flatten(0, -2).sum(0)
    return dx, dresidual, dbias


def _add_check(
    x: Tensor,
    residual: Tensor,
    rng: Tensor,
    bias: Tensor | None,
    *rows: Tensor | None,
    **attrs: Any,
) -> None:
    _check(x, rng, *rows, **attrs)
    if residual.shape != x.shape:
        raise ValueError(
            f"residual must have the shape of x {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    # The gradient of x is known in the residual's dtype only.
    if residual.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"residual must be {x.dtype} like x, or float32; got {residual.dtype}")
    if bias is not None and (x.dim() == 0 or bias.shape != x.shape[-1:]):
        raise ValueError(
            f"bias must have shape {tuple(x.shape[-1:])}, the last dim of x {tuple(x.shape)}; "
            f"got {tuple(bias.shape)}"
        )


def _add_shards(
    x: Tensor, residual: Tensor, _: Tensor, bias: Tensor | None, rows: Tensor | None, *__: object
) -> Placements:
    need_index("bias_dropout_add", "rows and width", rows)
    small = [None] if bias is None else [None, None]
    return [([d], [d, d, *small, d]) for d in batch_dims(x)]


def _add_backward_shards(grad: Tensor, _: Tensor, rows: Tensor | None, *__: object) -> Placements:
    need_index("bias_dropout_add", "rows and width", rows)
    return [([d, d, "partial"], [d, None, d]) for d in batch_dims(grad)]


def _add_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, p in (((7, 9), 0.1), ((64,), 0.5), ((3, 4, 5), 0.0), ((8, 8), 1.0)):
        args = (maker.normal(*shape), maker.normal(*shape), maker.rng(seed=1234, offset=5))
        label = f"{'x'.join(map(str, shape))},p={p}"
        yield Sample((*args, maker.normal(shape[-1]), None), _attrs(p), label)
    args = (maker.normal(6, 10), maker.normal(6, 10), maker.rng(seed=4, offset=2**32 - 3))
    yield Sample((*args, None, None), _attrs(0.3), "6x10,bias=None")
    attrs = _attrs(0.3, width=16, column=6)
    yield Sample((*args, maker.normal(10), maker.integers(50, 6)), attrs, "6x10,rows")


def _add_bytes(x: Tensor, residual: Tensor, bias: Tensor | None, rows: Tensor | None) -> int:
    stream = residual.numel() * residual.element_size()
    return 2 * stream + nbytes(x, bias, rows)


bias_dropout_add = OperatorSpec(
    name="bias_dropout_add",
    signature=(
        "(Tensor x, Tensor residual, Tensor rng, Tensor? bias=None, Tensor? rows=None, *, "
        "float p=0.5, int width=0, int column=0) -> Tensor"),
    equation="y = residual + dropout(x + bias, rng, rows, p, width, column), in residual's dtype",
    source="Srivastava et al. 2014, JMLR 15; Vaswani et al. 2017, section 5.4 (residual dropout)",
    forward=_add_forward, backward=_add_backward,
    fake=lambda x, residual, *_, **__: empty_like(residual), saved=("rng", "rows"),
    differentiable=("x", "residual", "bias"), shaped_like={"x": "grad0", "residual": "grad0"},
    check=_add_check, fixed_dtypes={"rng": "int64", "rows": "int64"},
    sizes=lambda x, *_, **__: {"numel": x.numel(), "hidden": x.shape[-1]},
    sharding=Sharding(_add_shards, _add_backward_shards),
    cost=lambda x, residual, rng, bias, rows=None, **_: Cost(
        _add_bytes(x, residual, bias, rows), 32 * x.numel()),
    backward_cost=lambda x, residual, rng, bias, rows=None, **_: Cost(
        _add_bytes(x, residual, bias, rows), 31 * x.numel()),
    samples=_add_samples, bound=Bound(forward=3, backward=2, length=lambda *_, **__: 1),
    random=True,
)  # fmt: skip
