"""Steps of update rules: rows per candidate, and peers that compute the same."""

import math

import pytest
import torch

import anychip
from anychip.comm import alone
from anychip.train import zero
from benchmarks import optimizers

HAS_TORCH = [name for name, setting in optimizers.settings().items() if setting.torch is not None]


@pytest.mark.parametrize("name", optimizers.settings())
def test_bench_optim_has_a_row_per_candidate(name: str) -> None:
    report = optimizers.run(
        anychip.use("cpu"), rounds=3, progress=lambda _: None, names=(name,), num_params=12_000,
        window=1e-3,
    )  # fmt: skip
    rows = {row.name for row in report.rows}
    for group in (f"{name}, 1 tensor", f"{name}, 100 tensors"):
        peers = ("for-loop", "foreach", "fused") if name in HAS_TORCH else ()
        assert {f"{group}: ours", f"{group}: traffic"} <= rows
        assert {f"{group}: torch {how}" for how in peers} <= rows
    for row in report.rows:
        if row.name.endswith("traffic"):
            assert row.facts["x bound"] == 1.0


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("name", HAS_TORCH)
def test_bench_optim_compares_with_the_same_rule(name: str, how: str) -> None:
    setting = optimizers.settings()[name]
    torch.manual_seed(0)
    start, grad = torch.randn(300), torch.randn(300)
    found = []
    for make in (
        lambda params: zero.Optimizer(params, setting.rule, alone()),
        lambda params: setting.torch(params, **{how: True}),
    ):
        param = start.clone().requires_grad_()
        optimizer = make([param])
        for step in range(4):
            param.grad = grad * (step + 1)
            optimizer.step()
        found.append(param.detach())
    assert not torch.equal(found[0], start)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


def test_bench_optim_without_deepspeed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    report = optimizers.run(
        anychip.use("cpu"), rounds=3, progress=lambda _: None, names=("adamw",), num_params=12_000,
        window=1e-3,
    )  # fmt: skip
    assert report.notes[-1] == (
        "DeepSpeedCPUAdam is left out: deepspeed is not installed (pip install anychip[bench])"
    )


@pytest.mark.parametrize("num_params", [12_000, 1_000_000, 25_000_000, 100_000_000])
def test_decoder_shapes_are_a_hundred_with_about_so_many_elements(num_params: int) -> None:
    shapes = optimizers.decoder_shapes(num_params)
    total = sum(map(math.prod, shapes))
    width = shapes[1][0]
    assert len(shapes) == 100
    # The next wider decoder, in steps of 8, would be too large.
    assert 169 * width**2 <= num_params < 169 * (width + 8) ** 2
    assert total == 169 * width**2 + 86 * width


def test_bench_optim_with_too_few_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 10816 parameters expected, got 10815"):
        optimizers.decoder_shapes(10_815)


def test_bench_optim_for_a_rule_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no rule adam; there are adamw, adamw-8bit, sgd"):
        optimizers.run(anychip.use("cpu"), rounds=3, progress=lambda _: None, names=("adam",))
