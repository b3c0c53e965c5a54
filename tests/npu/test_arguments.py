"""Does the emulator read what a row passes? An argument that it ignores hides a wrong one.

Each call of torch_npu that a mapped row makes is recorded and made again with one argument changed:
the answer must change, or the call be refused. What CANN itself ignores is listed with the page
that says so. Run on the emulator; whether CANN does so too, only silicon can tell.
"""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu")

import anychip  # noqa: E402
from anychip import ops  # noqa: E402
from anychip.conformance.perturbation import Calls, Reads, findings, recording  # noqa: E402
from anychip.contract import Row, SampleMaker  # noqa: E402
from anychip_npu import operators, table  # noqa: E402
from tests.npu.documented_rows import NOT_RUN  # noqa: E402
from tests.npu.emulator_process import run  # noqa: E402
from tests.npu.test_rows import key, kind_of  # noqa: E402
from tests.npu.test_rows import run as call  # noqa: E402

DECLARED = list(table.declared)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Cannot create tensor with internal format:UserWarning"
)
GRAD_OF_PERMUTE = (
    "the function of CANN has no such argument, torch_npu takes sizes of it: https://www.hiascend.com/"
    "document/detail/zh/CANNCommunityEdition/82RC1alpha003/API/aolapi/context/"
    "aclnnMoeTokenPermuteGrad.md"
)
ATTENTION = (
    "https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/"
    "torch_npu-npu_fusion_attention.md"
)
IGNORED = {
    ("npu::npu_fusion_attention", "pre_tockens"): f"no effect in sparse_mode 3: {ATTENTION}",
    ("npu::npu_fusion_attention", "next_tockens"): f"no effect in sparse_mode 3: {ATTENTION}",
    ("npu::npu_fusion_attention", "inner_precise"): f"0 and 1 are reserved: {ATTENTION}",
    ("aten::native_layer_norm_backward", "bias"):
        "no gradient depends on it: https://gitcode.com/cann/ops-nn/blob/master/norm/"
        "layer_norm_grad_v3/docs/aclnnLayerNormBackward.md",
    ("aten::_amp_foreach_non_finite_check_and_unscale_", "found_inf"):
        "it becomes 1 where an element is not finite, and is not read: https://www.hiascend.com/"
        "document/detail/zh/CANNCommunityEdition/850alpha001/API/aolapi/context/"
        "aclnnForeachNonFiniteCheckAndUnscale.md",
    ("npu::npu_rotary_mul_backward", "input"):
        "only gradients of cos and sin, which rows do not ask for, depend on it: "
        "https://gitcode.com/cann/ops-transformer/blob/master/posembedding/"
        "rotary_position_embedding_grad/docs/aclnnRotaryPositionEmbeddingGrad.md",
    ("npu::npu_moe_token_permute_grad", "tokens"): GRAD_OF_PERMUTE,
    ("npu::npu_moe_token_permute_grad", "indices"): GRAD_OF_PERMUTE,
    ("npu::npu_add_layer_norm", "additional_output"):
        "without it the sum is not written, and its place keeps what was there: "
        "https://gitcode.com/cann/ops-nn/blob/master/norm/add_layer_norm/docs/aclnnAddLayerNorm.md",
}  # fmt: skip
"""(torch's operator, argument): the page by which it has no effect on the answer."""
TEXTS = {
    "approximate": ("none", "tanh"), "rotary_mode": ("half", "interleave"),
    "reduction": ("none", "mean", "sum"), "input_layout": ("BSND", "BNSD", "TND"),
}  # fmt: skip


def of_cann(error: Exception) -> bool:
    """Whether CANN refused the call; torch_npu refuses some before it.

    Raises:
        Exception: the call has ended the device.
    """
    if "507015" in str(error):
        print("ends the device, and is not refused at the call")
        raise error
    return "161002" in str(error) or "561000" in str(error)


def calls_of(row: Row) -> Calls:
    """What a row calls for its samples, by operator."""
    operator = getattr(ops, row.operator)
    with recording(operators.table, row.calls) as calls:
        for dtype in (torch.float32, torch.bfloat16):
            for sample in operator.spec.samples(SampleMaker(torch.device("npu"), dtype)):
                given = (operator, sample.args, sample.attrs)
                if row.direction == "backward" or kind_of(*given) == "mapped":
                    call(*given, gradient="backward" in row.directions)
    return calls


def show_unread(row: int) -> None:
    """Prints what the calls of a row do not show of their arguments.

    In a process of its own: a wrong argument may end the device.
    """
    os.environ["ASCEND_LAUNCH_BLOCKING"] = "1"
    anychip.use("npu")
    for name, calls in calls_of(DECLARED[row]).items():
        passed = {a for one in calls for a, value in one.arguments.items() if value is not None}
        ignored = [argument for operator, argument in IGNORED if operator == name]
        page = dict.fromkeys(passed, Reads.VALUE) | dict.fromkeys(ignored, Reads.NOTHING)
        for finding in findings(calls, page, values=TEXTS, of_library=of_cann):
            print(name, finding)


@pytest.mark.grid
@pytest.mark.parametrize(
    "number", range(len(DECLARED)), ids=["-".join(key(row)) for row in DECLARED]
)
def test_each_argument_that_a_row_passes_changes_the_answer(number: int) -> None:
    if key(DECLARED[number]) in NOT_RUN:
        pytest.skip("the emulator cannot run it")
    ended = run(show_unread, number)
    assert ended.out == ""
    ended.checked()


def test_ignored_arguments_have_a_reason() -> None:
    assert all(len(reason) > 20 for reason in IGNORED.values())
