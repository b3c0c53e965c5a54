"""Rows of rope: q and k in one launch, views of a fused projection without a copy."""

from __future__ import annotations

from torch import Tensor

from anychip_cuda.native import Kernels, address, empty_like
from anychip_cuda.table import Needs, declared


def _with_whole_heads(x: Tensor) -> Tensor:
    """x itself when the elements of its heads are adjacent, wherever the heads lie."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rotated(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.contiguous(), sin.contiguous()
    given = [_with_whole_heads(x) for x in (q, k)]
    made = [empty_like(x) for x in given]
    # Tensors of two dtypes take a launch each, with no heads in the other's place.
    launches = [(0, 1)] if q.dtype == k.dtype else [(0, None), (None, 1)]
    for indices in launches:
        heads: list[object] = []
        for index in indices:
            if index is None:
                heads += [0, 0, 0, (0, 0, 0)]
                continue
            x = given[index]
            heads += [x.data_ptr(), address(made[index]), x.shape[2], x.stride()[:3]]
        first = given[next(i for i in indices if i is not None)]
        kernels.native.rope(
            *heads,
            cos.data_ptr(),
            sin.data_ptr(),
            *first.shape[:2],
            first.shape[3],
            2 * cos.shape[1],
            interleaved,
            inverse,
            kernels.codes[first.dtype],
            *kernels.place(first),
        )
    return made[0], made[1]


@declared.forward("rope")
def rope(
    kernels: Kernels, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return _rotated(kernels, q, k, cos, sin, interleaved=interleaved, inverse=False)


@declared.backward("rope")
def rope_backward(
    kernels: Kernels,
    dq: Tensor,
    dk: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    needs: Needs,
) -> tuple[Tensor, Tensor]:
    """Both gradients, whatever is needed: autograd leaves out the other one."""
    return _rotated(kernels, dq, dk, cos, sin, interleaved=interleaved, inverse=True)
