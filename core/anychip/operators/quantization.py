"""quantize and dequantize: int8 and int4 by blocks, with one float32 scale per block.

Symmetric: the block's largest magnitude becomes 127 (or 7), and no code is below -127 (or -7). A
block is a range of the flattened tensor. int4 is packed two to a byte, the element of lower index
in the low nibble, both in two's complement; after an odd number the last high nibble is 0.

Dettmers et al. 2022, arXiv:2110.02861, section 2.1 (scales by block); Gupta et al. 2015,
arXiv:1502.02551, section 3.1 (stochastic rounding).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import philox

LARGEST = {8: 127, 4: 7}
"""Largest code by number of bits."""
SMALLEST_SCALE = 2.0**-126
"""Below it a scale is not a normal number, and some chips flush it: such a block is all zeros."""


def code_bytes(numel: int, bits: int) -> int:
    """Bytes of the codes of so many elements."""
    return numel if bits == 8 else (numel + 1) // 2


def num_scales(numel: int, block: int) -> int:
    """Blocks; the last one may be shorter."""
    return (numel + block - 1) // block


def _check_format(bits: int, block: int) -> None:
    if bits not in LARGEST:
        raise ValueError(f"bits must be 8 or 4, got {bits}")
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")


# quantize


def block_rows(flat: Tensor, block: int) -> Tensor:
    """(blocks, block); zeros appended to the last one."""
    missing = num_scales(flat.shape[0], block) * block - flat.shape[0]
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, block)


def _rounded(steps: Tensor, rng: Tensor | None, numel: int, block: int) -> Tensor:
    """Whole numbers next to ``steps``: the nearest, or one drawn by Philox."""
    if rng is None:
        return torch.round(steps)
    words = block_rows(philox.words(rng, numel), block)
    below = torch.floor(steps)
    # 24 bits of the word: they and the fraction, a multiple of 2^-24 but for steps below 1, are
    # exact in float32, and so is the comparison.
    return below + ((words >> 8).float() < (steps - below) * 16777216.0)


def _quantize_forward(
    x: Tensor, rng: Tensor | None, *, bits: int, block: int
) -> tuple[Tensor, Tensor]:
    numel, largest = x.numel(), LARGEST[bits]
    rows = block_rows(x.reshape(-1).float(), block)
    scales = rows.abs().amax(-1) / largest
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    usable = (scales > 0.0) & torch.isfinite(scales)
    steps = rows / torch.where(usable, scales, 1.0).unsqueeze(-1)
    steps = torch.where(usable.unsqueeze(-1), steps, 0.0)
    codes = _rounded(steps, rng, numel, block).clamp(-largest, largest)
    codes = codes.reshape(-1)[:numel].to(torch.int8)
    if bits == 4:
        pairs = torch.nn.functional.pad(codes, (0, numel % 2)).view(-1, 2)
        codes = (pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)
    return codes.contiguous(), scales


def _quantize_fake(
    x: Tensor, rng: Tensor | None, *, bits: int, block: int
) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((code_bytes(x.numel(), bits),), dtype=torch.int8)
    return codes, x.new_empty((num_scales(x.numel(), block),), dtype=torch.float32)


def _quantize_check(x: Tensor, rng: Tensor | None, *, bits: int, block: int) -> None:
    _check_format(bits, block)
    if rng is not None and (rng.dim() != 1 or rng.shape[0] != 2):
        raise ValueError(f"rng must be int64[2] (seed, offset), got shape {tuple(rng.shape)}")


def _quantize_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, bits, block in (((7, 9), 8, 16), ((64,), 4, 32), ((3, 5), 4, 64)):
        for rng in (None, maker.rng(seed=1234, offset=5)):
            label = f"{'x'.join(map(str, shape))},int{bits}{'' if rng is None else ',stochastic'}"
            yield Sample((maker.normal(*shape), rng), {"bits": bits, "block": block}, label)


def _quantize_cost(x: Tensor, rng: Tensor | None, *, bits: int, block: int) -> Cost:
    given, codes = x.numel() * x.element_size(), code_bytes(x.numel(), bits)
    return Cost(given + codes + 4 * num_scales(x.numel(), block), (4 if rng is None else 34)
                * x.numel())  # fmt: skip


quantize = OperatorSpec(
    name="quantize",
    signature="(Tensor x, Tensor? rng=None, *, int bits=8, int block=256) -> (Tensor, Tensor)",
    equation=(
        "s = max |x| of the block / L, L = 127 or 7, 0 if below 2^-126; q = round(x / s) to even; "
        "with rng: q = floor(x / s) + 1 if (u_i >> 8) < 2^24 frac(x / s), u_i = word i of "
        "Philox(rng); q = 0 where s is 0 or not finite"
    ),
    source="Dettmers et al. 2022, arXiv:2110.02861, 2.1; Gupta et al. 2015, arXiv:1502.02551, 3.1",
    forward=_quantize_forward,
    fake=_quantize_fake,
    check=_quantize_check,
    fixed_dtypes={"rng": "int64"},
    sizes=lambda x, rng, *, bits, block: {"numel": x.numel(), "block": block},
    # No sharding rule: blocks are ranges of the flattened tensor, which a cut along a dim tears up.
    # Nor rows, as of dropout: a part of whole blocks is such a range, and where it starts at a
    # multiple of 4 it draws the words of the whole at offset + start // 4.
    cost=_quantize_cost,
    samples=_quantize_samples,
    bound=Bound(forward=1, backward=0, length=lambda *_, **__: 1),
    random=True,
)


# dequantize


def _dequantize_forward(
    codes: Tensor, scales: Tensor, *, shape: Sequence[int], bits: int, block: int
) -> Tensor:
    numel = math.prod(shape)
    if bits == 4:
        # Shifting left and back by 4 extends the sign of the low nibble.
        codes = torch.stack([(codes << 4) >> 4, codes >> 4], dim=-1).reshape(-1)[:numel]
    rows = block_rows(codes.reshape(-1).float(), block)
    return (rows * scales.unsqueeze(-1)).reshape(-1)[:numel].reshape(shape).contiguous()


def _dequantize_fake(
    codes: Tensor, scales: Tensor, *, shape: Sequence[int], bits: int, block: int
) -> Tensor:
    return scales.new_empty(tuple(shape))


def _dequantize_check(
    codes: Tensor, scales: Tensor, *, shape: Sequence[int], bits: int, block: int
) -> None:
    _check_format(bits, block)
    numel = math.prod(shape)
    for name, tensor, wanted in (
        ("codes", codes, code_bytes(numel, bits)),
        ("scales", scales, num_scales(numel, block)),
    ):
        if tensor.dim() != 1 or tensor.shape[0] != wanted:
            raise ValueError(
                f"{name} of int{bits} for shape {tuple(shape)} in blocks of {block} must have "
                f"shape ({wanted},), got {tuple(tensor.shape)}"
            )


def _dequantize_samples(maker: SampleMaker) -> Iterator[Sample]:
    for sample in _quantize_samples(maker):
        (x, rng), attrs = sample.args, dict(sample.attrs)
        if rng is None:
            codes, scales = _quantize_forward(x, rng, **attrs)
            yield Sample((codes, scales), {"shape": list(x.shape), **attrs}, sample.label)


dequantize = OperatorSpec(
    name="dequantize",
    signature=(
        "(Tensor codes, Tensor scales, *, SymInt[] shape, int bits=8, int block=256) -> Tensor"
    ),
    equation="y_i = q_i s_(i // block), float32",
    source="Dettmers et al. 2022, arXiv:2110.02861, section 2.1",
    forward=_dequantize_forward,
    fake=_dequantize_fake,
    check=_dequantize_check,
    fixed_dtypes={"codes": "int8", "scales": "float32"},
    sizes=lambda codes, scales, *, shape, bits, block: {"numel": math.prod(shape), "block": block},
    # No sharding rule: see quantize.
    cost=lambda codes, scales, *, shape, bits, block: Cost(
        codes.numel() + 4 * scales.numel() + 4 * math.prod(shape), math.prod(shape)
    ),
    samples=_dequantize_samples,
    bound=Bound(forward=1, backward=0, length=lambda *_, **__: 1),
)
