"""quantize and dequantize: a tensor as codes with block scales, and back.

What the formats are, and how codes lie in bytes: :mod:`anychip.operators.codes`. int8 and int4 can
be rounded at random. Dettmers et al. 2022, arXiv:2110.02861, section 2.1; Gupta et al. 2015,
arXiv:1502.02551, section 3.1 (stochastic rounding).
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import philox
from anychip.operators.codes import (
    MX_BLOCK,
    check_codes,
    decoded,
    encoded,
    exponent_codes,
    format_of,
    num_scales,
    packed,
    powers,
    unpacked,
)

SMALLEST_SCALE = 2.0**-126
"""Below it a scale is not a normal number, and some chips flush it: such a block is all zeros, and
of an MX format one whose largest magnitude is below it."""
_ROUND_AT_RANDOM = ("int8", "int4")


# quantize


def block_rows(flat: Tensor, block: int) -> Tensor:
    """(blocks, block); zeros appended to the last one."""
    missing = num_scales(flat.shape[0], block) * block - flat.shape[0]
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, block)


def _drawn(steps: Tensor, rng: Tensor, numel: int, block: int) -> Tensor:
    """Whole numbers next to ``steps``, one of two drawn by Philox."""
    words = block_rows(philox.words(rng, numel), block)
    below = torch.floor(steps)
    # 24 bits of the word: they and the fraction, a multiple of 2^-24 but for steps below 1, are
    # exact in float32, and so is the comparison.
    return below + ((words >> 8).float() < (steps - below) * 16777216.0)


def _quantize_forward(
    x: Tensor, rng: Tensor | None, *, format: str, block: int
) -> tuple[Tensor, Tensor]:
    numel, found = x.numel(), format_of(format, block)
    rows = block_rows(x.reshape(-1).float(), block)
    tops = rows.abs().amax(-1)
    if found.is_mx:
        scales = exponent_codes(tops, found.largest)
        factors = torch.where(tops < SMALLEST_SCALE, 0.0, powers(scales))
    else:
        scales = tops / found.largest
        factors = scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    usable = (factors > 0.0) & torch.isfinite(factors)
    steps = rows / torch.where(usable, factors, 1.0).unsqueeze(-1)
    steps = torch.where(usable.unsqueeze(-1), steps, 0.0)
    if rng is not None:
        steps = _drawn(steps, rng, numel, block)
    codes = encoded(steps, found)
    if found.table:  # the code of 0 is not 0 there
        codes = torch.where(usable.unsqueeze(-1), codes, found.table.index(0.0))
    return packed(codes.reshape(-1)[:numel], found.bits).contiguous(), scales


def _quantize_fake(
    x: Tensor, rng: Tensor | None, *, format: str, block: int
) -> tuple[Tensor, Tensor]:
    found = format_of(format, block)
    codes = x.new_empty((found.code_bytes(x.numel()),), dtype=torch.int8)
    return codes, x.new_empty((num_scales(x.numel(), block),), dtype=found.scale_dtype)


def _quantize_check(x: Tensor, rng: Tensor | None, *, format: str, block: int) -> None:
    format_of(format, block)
    if rng is not None and format not in _ROUND_AT_RANDOM:
        raise ValueError(f"{format} is not rounded at random: rng must be None")
    if rng is not None and (rng.dim() != 1 or rng.shape[0] != 2):
        raise ValueError(f"rng must be int64[2] (seed, offset), got shape {tuple(rng.shape)}")


def _quantize_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, format, block in (((7, 9), "int8", 16), ((64,), "int4", 32), ((3, 5), "int4", 64)):
        for rng in (None, maker.rng(seed=1234, offset=5)):
            label = f"{'x'.join(map(str, shape))},{format}{'' if rng is None else ',stochastic'}"
            yield Sample((maker.normal(*shape), rng), {"format": format, "block": block}, label)
    for format in ("nf4", "e4m3", "e5m2", "mx_e4m3", "mx_e5m2", "mx_e2m1"):
        attrs = {"format": format, "block": MX_BLOCK}
        yield Sample((maker.normal(7, 9), None), attrs, f"7x9,{format}")


def _nbytes(numel: int, format: str, block: int) -> int:
    """Of codes and scales."""
    found = format_of(format, block)
    return found.code_bytes(numel) + found.scale_dtype.itemsize * num_scales(numel, block)


def _quantize_cost(x: Tensor, rng: Tensor | None, *, format: str, block: int) -> Cost:
    nbytes = x.numel() * x.element_size() + _nbytes(x.numel(), format, block)
    return Cost(nbytes, (4 if rng is None else 34) * x.numel())


quantize = OperatorSpec(
    name="quantize",
    signature=(
        '(Tensor x, Tensor? rng=None, *, str format="int8", int block=256) -> (Tensor, Tensor)'),
    equation=(
        "s = max |x| of the block / L, L the format's largest value, 0 if below 2^-126; of MX "
        "2^(floor(log2 max |x|) - floor(log2 L)); q = code of the value next to x / s, of two the "
        "even one, of nf4 the lower one; with rng: q = floor(x / s) + 1 if (u_i >> 8) < 2^24 "
        "frac(x / s), u_i = word i of Philox(rng); q is the code of 0 where s is 0 or not finite"),
    source="Dettmers et al. 2022, arXiv:2110.02861, 2.1; Gupta et al. 2015, arXiv:1502.02551, 3.1",
    forward=_quantize_forward, fake=_quantize_fake, check=_quantize_check,
    fixed_dtypes={"rng": "int64"},
    sizes=lambda x, rng, *, format, block: {"numel": x.numel(), "block": block},
    # No sharding rule: blocks are ranges of the flattened tensor, which a cut along a dim tears up.
    # Nor rows, as of dropout: a part of whole blocks is such a range, and where it starts at a
    # multiple of 4 it draws the words of the whole at offset + start // 4.
    cost=_quantize_cost,
    samples=_quantize_samples, bound=Bound(forward=1, backward=0, length=lambda *_, **__: 1),
    random=True,
)  # fmt: skip


# dequantize


def _dequantize_forward(
    codes: Tensor, scales: Tensor, *, shape: Sequence[int], format: str, block: int
) -> Tensor:
    numel, found = math.prod(shape), format_of(format, block)
    values = decoded(unpacked(codes.reshape(-1), found.bits, numel), found)
    factors = powers(scales) if found.is_mx else scales
    rows = block_rows(values, block) * factors.unsqueeze(-1)
    return rows.reshape(-1)[:numel].reshape(shape).contiguous()


def _dequantize_samples(maker: SampleMaker) -> Iterator[Sample]:
    for sample in _quantize_samples(maker):
        (x, rng), attrs = sample.args, dict(sample.attrs)
        if rng is None:
            codes, scales = _quantize_forward(x, rng, **attrs)
            yield Sample((codes, scales), {"shape": list(x.shape), **attrs}, sample.label)


dequantize = OperatorSpec(
    name="dequantize",
    signature=(
        "(Tensor codes, Tensor scales, *, SymInt[] shape, "
        'str format="int8", int block=256) -> Tensor'),
    equation="y_i = (value of code q_i) s_(i // block), float32",
    source="Dettmers et al. 2022, arXiv:2110.02861, section 2.1",
    forward=_dequantize_forward,
    fake=lambda codes, *_, shape, **__: codes.new_empty(tuple(shape), dtype=torch.float32),
    check=check_codes, fixed_dtypes={"codes": "int8", "scales": ("float32", "uint8")},
    sizes=lambda codes, scales, *, shape, format, block: {
        "numel": math.prod(shape), "block": block},
    # No sharding rule: see quantize.
    cost=lambda codes, scales, *, shape, format, block: Cost(
        _nbytes(math.prod(shape), format, block) + 4 * math.prod(shape), math.prod(shape)
    ),
    samples=_dequantize_samples, bound=Bound(forward=1, backward=0, length=lambda *_, **__: 1),
)  # fmt: skip
