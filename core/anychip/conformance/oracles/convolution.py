"""Oracles of conv1d and conv2d: sums of products over what a kernel sees.

A position and a place in the kernel say which number of x is seen; none of x, where it is padding,
is an exact 0. y and the weight's gradient gather x by that; x's gradient gathers the output's, by
the same relation told from the other side: x's number i is seen at position (i + padding - place *
dilation) / stride, if that is whole. The bound counts the zeros among the terms.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, concatenate, matmul
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Index = NDArray[np.int64]
"""Positions by places in the kernel: which number is seen; -1 is a zero."""


def _seen(size: int, kernel: int, stride: int, before: int, dilation: int, outputs: int) -> Index:
    index = np.arange(outputs)[:, None] * stride - before + np.arange(kernel) * dilation
    return np.where((index >= 0) & (index < size), index, -1)


def _seen_by(
    size: int, kernel: int, stride: int, before: int, dilation: int, outputs: int
) -> Index:
    position = np.arange(size)[:, None] + before - np.arange(kernel) * dilation
    index, rest = np.divmod(position, stride)
    return np.where((rest == 0) & (index >= 0) & (index < outputs), index, -1)


def _taken(x: Rounded, rows: Index, columns: Index, groups: int) -> Rounded:
    """(N, C, H, W) as (groups, N * positions, C / groups * places)."""
    padded = x.shaped(lambda array: np.pad(array, ((0, 0), (0, 0), (0, 1), (0, 1))))
    found = padded[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    n, c, high, wide, *places = found.shape
    found = found.reshape(n, groups, c // groups, high, wide, *places).transpose(
        1, 0, 3, 4, 2, 5, 6
    )
    return found.reshape(groups, n * high * wide, c // groups * math.prod(places))


def _apart(y: Rounded, groups: int) -> Rounded:
    """(N, O, H, W) as (groups, O / groups, N * H * W)."""
    n, outputs, high, wide = y.shape
    turned = y.transpose(1, 0, 2, 3)
    return turned.reshape(groups, outputs // groups, n * high * wide)


def _together(y: Rounded, n: int, high: int, wide: int) -> Rounded:
    """The other way round."""
    groups, outputs, _ = y.shape
    return y.reshape(groups * outputs, n, high, wide).transpose(1, 0, 2, 3)


def _by_group(weight: Rounded, groups: int) -> Rounded:
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])


Sizes = tuple[int, ...]
"""Of a dim: numbers, kernel, stride, padding, dilation, outputs."""


def _convolved(
    x: Rounded, weight: Rounded, bias: Rounded | None, sizes: Sequence[Sizes], groups: int
) -> Answer:
    rows, columns = (_seen(*of_dim) for of_dim in sizes)
    kernels = _by_group(weight, groups)
    kernels = kernels.reshape(groups, kernels.shape[1], math.prod(kernels.shape[2:]))
    taken = terms = _taken(x, rows, columns, groups)
    if bias is not None:
        # A term like the others, in any order: many sums begin with it.
        kernels = concatenate([kernels, bias.reshape(*kernels.shape[:2], 1)], 2)
        terms = concatenate([taken, Rounded.exact(np.ones((*taken.shape[:2], 1)))], 2)
    y = _together(matmul(kernels, terms.transpose(0, 2, 1)), x.shape[0], len(rows), len(columns))

    def backward(grad: Rounded) -> Gradients:
        by_rows, by_columns = (_seen_by(*of_dim) for of_dim in sizes)
        turned = _by_group(weight, groups).transpose(0, 2, 1, 3, 4)
        turned = turned.reshape(groups, turned.shape[1], math.prod(turned.shape[2:]))
        dx = matmul(turned, _taken(grad, by_rows, by_columns, groups).transpose(0, 2, 1))
        dweight = matmul(_apart(grad, groups), taken).reshape(*weight.shape)
        dbias = None if bias is None else grad.sum((0, 2, 3))
        return _together(dx, *x.shape[:1], *x.shape[2:]), dweight, dbias

    return (y,), backward


# conv2d


def _pairs(x: Rounded, weight: Rounded, attrs: dict[str, Any]) -> Iterator[Sizes]:
    for dim in (0, 1):
        given = (attrs[name] for name in ("stride", "padding", "dilation"))
        step, before, apart = (v[dim] if isinstance(v, (list, tuple)) else v for v in given)
        size, kernel = x.shape[dim + 2], weight.shape[dim + 2]
        outputs = (size + 2 * before - (kernel - 1) * apart - 1) // step + 1
        yield size, kernel, step, before, apart, outputs


def _conv2d(
    x: Rounded, weight: Rounded, bias: Rounded | None, *, groups: int, **attrs: Any
) -> Answer:
    return _convolved(x, weight, bias, list(_pairs(x, weight, attrs)), groups)


# conv1d


def _flat(x: Rounded) -> Rounded:
    return x.reshape(*x.shape[:2], 1, x.shape[2])


def _conv1d(x: Rounded, weight: Rounded, bias: Rounded | None) -> Answer:
    channels, kernel = weight.shape
    sizes = ((1, 1, 1, 0, 1, 1), (x.shape[2], kernel, 1, kernel - 1, 1, x.shape[2]))
    kernels = weight.reshape(channels, 1, 1, kernel)
    (y,), of_image = _convolved(_flat(x), kernels, bias, sizes, channels)

    def backward(grad: Rounded) -> Gradients:
        dx, dweight, dbias = of_image(_flat(grad))
        assert dx is not None
        assert dweight is not None
        return dx.reshape(*x.shape), dweight.reshape(*weight.shape), dbias

    return (y.reshape(*x.shape),), backward


CONV2D = differentiable(_conv2d)
CONV1D = differentiable(_conv1d)
