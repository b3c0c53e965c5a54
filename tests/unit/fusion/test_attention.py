"""Modules that call torch's attention: served by the operator, or by torch, never differently."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.nn.functional import scaled_dot_product_attention

import anychip
from anychip.conformance.oracles import philox

UNIT = 2.0**-24


class Product(nn.Module):
    """Attention of what it is given, and another call of torch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return scaled_dot_product_attention(q, k, v, **options).abs()


def tensors(
    queries: int, keys: int, heads: int = 4, kv_heads: int = 4, **options: Any
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = [(2, heads, queries, 8), *[(2, kv_heads, keys, 8)] * 2]
    return [torch.randn(shape, generator=generator).to(**options) for shape in shapes]


def exact(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, factor: Tensor | float = 1.0
) -> Tensor:
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) * factor @ v).abs()


SERVED: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "causal": (tensors(7, 7), {"is_causal": True}), "full": (tensors(7, 7), {}),
    "scaled": (tensors(5, 5), {"is_causal": True, "scale": 0.7}),
    "grouped": (tensors(6, 6, 4, 2), {"is_causal": True, "enable_gqa": True}),
    "more-keys": (tensors(3, 9), {}),
    "one-head-of-keys": (tensors(6, 6, 4, 1), {"is_causal": True}),
    "one-query": (tensors(1, 9, 4, 1), {"enable_gqa": True}),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options"), SERVED.values(), ids=SERVED)
def test_fused_attention_equals_float64(args: list[Tensor], options: dict[str, Any]) -> None:
    module = Product()
    report = anychip.fuse(module)
    got = module(*args, **options)
    want = exact(*args, options.get("is_causal", False), options.get("scale"))
    # Every output is a mean of v; scores of 8 products, sums of 9 keys: 12 roundings and these.
    top = float(args[2].abs().max()) * max(1.0, float(args[0].norm(dim=-1).max()))
    assert float((got - want).abs().max()) <= (12 + 17) * UNIT * top
    assert report.fallbacks() == ()
    assert [row.operator for row in anychip.provenance().rows()] == ["attention"]


def sequences(*lengths: int, causal: bool) -> Tensor:
    """The mask of some sequences one after the other; a negative length is padding."""
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths).abs())
    mask = (number[:, None] == number) & (torch.tensor(lengths)[number] > 0)
    return mask.tril() if causal else mask


ROWS = torch.stack([sequences(-3, 4, causal=True), sequences(2, 5, causal=True)])
TOGETHER = torch.ones(7, 7, dtype=torch.bool)
SERVED_MASKS: dict[str, tuple[list[Tensor], Tensor, set[str]]] = {
    "all": (tensors(7, 7), TOGETHER, {"attention"}),
    "causal": (tensors(7, 7), TOGETHER.tril(), {"attention"}),
    "last-queries": (tensors(3, 7), TOGETHER.tril()[4:], {"attention"}),
    "one-query": (tensors(1, 7), TOGETHER[:1], {"attention"}),
    "packed": (tensors(7, 7), sequences(3, 1, 3, causal=True), {"attention_varlen"}),
    "packed-both-ways": (tensors(7, 7), sequences(3, 4, causal=False), {"attention_varlen"}),
    "padded-left": (tensors(7, 7), sequences(-3, 4, causal=True), {"attention_varlen"}),
    "padded-rows": (tensors(7, 7), ROWS[:, None], {"attention_varlen"}),
    "padded-whole": (tensors(7, 7), torch.zeros_like(TOGETHER), {"attention_varlen"}),
    "padded-both-ways": (tensors(7, 7), sequences(5, -2, causal=False), {"attention_varlen"}),
}


@pytest.mark.parametrize(("args", "mask", "served"), SERVED_MASKS.values(), ids=SERVED_MASKS)
def test_fused_attention_under_a_mask_of_sequences_equals_float64(
    args: list[Tensor], mask: Tensor, served: set[str]
) -> None:
    module = Product()
    report = anychip.fuse(module)
    leaves = [t.clone().requires_grad_() for t in args]
    got = module(*leaves, attn_mask=mask)
    wide = [t.double().requires_grad_() for t in args]
    scores = (wide[0] @ wide[1].transpose(-1, -2) / math.sqrt(8)).masked_fill(~mask, -math.inf)
    want = (torch.nan_to_num(scores.softmax(-1)) @ wide[2]).abs()
    top = float(args[2].abs().max()) * max(1.0, float(args[0].norm(dim=-1).max()))
    assert float((got - want).detach().abs().max()) <= (12 + 17) * UNIT * top
    slope = torch.randn(got.shape)
    grads = torch.autograd.grad(got, leaves, slope)
    wanted = torch.autograd.grad(want, wide, slope.double())
    for grad, exactly in zip(grads, wanted, strict=True):
        limit = (24 + 9) * UNIT * top * max(1.0, float(exactly.nan_to_num().abs().max()))
        assert float((grad - exactly.nan_to_num()).abs().max()) <= limit
    assert report.fallbacks() == ()
    forward = {row.operator for row in anychip.provenance().rows() if row.direction == "forward"}
    assert forward == served


def test_mask_that_was_written_into_is_read_again() -> None:
    module, args = Product(), tensors(4, 4)
    anychip.fuse(module)
    mask = sequences(2, 2, causal=True)
    for _ in range(2):
        module(*args, attn_mask=mask)
    mask[1, 0] = False
    want = scaled_dot_product_attention(*args, attn_mask=mask).abs()
    assert torch.allclose(module(*args, attn_mask=mask), want, rtol=0.0, atol=1e-5)
    assert sum(row.calls for row in anychip.provenance().fallbacks()) == 0
    mask[1] = torch.tensor([True, False, True, False])
    assert torch.equal(
        module(*args, attn_mask=mask), scaled_dot_product_attention(*args, attn_mask=mask).abs()
    )


def test_fallbacks_are_those_of_the_reports_own_model() -> None:
    first, second = Product(), Product()
    reports = [anychip.fuse(module) for module in (first, second)]
    for module, calls in ((first, 1), (second, 2), (copy.deepcopy(first), 3)):
        for _ in range(calls):
            module(*tensors(4, 4, dtype=torch.float64))
    assert [[row.calls for row in report.fallbacks()] for report in reports] == [[1], [2]]
    (row,) = anychip.provenance().fallbacks()
    assert row.calls == 6
    assert anychip.fuse(first).fallbacks() == ()


BAND = torch.ones(4, 4).tril().triu(-1).bool()
OWN_CODE: dict[str, tuple[list[Tensor], dict[str, Any], str]] = {
    "mask": (tensors(4, 4), {"attn_mask": BAND}, "a mask"),
    "mask-interleaved": (tensors(4, 4), {"attn_mask": torch.eye(2).repeat(2, 2).tril().bool()},
                         "a mask"),
    "mask-that-a-hidden-query-reads": (
        tensors(4, 4),
        {"attn_mask": torch.ones(4, 4).tril().bool() & torch.tensor([1, 1, 1, 0]).bool()}, "a mask",
    ),
    "mask-of-one-key": ([tensors(4, 4)[0], *tensors(1, 1)[1:]],
                        {"attn_mask": torch.tensor([True, False])[:, None, None, None]}, "a mask"),
    "mask-of-numbers": (tensors(4, 4), {"attn_mask": torch.zeros(4, 4)}, "a mask of numbers"),
    "mask-and-dropout": (tensors(4, 4),
                         {"attn_mask": sequences(2, 2, causal=True), "dropout_p": 0.5},
                         "a mask, and dropout"),
    "dropout-fewer-queries": (tensors(3, 5), {"is_causal": True, "dropout_p": 0.5}, "causal with"),
    "causal-first-keys": (tensors(3, 5), {"is_causal": True}, "causal with other keys"),
    "float64": (tensors(4, 4, dtype=torch.float64), {}, "float64"),
    "three-dims": ([t[0] for t in tensors(4, 4)], {}, "not (batch, heads, seq, head_dim)"),
    "one-batch-of-keys": ([tensors(4, 4)[0], *(t[:1] for t in tensors(4, 4)[1:])], {}, "batch"),
    "wide-values": ([*tensors(4, 4)[:2], torch.ones(2, 4, 4, 3)], {}, "head_dims or lengths"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "reason"), OWN_CODE.values(), ids=OWN_CODE)
def test_fused_attention_that_the_operator_cannot_serve_is_torchs_and_counted(
    args: list[Tensor], options: dict[str, Any], reason: str
) -> None:
    module = Product()
    torch.manual_seed(9)
    want = module(*args, **options)
    report = anychip.fuse(module)
    torch.manual_seed(9)
    assert torch.equal(module(*args, **options), want)
    (row,) = report.fallbacks()
    assert (row.operator, row.calls) == ("attention", 1)
    assert reason in (row.fallback_reason or "")


def factor(p: float, shape: tuple[int, ...], seed: int) -> Tensor:
    """What a weight is multiplied with: the mask that words of Philox in numpy give."""
    words = torch.from_numpy(philox.words(seed, 0, math.prod(shape)).astype("int64"))
    return (words >= math.floor(p * 2**32)).reshape(shape).double() / (1 - p)


DROPPED: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "causal": (tensors(7, 7), {"is_causal": True, "dropout_p": 0.25}),
    "grouped": (tensors(6, 6, 4, 2), {"is_causal": True, "enable_gqa": True, "dropout_p": 0.5}),
    "more-keys": (tensors(3, 9), {"dropout_p": 0.1, "scale": 0.7}),
}


@pytest.mark.parametrize(("args", "options"), DROPPED.values(), ids=DROPPED)
def test_fused_attention_with_dropout_and_gradients_equal_float64(
    args: list[Tensor], options: dict[str, Any]
) -> None:
    module = Product()
    report = anychip.fuse(module)
    leaves = [t.clone().requires_grad_() for t in args]
    torch.manual_seed(9)
    seed = int(torch.randint(2**63 - 1, (1,)))  # one draw of the host's generator a call
    torch.manual_seed(9)
    got = module(*leaves, **options)
    wide = [t.double().requires_grad_() for t in args]
    causal, scale = options.get("is_causal", False), options.get("scale")
    p, shape = options["dropout_p"], (*args[0].shape[:3], args[1].shape[2])
    want = exact(*wide, causal, scale, factor(p, shape, seed))
    # As above; what is kept is larger by 1 / (1 - p), and two roundings more.
    top = float(args[2].abs().max()) * max(1.0, float(args[0].norm(dim=-1).max())) / (1 - p)
    assert float((got - want).detach().abs().max()) <= (14 + 17) * UNIT * top
    slope = torch.randn(got.shape)
    grads = torch.autograd.grad(got, leaves, slope)
    wanted = torch.autograd.grad(want, wide, slope.double())
    for grad, exactly in zip(grads, wanted, strict=True):
        # Norm-wise, the roundings that the operator's specification allows backward.
        limit = (26 + 9) * UNIT * top * float(exactly.abs().max())
        assert float((grad - exactly).abs().max()) <= limit
    assert report.fallbacks() == ()
    rows = [row.operator for row in anychip.provenance().rows() if row.direction == "forward"]
    assert rows == ["attention_dropout"]


def test_fused_attention_with_dropout_draws_anew_and_repeats_after_the_same_seed() -> None:
    module, args = Product(), tensors(8, 8)
    anychip.fuse(module)
    torch.manual_seed(9)
    first, second = (module(*args, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(9)
    assert torch.equal(module(*args, dropout_p=0.5), first)
    assert not torch.equal(second, first)


@pytest.mark.parametrize(("shape", "p", "message"), [
    ((4, 4), -0.1, "dropout"), ((4, 4), 1.5, "dropout"), ((4, 4, 4, 2), 0.0, "size"),
], ids=["p-below-0", "p-above-1", "heads-differ"])  # fmt: skip
def test_fused_attention_that_cannot_be_is_torchs_error(
    shape: tuple[int, ...], p: float, message: str
) -> None:
    module = Product()
    anychip.fuse(module)
    with pytest.raises(RuntimeError, match=message):
        module(*tensors(*shape), dropout_p=p)


def test_fused_attention_with_dropout_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    module, graphs = Product(), EagerAndRecordGraphs()
    anychip.fuse(module)
    compiled = torch.compile(module, backend=graphs, fullgraph=True)
    torch.manual_seed(9)
    got = compiled(*tensors(4, 4), dropout_p=0.5)
    torch.manual_seed(9)
    assert torch.equal(got, module(*tensors(4, 4), dropout_p=0.5))
    torch._dynamo.reset()


def test_fused_attention_under_autocast_has_its_dtype() -> None:
    module, args = Product(), tensors(6, 6)
    args[2] = args[2].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = module(*args, is_causal=True)
        report = anychip.fuse(module)
        got = module(*args, is_causal=True)
    assert got.dtype == want.dtype == torch.bfloat16
    # Weights and result are rounded to 8 bits on both sides; the entries are below 4.
    assert torch.allclose(got.float(), want.float(), rtol=0.0, atol=4 * 4 * 2.0**-9)
    assert report.fallbacks() == ()


def test_attention_outside_of_a_fused_module_stays_torchs() -> None:
    anychip.fuse(Product())
    args = tensors(4, 4)
    assert torch.equal(Product()(*args), scaled_dot_product_attention(*args).abs())
    assert anychip.provenance().rows() == ()


# Functions of attention that a file finds by their names, as in transformers


class Functions(dict[str, Any]):
    def get_interface(self, name: str, default: Any) -> Any:
        return self.get(name, default)


def sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    causal = bool(options.get("is_causal", True)) and query.shape[2] > 1
    y = scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    return y.transpose(1, 2).contiguous(), None


def steeper(module: Any, query: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
    return sdpa(module, 1.001 * query, *rest, **options)


def detached(module: Any, query: Tensor, key: Tensor, *rest: Any, **given: Any) -> tuple[Any, ...]:
    return sdpa(module, query, key.detach(), *rest, **given)


def shuffled(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Repeats heads for a mask, in another order than transformers."""
    if attention_mask is not None:
        key, value = (t.repeat(1, 2, 1, 1) for t in (key, value))
    given = {"is_causal": attention_mask is None, "enable_gqa": True}
    y = scaled_dot_product_attention(query, key, value, attention_mask, **given)
    return y.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS = Functions(sdpa=sdpa)


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return function(self, q, k, v, None, **options)[0]


def test_fused_attention_that_asks_for_sdpa_equals_float64() -> None:
    module, args = Asking(), tensors(6, 6, 4, 2)
    report = anychip.fuse(module)
    top = float(args[2].abs().max()) * max(1.0, float(args[0].norm(dim=-1).max()))
    error = module(*args).transpose(1, 2).abs() - exact(*args, True, None)
    assert float(error.abs().max()) <= (12 + 17) * UNIT * top
    assert report.count("attention") == 1
    assert [row.operator for row in anychip.provenance().rows()] == ["attention"]


def capped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    position_bias: Any = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Scales by a cap or a bias, where it is given one."""
    factor = (options.get("softcap") or 1.0) * (2.0 if position_bias is not None else 1.0)
    return sdpa(module, factor * query, key, value, attention_mask)  # fmt: skip


@pytest.mark.parametrize(
    "option", [{"softcap": 3.0}, {"position_bias": 1.0}, {"output_attentions": True}], ids=str
)
def test_fused_attention_that_is_told_more_is_the_functions_own_and_counted(
    monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]
) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", capped)
    kind = type("Capped", (Asking,), {"forward": Asking.forward})  # no class was fused before
    module, args = kind(), tensors(6, 6, 4, 2)
    want = module(*args, **option)
    report = anychip.fuse(module)
    assert report.count("attention") == 1
    assert torch.equal(module(*args, **option), want)
    (row,) = report.fallbacks()
    assert row.fallback_reason == f"argument {next(iter(option))}"


@pytest.mark.parametrize(("function", "reason"), [
    (steeper, "not attention: its result"), (detached, "not attention: its gradient of key"),
    (shuffled, "not attention: its result"),
], ids=["result", "gradient", "under-a-mask"])  # fmt: skip
def test_fuse_leaves_attention_whose_sdpa_is_another_one(
    monkeypatch: pytest.MonkeyPatch, function: Any, reason: str
) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", function)
    report = anychip.fuse(Asking())
    assert report.count() == 0
    assert [entry.reason.startswith(reason) for entry in report.left] == [True]
