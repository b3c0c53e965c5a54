"""The cases of operators of (N, C, ...): group_norm, conv1d, conv2d."""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from anychip.bench.case import Case, Make
from anychip.contract import SampleMaker

_BATCH, _CHANNELS, _LENGTH, _SIDE = 4, 256, 1024, 56


def cases() -> Mapping[str, Make]:
    """By operator."""
    return {"group_norm": _group_norm, "conv1d": _conv1d, "conv2d": _conv2d}


def _group_norm(m: SampleMaker) -> Case:
    def eager(x: Tensor, weight: Tensor, bias: Tensor, *, num_groups: int, eps: float) -> Tensor:
        return functional.group_norm(x, num_groups, weight, bias, eps)

    args = (m.normal(_BATCH, _CHANNELS, _LENGTH), m.normal(_CHANNELS), m.normal(_CHANNELS))
    return Case(args=args, attrs={"num_groups": 32, "eps": 1e-5}, eager=eager)


def _conv1d(m: SampleMaker) -> Case:
    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        seen = functional.pad(x, (weight.shape[1] - 1, 0))
        return functional.conv1d(seen, weight[:, None], bias, groups=x.shape[1])

    args = (m.normal(_BATCH, _CHANNELS, _LENGTH), m.normal(_CHANNELS, 4), m.normal(_CHANNELS))
    return Case(args=args, attrs={}, eager=eager)


def _conv2d(m: SampleMaker) -> Case:
    channels = _CHANNELS // 4
    shapes = (_BATCH, channels, _SIDE, _SIDE), (channels, channels, 3, 3), (channels,)
    attrs = {"stride": 1, "padding": 1, "dilation": 1, "groups": 1}
    return Case(args=tuple(m.normal(*s) for s in shapes), attrs=attrs, eager=functional.conv2d)
