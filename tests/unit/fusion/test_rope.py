"""Rope functions of files: which are replaced, what they compute, and which calls are their own."""

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip import FallbackError
from tests.unit.fusion import rotary
from tests.unit.fusion.rotary import HEADS, KV_HEADS, SIZE, Model

UNIT = 2.0**-24
REST = 4
# Function, module of tables, pairs or halves, and dims of a head that are not turned.
KINDS: dict[str, tuple[Callable[..., Any], type[rotary.Tables], bool, int]] = {
    "llama": (rotary.apply_rotary, rotary.Tables, False, 0),
    "cohere": (rotary.apply_rotary_paired, rotary.PairedTables, True, 0),
    "glm": (rotary.apply_rotary_glm, rotary.Tables, True, REST),
    "gpt-oss": (rotary.apply_rotary_narrow, rotary.NarrowTables, False, 0),
}
POSITIONS = {
    "one-row": torch.tensor([[3, 0, 7, 8, 20]]),
    "rows-of-their-own": torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [9, 8, 7, 6, 5]]),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def build(kind: str) -> Model:
    function, tables, _, _ = KINDS[kind]
    return Model(function, tables)


def fused(model: Model) -> Model:
    report = anychip.fuse(model)
    assert [(e.path, e.kind, e.source) for e in report.replaced] == [("attention", "rope", "rope")]
    return model


def heads(kind: str = "llama", dtype: torch.dtype = torch.float32, batch: int = 3) -> list[Tensor]:
    """q and k as an attention has them: (B, H, S, size), views of (B, S, H, size)."""
    generator, size = torch.Generator().manual_seed(4), SIZE + KINDS[kind][3]
    shapes = [(batch, 5, count, size) for count in (HEADS, KV_HEADS)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [t.transpose(1, 2).requires_grad_() for t in made]


def exact(kind: str, x: Tensor, positions: Tensor) -> Tensor:
    """Rotation as a product of complex numbers, in float64, by the tables' float32 angles."""
    angles = rotary.Tables().angles(positions).double()[:, None]
    turned, rest = x.double()[..., :SIZE], x.double()[..., SIZE:]
    pairs = turned.unflatten(-1, (-1, 2) if KINDS[kind][2] else (2, -1))
    pairs = pairs if KINDS[kind][2] else pairs.transpose(-1, -2)
    product = torch.view_as_complex(pairs.contiguous()) * torch.polar(angles.new_ones(1), angles)
    pairs = torch.view_as_real(product)
    pairs = pairs if KINDS[kind][2] else pairs.transpose(-1, -2)
    return torch.cat((pairs.flatten(-2), rest), dim=-1)


def difference(got: Tensor, want: Tensor) -> float:
    """Largest error, in units of the row's largest entry."""
    return float(((got - want).abs() / want.abs().amax(-1, keepdim=True)).max())


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_fused_rope_and_gradients_equal_float64(kind: str, positions: Tensor) -> None:
    model, (q, k) = fused(build(kind)), heads(kind)
    turned = model(q, k, positions)
    # cos and sin are rounded once; then two products and a sum.
    for got, x in zip(turned, (q, k), strict=True):
        assert got.shape == x.shape
        assert difference(got.detach(), exact(kind, x.detach(), positions)) <= 4 * UNIT
    slopes = [torch.randn_like(y) for y in turned]
    grads = torch.autograd.grad(turned, (q, k), slopes)
    for got, x, slope in zip(grads, (q, k), slopes, strict=True):
        leaf = x.detach().double().requires_grad_()
        (want,) = torch.autograd.grad(exact(kind, leaf, positions), leaf, slope.double())
        assert difference(got, want) <= 4 * UNIT
    (forward,) = [r for r in anychip.provenance().rows() if r.direction == "forward"]
    assert (forward.operator, forward.calls, forward.fallback_reason) == ("rope", 1, None)


MIXED = {
    "all-bf16": (torch.bfloat16, torch.bfloat16), "tables-fp32": (torch.bfloat16, torch.float32),
    "tables-bf16": (torch.float32, torch.bfloat16),
    "fp16-and-bf16": (torch.float16, torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "table"), MIXED.values(), ids=MIXED)
def test_fused_rope_has_the_dtype_that_it_had(
    kind: str, dtype: torch.dtype, table: torch.dtype
) -> None:
    before = build(kind)
    model = fused(copy.deepcopy(before))
    (q, k), positions = heads(kind, dtype), POSITIONS["one-row"]
    given = torch.ones((), dtype=table)
    wants = before.attention(q, k, before.tables(given, positions))
    gots = model.attention(q, k, model.tables(given, positions))
    for got, want in zip(gots, wants, strict=True):
        assert got.dtype == want.dtype
        # Three roundings of the file's function and one of the operator, of 8 bits.
        assert difference(got.detach().double(), want.detach().double()) <= 4 * 2.0**-8
    assert not anychip.provenance().fallbacks()


LEFT = {
    "backwards": (rotary.backwards, rotary.Tables, "its result differs"),
    "swapped": (rotary.swapped, rotary.Tables, "its result differs"),
    "queries-only": (rotary.queries_only, rotary.Tables, "its result differs"),
    "permuted": (rotary.permuted, rotary.Tables, "its result differs"),
    "detached": (rotary.detached, rotary.Tables, "its gradient of k differs"),
    "last-heads": (rotary.last_heads, rotary.Tables, "heads that are longer than its tables"),
    "widened": (rotary.widened, rotary.Tables, "it gives torch.float32"),
    "first-of-the-batch": (rotary.scaled_by_first, rotary.Tables, "its result differs"),
    "paired-tables": (rotary.apply_rotary, rotary.PairedTables, "its result differs"),
    "uneven-tables": (rotary.apply_rotary, rotary.UnevenTables, "it cannot be called"),
    "no-tables": (rotary.apply_rotary, lambda _: nn.Identity(), "no module of the model makes"),
}


@pytest.mark.parametrize(("function", "tables", "reason"), LEFT.values(), ids=LEFT)
def test_fuse_leaves_a_function_that_is_not_rope(
    function: Callable[..., Any], tables: Callable[[int], nn.Module], reason: str
) -> None:
    model = Model(function, tables)
    kinds = [type(module) for module in model.modules()]
    report = anychip.fuse(model)
    assert report.count("rope") == 0
    (entry,) = [e for e in report.left if e.path == "attention" and e.source == "rope"]
    assert reason in entry.reason
    assert [type(module) for module in model.modules()] == kinds


class Kernel:
    """What a library may put in a function's place."""

    __call__ = staticmethod(rotary.apply_rotary)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


def test_fuse_leaves_a_callable_that_is_no_function() -> None:
    assert [e.reason for e in anychip.fuse(Model(Kernel())).left if e.source == "rope"] == [
        "it is a Kernel, not a function"
    ]


def test_fuse_leaves_a_forward_in_a_decorator() -> None:
    model = Model()
    kind = type(model.attention)
    kind.forward = wrapped(kind.forward)
    assert [e.reason for e in anychip.fuse(model).left if e.source == "rope"] == [
        "the forward that calls it is wrapped by a decorator"
    ]


@pytest.mark.parametrize(("options", "reason"), [
    ({"skip": "rope"}, "skip rope"), ({"skip": "attention"}, "skip attention"),
    ({"skip": "tables"}, "no module of the model makes"),
    ({"only": "norm"}, "only norm"),
], ids=["kind", "attention", "tables", "only"])  # fmt: skip
def test_fuse_leaves_rope_by_choice(options: dict[str, Any], reason: str) -> None:
    report = anychip.fuse(Model(), **options)
    assert report.count() == 0
    assert any(e.source == "rope" and reason in e.reason for e in report.left)


# Calls that are the file's own


def tables_of(model: Model) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = model.tables(torch.ones(()), POSITIONS["one-row"])
    return made


OWN_CODE: dict[str, tuple[Callable[[Model], tuple[Any, ...]], str]] = {
    "plain-tuple": (lambda m: (*heads(), tuple(tables_of(m))),
                    "position_embeddings of no fused module"),
    "float64": (lambda m: (*heads(dtype=torch.float64), tables_of(m)), "q torch.float64"),
    "other-keys": (lambda m: (heads()[0], heads(dtype=torch.bfloat16)[1], tables_of(m)),
                   "k torch.bfloat16"),
    "three-dims": (lambda m: (*(t[0] for t in heads()), tables_of(m)), "q torch.float32 (4, 5, 8)"),
    "one-head-of-keys": (lambda m: (heads()[0], heads(batch=1)[1], tables_of(m)),
                         "k torch.float32 (1, 2, 5, 8)"),
    "tables-with-gradient": (
        lambda m: (*heads(), type(tables_of(m))(*(t.requires_grad_() for t in tables_of(m)))),
        "with a gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "reason"), OWN_CODE.values(), ids=OWN_CODE)
def test_fused_rope_that_the_operator_cannot_serve_is_the_files_and_counted(
    arguments: Callable[[Model], tuple[Any, ...]], reason: str
) -> None:
    before = Model()
    model = fused(copy.deepcopy(before))
    args = arguments(model)
    want = before.attention(*args)
    assert all(torch.equal(a, b) for a, b in zip(model.attention(*args), want, strict=True))
    (row,) = anychip.provenance().rows()
    assert (row.operator, row.calls) == ("rope", 1)
    assert reason in (row.fallback_reason or "")
    with anychip.policy(fallback="strict"), pytest.raises(FallbackError, match="rope"):
        model.attention(*args)


@pytest.mark.parametrize("forward", rotary.FORWARDS, ids=lambda f: f.__name__)
def test_fused_rope_of_a_forward_that_changes_its_tables_is_the_files_and_counted(
    forward: Callable[..., Any],
) -> None:
    before = Model()
    before.attention = rotary.attention_of(rotary.apply_rotary, forward)()
    model = fused(copy.deepcopy(before))
    args = (*heads(), POSITIONS["one-row"])
    for got, want in zip(model(*args), before(*args), strict=True):
        # Of two turns the operator may serve the first.
        assert difference(got.detach(), want.detach()) <= (
            8 * UNIT if forward.__name__ == "once_more" else 0.0
        )
    (row,) = anychip.provenance().fallbacks()
    assert row.fallback_reason == "not the two of position_embeddings as they are"


def others(made: tuple[Tensor, Tensor]) -> Any:
    return (torch.cat((made[0][..., :4], made[0][..., 4:] * 2), -1),) * 2


def in_place(made: tuple[Tensor, Tensor]) -> None:
    made[0][..., 4:] *= 2


@pytest.mark.parametrize(("change", "reason"), [
    (others, "position_embeddings of no fused module"), (in_place, "not the two of position_emb"),
])  # fmt: skip
def test_fused_rope_with_tables_that_a_hook_changed_is_the_files_and_counted(
    change: Callable[..., Any], reason: str
) -> None:
    before = Model()
    model = fused(copy.deepcopy(before))
    for each in (before, model):
        each.tables.register_forward_hook(lambda _module, _args, made: change(made))
    args = (*heads(), POSITIONS["one-row"])
    assert all(map(torch.equal, model(*args), before(*args)))
    (row,) = anychip.provenance().rows()
    assert reason in (row.fallback_reason or "")


def test_fused_rope_with_heads_longer_than_the_tables_is_the_files_error() -> None:
    model = fused(Model())
    with pytest.raises(RuntimeError, match="must match"):
        model(*(torch.cat((t, t), dim=-1) for t in heads()), POSITIONS["one-row"])


def test_fused_rope_keeps_no_argument_alive() -> None:
    model = fused(Model())
    args = [*heads(), model.tables(torch.ones(()), POSITIONS["one-row"])]
    model.attention(*args)
    kept = weakref.ref(args[0])
    del args
    assert kept() is None


def test_fused_rope_of_no_token_has_its_shape() -> None:
    model = fused(Model())
    q, k = (t[:, :, :0] for t in heads())
    for positions in (POSITIONS["one-row"], POSITIONS["rows-of-their-own"]):
        y, z = model(q, k, positions[:, :0])
        assert (y.shape, z.shape) == (q.shape, k.shape)


# The module and its file stay what they are


def test_fused_rope_follows_what_else_changes_in_the_file() -> None:
    model = Model()
    file = type(model.attention).forward.__globals__
    names = set(file)
    fused(model)
    assert [name.startswith("anychip_rope_rope_halves") for name in set(file) - names] == [True]
    assert file["rope"] is rotary.apply_rotary


def test_tables_of_a_fused_model_are_the_same_numbers_and_unpack() -> None:
    before = Model()
    model = fused(copy.deepcopy(before))
    cos, sin = model.tables(torch.ones(()), POSITIONS["one-row"])
    wanted = before.tables(torch.ones(()), POSITIONS["one-row"])
    assert all(map(torch.equal, (cos, sin), wanted))


def test_fuse_again_and_copies_find_nothing_to_do() -> None:
    model = fused(Model())
    for each in (model, copy.deepcopy(model)):
        report = anychip.fuse(each)
        assert (report.count(), report.before) == (0, 1)
        assert all(e.source != "rope" for e in report.left)
    args = (*heads(), POSITIONS["one-row"])
    assert all(map(torch.equal, copy.deepcopy(model)(*args), model(*args)))
    assert list(model.state_dict()) == list(Model().state_dict())


def test_fuse_a_layer_later_uses_the_tables_that_are_fused_already() -> None:
    model = nn.ModuleDict({"first": Model(), "second": rotary.attention_of(rotary.apply_rotary)()})
    anychip.fuse(model, only="first")
    report = anychip.fuse(model)
    assert [(e.path, e.kind) for e in report.replaced] == [("second", "rope")]
    assert report.before == 1


def test_fuse_model_without_data_finds_the_same_rope(kind: str) -> None:
    with torch.device("meta"):
        model = build(kind)
    fused(model)


def test_fuse_under_another_default_dtype_and_device_finds_the_same_rope() -> None:
    model = Model()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.no_grad():
            fused(model)
    finally:
        torch.set_default_dtype(torch.float32)


def test_fuse_runs_neither_tables_nor_attention_and_counts_nothing() -> None:
    model, state = Model(), torch.random.get_rng_state()
    for module in (model.tables, model.attention):
        module.register_forward_hook(lambda *_: pytest.fail("it was run"))
    fused(model)
    assert anychip.provenance().rows() == ()
    assert torch.equal(torch.random.get_rng_state(), state)
