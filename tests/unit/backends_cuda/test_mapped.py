"""The mapped rows on the host: by the rules for every chip, with torch's kernels replaced by ours.

Attention's kernels are float64 ones of the same calls; what is tested is what stands around them.
"""

from collections.abc import Iterator

import pytest
import torch

import anychip
from anychip import conformance
from anychip_cuda import operators  # noqa: F401 - declares the rows
from anychip_cuda.table import make_table
from tests.meta.honest import HonestBackend
from tests.unit.backends_cuda.attention_kernels import Kernels


class Mapped(HonestBackend):
    """With the mapped rows and no others."""

    name = "mapped"
    operators = make_table(None)
    dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16})


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    yield Mapped()
    anychip.use("cpu")


BY_NAME = "silu relu relu2 sigmoid tanh softplus conv1d conv2d linear_cross_entropy_partials"
# On a host torch's 16-bit product of strided factors has no float32 accumulator.
SERVED = {
    "linear": ("linear/fp32/", {"linear"}),
    **{name: (f"{name}/", {name, f"{name}_backward"}) for name in BY_NAME.split()},
    "embedding": ("embedding/", {"embedding_by_torch"}),
    "grouped_linear": ("grouped_linear/", {"grouped_linear_by_group"}),
    "attention": ("attention/", {f"attention_by_{w}" for w in ("flash", "efficient", "products")}),
    "attention_varlen": ("attention_varlen/",
                         {"attention_varlen_by_flash", "attention_varlen_by_sequence"}),
}  # fmt: skip
"""Operator to cases, and the rows that have to serve them."""


@pytest.mark.grid
@pytest.mark.parametrize("name", SERVED)
def test_mapped_row_passes_the_suite(name: str, mapped: Mapped, kernels: Kernels) -> None:
    cases, rows = SERVED[name]
    # A chip's rows do not look at the numbers of an index.
    select = f"(operators/{cases} or gradients/{cases}) and not rule:range"
    report = conformance.run(mapped, select=select)
    assert [f"{r.case}: {r.reason}" for r in report.results if not r.ok] == []
    assert report.provenance is not None
    served = {row["implementation"].rpartition(".")[2] for row in report.provenance["operators"]}
    assert rows <= served
    if name == "attention":
        assert {f"{kind}{way}" for kind in ("flash", "efficient") for way in ("", " backward")} == (
            set(kernels.calls)
        )
    assert all(kernels.modes), "a backward that adds up in any order"
    assert not torch.are_deterministic_algorithms_enabled()
