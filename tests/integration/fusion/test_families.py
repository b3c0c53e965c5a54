"""Many decoders of transformers: fused, each has the logits, loss and gradients that it had.

How many modules of each kind are replaced in each stands in the table of docs/fusing.md.
"""

import copy
import math

import pytest
from torch import Tensor, nn

import anychip
from tests.unit.fusion import parity

pytest.importorskip("transformers")

from tests.integration.fusion import families

FAMILIES = families.FAMILIES
BOUND = parity.gradient_bound(families.LAYERS, 4 * families.WIDTH)
# bf16 sums in float32 and rounds once an operator; parity.gradient_bound counts 18 of them a layer.
BF16_BOUND = 2 * math.sqrt(18 * (families.LAYERS + 1)) * 2.0**-9
# A router's choice of experts is not continuous: in bf16 a token may go to another one.
ROUTED = {"DeepseekV3", "GptOss", "Mixtral", "Qwen3Moe"}


def trained(model: nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and gradients."""
    made = model(families.tokens(), labels=families.tokens())
    made.loss.backward()
    grads = {path: p.grad.double() for path, p in model.named_parameters() if p.grad is not None}
    return made.logits, made.loss, grads


def density(grads: dict[str, Tensor]) -> float:
    """Root of the mean square of all gradients of a model."""
    numel = sum(g.numel() for g in grads.values())
    return math.sqrt(sum(float(g.square().sum()) for g in grads.values()) / numel)


@pytest.mark.grid
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_family_logits_loss_and_gradients_equal_those_before(family: str) -> None:
    before = families.build(family)
    model = copy.deepcopy(before)
    first = anychip.fuse(model, linear=True)
    second = anychip.fuse(model, linear=True)
    assert first.count() > first.count("linear") > 0 or family == "GPT2"
    assert (second.count(), second.before) == (0, first.count())
    (*wants, wanted), (*gots, grads) = trained(before), trained(model)
    # Both are within the bound of the exact one.
    for got, want in zip(gots, wants, strict=True):
        assert parity.relative(got, want) <= 2 * BOUND
    assert grads.keys() == wanted.keys()
    usual = density(wanted)
    for path, grad in wanted.items():
        # Some vanish, as that of a bias of all keys: only their terms have a size.
        size = max(float(grad.norm()), usual * math.sqrt(grad.numel()))
        assert float((grads[path] - grad).norm()) <= 2 * BOUND * size, path


@pytest.mark.grid
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ROUTED])
def test_fused_family_in_bf16_stays_within_its_rounding(family: str) -> None:
    exact = families.build(family)
    before = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(before.state_dict())  # the same rounded weights
    model = copy.deepcopy(before)
    anychip.fuse(model, linear=True)
    (_, want, wanted), (_, _, others), (_, got, grads) = map(trained, (exact, before, model))
    assert parity.relative(got, want) <= BF16_BOUND
    # How roundings grow on the way back is the model's matter; fused, it has no more of them. Two
    # sums of as many errors that are independent differ by far less than a factor of 2.
    errors = [
        density({path: each[path] - wanted[path] for path in wanted}) for each in (grads, others)
    ]
    assert errors[0] <= 2 * errors[1]


def rows_of_the_page() -> dict[str, str]:
    """The rows of the table by family."""
    return {line.split()[1]: line for line in families.written().splitlines()[2:]}


@pytest.mark.grid
@pytest.mark.parametrize("family", FAMILIES)
def test_row_of_the_page_is_what_fuse_does(family: str) -> None:
    assert rows_of_the_page()[family] == families.row(family), (
        "write it anew: python -m tests.integration.fusion.families"
    )


def test_table_of_the_page_has_all_families() -> None:
    assert list(rows_of_the_page()) == list(FAMILIES)
