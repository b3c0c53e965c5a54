"""What is taken for an operator, and what only looks like one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip.fusion import layers, table
from tests.unit.fusion import modules
from tests.unit.fusion.modules import WIDTH

TAKEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layer-norm": (lambda: nn.LayerNorm(WIDTH), "layer_norm"),
    "layer-norm-without-bias": (lambda: nn.LayerNorm(WIDTH, bias=False), "layer_norm"),
    "layer-norm-narrow": (lambda: nn.LayerNorm(4), "layer_norm"),
    "layer-norm-wide": (lambda: nn.LayerNorm(3001, eps=1e-3), "layer_norm"),
    "handmade-layer-norm": (modules.HandmadeLayerNorm, "layer_norm"),
    "rms-norm": (lambda: nn.RMSNorm(WIDTH, eps=1e-8), "rms_norm"),
    "rms-norm-without-eps": (lambda: nn.RMSNorm(WIDTH), "rms_norm"),
    "handmade-rms-norm": (modules.RMSNorm, "rms_norm"), "gelu": (nn.GELU, "gelu"),
    "gelu-tanh": (lambda: nn.GELU("tanh"), "gelu"), "handmade-gelu": (modules.ErfGELU, "gelu"),
    "handmade-gelu-tanh": (modules.NewGELU, "gelu"), "gated": (modules.GatedMLP, "swiglu"),
    "gated-square": (lambda: modules.GatedMLP(inner=WIDTH), "swiglu"),
    "cross-entropy": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), "cross_entropy"),
    "linear": (lambda: nn.Linear(2, 3), "linear"),
    "linear-without-bias": (lambda: nn.Linear(5, 400, bias=False), "linear"),
}  # fmt: skip


def quantized() -> nn.Module:
    module = modules.RMSNorm()
    module.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.int8), requires_grad=False)
    return module


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one-plus-weight": (modules.ShiftedRMSNorm, "not rms_norm: its result differs"),
    "other-eps": (modules.OtherEpsRMSNorm, "not rms_norm: its result differs"),
    "detached": (modules.DetachedRMSNorm, "not rms_norm: its gradient of x differs"),
    "noise-in-training": (modules.NoisyRMSNorm, "not rms_norm: its result differs"),
    "other-dims": (modules.FirstDimRMSNorm, "not rms_norm: its result differs"),
    "sample-variance": (modules.SampleLayerNorm, "not layer_norm: its result differs"),
    "two-dims": (lambda: nn.LayerNorm((4, WIDTH)), "no weight, or is over several dims"),
    "no-weight": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "no weight"),
    "group-norm": (lambda: nn.GroupNorm(1, WIDTH), "no norm"),
    "batch-norm": (lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), "no norm"),
    "quick-gelu": (modules.QuickGELU, "not gelu: its result differs"),
    "clipped-gelu": (modules.ClippedGELU, "not gelu: its result differs"),
    "gelu-gate": (lambda: modules.GatedMLP(nn.Tanh()), "not swiglu: its result differs"),
    "limited-gate": (modules.LimitedMLP, "not swiglu: its result differs"),
    "scaled-mlp": (modules.ScaledMLP, "not swiglu: its result differs"),
    "float64": (lambda: nn.LayerNorm(WIDTH).double(), "operators take no torch.float64"),
    "quantized": (quantized, "operators take no torch.int8"),
    "scripted": (lambda: torch.jit.script(nn.LayerNorm(WIDTH)), "TorchScript"),
    "weighted-loss": (lambda: nn.CrossEntropyLoss(torch.ones(3)), "weighs its classes"),
    "multi-head": (lambda: nn.MultiheadAttention(WIDTH, 4), "inside one function of torch"),
    "scaled-linear": (modules.ScaledLinear, "not linear: its result differs"),
    "linear-of-float64": (lambda: nn.Linear(2, 3).double(), "operators take no torch.float64"),
}


@pytest.mark.parametrize(("make", "operator"), TAKEN.values(), ids=TAKEN)
def test_fuse_module_that_computes_an_operator_replaces_it(
    make: Callable[[], nn.Module], operator: str
) -> None:
    module = make()
    linear = isinstance(module, nn.Linear)  # not those inside
    report = anychip.fuse(nn.ModuleDict({"it": module}), linear=linear)
    assert [(entry.path, entry.operator) for entry in report.replaced] == [("it", operator)]


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=LEFT)
def test_fuse_module_that_computes_something_else_leaves_it_with_a_reason(
    make: Callable[[], nn.Module], reason: str
) -> None:
    module = make()
    kind = type(module)
    linear = isinstance(module, nn.Linear)
    report = anychip.fuse(nn.ModuleDict({"it": module}), linear=linear)
    (entry,) = [entry for entry in report.left if entry.path == "it"]
    assert reason in entry.reason
    assert type(module) is kind
    assert report.count() == 0


@pytest.mark.parametrize(
    ("asked", "count"),
    [({}, 0), ({"only": "linear"}, 2), ({"only": "0"}, 0), ({"linear": True}, 2),
     ({"linear": True, "skip": "1"}, 1)],
    ids=str,
)  # fmt: skip
def test_fuse_linear_layers_where_they_are_asked_for(asked: dict[str, Any], count: int) -> None:
    report = anychip.fuse(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), **asked)
    assert report.count() == report.count("linear") == count
    assert len(report.left) == 2 - count
    assert asked or "fuse(model, linear=True)" in report.left[0].reason


@pytest.mark.parametrize("names", [
    ("gate_proj", "up_proj", "down_proj"), ("proj_up_gate", "proj_up", "proj_down"),
], ids=" ".join)  # fmt: skip
def test_fuse_gated_mlp_is_known_by_the_names_of_its_layers(names: tuple[str, ...]) -> None:
    assert anychip.fuse(NamedMLP(names)).count("activation") == 1
    assert anychip.fuse(NamedMLP((names[1], names[0], names[2]))).count() == 0


class NamedMLP(nn.Module):
    """Of layers with these names the first is the gate."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for name in sorted(names):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(nn.functional.silu(gate(x)) * up(x))


def test_fuse_takes_rows_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnClass(nn.Module):
        forward = modules.RMSNorm.forward

    module: Any = OwnClass()
    module.weight, module.variance_epsilon = nn.Parameter(torch.ones(WIDTH)), 1e-5
    assert anychip.fuse(module).count() == 0
    row = table.Lookalike("^OwnClass$", layers.norms)
    monkeypatch.setattr(table, "LAYERS", [*table.LAYERS, row])
    assert anychip.fuse(module).count("norm") == 1


class Offset(modules.RMSNorm):
    """Its weight is weight + offset, as each module says."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (self.weight + self.offset) / self.weight


def test_fuse_modules_of_a_class_that_differ_are_proved_one_by_one() -> None:
    report = anychip.fuse(nn.Sequential(Offset(0.0), Offset(1.0), Offset(0.0)))
    assert [entry.path for entry in report.replaced] == ["0", "2"]


class CallsFunctionals(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x)


def test_fuse_module_that_calls_a_functional_itself_says_so() -> None:
    report = anychip.fuse(nn.Sequential(CallsFunctionals()))
    assert [entry.reason for entry in report.left] == ["it calls gelu itself"]


def test_fuse_module_whose_forward_was_replaced_on_the_instance_leaves_it() -> None:
    module = nn.LayerNorm(WIDTH)
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert "replaced on the instance" in anychip.fuse(nn.Sequential(module)).left[0].reason


def test_probe_leaves_no_trace_in_module_or_random_state() -> None:
    module = modules.CountingNorm()
    seen: list[Any] = []
    module.register_forward_hook(lambda *args: seen.append(args))
    state = torch.random.get_rng_state()
    with torch.no_grad():
        weight = module.weight.clone()
    assert anychip.fuse(nn.Sequential(module, modules.NoisyRMSNorm())).count("norm") == 1
    assert module.calls == []
    assert seen == []
    assert module.weight.grad is None
    assert torch.equal(module.weight, weight)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert anychip.provenance().rows() == ()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_fuse_without_gradients_finds_the_same(around: Callable[[], Any]) -> None:
    with around():
        report = anychip.fuse(nn.Sequential(modules.RMSNorm(), modules.DetachedRMSNorm()))
    assert [entry.path for entry in report.replaced] == ["0"]


def test_fuse_under_another_default_dtype_device_and_autocast_finds_the_same() -> None:
    module = nn.Sequential(modules.RMSNorm(), nn.LayerNorm(WIDTH))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            report = anychip.fuse(module)
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.count("norm") == 2


def test_fuse_model_without_data_finds_the_same() -> None:
    with torch.device("meta"):
        model = nn.Sequential(modules.RMSNorm(), modules.ShiftedRMSNorm(), modules.GatedMLP())
    assert [entry.path for entry in anychip.fuse(model).replaced] == ["0", "2"]


# only and skip


def model() -> nn.Module:
    shared = nn.LayerNorm(WIDTH)
    return nn.ModuleDict({
        "first": nn.Sequential(shared, nn.GELU()),
        "second": nn.Sequential(modules.RMSNorm(), nn.GELU("tanh")), "again": shared,
    })  # fmt: skip


@pytest.mark.parametrize(("options", "paths"), [
    ({}, ["first.0", "first.1", "second.0", "second.1"]),
    ({"only": "norm"}, ["first.0", "second.0"]),
    ({"only": ["activation", "second.0"]}, ["first.1", "second.0", "second.1"]),
    ({"only": "second"}, ["second.0", "second.1"]),
    ({"only": "*.1"}, ["first.1", "second.1"]), ({"skip": "norm"}, ["first.1", "second.1"]),
    ({"skip": "again"}, ["first.1", "second.0", "second.1"]),
    ({"only": "first", "skip": "activation"}, ["first.0"]),
    ({"only": ()}, []),
], ids=str)  # fmt: skip
def test_fuse_only_and_skip_choose_by_kind_and_path(
    options: dict[str, Any], paths: list[str]
) -> None:
    assert [entry.path for entry in anychip.fuse(model(), **options).replaced] == paths


def test_fuse_left_out_by_choice_says_which() -> None:
    report = anychip.fuse(model(), skip=["first.0"])
    assert {e.path: e.reason for e in report.left} == {"first.0": "skip first.0"}


@pytest.mark.parametrize(("option", "message"), [
    ("norms", "did you mean 'norm'"), ("seconds", "did you mean 'second'"), ("zzz", "kinds are"),
])  # fmt: skip
def test_fuse_with_an_unknown_name_is_refused(option: str, message: str) -> None:
    for name in ("only", "skip"):
        with pytest.raises(ValueError, match=message):
            anychip.fuse(model(), **{name: option})
