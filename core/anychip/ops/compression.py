"""Smaller representations: quantization by block, Hadamard transform, the largest entries."""

from collections.abc import Sequence

from torch import Tensor

from anychip import operators
from anychip.dispatch.operator import operator
from anychip.operators.codes import Codes


@operator(operators.quantize)
def quantize(
    x: Tensor, rng: Tensor | None = None, *, format: str = "int8", block: int = 256
) -> tuple[Tensor, Tensor]:
    """Codes and one scale per block of consecutive elements of the flattened tensor.

    Args:
        x: float, any shape.
        rng: int64[2] (seed, offset): rounds up or down at random, right on average; element i uses
            word ``i % 4`` of the Philox4x32-10 block at counter ``offset + i // 4``. None: to the
            nearest, halves to even.
            For int8 and int4 only.
        format: int8 (-127 to 127), int4 (-7 to 7), nf4, e4m3, e5m2, mx_e4m3, mx_e5m2 or mx_e2m1;
            :mod:`anychip.operators.codes` says what they are. Codes of 4 bits are two per byte, the
            low nibble first.
        block: elements per scale; 32 of the MX formats.

    Returns:
        codes: int8, (numel,) or (ceil(numel / 2),): bit patterns, of e4m3 those of
            ``codes.view(torch.float8_e4m3fn)``.
        scales: (ceil(numel / block),) float32, 0 for a block of zeros, or of numbers below about
            1e-36; of an MX format uint8, the exponent of a power of two plus 127. A block with a
            NaN or an Inf has a scale of NaN or Inf, or 255, and codes of zero, so that all of it
            comes back as NaN.

    Source: Dettmers et al. 2022, arXiv:2110.02861; Gupta et al. 2015, arXiv:1502.02551; OCP
    Microscaling Formats 1.0, section 6.3.
    """
    raise NotImplementedError


@operator(operators.dequantize)
def dequantize(
    codes: Tensor, scales: Tensor, *, shape: Sequence[int], format: str = "int8", block: int = 256
) -> Tensor:
    """float32 tensor of a shape from what :func:`quantize` gave: a code's value times its scale.

    ``dequantize(codes)`` of :func:`coded` codes, which are all five arguments in one.

    Args:
        codes: int8, (numel,) or (ceil(numel / 2),).
        scales: (ceil(numel / block),) float32; of an MX format uint8.
        shape: of the tensor that was quantized.
        format, block: as they were for quantize.
    """
    raise NotImplementedError


def coded(x: Tensor, rng: Tensor | None = None, *, format: str = "int8", block: int = 256) -> Codes:
    """What :func:`quantize` gives, as one argument for operators that take codes."""
    return Codes(*quantize(x, rng, format=format, block=block), tuple(x.shape), format, block)


@operator(operators.hadamard)
def hadamard(x: Tensor, *, block: int | None = None) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dim, block by block; its own inverse.

    Args:
        x: (..., H) float.
        block: a power of two that divides H; None: H itself.

    Source: Fino and Algazi 1976, IEEE Trans. Computers C-25:1142; Sylvester's order.
    """
    raise NotImplementedError


@operator(operators.top_k)
def top_k(x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """The k elements of largest magnitude of the last dim, largest first.

    Of equal magnitudes the lower index comes first; NaN counts as the largest. For the whole tensor
    pass ``x.flatten()``.

    Args:
        x: (..., H) float.
        k: 0 to H.

    Returns:
        values: (..., k), x's dtype, with their signs. The gradient of the other elements is 0.
        indices: (..., k) int64.

    Source: Lin et al. 2018, arXiv:1712.01887.
    """
    raise NotImplementedError
