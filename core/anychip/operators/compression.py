"""What gradients are compressed with, besides quantization: hadamard and top_k.

Both work on the last dim. hadamard spreads outliers over a block, so that quantization loses less
(Xi et al. 2023, arXiv:2306.11987, section 4.2); top_k keeps the largest magnitudes (Lin et al.
2018, arXiv:1712.01887).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker, Sharding
from anychip.operators.extents import batch_dims, nbytes

# hadamard


def _length(x: Tensor, block: int | None) -> int:
    return x.shape[-1] if block is None else block


def _hadamard_forward(x: Tensor, *, block: int | None) -> Tensor:
    length = _length(x, block)
    y = x.float().reshape(-1, length) if x.numel() else x.float()
    half = 1
    while half < length and x.numel():
        # Sylvester's order: pairs at a distance of 1, then 2, then 4 ...
        pairs = y.reshape(-1, length // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack([first + second, first - second], dim=2)
        half *= 2
    return (y.reshape(x.shape) * (1.0 / math.sqrt(length))).to(x.dtype).contiguous()


def _hadamard_check(x: Tensor, *, block: int | None) -> None:
    if x.dim() == 0:
        raise ValueError("x must have at least one dim, got a 0-dim tensor")
    length = _length(x, block)
    if length < 1 or length & (length - 1):
        name = "the last dim of x" if block is None else "block"
        raise ValueError(f"{name} must be a power of two, got {length}")
    if x.shape[-1] % length:
        raise ValueError(f"block must divide the last dim of x ({x.shape[-1]}), got {length}")


def _hadamard_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, block in (((3, 8), None), ((2, 3, 24), 4), ((5, 1), 1)):
        label = f"{'x'.join(map(str, shape))},block={block}"
        yield Sample((maker.normal(*shape),), {"block": block}, label)


def _hadamard_cost(x: Tensor, *, block: int | None) -> Cost:
    return Cost(2 * nbytes(x), x.numel() * (_length(x, block).bit_length()))


hadamard = OperatorSpec(
    name="hadamard", signature="(Tensor x, *, int? block=None) -> Tensor",
    equation="y = x H / sqrt(n) per block of n, H_ij = (-1)^popcount(i & j); H H^T = n I",
    source="Fino and Algazi 1976, IEEE Trans. Computers C-25:1142; Sylvester's (natural) order",
    forward=_hadamard_forward,
    backward=lambda grad, *, block, needs: (_hadamard_forward(grad, block=block),),
    fake=lambda x, *, block: torch.empty_like(x, memory_format=torch.contiguous_format),
    differentiable=("x",), shaped_like={"x": "grad0"}, check=_hadamard_check,
    sizes=lambda x, *, block: {"numel": x.numel(), "block": _length(x, block)},
    sharding=Sharding(*[lambda x, *_: [([d], [d]) for d in batch_dims(x)]] * 2),
    cost=_hadamard_cost, backward_cost=_hadamard_cost, samples=_hadamard_samples,
    bound=Bound(forward=2, backward=2, length=lambda x, *, block: _length(x, block)),
)  # fmt: skip


# top_k


def _top_k_forward(x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    # A stable sort keeps equal magnitudes in the order of their indices; NaN counts as largest.
    order = torch.sort(x.abs(), dim=-1, descending=True, stable=True).indices
    indices = order[..., :k].contiguous()
    return x.gather(-1, indices).contiguous(), indices


def _top_k_backward(
    grad: Tensor, _: Tensor, x: Tensor, indices: Tensor, *, k: int, needs: tuple[bool]
) -> tuple[Tensor | None]:
    return (torch.zeros_like(x, memory_format=torch.contiguous_format)
            .scatter(-1, indices, grad.to(x.dtype)),)  # fmt: skip


def _top_k_fake(x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _top_k_check(x: Tensor, *, k: int) -> None:
    if x.dim() == 0:
        raise ValueError("x must have at least one dim, got a 0-dim tensor")
    if not 0 <= k <= x.shape[-1]:
        raise ValueError(f"k must be from 0 to the last dim of x ({x.shape[-1]}), got {k}")


def _top_k_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, k in (((3, 8), 5), ((33,), 33), ((2, 3, 7), 1)):
        yield Sample((maker.normal(*shape),), {"k": k}, f"{'x'.join(map(str, shape))},k={k}")
    # Ties, of both signs: the lower index comes first.
    ties = (maker.integers(5, 4, 16) - 2).to(maker.dtype)
    yield Sample((ties,), {"k": 6}, "ties")


top_k = OperatorSpec(
    name="top_k", signature="(Tensor x, *, int k) -> (Tensor, Tensor)",
    equation="indices: of the k largest |x| of the last dim, largest first, ties by index; x there",
    source="Lin et al. 2018, arXiv:1712.01887, algorithm 1",
    forward=_top_k_forward, backward=_top_k_backward, fake=_top_k_fake, saved=("x", "y1"),
    differentiable=("x",), check=_top_k_check,
    # The backward direction is given the indices and, as for every output, a gradient of theirs.
    fixed_dtypes={"y1": "int64", "grad1": "int64"},
    sizes=lambda x, *, k: {"numel": x.numel(), "k": k},
    sharding=Sharding(
        lambda x, *_: [([d, d], [d]) for d in batch_dims(x)],
        lambda grad, *_: [([d], [d] * 4) for d in batch_dims(grad)]),
    cost=lambda x, *, k: Cost(
        nbytes(x) + (x.element_size() + 8) * k * (x.numel() // max(x.shape[-1], 1)), x.numel()),
    backward_cost=lambda x, *, k: Cost(
        nbytes(x) + (x.element_size() + 8) * k * (x.numel() // max(x.shape[-1], 1)), 0),
    samples=_top_k_samples, bound=Bound(forward=0, backward=0, length=lambda *_, **__: 1),
)  # fmt: skip
