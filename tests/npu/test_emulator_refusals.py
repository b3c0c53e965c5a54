"""Masks and other arguments that the emulator once took as they came, against what pages say.

Source: the constraints of sparse_mode, softmax_layout and ignore_index in
https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
https://gitcode.com/cann/ops-nn/blob/master/loss/cross_entropy_loss/docs/aclnnCrossEntropyLoss.md
"""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

import anychip  # noqa: E402
from anychip_npu import attention  # noqa: E402
from tests.npu import documented_operators  # noqa: E402
from tests.npu.emulator_process import run  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:Cannot create tensor with internal format:UserWarning"
)
LEFT_UP, RIGHT_DOWN, BAND = 2, 3, 4
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that is refused raises where it is called."""
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")


def inputs(queries: int, keys: int) -> list[Any]:
    """Query, key and value of layout BNSD, two heads and one."""
    generator = torch.Generator().manual_seed(queries)
    shapes = ((1, 2, queries, 8), (1, 1, keys, 8), (1, 1, keys, 8))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def attended(given: list[Any], mask: Any, mode: int, **named: Any) -> Any:
    """What the emulator makes of it, through torch_npu."""
    moved = [x.npu() for x in given]
    where = None if mask is None else mask.npu()
    return torch_npu.npu_fusion_attention(
        *moved, 2, "BNSD", atten_mask=where, scale=0.5, sparse_mode=mode, **named
    )[0].cpu()


def reference(given: list[Any], hidden: Any) -> Any:
    """The same in float64, with the scores that a bool mask hides left out."""
    q, k, v = (x.double() for x in given)
    scores = (q @ k.transpose(2, 3) * 0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def places(queries: int, keys: int) -> Any:
    """How far each key is past its query, both counted from the start."""
    return torch.arange(keys)[None] - torch.arange(queries)[:, None]


HIDDEN: dict[int, Callable[[int, int], Any]] = {
    LEFT_UP: lambda q, k: places(q, k) > 0, RIGHT_DOWN: lambda q, k: places(q, k) > k - q,
    BAND: lambda q, k: (places(q, k) > k - q + 1) | (places(q, k) < k - q - 3),
}  # fmt: skip
TOKENS = {"pre_tockens": 3, "next_tockens": 1}


@pytest.mark.parametrize("sizes", [(6, 6), (4, 9), (2, 2100)], ids=["square", "wide", "long"])
@pytest.mark.parametrize("mode", [LEFT_UP, RIGHT_DOWN, BAND])
def test_mask_of_a_compressed_mode_is_read(mode: int, sizes: tuple[int, int]) -> None:
    given, named = inputs(*sizes), TOKENS if mode == BAND else {}
    wanted = reference(given, HIDDEN[mode](*sizes))

    got = attended(given, TRIANGLE, mode, **named)
    wrong = attended(given, TRIANGLE.t().contiguous(), mode, **named)

    assert (got - wanted).abs().max() < 1e-5
    assert not (wrong - wanted).abs().max() < 1e-2


@pytest.mark.parametrize("mode", [0, 1, LEFT_UP, RIGHT_DOWN, BAND])
def test_without_a_mask_nothing_is_hidden_in_any_mode(mode: int) -> None:
    given = inputs(6, 6)

    got = attended(given, None, mode, **TOKENS)

    assert (got - reference(given, torch.zeros(6, 6, dtype=torch.bool))).abs().max() < 1e-5


def test_mask_the_wrong_way_round_in_the_backend_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    anychip.use("npu")
    q = torch.randn(1, 7, 2, 8, generator=torch.Generator().manual_seed(1))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *[q.double().transpose(1, 2)] * 3, is_causal=True
    ).transpose(1, 2)

    def error() -> float:
        got = anychip.ops.attention(*[q.npu()] * 3, causal=True)
        return float((got.cpu() - wanted).abs().max())

    right = error()
    wrong_way = torch.ones(2048, 2048, dtype=torch.bool).tril().npu()
    monkeypatch.setattr(attention, "_triangles", {torch.device("npu", 0): wrong_way})

    assert right < 1e-5
    assert not error() < 1e-2


def multiplied(**named: Any) -> Any:
    """A grouped product that is right but for what is named."""
    x, weight = torch.ones(4, 3).npu(), torch.ones(2, 3, 5).npu()
    given = {"split_item": 3, "group_type": 0, "group_list": torch.tensor([1, 4]).npu(), **named}
    return torch_npu.npu_grouped_matmul([x], given.pop("weight", [weight]), **given)


def loss(**named: Any) -> Any:
    """A loss that is right but for what is named."""
    target = named.pop("target", torch.tensor([1, 2])).npu()
    return torch_npu.npu_cross_entropy_loss(torch.ones(2, 4).npu(), target, **named)


SQUARE = torch.zeros(6, 6, dtype=torch.bool)
REFUSED = [
    ("mask of floats", 161002, lambda: attended(inputs(6, 6), SQUARE.float(), 0)),
    ("mask of another size", 161002, lambda: attended(inputs(6, 6), SQUARE[:5], 0)),
    ("mask of five axes", 161002, lambda: attended(inputs(6, 6), SQUARE[None, None, None], 1)),
    ("mask that is no triangle", 161002, lambda: attended(inputs(6, 6), SQUARE, RIGHT_DOWN)),
    ("prefix", 561000, lambda: attended(inputs(6, 6), TRIANGLE, 6, prefix=[3])),
    ("bias of groups", 561000, lambda: multiplied(bias=[torch.ones(2, 5).npu()])),
    ("list of weights", 561000, lambda: multiplied(weight=[torch.ones(3, 5).npu()] * 2)),
    ("group_list of type 2", 161002, lambda: multiplied(group_list_type=2)),
    ("sorter", 561000,
     lambda: torch.searchsorted(torch.tensor([2.0, 1.0]).npu(), torch.ones(1).npu(),
                                sorter=torch.tensor([1, 0]).npu())),
    ("label smoothing", 561000, lambda: loss(label_smoothing=0.1)),
    ("ignored class of none", 161002, lambda: loss(ignore_index=4)),
    ("targets of bytes", 161002, lambda: loss(target=torch.tensor([1, 2], dtype=torch.uint8))),
    ("reduction", 161002, lambda: loss(reduction="max")),
]  # fmt: skip


@pytest.mark.parametrize(("status", "call"), [x[1:] for x in REFUSED], ids=[x[0] for x in REFUSED])
def test_call_that_is_not_taken_is_refused_and_the_device_works_on(
    status: int, call: Callable[[], Any]
) -> None:
    with pytest.raises(RuntimeError, match=f"{status}"):
        call()

    assert float(torch.ones(3, device="npu").sum()) == 3.0


def test_packed_statistics_are_laid_out_by_heads() -> None:
    q = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(3))

    _, largest, total, *_ = torch_npu.npu_fusion_attention(
        *[q.npu()] * 3, 2, "TND", actual_seq_qlen=[2, 5], actual_seq_kvlen=[2, 5]
    )

    for start, end in ((0, 2), (2, 5)):
        rows = q[start:end].double().transpose(0, 1)
        scores = rows @ rows.transpose(1, 2)
        wanted = scores.amax(-1)
        for got, of_page in (
            (largest, wanted),
            (total, (scores - wanted[..., None]).exp().sum(-1)),
        ):
            packed = got.cpu().view(2, 5, 8)[:, start:end]
            torch.testing.assert_close(packed, of_page.float()[..., None].expand(-1, -1, 8))


def negative_label() -> None:
    """A target of -100, which the default of ignore_index does not ignore."""
    try:
        loss(target=torch.tensor([1, -100]))[0].cpu()
        print("no error")
    except RuntimeError as error:
        print(" ".join(str(error).split()))


def test_negative_ignore_index_ignores_nothing() -> None:
    assert "507015" in run(negative_label).checked().out
    kept, none = (loss(ignore_index=i)[0].item() for i in (2, -100))
    assert (kept, none) == (pytest.approx(1.3862944), pytest.approx(1.3862944))


def test_page_has_the_rows_of_now_with_their_limits() -> None:
    page = documented_operators.PAGE.read_text()

    assert page == documented_operators.rendered(), "run python -m tests.npu.documented_operators"
    assert "| `aclnnSearchSorted` | any | Has no sorter of searchsorted. |" in page
    assert page.count("Expects: atten_mask of sparse_mode 2 to 4 as [2048, 2048].") == 4
