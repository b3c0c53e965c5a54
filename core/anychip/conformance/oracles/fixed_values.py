"""Values of fixed calls that no kind of values has: each puts them into a call's arguments."""

import math
from typing import Any

import torch
from torch import Tensor

Args = tuple[Any, ...]


def far_scores(args: Args) -> None:
    """About -22,500, which a number that stands for -inf, such as -10,000, exceeds; and of every
    second query 22,500. Before they are scaled float16 does not hold them.
    """
    args[0][..., 0], args[1][..., 0] = 300.0, -300.0
    args[0][..., 1::2, :, 0] *= -1.0


def far_below(args: Args) -> None:
    """Scores about -256, of which a block that is seen first, and hidden, has none."""
    args[0].fill_(8.0)
    args[1].mul_(0.1).sub_(8.0)


def largest_at_last(args: Args) -> None:
    """Where a row's index has more than 16 bits."""
    args[0][..., -2:] = 50.0


def first_ignored(args: Args) -> None:
    """All targets of a chunk of rows."""
    args[2][:256] = -100


def infinite_behind(args: Args) -> None:
    """In a tensor that several launches of a kernel come to late."""
    args[0][-10][1] = math.inf


def infinite_once_scaled(args: Args) -> None:
    """What is infinite in 16 bits once it is divided by a scale below 1."""
    args[0][0].fill_(6e4)


def one_nan(args: Args) -> None:
    """And nothing infinite, which a comparison finds: a tensor's, or a list's last one's."""
    tensor = args[0] if isinstance(args[0], Tensor) else args[0][-1]
    tensor.view(-1)[-3] = math.nan


def far_gates(args: Args) -> None:
    """Small slopes: what float16 does not hold before is found to be small with them."""
    args[0].fill_(-3.0)
    args[1].fill_(30_000.0)


def far_sums(args: Args) -> None:
    """Two numbers whose sum float16 does not hold."""
    for arg in args:
        arg.fill_(-6e4)


def far_terms(args: Args) -> None:
    """Numbers whose sums float16 does not hold before they are scaled."""
    args[0].mul_(8192.0)


def far_scaled(args: Args) -> None:
    """Numbers that float16 does not hold once they are scaled."""
    args[0].add_(3e4)


def of_one_sign(args: Args) -> None:
    """Values whose mean is far from 0: that it is rounded shows."""
    args[2].add_(4.0)


def far_softmax(args: Args) -> None:
    """Its scores lie beyond such a number too; each row sees a key, but for the last."""
    args[0].sub_(30_000.0)
    args[0][..., -1, :] = -math.inf
    if args[1] is not None:
        args[1].fill_diagonal_(True)


def far_inputs(args: Args) -> None:
    """Numbers of both signs whose double, let alone whose square, float16 does not hold."""
    args[0].copy_(torch.where(args[0] < 0.0, -4e4, 4e4))


def tiny_scales(args: Args) -> None:
    """Blocks that are nearly 0, as of an expert that nothing comes to, and large ones."""
    args[1].mul_(torch.tensor([2.0**-80, 2.0**60, 2.0**-110]).repeat(len(args[1]))[: len(args[1])])


def far_from_zero(args: Args) -> None:
    """A mean of many deviations: what is left of a difference of squares is nothing."""
    args[0].add_(300.0)


def mostly_zero(args: Args) -> None:
    """More equal numbers than a buffer of candidates has, and more are wanted."""
    args[0].mul_(torch.arange(args[0].shape[-1]) % 50 == 7)


def rows_of_nan(args: Args) -> None:
    """The first and the last of many rows alone."""
    args[0][::599] = math.nan


def some_rows_of_nan(args: Args) -> None:
    """Between others of a tile, whose last terms are filled up with 0: of NaN that makes NaN."""
    args[0][1::5] = math.nan


def far_targets(args: Args) -> None:
    """The last class, and those that are -100, which is ignored, in 8 and in 16 bits."""
    target = next(arg for arg in args if isinstance(arg, Tensor) and arg.dtype == torch.int64)
    size = args[0].shape[-1] if args[1] is target else args[1].shape[0]
    chosen = [size - 1, size // 2, 40_000 % size, -100 % 2**8, -100 % 2**16]
    target.copy_(torch.tensor(chosen))


def far_rows(args: Args) -> None:
    """Indices from both ends and around 2^15 and 2^16."""
    count = len(args[1])
    args[0].copy_(torch.tensor([0, 1, count - 1, count - 2, 32_767, 32_768, 65_536]))


def far_octaves(args: Args) -> None:
    """Gradients of 24 octaves in one block of codes, and one block of zeros."""
    (grad,) = args[1]
    grad.mul_(torch.exp2(torch.arange(grad.numel()) * 7919 % 25 - 12.0).view_as(grad))
    grad[1] = 0.0


def infinite_at_last(args: Args) -> None:
    """The last number alone, behind more than 16 bits count."""
    args[0][0][-1] = -math.inf


def infinite_at_first(args: Args) -> None:
    """What is found early is not forgotten at the next tensor, an empty one, or the next part."""
    args[0][0][2] = math.inf


def signalling_nan(args: Args) -> None:
    """A NaN without the bit that makes it quiet, as broken memory has it, is a NaN."""
    bits = args[0][0].view(torch.int32 if args[0][0].dtype == torch.float32 else torch.int16)
    bits[2] = {torch.float32: 0x7F800001, torch.bfloat16: 0x7F81}.get(args[0][0].dtype, 0x7C01)


def no_gradients(args: Args) -> None:
    """A gradient of 0 is no reason to leave a tensor out: its averages decay."""
    for grad in args[1][::4]:
        grad.zero_()


def zero_norms(args: Args) -> None:
    """A parameter of 0 has no norm, and no update has one where there is neither gradient, moment
    nor decay.
    """
    for number, tensors in enumerate(zip(*args[:4], strict=True)):
        for tensor in tensors[1:] if number % 2 else tensors[:1]:
            tensor.zero_()


def impossible(args: Args) -> None:
    """A target that a mask has ruled out: the loss is infinite, and says so."""
    args[0][0, int(args[1][0])] = -math.inf


def ties(args: Args) -> None:
    """Blocks of zeros, of one value, of an outlier, and of halves of steps of 8 bits."""
    x = args[0]
    x[0], x[1], x[2, 7] = 0.0, -2.5, 1000.0
    x[3] = torch.arange(32) * 4 - 62.5
    x[3, 0] = -127.0
