"""A fused module is the module that it was: parameters, hooks, mode, copies, and odd calls."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip import FallbackError
from tests.unit.fusion import modules
from tests.unit.fusion.modules import WIDTH

KINDS: dict[str, Callable[[], nn.Module]] = {
    "layer-norm": lambda: nn.LayerNorm(WIDTH), "rms-norm": modules.RMSNorm, "gelu": modules.NewGELU,
    "gated": modules.GatedMLP, "linear": lambda: nn.Linear(WIDTH, 3),
}  # fmt: skip


def fused(module: nn.Module) -> nn.Module:
    # The layers of a gated MLP stay: only what is asked about is replaced.
    assert anychip.fuse(module, linear=isinstance(module, nn.Linear)).count() == 1
    return module


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def module(request: pytest.FixtureRequest) -> nn.Module:
    made: nn.Module = request.param()
    return made


def test_fused_module_is_the_same_object_of_a_subclass(module: nn.Module) -> None:
    kind, attributes, tensors = type(module), dict(vars(module)), list(module.parameters())
    fused(module)
    assert isinstance(module, kind)
    assert type(module).__name__ == f"Fused{kind.__name__}"
    assert vars(module) == attributes
    assert all(a is b for a, b in zip(module.parameters(), tensors, strict=True))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)], ids=str)
def test_fused_module_takes_what_it_took(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = inputs(*shape)
    want = module(x)
    got = fused(module)(x)
    assert got.shape == want.shape
    # Norm-wise, with the roundings that the widest operator's specification allows, on both sides.
    top = float(want.detach().abs().max()) if want.numel() else 0.0
    assert torch.allclose(got, want, rtol=0.0, atol=2 * (10 + WIDTH) * 2.0**-24 * top)


def test_fused_module_strided_and_special_values_pass_through(module: nn.Module) -> None:
    x = inputs(6, 4).transpose(0, 1)
    x[1, 2, 3] = torch.nan
    want = module(x)
    got = fused(module)(x)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isnan().any(-1), x.isnan().any(-1))


def test_fused_module_takes_its_argument_by_name() -> None:
    module = modules.RMSNorm()
    x = inputs(3)
    assert torch.equal(fused(module)(hidden=x), module(x))


def test_fused_module_keeps_hooks_and_their_handles(module: nn.Module) -> None:
    seen: list[str] = []
    handle = module.register_forward_hook(lambda *_: seen.append("forward"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    fused(module)(inputs(2).requires_grad_()).sum().backward()
    assert seen == ["forward", "backward"]
    handle.remove()
    module(inputs(2))
    assert seen == ["forward", "backward"]


@pytest.mark.parametrize("training", [True, False])
def test_fused_module_keeps_its_mode(module: nn.Module, training: bool) -> None:
    module.train(training)
    assert fused(module).training is training


@pytest.mark.parametrize("copied", [
    copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)),
], ids=["deepcopy", "copy", "pickle"])  # fmt: skip
def test_copy_of_a_fused_module_computes_the_same(
    module: nn.Module, copied: Callable[[nn.Module], nn.Module]
) -> None:
    twin = copied(fused(module))
    assert type(twin) is type(module)
    assert torch.equal(twin(inputs(3)), module(inputs(3)))
    assert list(twin.state_dict()) == list(module.state_dict())


def test_fused_module_with_frozen_parameters_gives_them_no_gradients(module: nn.Module) -> None:
    x = inputs(3).requires_grad_()
    fused(module.requires_grad_(requires_grad=False))(x).sum().backward()
    assert x.grad is not None
    assert all(param.grad is None for param in module.parameters())


def test_shared_module_is_fused_once() -> None:
    shared = nn.LayerNorm(WIDTH)
    model = nn.ModuleList([shared, nn.Sequential(shared)])
    assert anychip.fuse(model).count() == 1
    assert model[0] is model[1][0]


def test_fused_gated_mlp_with_a_hook_on_its_activation_is_left_alone() -> None:
    module = modules.GatedMLP()
    module.act.register_forward_hook(lambda *_: None)
    report = anychip.fuse(module)
    assert report.count() == 0
    assert "hooks of its SiLU would no longer be called" in {e.reason for e in report.left}


def test_fused_norm_follows_a_changed_eps() -> None:
    module, x = modules.RMSNorm(), inputs(2) * 1e-3
    before = fused(module)(x)
    module.variance_epsilon = 1.0
    want = x / (x.square().mean(-1, keepdim=True) + 1.0).sqrt()
    assert not torch.equal(module(x), before)
    assert torch.allclose(module(x), want, rtol=2 * (6 + WIDTH) * 2.0**-24, atol=0.0)


# what an operator cannot serve


def test_fused_module_in_float64_runs_its_own_code_and_counts_it(module: nn.Module) -> None:
    twin = copy.deepcopy(module).double()
    report = anychip.fuse(module, linear=isinstance(module, nn.Linear))
    x = inputs(3, dtype=torch.float64)
    assert torch.equal(module.double()(x), twin(x))
    (row,) = report.fallbacks()
    assert (row.operator, row.calls) == (report.replaced[0].operator, 1)
    assert row.implementation.endswith(f"{type(twin).__name__}.forward")
    assert "torch.float64" in (row.fallback_reason or "")


def test_fused_module_under_strict_is_an_error_where_the_operator_cannot_serve() -> None:
    module = fused(modules.RMSNorm()).double()
    with (
        anychip.policy(fallback="strict"),
        pytest.raises(FallbackError, match=r"rms_norm.*float64.*skip"),
    ):
        module(inputs(3, dtype=torch.float64))


LOW = {
    "own": (torch.bfloat16, torch.bfloat16, False), "mixed": (torch.bfloat16, torch.float32, False),
    "autocast-mixed": (torch.bfloat16, torch.float32, True),
    "autocast-own": (torch.bfloat16, torch.bfloat16, True),
    "autocast-wide": (torch.float32, torch.float32, True),
}  # fmt: skip


@pytest.mark.parametrize("name", ["layer-norm", "rms-norm"])
@pytest.mark.parametrize(("dtype", "weight", "autocast"), LOW.values(), ids=LOW)
def test_fused_norm_gives_the_dtype_that_it_gave(
    name: str, dtype: torch.dtype, weight: torch.dtype, autocast: bool
) -> None:
    module, x = KINDS[name]().to(weight), inputs(5, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        want = module(x)
        got = fused(module)(x)
    assert got.dtype == want.dtype
    # One rounding of either side, and that of the module before its weight.
    assert torch.allclose(got.double(), want.double(), rtol=3 * 2.0**-8, atol=0.0)


def test_fused_norm_of_16_bits_without_eps_runs_its_own_code() -> None:
    module = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
    x = inputs(4, dtype=torch.bfloat16) * 2.0**-6
    want = module(x)
    assert torch.equal(fused(module)(x), want)


def test_fused_norm_with_a_weight_of_fewer_bits_is_torchs_error() -> None:
    module = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError) as before:
        module(inputs(4))
    with pytest.raises(RuntimeError) as after:
        fused(module)(inputs(4))
    assert str(after.value) == str(before.value)
