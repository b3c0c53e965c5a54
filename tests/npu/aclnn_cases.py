"""What is called of torch and torch_npu for rows of the emulator's operator table.

What a case is: :mod:`tests.npu.aclnn_case`.
"""

from typing import Any

import torch

from tests.npu.aclnn_case import FLOATS, Case, Function, torch_npu
from tests.npu.aclnn_fused_cases import fused


def in_place(method: str, *arguments: Any, **named: Any) -> Function:
    """Calls a method with a trailing underscore on a copy of the first tensor."""

    def call(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        copy = first.clone()
        getattr(copy, method)(*others, *arguments, **named)
        return copy

    return call


def listed(function: Function, *arguments: Any) -> Function:
    """Calls a function of lists with each tensor, and its half, as one list."""

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(*[[t, t[:1] / 2] for t in tensors], *arguments))

    return call


def unary() -> list[Case]:
    """Rows of one tensor, and those that write into it."""
    positive = dict.fromkeys("sqrt rsqrt reciprocal log log2 log1p".split(), 0.1)
    names = "abs neg sign ceil floor round sqrt rsqrt reciprocal exp log log2 sin cos erf tanh"
    names += " expm1 log1p trunc tan atan erfc"
    cases = [
        Case(name.capitalize(), getattr(torch, name), low=positive.get(name))
        for name in f"{names} sigmoid relu".split()
    ]
    written = "floor sqrt rsqrt reciprocal exp log tanh sigmoid relu".split()
    return cases + [
        Case(f"Inplace{name.capitalize()}", in_place(f"{name}_"), low=positive.get(name))
        for name in written
    ]


TWO = ((3, 5), (3, 5))
THREE = ((3, 5), (3, 5), (3, 5))
MASK = torch.tensor([[True, False, True, False, True]] * 3)
INDEX = torch.tensor([2, 0, 1])
COLUMNS = torch.tensor([[0, 2, 1, 4, 3], [1, 3, 0, 2, 4], [3, 0, 2, 4, 1]])
PLACES = torch.tensor([[0, 2, 1, 4, 3], [1, 1, 0, 2, 4], [3, 0, 2, 2, 1]])


def arithmetic() -> list[Case]:
    """Rows of two and three tensors, and of numbers."""
    return [
        Case("Add", lambda a, b: torch.add(a, b, alpha=2), TWO),
        Case("Sub", lambda a, b: torch.sub(a, b, alpha=2), TWO),
        Case("Rsubs", lambda a: torch.rsub(a, 0.5, alpha=2)),
        Case("Adds", lambda a: torch.add(a, 0.5)), Case("Subs", lambda a: torch.sub(a, 0.5)),
        Case("InplaceAdd", in_place("add_", alpha=3), TWO),
        Case("InplaceSub", in_place("sub_", alpha=3), TWO),
        Case("InplaceAdds", in_place("add_", 0.5)), Case("InplaceSubs", in_place("sub_", 0.5)),
        Case("Mul", torch.mul, TWO), Case("Muls", lambda a: a * 1.5),
        Case("InplaceMul", in_place("mul_"), TWO), Case("InplaceMuls", in_place("mul_", 1.5)),
        Case("Div", torch.div, TWO, low=0.5), Case("Divs", lambda a: a / 1.5),
        Case("InplaceDiv", in_place("div_"), TWO, low=0.5),
        Case("InplaceDivs", in_place("div_", 1.5)), Case("Maximum", torch.maximum, TWO),
        Case("Minimum", torch.minimum, TWO), Case("PowTensorScalar", lambda a: a.pow(3)),
        Case("InplacePowTensorScalar", in_place("pow_", 3)),
        Case("PowTensorTensor", torch.pow, TWO, low=0.5),
        Case("PowScalarTensor", lambda a: torch.pow(2.0, a)),
        Case("Addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), THREE),
        Case("Addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), THREE, low=0.5),
        Case("InplaceAddcmul", in_place("addcmul_", value=0.5), THREE),
        Case("InplaceAddcdiv", in_place("addcdiv_", value=0.5), THREE, low=0.5),
        Case("Lerps", lambda a, b: torch.lerp(a, b, 0.3), TWO),
        Case("InplaceLerps", in_place("lerp_", 0.3), TWO),
        Case("InplaceLerp", in_place("lerp_"), THREE),
        Case("SWhere", lambda a, b, m: torch.where(m, a, b), TWO, extra=(MASK,)),
    ]  # fmt: skip


def bounded() -> list[Case]:
    """Rows of remainders and of bounds, by a tensor, by a number, and in place."""
    cases = [Case("RemainderScalarTensor", lambda a: torch.remainder(3.0, a), low=0.5)]
    for row, number, method in (
        ("RemainderTensorTensor", "RemainderTensorScalar", "remainder"),
        ("FmodTensor", "FmodScalar", "fmod"),
    ):
        function = getattr(torch, method)
        for prefix, call in (("", function), ("Inplace", in_place(f"{method}_"))):
            cases.append(Case(prefix + row, call, TWO, low=0.5))
            cases.append(Case(prefix + number, lambda a, f=call: f(a, 4.0), low=0.5))
    for bound in ("Min", "Max"):
        method = f"clamp_{bound.lower()}"
        function = getattr(torch, method)
        cases += [
            Case(f"Clamp{bound}Tensor", function, TWO),
            Case(f"InplaceClamp{bound}Tensor", in_place(f"{method}_"), TWO),
            Case(f"Clamp{bound}", lambda a, f=function: f(a, 0.5)),
        ]
    return [
        *cases, Case("InplaceClampMax", in_place("clamp_max_", 0.5)),
        Case("Clamp", lambda a: torch.clamp(a, -0.5, 0.75)),
        Case("ClampTensor", torch.clamp, THREE),
    ]  # fmt: skip


def comparisons() -> list[Case]:
    """Rows whose result is a truth value."""
    cases = []
    for name in "eq ne gt ge lt le".split():
        function = getattr(torch, name)
        prefix = name.capitalize()
        cases.append(Case(f"{prefix}Tensor", function, TWO))
        cases.append(Case(f"{prefix}Scalar", lambda a, f=function: f(a, 0.25)))
    flags = ((MASK, ~MASK.roll(1, 1)), ())
    for row, function in (
        ("LogicalAnd", torch.logical_and), ("LogicalOr", torch.logical_or),
        ("BitwiseAndTensor", torch.bitwise_and), ("BitwiseOrTensor", torch.bitwise_or),
        ("BitwiseXorTensor", torch.bitwise_xor),
    ):  # fmt: skip
        cases.append(Case(row, function, (), extra=flags[0]))
    return [
        *cases, Case("LogicalNot", torch.logical_not, (), extra=(MASK,)),
        Case("BitwiseNot", torch.bitwise_not, (), extra=(MASK,)),
        Case("IsFinite", lambda a: torch.isfinite(a / a.relu())),
        Case("IsNegInf", lambda a: torch.isneginf(a / a.relu())),
        Case("IsPosInf", lambda a: torch.isposinf(1 / a.relu())),
        Case("Signbit", lambda a: torch.signbit(-a.relu())),
        Case("Equal", lambda a: torch.tensor(torch.equal(a, a + 1)), dtypes=FLOATS[:1]),
        Case("All", lambda m: m.all(1), (), extra=(MASK,)),
        Case("Any", lambda m: m.any(0), (), extra=(MASK,)),
        Case("FloorDivide", torch.floor_divide, (), extra=(PLACES, PLACES + 1)),
        Case("FloorDivides", lambda a: a // 2, (), extra=(PLACES,)),
        Case("DivMods", lambda a: torch.div(a - 2, 2, rounding_mode="floor"), (), extra=(PLACES,)),
        Case("BitwiseAndScalar", lambda a: a & 5, (), extra=(PLACES,)),
        Case("BitwiseOrScalar", lambda a: a | 5, (), extra=(PLACES,)),
        Case("BitwiseXorScalar", lambda a: a ^ 5, (), extra=(PLACES,)),
        Case("LeftShift", lambda a, b: a << b, (), extra=(PLACES, PLACES)),
        Case("LeftShifts", lambda a: a << 3, (), extra=(PLACES,)),
        Case("RightShift", lambda a: (a - 2) >> 1, (), extra=(PLACES,)),
    ]  # fmt: skip


def activations() -> list[Case]:
    """Rows with a gradient of their own."""
    f = torch.nn.functional
    return [
        Case("Gelu", f.gelu, reference=lambda a: f.gelu(a, approximate="tanh"),
             backward="GeluBackward"),
        Case("Softmax", lambda a: f.softmax(a, -1), backward="SoftmaxBackward"),
        Case("LogSoftmax", lambda a: f.log_softmax(a, -1), backward="LogSoftmaxBackward"),
    ]  # fmt: skip


def losses() -> list[Case]:
    """Rows of torch's own losses."""
    f = torch.nn.functional
    return [
        Case("MseLoss", lambda a, b: f.mse_loss(a, b), TWO, backward="MseLossBackward"),
        Case("BinaryCrossEntropy",
             lambda a, t: f.binary_cross_entropy(a / 4, t.to(a.dtype), reduction="sum"),
             backward="BinaryCrossEntropyBackward", low=0.25, extra=(MASK,), units=24),
        *(
            Case(
                "BinaryCrossEntropyWithLogits", with_logits(reduction, is_weighted),
                backward="BinaryCrossEntropyWithLogitsBackward", extra=(MASK,), units=24,
            )
            for reduction, is_weighted in (("mean", False), ("sum", True))
        ),
        Case("LogSoftmax NLLLoss", lambda a, t: f.cross_entropy(a, t, ignore_index=2),
             backward="NLLLossBackward LogSoftmaxBackward", extra=(torch.tensor([1, 2, 4]),)),
    ]  # fmt: skip


def with_logits(reduction: str, is_weighted: bool) -> Function:
    """Binary cross entropy of logits, with weights of classes and of positive targets or none."""

    def call(a: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(1.0, 6.0).to(a) if is_weighted else None
        return torch.nn.functional.binary_cross_entropy_with_logits(
            a, target.to(a.dtype), weights, reduction=reduction, pos_weight=weights
        )

    return call


def of_pictures() -> list[Case]:
    """Rows of convolution, pooling, and norms over channels."""
    f = torch.nn.functional
    picture, back = (2, 4, 7, 6), "ConvolutionBackward"

    def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # It moves the running statistics; the second call uses them.
        mean, var = (torch.full((4,), v, device=x.device, dtype=w.dtype) for v in (0.5, 2.0))
        first = f.batch_norm(x, mean, var, w, b, training=True, momentum=0.25)
        return torch.cat((first, f.batch_norm(x, mean, var, w, b)))

    return [
        Case("Convolution", lambda x, w, b: f.conv2d(x, w, b, 2, 1, groups=2),
             (picture, (6, 2, 3, 3), (6,)), backward=back, units=24),
        Case("Convolution", lambda x, w: f.conv_transpose2d(x, w, dilation=2),
             (picture, (4, 3, 3, 2)), backward=back, units=24),
        Case("MaxPool2dWithMask", lambda x: f.max_pool2d(x, 3, 2, 1), (picture,),
             backward="MaxPool2dWithMaskBackward"),
        Case("AvgPool2d", lambda x: f.avg_pool2d(x, 2, padding=1, count_include_pad=False),
             (picture,), backward="AvgPool2dBackward"),
        Case("AdaptiveAvgPool2d", lambda x: f.adaptive_avg_pool2d(x, (3, 2)), (picture,),
             backward="AdaptiveAvgPool2dBackward"),
        Case("BatchNorm", batch_norm, (picture, (4,), (4,)),
             backward="BatchNormBackward", units=32),
    ]  # fmt: skip


def products() -> list[Case]:
    """Rows of matrices."""
    return [
        Case("Mm", torch.mm, ((4, 6), (6, 3)), backward="Mm"), Case("Dot", torch.dot, ((6,), (6,))),
        Case("Mv", torch.mv, ((4, 6), (6,))), Case("Matmul", torch.matmul, ((2, 4, 6), (6, 3))),
        Case("BatchMatMul", torch.bmm, ((2, 4, 6), (2, 6, 3))),
        Case("Addmm", torch.addmm, ((3,), (4, 6), (6, 3))),
        Case("Baddbmm", torch.baddbmm, ((2, 4, 3), (2, 4, 6), (2, 6, 3))),
    ]  # fmt: skip


def shaping() -> list[Case]:
    """Rows that copy, fill, mask and join."""
    return [
        Case("InplaceCopy", lambda a: a.t().contiguous()), Case("InplaceZero", in_place("zero_")),
        Case("InplaceOne", lambda a: torch.ones(3, device=a.device)),
        Case("InplaceFillTensor", lambda a, v: in_place("fill_", v)(a), extra=(torch.tensor(2.5),)),
        Case("InplaceMaskedFillTensor",
             lambda a, m, v: in_place("masked_fill_", m, v.to(a.dtype))(a),
             extra=(MASK, torch.tensor(2.0))),
        Case("Cast", lambda a: torch_npu().npu_dtype_cast(a, torch.float32), reference=lambda a: a,
             dtypes=FLOATS[1:]),
        Case("ChunkCat", chunked), Case("InplaceFillScalar", in_place("fill_", 2.5)),
        Case("Arange", lambda a: torch.arange(2, 9, 3, device=a.device)),
        Case("Linspace", lambda a: torch.linspace(-1, 2, 7, device=a.device)),
        Case("Eye", lambda a: torch.eye(3, 4, device=a.device)),
        Case("Complex", lambda a, b: torch.view_as_real(torch.complex(a, b)), TWO,
             dtypes=FLOATS[:1]),
        Case("Cat", lambda a, b: torch.cat([a, b], 1), TWO),
        Case("Stack", lambda a, b: torch.stack([a, b], 1), TWO),
        Case("ConstantPadNd", lambda a: torch.nn.functional.pad(a, (1, 2), value=3.0)),
        Case("Repeat", lambda a: a.repeat(2, 1, 3)), Case("Flip", lambda a: a.flip(1)),
        Case("Tril", lambda a: a.tril(1)), Case("Triu", lambda a: a.triu(1)),
        Case("InplaceTril", in_place("tril_", 1)), Case("InplaceTriu", in_place("triu_", 1)),
        Case("InplaceMaskedFillScalar", in_place("masked_fill_", 2.0), extra=(MASK,)),
        Case("MaskedSelect", torch.masked_select, extra=(MASK,)),
        Case("Nonzero", torch.nonzero, (), extra=(MASK,)),
        Case("NonzeroV2", lambda x, mask: x[mask], extra=(MASK,)),
    ]  # fmt: skip


def indexing() -> list[Case]:
    """Rows that select and place by indices, and that sort."""
    return [
        Case("Index", lambda a, i: a[i], extra=(INDEX[:2],)),
        Case("IndexPutImpl", lambda a, i: in_place("index_put_", (i,), a[:2])(a),
             extra=(INDEX[:2],)),
        Case("IndexSelect", lambda a, i: a.index_select(0, i), extra=(INDEX,)),
        Case("Gather", lambda a, i: a.gather(1, i), extra=(PLACES,)),
        Case("Scatter", lambda a, b, i: a.scatter(1, i, b), TWO, extra=(COLUMNS,)),
        Case("InplaceScatter", lambda a, b, i: in_place("scatter_", 1, i, b)(a), TWO,
             extra=(COLUMNS,)),
        Case("ScatterValue", lambda a, i: a.scatter(1, i, 2.5), extra=(COLUMNS[:, :2],)),
        Case("InplaceScatterValue", lambda a, i: in_place("scatter_", 1, i, 2.5)(a),
             extra=(COLUMNS[:, :2],)),
        Case("IndexAdd", lambda a, b, i: a.index_add(0, i, b, alpha=2), TWO,
             extra=(torch.tensor([1, 1, 0]),)),
        Case("SearchSorted", lambda e, i: torch.searchsorted(e, i, right=True), (),
             extra=(torch.tensor([0, 2, 2, 5]), PLACES)),
        Case("RepeatInterleaveIntWithDim", lambda a: a.repeat_interleave(2, dim=1)),
        Case("RepeatInterleave", lambda i: i.repeat_interleave(i.flatten()), (), extra=(PLACES,)),
        Case("Unique2", lambda i: i.unique(return_inverse=True, return_counts=True), (),
             extra=(PLACES,)),
        Case("ScatterAdd", lambda a, b, i: a.scatter_add(1, i, b), TWO, extra=(PLACES,)),
        Case("Topk", lambda a: tuple(a.topk(2)), dtypes=FLOATS[:1]),
        Case("Sort", lambda a: tuple(a.sort(descending=True)), dtypes=FLOATS[:1]),
    ]  # fmt: skip


def chunked(a: torch.Tensor) -> torch.Tensor:
    """Two tensors, each in two chunks of rows, side by side."""
    return torch._chunk_cat([a, a * 2], 0, 2)


def reductions() -> list[Case]:
    """Rows that make fewer numbers of many."""
    return [
        Case("ReduceSum", lambda a: a.sum(1)), Case("Mean", lambda a: a.mean(1)),
        Case("LinalgVectorNorm", lambda a: torch.linalg.vector_norm(a)),
        Case("LogSumExp", lambda a: torch.logsumexp(a, 1)), Case("Amax", lambda a: a.amax(1)),
        Case("Aminmax", lambda a: torch.stack(a.aminmax(dim=1))),
        Case("Amin", lambda a: a.amin(1)), Case("Max", lambda a: a.max()),
        Case("Min", lambda a: a.min()),
        Case("MaxDim", lambda a: tuple(a.max(1)), dtypes=FLOATS[:1]),
        Case("ArgMax", lambda a: a.argmax(1), dtypes=FLOATS[:1]),
        Case("Cumsum", lambda a: a.cumsum(1)), Case("VarCorrection", lambda a: a.var(1), units=24),
        Case("Std", lambda a: a.std(1), units=24),
        Case("VarMean", lambda a: tuple(torch.var_mean(a, 1, correction=0)), units=24),
        Case("StdMeanCorrection", lambda a: tuple(torch.std_mean(a, 0)), units=24),
        Case("Norm", lambda a: torch.ops.aten.norm.ScalarOpt_dim(a, 3, [1]), units=24),
        Case("LinalgVectorNorm", lambda a: torch.linalg.vector_norm(a, 1, dim=0), units=24),
    ]  # fmt: skip


def lists() -> list[Case]:
    """Rows over lists."""
    t = torch
    return [
        Case("ForeachReciprocal", listed(t._foreach_reciprocal), low=0.1),
        Case("ForeachNeg", listed(t._foreach_neg)),
        Case("ForeachAddScalarV2", listed(t._foreach_add, 0.5)),
        Case("ForeachDivScalarV2", listed(t._foreach_div, 1.5)),
        Case("ForeachSubListV2", listed(t._foreach_sub), TWO),
        Case("ForeachMulList", listed(t._foreach_mul), TWO),
        Case("ForeachMaximumList", listed(t._foreach_maximum), TWO),
        Case("ForeachAddScalarList", listed(t._foreach_add, [0.5, 2.0])),
        Case("ForeachMulScalarList", listed(t._foreach_mul, [0.5, 3.0])),
        Case("ForeachDivScalarList", listed(t._foreach_div, [0.5, 3.0])),
        Case("ForeachLerpScalar", listed(t._foreach_lerp, 0.3), TWO),
        Case("ForeachAddcdivScalarV2", listed(t._foreach_addcdiv, 0.5), THREE, low=0.5),
        Case("ForeachCopy", copied_lists, TWO), Case("ForeachZeroInplace", zeroed_list),
    ]  # fmt: skip


def copied_lists(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The first of a list after the second was copied to it."""
    copy = a.clone()
    torch._foreach_copy_([copy], [b])
    return copy


def zeroed_list(a: torch.Tensor) -> torch.Tensor:
    """The only tensor of a list that is set to zero."""
    copy = a.clone()
    torch._foreach_zero_([copy])
    return copy


CASES = [
    *unary(), *arithmetic(), *bounded(), *losses(), *comparisons(), *activations(), *of_pictures(),
    *products(), *shaping(), *indexing(), *reductions(), *lists(), *fused(),
]  # fmt: skip
