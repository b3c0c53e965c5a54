"""What the bindings of the CUDA kernels refuse: sizes, formats and lists that do not fit together.

Norms, which have most arguments, are in test_norm.py.
"""

from typing import Any

import pytest
import torch

from anychip_cuda.loss import Options
from tests.unit.backends_cuda.conftest import Chip

F32, BF16 = 0, 1
PLAIN = Options(-100, 0.0, 0.0)
ONES = (1, 1, 1, 1)
NONE = (0, (0, 0, 0, 0), 0)
HEADS = (0, 0, 1, (8, 8, 8))
# Names of functions, and arguments up to the place.
CALLS: list[tuple[Any, ...]] = [
    ("gelu_forward", 0, 0, -1, False, 0), ("bias_gelu_forward", 0, 0, 0, 2, 2, False, 0, 0),
    ("bias_gelu_backward", *[0] * 6, 0, 2, 0, False, 0, 0),
    ("embedding_forward", 0, True, 0, 0, -1, 1, 1, 0),
    ("embedding_backward", 0, 0, True, 0, 0, 0, 0, 1, 1, 1, 0, 0),
    *(("hadamard", 0, 0, *sizes, F32) for sizes in ((12, 3), (8, 0), (12, 8), (65_536, 65_536))),
    *(
        ("cross_entropy_backward", 0, False, 0, 0, 4, 0, 0, 0, 4, rows, classes, *PLAIN, 1, code)
        for rows, classes, code in ((-1, 4, BF16), (1, 0, BF16), (1, 4, 2))  # another type's, last
    ),
    *(
        ("permutation_map", 0, True, 0, 0, 0, entries, experts)
        for entries, experts in ((-1, 4), (4, 0), (4, 1025), (2**31, 4))
    ),
    ("permute_rows", 0, 0, 0, 4, 2, 7), ("combine_rows", 0, 0, 0, 0, 4, 0, 8, F32, F32),
    ("combine_rows_backward", *[0] * 6, 4, 0, 8, F32, F32),
    *(
        call
        for form in ((0, "int8"), (-4, "int4"), (64, "mx_e4m3"), (0, "nf4"))
        for call in (("quantize", 0, 0, 0, 0, 64, *form, F32), ("dequantize", 0, 0, 0, 64, *form))
    ),
    *(
        ("rope", *HEADS, *HEADS, 0, 0, 1, seq, 8, rotary_dim, False, False, 0)
        for seq, rotary_dim in ((-1, 8), (1, 10), (1, 5), (1, -2))
    ),
    *(
        call
        for rows, queries, causal in ((-1, 1, False), (2**31, 1, False), (3, 2, True), (3, 0, True))
        for call in (
            ("softmax_forward", 0, 0, NONE, NONE, ONES, rows, queries, 8, 1.0, causal, 0, 0),
            ("softmax_backward", 0, 0, 0, 0, 0, rows, queries, 8, 1.0, causal, 0),
        )
    ),
    ("softmax_bias_gradient", 0, 0, 0, ONES, ONES, ONES, ONES, 8, 0, 0, 0, 0, 0),
    *(
        ("top_k", 0, 0, 0, 0, rows, length, k, 4, F32)
        for rows, length, k in ((1, 4, 5), (-1, 4, 2), (1, 4, -1), (1, 2**32, 1), (1, 3000, 2500))
    ),
    ("top_k_backward", 0, 0, 0, 1, 4, 5, F32),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=[call[0] for call in CALLS])
def test_sizes_that_do_not_fit_are_refused(chip: Chip, call: tuple[Any, ...]) -> None:
    native, (name, *given) = chip.kernels.native, call
    place = chip.kernels.place(torch.empty(0, device=chip.device))
    with pytest.raises(RuntimeError, match=f"^{name}: CUDA error 1"):
        getattr(native, name)(*given, *place)


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
