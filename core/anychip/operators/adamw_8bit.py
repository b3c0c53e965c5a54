"""adamw_8bit: AdamW whose two averages are stored in 8 bits, with one float32 scale per block.

A block is 256 elements of the flattened tensor. Its scale is its largest magnitude divided by the
largest number that a code stands for. A code is a small floating-point number, so that numbers
that are 100,000 times smaller than the block's largest still have digits; equal steps, as of
``quantize``, would make most squares 0, and the updates that are divided by their roots endless.

Note: The codes
    A byte holds four bits of exponent e above ``fraction_bits`` bits of fraction f, and for a
    signed code the sign above both: ``2^(e - 15) (1 + f / 2^b)``, and ``2^-14 f / 2^b`` for e = 0.
    A first average has b = 3 and a sign, an average of squares b = 4 and none: the largest numbers
    are 1.875 and 1.9375, the smallest 2^-17 and 2^-18. All are float32 numbers, and x / scale
    becomes the nearest one, halves to even. A square above 0 never becomes 0: it keeps the smallest
    code, and the update of its element is small, not huge.

    Dettmers et al. (section 2.2) use "dynamic tree" codes, with a unary exponent of base 10. Those
    have more digits next to the block's largest number and fewer below a tenth of it, where most
    squares are: steps of 7 % and more, of which rounding to nearest hides the half. An average that
    forgets 5 % per step (``beta2 = 0.95``) would stand still. Steps of 1/16 to 1/32 follow it. The
    slower drift of ``beta2 = 0.999`` they follow only through the scale, which is float32 for this.

Note: Shards
    Blocks of shards that begin at a multiple of 256 are those of the whole tensor: such shards are
    updated like the whole, bit for bit.

Source: Dettmers et al. 2022, arXiv:2110.02861, section 2; Loshchilov and Hutter 2019,
arXiv:1711.05101, algorithm 2.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import lists
from anychip.operators.codes import num_scales
from anychip.operators.quantization import SMALLEST_SCALE, block_rows
from anychip.operators.rule import (
    Move,
    UpdateCall,
    check_call,
    sampled_scalars,
    sampled_tensors,
    write,
)
from anychip.operators.update import adamw_move

BLOCK = 256
"""Elements that share a scale: 1.6 % of their bytes are scales."""
_MIN_EXPONENT = -14
"""Of the numbers with all digits."""


class StateCodes(NamedTuple):
    """Which numbers the bytes of a state stand for; see "The codes" above.

    Attributes:
        fraction_bits: b.
        signed: the highest bit is a sign.
    """

    fraction_bits: int
    signed: bool

    @property
    def top(self) -> int:
        """The code of the largest number."""
        return (16 << self.fraction_bits) - 1

    @property
    def largest(self) -> float:
        """The number that ``top`` stands for."""
        return 2.0 - 2.0**-self.fraction_bits

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 codes in the shape of x, and (blocks,) float32 scales.

        Args:
            x: float32. A block that holds NaN or an infinity has such a scale, and codes of 0.
        """
        rows = block_rows(x.reshape(-1), BLOCK)
        scales = rows.abs().amax(-1) / self.largest
        scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
        usable = ((scales > 0.0) & torch.isfinite(scales)).unsqueeze(-1)
        ratios = rows.abs() / torch.where(usable, scales.unsqueeze(-1), 1.0)
        ratios = torch.where(usable, ratios, 0.0)
        exponents = ((ratios.view(torch.int32) >> 23) - 127).clamp(min=_MIN_EXPONENT)
        # A multiplication by a power of 2 is exact. Rounding up to one carries into the exponent.
        digits = torch.round(ratios * _power_of_2(self.fraction_bits - exponents)).to(torch.int32)
        codes = digits + ((exponents - _MIN_EXPONENT) << self.fraction_bits)
        codes = codes.clamp(max=self.top)
        if self.signed:
            codes = torch.where((rows < 0.0) & (codes > 0), codes + 128, codes)
        else:
            codes = torch.where((rows > 0.0) & usable, codes.clamp(min=1), codes)
        return codes.reshape(-1)[: x.numel()].to(torch.uint8).reshape(x.shape), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The float32 numbers that codes stand for, in their shape."""
        flat = codes.reshape(-1).to(torch.int32)
        size = flat & (127 if self.signed else 255)
        exponents = (size >> self.fraction_bits).clamp(min=1)
        digits = size - ((exponents - 1) << self.fraction_bits)
        values = digits.float() * _power_of_2(exponents - 15 - self.fraction_bits)
        if self.signed:
            values = torch.where(flat > 127, -values, values)
        rows = block_rows(values, BLOCK) * scales.unsqueeze(-1)
        return rows.reshape(-1)[: codes.numel()].reshape(codes.shape)


def _power_of_2(exponents: Tensor) -> Tensor:
    """Exact, by the bits of a float32 number; exponents int32, from -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)


SIGNED = StateCodes(3, True)
"""Of exp_avgs."""
UNSIGNED = StateCodes(4, False)
"""Of exp_avg_sqs."""

_STATES = ("exp_avgs", "exp_avg_scales", "exp_avg_sqs", "exp_avg_sq_scales")


def _moves(count: Tensor, **attrs: float) -> Move:
    adam = adamw_move(count, **attrs)

    def move(rate: Tensor, param: Tensor, grad: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        averages = SIGNED.decode(*states[:2]), UNSIGNED.decode(*states[2:])
        new, first, second = adam(rate, param, grad, *averages)
        return new, *SIGNED.encode(first), *UNSIGNED.encode(second)

    return move


def _forward(*args: Any, **attrs: float) -> None:
    call = UpdateCall.of(args, len(_STATES))
    write(call, _moves(call.step + 1.0, **attrs))


def _check(*args: Any, **attrs: float) -> None:
    call = UpdateCall.of(args, len(_STATES))
    named = dict(zip(_STATES, call.states, strict=True))
    check_call(call, {name: named[name] for name in ("exp_avgs", "exp_avg_sqs")})
    for name in ("exp_avg_scales", "exp_avg_sq_scales"):
        _check_scales(name, call.params, named[name])
    lists.check_numbers(attrs)


def _check_scales(name: str, params: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
    if len(scales) != len(params):
        raise ValueError(f"{name} must be as long as params ({len(params)}), got {len(scales)}")
    for index, (param, given) in enumerate(zip(params, scales, strict=True)):
        wanted = (num_scales(param.numel(), BLOCK),)
        if tuple(given.shape) != wanted:
            raise ValueError(
                f"{name}[{index}] must have one scale per {BLOCK} elements of params[{index}], "
                f"shape {wanted}, got {tuple(given.shape)}"
            )


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    for label, scalars in sampled_scalars(maker):
        params, grads, firsts, seconds = sampled_tensors(maker, ("exp_avgs", "exp_avg_sqs"))
        states: list[list[Tensor]] = []
        for form, values in ((SIGNED, firsts), (UNSIGNED, seconds)):
            states += map(list, zip(*(form.encode(value) for value in values), strict=True))
        low = [p.to(torch.bfloat16) for p in params] if label == "scale,clip" else None
        fixed = (maker.scalar(1e-2), maker.scalar(3.0))
        attrs = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
        yield Sample((params, grads, *states, *fixed, *scalars, low), attrs, label)


def _cost(*args: Any, **attrs: float) -> Cost:
    """Everything read once; parameters and states written."""
    call = UpdateCall.of(args, len(_STATES))
    written = lists.nbytes(call.params, *call.states)
    # Besides AdamW's 15, as many for two decoded numbers, two encoded ones, and two maxima.
    return Cost(2 * written + lists.nbytes(call.grads), 45 * lists.numel(call.params))


adamw_8bit = OperatorSpec(
    name="adamw_8bit",
    signature=(
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
        "Tensor(c!)[] exp_avg_scales, Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] exp_avg_sq_scales, "
        "Tensor lr, Tensor(f!) step, Tensor? scale=None, Tensor? clip=None, "
        "Tensor? found_inf=None, Tensor(g!)[]? low_precision=None, *, float beta1=0.9, "
        "float beta2=0.999, float eps=1e-08, float weight_decay=0.01) -> ()"
    ),
    equation=(
        "m, v = scale of the block times the number of each code; adamw's step of p, m, v; "
        "scale = max |x| of the block / L, 0 if below 2^-126; code = nearest to x / scale, 0 where "
        "scale is 0 or not finite, at least 1 for a v > 0; L = 1.875 for m, 1.9375 for v"
    ),
    source="Dettmers et al. 2022, arXiv:2110.02861, section 2; other codes, see the module",
    forward=_forward,
    fake=lambda *args, **attrs: None,
    check=_check,
    fixed_dtypes={
        **dict.fromkeys(("exp_avgs", "exp_avg_sqs"), "uint8"),
        **dict.fromkeys(("exp_avg_scales", "exp_avg_sq_scales"), "float32"),
        **dict.fromkeys(("lr", "step", "scale", "clip", "found_inf"), "float32"),
    },
    sizes=lambda params, *_, **__: {"numel": lists.numel(params), "tensors": len(params)},
    # Of shards that are whole blocks.
    cost=_cost,
    samples=_samples,
    bound=Bound(forward=16, backward=0, length=lambda *_, **__: 1),
)  # fmt: skip
