"""What the bindings of the CUDA kernels refuse: sizes, formats and lists that do not fit together.

Norms, which have most arguments, are in test_norm.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from anychip_cuda.loss import Options
from tests.unit.backends_cuda.conftest import Chip

Call = Callable[..., Any]
PLAIN = Options(-100, 0.0, 0.0)
ONES = (1, 1, 1, 1)
NONE = (0, (0, 0, 0, 0), 0)
HEADS = (0, 0, 1, (8, 8, 8))


def before_permute() -> Iterator[tuple[str, Call]]:
    """Names of functions, and calls of them with the native module, a place and a float32 code."""
    yield "gelu_forward", lambda n, p, f: n.gelu_forward(0, 0, -1, False, 0, *p)
    yield "bias_gelu_forward", lambda n, p, f: n.bias_gelu_forward(0, 0, 0, 2, 2, False, 0, 0, *p)
    yield (
        "bias_gelu_backward",
        lambda n, p, f: n.bias_gelu_backward(*[0] * 6, 0, 2, 0, False, 0, 0, *p),
    )
    yield "embedding_forward", lambda n, p, f: n.embedding_forward(0, True, 0, 0, -1, 1, 1, 0, *p)
    yield (
        "embedding_backward",
        lambda n, p, f: n.embedding_backward(0, 0, True, 0, 0, 0, 0, 1, 1, 1, 0, 0, *p),
    )
    for numel, length in ((12, 3), (8, 0), (12, 8), (65_536, 65_536)):
        yield "hadamard", lambda n, p, f, s=(numel, length): n.hadamard(0, 0, *s, f, *p)
    for rows, classes, code in ((-1, 4, 1), (1, 0, 1), (1, 4, 2)):
        numbers = (rows, classes, *PLAIN, 1, code)  # bfloat16, and a gradient of another type
        yield (
            "cross_entropy_backward",
            lambda n, p, f, s=numbers: n.cross_entropy_backward(
                0, False, 0, 0, 4, 0, 0, 0, 4, *s, *p
            ),
        )


def from_permute_on() -> Iterator[tuple[str, Call]]:
    """The others, in the order of the alphabet, too."""
    for entries, experts in ((-1, 4), (4, 0), (4, 1025), (2**31, 4)):
        yield (
            "permutation_map",
            lambda n, p, f, s=(entries, experts): n.permutation_map(0, True, 0, 0, 0, *s, *p),
        )
    yield "permute_rows", lambda n, p, f: n.permute_rows(0, 0, 0, 4, 2, 7, *p)
    yield "combine_rows", lambda n, p, f: n.combine_rows(0, 0, 0, 0, 4, 0, 8, f, f, *p)
    yield (
        "combine_rows_backward",
        lambda n, p, f: n.combine_rows_backward(*[0] * 6, 4, 0, 8, f, f, *p),
    )
    for block, name in ((0, "int8"), (-4, "int4"), (64, "mx_e4m3"), (0, "nf4")):
        yield "quantize", lambda n, p, f, s=(block, name): n.quantize(0, 0, 0, 0, 64, *s, f, *p)
        yield "dequantize", lambda n, p, f, s=(block, name): n.dequantize(0, 0, 0, 64, *s, *p)
    for seq, rotary_dim in ((-1, 8), (1, 10), (1, 5), (1, -2)):
        yield (
            "rope",
            lambda n, p, f, s=seq, r=rotary_dim: n.rope(
                *HEADS, *HEADS, 0, 0, 1, s, 8, r, False, False, 0, *p
            ),
        )
    for rows, queries, causal in ((-1, 1, False), (2**31, 1, False), (3, 2, True), (3, 0, True)):
        yield (
            "softmax_forward",
            lambda n, p, f, s=(rows, queries), c=causal: n.softmax_forward(
                0, 0, NONE, NONE, ONES, *s, 8, 1.0, c, 0, 0, *p
            ),
        )
        yield (
            "softmax_backward",
            lambda n, p, f, s=(rows, queries), c=causal: n.softmax_backward(
                0, 0, 0, 0, 0, *s, 8, 1.0, c, 0, *p
            ),
        )
    yield (
        "softmax_bias_gradient",
        lambda n, p, f: n.softmax_bias_gradient(
            0, 0, 0, ONES, ONES, ONES, ONES, 8, 0, 0, 0, 0, 0, *p
        ),
    )
    for rows, length, k in ((1, 4, 5), (-1, 4, 2), (1, 4, -1), (1, 2**32, 1), (1, 3000, 2500)):
        yield "top_k", lambda n, p, f, s=(rows, length, k): n.top_k(0, 0, 0, 0, *s, 4, f, *p)
    yield "top_k_backward", lambda n, p, f: n.top_k_backward(0, 0, 0, 1, 4, 5, f, *p)


CALLS = [*before_permute(), *from_permute_on()]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_sizes_that_do_not_fit_are_refused(chip: Chip, name: str, call: Call) -> None:
    native, place = chip.kernels.native, chip.kernels.place(torch.empty(0, device=chip.device))
    with pytest.raises(RuntimeError, match=f"^{name}: CUDA error 1"):
        call(native, place, native.FLOAT32)


def test_lists_that_do_not_fit_together_are_refused(chip: Chip) -> None:
    native, x = chip.kernels.native, torch.ones(64, device=chip.device)
    a, f, place = x.data_ptr(), native.FLOAT32, chip.kernels.place(x)

    def update(grads: Any, first: Any, low: Any = (), size: int = 4, code: int = f) -> Any:
        copies = [list(low), [f] * len(low)]
        return native.Update([a], [size], [f], grads, [code], first, [a], *copies)

    def coded(
        grads: Any, codes: Any, scales: Any, low: Any = (), size: int = 4, code: int = f
    ) -> Any:
        given = (codes, scales, codes, scales, list(low), [f] * len(low))
        return native.CodedUpdate([a], [size], [f], grads, [code], *given)

    def refused(name: str, *given: Any) -> None:
        with pytest.raises(RuntimeError, match=f"^{name}: CUDA error 1"):
            getattr(native, name)(*given, *place)

    for addresses, sizes in (([a + 2], [4]), ([0], [4]), ([a], [-1])):
        refused("clip", addresses, sizes, [f], a, 1.0)
    refused("l2_norm", [a], [8], [f], a, 0, a)
    refused("sums_of_squares", [a], [8], [f], 0)
    refused("sums_of_squares", [0], [8], [f], a)
    for made in (
        update([], [a]), update([a], []), update([a], [a], [a, a]), update([0], [a]),
        update([a + 1], [a]), update([a], [a], size=-1),
    ):  # fmt: skip
        refused("adamw", made, a, 0.9, 0.99, 1e-8)
    good = update([a], [a])
    refused("lamb", good, a, 0, 0.9, 0.99, 1e-8, 0.0)
    refused("lamb_sums_of_squares", good, a, 0.9, 0.99, 1e-8, 0.0, 0)
    refused("lamb_sums_of_squares", good, 0, 0.9, 0.99, 1e-8, 0.0, a)
    refused("begin_step", a, 0, 0, 0, 0, 0.9, 0.99, 0.0, True, a)
    for made in (
        coded([], [a], [a]), coded([a], [], [a]), coded([a], [a], []), coded([a], [a], [a], [a, a]),
        coded([0], [a], [a]), coded([a], [0], [a]), coded([a], [a], [0]), coded([a], [a], [a + 2]),
        coded([a + 1], [a], [a]), coded([a], [a], [a], size=-1),
    ):  # fmt: skip
        refused("adamw_8bit", made, a, 0.9, 0.99, 1e-8)
    refused("adamw_8bit", coded([a], [a], [a]), 0, 0.9, 0.99, 1e-8)
    for make in (update, coded):
        with pytest.raises(ValueError, match="expected FLOAT32"):
            make([a], [a], [a], code=9)
    with pytest.raises(ValueError, match="expected sizes and dtypes of 2 tensors, got 1 and 2"):
        native.clip([a] * 2, [8], [f] * 2, a, 1.0, *place)
    with pytest.raises(ValueError, match="expected FLOAT32"):
        native.clip([a], [8], [7], a, 1.0, *place)
