"""Does the emulator read what a row passes? An argument that it ignores hides a wrong one.

Each call of torch_npu that a mapped row makes is recorded and made again with one argument changed:
the answer must change, or the call be refused. What CANN itself ignores is listed with the page
that says so. Run on the emulator; whether CANN does so too, only silicon can tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

import anychip  # noqa: E402
from anychip import ops  # noqa: E402
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
    ("aten::native_layer_norm_backward", "bias"): (
        "no gradient depends on it: https://gitcode.com/cann/ops-nn/blob/master/norm/"
        "layer_norm_grad_v3/docs/aclnnLayerNormBackward.md"
    ),
    ("aten::_softmax_backward_data", "input_dtype"): (
        "an argument of torch's, which aclnnSoftmaxBackward has not: "
        "https://gitcode.com/cann/ops-nn/blob/master/activation/softmax_grad/docs/"
        "aclnnSoftmaxBackward.md"
    ),
    ("npu::npu_moe_token_permute_grad", "tokens"): GRAD_OF_PERMUTE,
    ("npu::npu_moe_token_permute_grad", "indices"): GRAD_OF_PERMUTE,
    ("npu::npu_add_layer_norm", "additional_output"): (
        "without it the sum is not written, and its place keeps what was there: "
        "https://gitcode.com/cann/ops-nn/blob/master/norm/add_layer_norm/docs/aclnnAddLayerNorm.md"
    ),
}
"""(torch's operator, argument): the page by which it has no effect on the answer."""
WORDS = (("none", "tanh"), ("none", "mean", "sum"), ("half", "interleave"), ("BSND", "BNSD", "TND"))
"""Values that a text may have."""
MOST_CALLS = 4


class Made(NamedTuple):
    """A call as a row has made it."""

    function: Any
    arguments: dict[str, Any]

    def answer(self, changed: dict[str, Any]) -> list[Any]:
        """Copies of what it returns, and of what it may have written to, on the host."""
        given = tree_map_only(torch.Tensor, torch.clone, {**self.arguments, **changed})
        schema = self.function._schema
        names = [a.name for a in schema.arguments if not a.kwarg_only]
        positional = []
        for name in names:
            if name not in given:
                break
            positional.append(given[name])
        rest = {n: v for n, v in given.items() if n not in names[: len(positional)]}
        returned = self.function(*positional, **rest)
        written = [given[a.name] for a in schema.arguments if a.alias_info and a.name in given]
        tensors = [x for x in tree_leaves((returned, written)) if isinstance(x, torch.Tensor)]
        return [x.cpu() for x in tensors]


class Recorder(TorchDispatchMode):
    """Keeps the first calls of the operators that it is given."""

    def __init__(self, wanted: set[str]) -> None:
        super().__init__()
        self.made: dict[str, list[Made]] = {name: [] for name in wanted}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self.made.get(func.name())
        if found is not None and len(found) < MOST_CALLS:
            names = [a.name for a in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            copies = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), given)
            if not found or _differs(found[-1], copies):
                found.append(Made(func, copies))
        return func(*args, **kwargs)


def _differs(last: Made, given: dict[str, Any]) -> bool:
    """In what is passed, or in what is no tensor; one more call of the same kind shows nothing."""
    plain = [
        {n: v for n, v in one.items() if not isinstance(v, torch.Tensor)}
        for one in (last.arguments, given)
    ]
    return last.arguments.keys() != given.keys() or str(plain[0]) != str(plain[1])


def others(value: Any) -> Iterator[Any]:
    """Values of the same kind that are not this one."""
    if isinstance(value, torch.Tensor):
        yield from _other_tensors(value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, 1 - value, 0)
    elif isinstance(value, torch.dtype):
        yield torch.bfloat16
    elif isinstance(value, float):
        yield from (value * 1.5 + 0.125, value / 2)
    elif isinstance(value, str):
        yield from (word for words in WORDS if value in words for word in words if word != value)
    elif isinstance(value, (list, tuple)) and value:
        if all(isinstance(x, int) and not isinstance(x, bool) for x in value):
            yield [*(max(x - 1, 0) for x in value[:-1]), value[-1]]
            yield [value[0] - 1, *value[1:]]
        else:
            yield from ([other, *value[1:]] for other in others(value[0]))


def _other_tensors(value: Any) -> Iterator[Any]:
    if value.is_floating_point():
        yield value * 1.25 + 0.125
        yield -value  # of some the sign alone is read
    elif value.dtype == torch.bool:
        yield value.logical_not()
        yield value.t().clone() if value.dim() == 2 else value.flip(0)
    elif value.dim() == 1 and bool((value.diff() >= 0).all()):
        yield torch.cat((value[:-1] - 1, value[-1:])).clamp(min=0)
    else:
        yield (value - 1).clamp(min=0)
        yield value.flip(0)
        yield value + 1


def same(first: list[Any], second: list[Any]) -> list[bool]:
    """Which of two answers' tensors have the same bits; none where one answer has fewer."""
    if len(first) != len(second):
        return [False] * len(first)
    sides = [[x.contiguous().view(-1).view(torch.uint8) for x in side] for side in (first, second)]
    return [
        a.shape == b.shape and torch.equal(c, d)
        for a, b, c, d in zip(first, second, *sides, strict=True)
    ]


def is_read(made: Made, name: str) -> bool:
    """Some other value of the argument changes the answer, or CANN refuses it, or torch_npu all."""
    before = made.answer({})
    # What nobody writes is not compared: it may be anything.
    written = same(before, made.answer({}))
    is_refused = True
    value = made.arguments[name]
    for other in others(value):
        if not any(isinstance(x, torch.Tensor) for x in tree_leaves(value)) and other == value:
            continue
        try:
            after = made.answer({name: other})
        except (RuntimeError, IndexError) as error:
            if "161002" in str(error) or "561000" in str(error):
                return True
            if "507015" in str(error):
                print("ends the device, and is not refused at the call:", name)
                raise
            continue
        is_refused = False
        if not all(s or not w for s, w in zip(same(before, after), written, strict=True)):
            return True
    return is_refused


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Every row of the backend runs in the mode; what is around rows does not see it."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **attributes: Any) -> Any:
            with recorder:
                return function(*arguments, **attributes)

        return call

    before = [(row, row.function, row.paired) for row in operators.table]
    try:
        for row, function, pair in before:
            object.__setattr__(row, "function", watched(function))
            if pair is not None:
                own = pair._replace(backward=watched(pair.backward))
                object.__setattr__(row, "paired", own)
        yield
    finally:
        for row, function, pair in before:
            object.__setattr__(row, "function", function)
            object.__setattr__(row, "paired", pair)


def recorded(row: Row) -> dict[str, list[Made]]:
    """What a row calls for its samples, by operator."""
    operator = getattr(ops, row.operator)
    recorder = Recorder(set(row.calls))
    with recording(recorder):
        for dtype in (torch.float32, torch.bfloat16):
            for sample in operator.spec.samples(SampleMaker(torch.device("npu"), dtype)):
                given = (operator, sample.args, sample.attrs)
                if row.direction == "backward" or kind_of(*given) == "mapped":
                    call(*given, gradient="backward" in row.directions)
    return recorder.made


def show_unread(row: int) -> None:
    """Prints each argument of a row's calls that nothing reads, and each that IGNORED is wrong of.

    In a process of its own: a wrong argument may end the device.
    """
    os.environ["ASCEND_LAUNCH_BLOCKING"] = "1"
    anychip.use("npu")
    for name, calls in recorded(DECLARED[row]).items():
        if not calls:
            print("not called:", name)
        passed = [(made, a) for made in calls for a, v in made.arguments.items() if v is not None]
        for argument in dict.fromkeys(a for _, a in passed):
            found = any(is_read(made, argument) for made, a in passed if a == argument)
            if found == ((name, argument) in IGNORED):
                print("read, and IGNORED" if found else "not read:", name, argument)


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
