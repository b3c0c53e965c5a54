"""torch.export, strict and not, and what the exported program computes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip import ops
from tests.unit.dispatch.calls import SPECS, WRITING, bits, call


class Block(nn.Module):
    """A norm, a product, an activation and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.Parameter(torch.rand(16))
        self.up = nn.Parameter(torch.randn(24, 16))
        self.down = nn.Parameter(torch.randn(16, 12))

    def forward(self, x: Tensor, rng: Tensor) -> Tensor:
        y = ops.linear(ops.rms_norm(x, self.norm), self.up)
        y = ops.linear(ops.swiglu(*y.chunk(2, -1)), self.down)
        return ops.gelu(x + ops.dropout(y, rng, p=0.2))


@pytest.mark.grid
@pytest.mark.parametrize("pinned", [False, True], ids=["rows", "references"])
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exported_module_computes_what_the_module_does(strict: bool, pinned: bool) -> None:
    names = ("rms_norm", "linear", "swiglu", "gelu", "dropout")
    pins = dict.fromkeys(names, "reference") if pinned else {}
    block, rng = Block(), torch.tensor([1, 2])
    x, other = torch.randn(3, 5, 16), torch.randn(7, 5, 16)
    batch = torch.export.Dim("batch", min=2, max=100)
    with anychip.policy(pin=pins):
        program = torch.export.export(
            block, (x, rng), dynamic_shapes=({0: batch}, None), strict=strict
        )
        for given in (x, other):
            torch.testing.assert_close(
                program.module()(given, rng), block(given, rng), rtol=1e-6, atol=1e-6
            )
    targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    ours = {t for t in targets if t.startswith("anychip")}
    assert bool(ours) != pinned, targets


class One(nn.Module):
    """One operator."""

    def __init__(self, name: str, attrs: dict[str, Any]) -> None:
        super().__init__()
        self.name, self.attrs = name, attrs

    def forward(self, *args: Any) -> Any:
        return getattr(ops, self.name)(*args, **self.attrs)


@pytest.mark.grid
@pytest.mark.parametrize("name", [n for n in SPECS if n not in WRITING])
def test_every_operator_without_writes_is_exported_and_keeps_its_bits(name: str) -> None:
    made = call(name, grad=False)
    program = torch.export.export(One(name, made.attrs), made.args, strict=False)
    assert bits(program.module()(*made.args)) == bits(made())
