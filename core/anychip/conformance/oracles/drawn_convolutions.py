"""What convolutions may be called with."""

import math

from anychip.conformance.calls import Arguments, Draw
from anychip.conformance.choices import Choices

LONG = (300, 100, 200, 600, 1100)
"""Of a first dim, which a kernel may hold in a dimension of its grid."""


def conv1d(choose: Choices, draw: Draw) -> Arguments:
    choose.has_channels = True
    batch = choose.number("batch", (2,), (1,), (3, 4, 5, 8, 16, 40, 64), (0,), LONG)
    kernel = choose.number("kernel", (4,), (1,), (2,), (3, 5), (7, 6, 8, 16), (64, 130, 31))
    room = choose.room(batch, -(-kernel // 4))
    channels, length = room.size("channels", 2000), room.size("length", none=True)
    x = choose.values("x", draw, batch, channels, length, added=True)
    weight = choose.values("weight", draw, channels, kernel, more=())  # what is padded times NaN
    return (x, weight, choose.optional("bias", draw, channels, added=True)), {}


def conv2d(choose: Choices, draw: Draw) -> Arguments:
    """Kernels that fit: what a kernel spans is no larger than an image with its padding."""
    choose.has_channels = True
    names = ("height", "width")
    long = (4, 5, 7, 8), (16, 32, 11)
    kernel = [choose.number(f"kernel {name}", (1,), (2,), (3,), *long) for name in names]
    if math.prod(kernel) > 64:  # the oracle adds up place by place, and all channels at each
        kernel[1] = 2
    groups = choose.number("groups", (1,), (2, 3), (4, 8, 6, 16), (32, 64, 100, 256))
    most = 17 if math.prod(kernel) * groups <= 64 else 2
    inputs = groups * choose.number_up_to(most, "inputs of a group", (1,), (3, 2, 4), (16, 8))
    outputs = groups * choose.number_up_to(most, "outputs of a group", (1,), (2, 3, 4), (17, 8, 16))
    dilation = [choose.number(f"dilation {name}", (1,), (2,), (3, 4, 5)) for name in names]
    padding = [choose.number(f"padding {name}", (0,), (1,), (2, 3, 5, 4)) for name in names]
    # One dim may be long at a time: batch, height or width.
    few = 16 if groups <= 16 else 3
    most = max((1 << 10) // (max(inputs, outputs) * math.prod(kernel)), 1)
    batch = choose.number_up_to(most, "batch", (1,), (2, 3, 5), (0,), (8, 17, 40, *LONG))
    most, sizes = max(most // max(batch, 1), few if batch < 9 else 1), []
    more = (1,), (2, 3, 6), (5, 4, 8), (9, 16, 13), (33, 64, 100, 300, 1100), (0, -1, -3, -7)
    for name, k, d, pad in zip(names, kernel, dilation, padding, strict=True):
        found = choose.number_up_to(most, f"more {name}", *more)
        span = (k - 1) * d
        sizes.append(max(span + found, span + 1 - 2 * pad, 1))
        most = max(most // max(found, 1), few) if most >= few else most
    x = choose.values("x", draw, batch, inputs, *sizes, added=True)
    weight = choose.values("weight", draw, outputs, inputs // groups, *kernel, more=())
    bias = choose.optional("bias", draw, outputs, added=True)
    stride = [choose.number(f"stride {name}", (1,), (2,), (3, 5, 4, 8)) for name in names]
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (x, weight, bias), attrs
