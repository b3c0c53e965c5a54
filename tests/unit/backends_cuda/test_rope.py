"""rope of the CUDA kernels: both layouts, partial rotation, heads wherever they lie."""

import pytest
import torch
from torch import Tensor

from anychip import operators as specs
from tests.unit.backends_cuda.conftest import Chip, drawn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (batch, seq, heads, kv_heads, head_dim, rotary_dim): vectors and scalars of both layouts, fewer
# and more heads than lanes, heads wider than a block's units, all of a head copied.
SIZES = (
    (2, 5, 4, 2, 32, 32), (1, 3, 1, 1, 2, 2), (2, 9, 3, 1, 10, 6), (1, 2, 40, 8, 128, 128),
    (2, 3, 2, 2, 64, 16), (1, 2, 2, 1, 24, 12), (1, 1, 1, 1, 600, 600), (2, 3, 2, 1, 8, 0),
)  # fmt: skip


def _angles(seq: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    angle = torch.linspace(-3.0, 3.0, seq * rotary_dim // 2).view(seq, rotary_dim // 2)
    return angle.cos(), angle.sin()


def _is_near(got: Tensor, x: Tensor, want: Tensor) -> bool:
    """One rounding to got's dtype; two products and a sum of numbers up to the head's largest."""
    largest = x.double().abs().amax(-1, keepdim=True)
    half = torch.finfo(got.dtype).eps / 2
    return bool(torch.all((got.double() - want).abs() <= half * want.abs() + 2**-22 * largest))


def _double(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """A rotation of complex numbers, in float64."""
    rotary_dim = 2 * cos.shape[1]
    turned, rest = x.double().split([rotary_dim, x.shape[-1] - rotary_dim], -1)
    pairs = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    real, imaginary = pairs.unbind(-1 if interleaved else -2)
    numbers = torch.complex(real, imaginary) * torch.complex(cos.double(), sin.double())[:, None]
    parts = torch.stack((numbers.real, numbers.imag), -1 if interleaved else -2)
    return torch.cat((parts.flatten(-2), rest), -1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_of_any_sizes_is_a_rotation(
    chip: Chip, dtype: torch.dtype, sizes: tuple[int, ...], interleaved: bool
) -> None:
    batch, seq, heads, kv_heads, head_dim, rotary_dim = sizes
    q = drawn(batch, seq, heads, head_dim, dtype=dtype)
    k = drawn(batch, seq, kv_heads, head_dim, dtype=dtype, seed=1)
    cos, sin = _angles(seq, rotary_dim)
    made = chip.call("rope", "forward", q, k, cos, sin, interleaved=interleaved)
    back = chip.call(
        "rope", "backward", q, k, cos, sin, interleaved=interleaved, needs=(True, True)
    )
    for x, y, dx in zip((q, k), made, back, strict=True):
        assert y.is_contiguous()
        assert _is_near(y, x, _double(x, cos, sin, interleaved))
        assert _is_near(dx, x, _double(x, cos, -sin, interleaved))
        assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])


def test_rope_behind_2_to_the_31_elements_is_found(chip: Chip) -> None:
    # 4 GiB of addresses, of which a few pages are touched.
    storage = torch.empty(2**31 + 256, dtype=torch.bfloat16, device=chip.device)
    x = storage.as_strided((2, 1, 2, 64), (2**31, 64, 64, 1))
    x.copy_(drawn(2, 1, 2, 64, dtype=torch.bfloat16))
    cos, sin = _angles(1, 64)
    made = chip.call("rope", "forward", x, x, cos, sin, interleaved=False)
    want = specs.rope.forward(x.cpu().contiguous(), x.cpu().contiguous(), cos, sin,
                              interleaved=False)  # fmt: skip
    assert torch.equal(made[0], want[0])
    assert torch.equal(made[1], want[1])
