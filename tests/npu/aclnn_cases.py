"""What is called of torch and torch_npu for each row of the emulator's operator table.

What a case is: :mod:`tests.npu.aclnn_case`.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.npu.aclnn_case import FLOATS, Case, Function, torch_npu
from tests.npu.aclnn_fused_cases import experts, fused, norms


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
        Case((f"aclnn{name.capitalize()}",), getattr(torch, name), low=positive.get(name))
        for name in f"{names} sigmoid relu".split()
    ]
    written = "floor sqrt rsqrt reciprocal exp log tanh sigmoid relu".split()
    return cases + [
        Case((f"aclnnInplace{name.capitalize()}",), in_place(f"{name}_"), low=positive.get(name))
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
        Case(("aclnnAdd",), lambda a, b: torch.add(a, b, alpha=2), TWO),
        Case(("aclnnSub",), lambda a, b: torch.sub(a, b, alpha=2), TWO),
        Case(("aclnnRsubs",), lambda a: torch.rsub(a, 0.5, alpha=2)),
        Case(("aclnnAdds",), lambda a: torch.add(a, 0.5)),
        Case(("aclnnSubs",), lambda a: torch.sub(a, 0.5)),
        Case(("aclnnInplaceAdd",), in_place("add_", alpha=3), TWO),
        Case(("aclnnInplaceSub",), in_place("sub_", alpha=3), TWO),
        Case(("aclnnInplaceAdds",), in_place("add_", 0.5)),
        Case(("aclnnInplaceSubs",), in_place("sub_", 0.5)),
        Case(("aclnnMul",), torch.mul, TWO),
        Case(("aclnnMuls",), lambda a: a * 1.5),
        Case(("aclnnInplaceMul",), in_place("mul_"), TWO),
        Case(("aclnnInplaceMuls",), in_place("mul_", 1.5)),
        Case(("aclnnDiv",), torch.div, TWO, low=0.5),
        Case(("aclnnDivs",), lambda a: a / 1.5),
        Case(("aclnnInplaceDiv",), in_place("div_"), TWO, low=0.5),
        Case(("aclnnInplaceDivs",), in_place("div_", 1.5)),
        Case(("aclnnMaximum",), torch.maximum, TWO),
        Case(("aclnnMinimum",), torch.minimum, TWO),
        Case(("aclnnPowTensorScalar",), lambda a: a.pow(3)),
        Case(("aclnnInplacePowTensorScalar",), in_place("pow_", 3)),
        Case(("aclnnPowTensorTensor",), torch.pow, TWO, low=0.5),
        Case(("aclnnPowScalarTensor",), lambda a: torch.pow(2.0, a)),
        Case(("aclnnAddcmul",), lambda a, b, c: torch.addcmul(a, b, c, value=0.5), THREE),
        Case(("aclnnAddcdiv",), lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), THREE, low=0.5),
        Case(("aclnnInplaceAddcmul",), in_place("addcmul_", value=0.5), THREE),
        Case(("aclnnInplaceAddcdiv",), in_place("addcdiv_", value=0.5), THREE, low=0.5),
        Case(("aclnnLerps",), lambda a, b: torch.lerp(a, b, 0.3), TWO),
        Case(("aclnnInplaceLerps",), in_place("lerp_", 0.3), TWO),
        Case(("aclnnInplaceLerp",), in_place("lerp_"), THREE),
        Case(("aclnnSWhere",), lambda a, b, m: torch.where(m, a, b), TWO, extra=(MASK,)),
    ]


def bounded() -> list[Case]:
    """Rows of remainders and of bounds, by a tensor, by a number, and in place."""
    cases = [Case(("aclnnRemainderScalarTensor",), lambda a: torch.remainder(3.0, a), low=0.5)]
    for row, number, method in (
        ("RemainderTensorTensor", "RemainderTensorScalar", "remainder"),
        ("FmodTensor", "FmodScalar", "fmod"),
    ):
        function = getattr(torch, method)
        for prefix, call in (("aclnn", function), ("aclnnInplace", in_place(f"{method}_"))):
            cases.append(Case((prefix + row,), call, TWO, low=0.5))
            cases.append(Case((prefix + number,), lambda a, f=call: f(a, 4.0), low=0.5))
    for bound in ("Min", "Max"):
        method = f"clamp_{bound.lower()}"
        function = getattr(torch, method)
        cases += [
            Case((f"aclnnClamp{bound}Tensor",), function, TWO),
            Case((f"aclnnInplaceClamp{bound}Tensor",), in_place(f"{method}_"), TWO),
            Case((f"aclnnClamp{bound}",), lambda a, f=function: f(a, 0.5)),
        ]
    return [
        *cases,
        Case(("aclnnInplaceClampMax",), in_place("clamp_max_", 0.5)),
        Case(("aclnnClamp",), lambda a: torch.clamp(a, -0.5, 0.75)),
        Case(("aclnnClampTensor",), torch.clamp, THREE),
    ]


def comparisons() -> list[Case]:
    """Rows whose result is a truth value."""
    cases = []
    for name in "eq ne gt ge lt le".split():
        function = getattr(torch, name)
        prefix = f"aclnn{name.capitalize()}"
        cases.append(Case((f"{prefix}Tensor",), function, TWO))
        cases.append(Case((f"{prefix}Scalar",), lambda a, f=function: f(a, 0.25)))
    flags = ((MASK, ~MASK.roll(1, 1)), ())
    for row, function in (
        ("LogicalAnd", torch.logical_and),
        ("LogicalOr", torch.logical_or),
        ("BitwiseAndTensor", torch.bitwise_and),
        ("BitwiseOrTensor", torch.bitwise_or),
        ("BitwiseXorTensor", torch.bitwise_xor),
    ):
        cases.append(Case((f"aclnn{row}",), function, (), extra=flags[0]))
    return [
        *cases,
        Case(("aclnnLogicalNot",), torch.logical_not, (), extra=(MASK,)),
        Case(("aclnnBitwiseNot",), torch.bitwise_not, (), extra=(MASK,)),
        Case(("aclnnIsFinite",), lambda a: torch.isfinite(a / a.relu())),
        Case(("aclnnIsNegInf",), lambda a: torch.isneginf(a / a.relu())),
        Case(("aclnnIsPosInf",), lambda a: torch.isposinf(1 / a.relu())),
        Case(("aclnnEqual",), lambda a: torch.tensor(torch.equal(a, a + 1)), dtypes=FLOATS[:1]),
        Case(("aclnnAll",), lambda m: m.all(1), (), extra=(MASK,)),
        Case(("aclnnAny",), lambda m: m.any(0), (), extra=(MASK,)),
        Case(("aclnnFloorDivide",), torch.floor_divide, (), extra=(PLACES, PLACES + 1)),
        Case(("aclnnFloorDivides",), lambda a: a // 2, (), extra=(PLACES,)),
        Case(
            ("aclnnDivMods",),
            lambda a: torch.div(a - 2, 2, rounding_mode="floor"),
            (),
            extra=(PLACES,),
        ),
        Case(("aclnnBitwiseAndScalar",), lambda a: a & 5, (), extra=(PLACES,)),
        Case(("aclnnBitwiseOrScalar",), lambda a: a | 5, (), extra=(PLACES,)),
        Case(("aclnnBitwiseXorScalar",), lambda a: a ^ 5, (), extra=(PLACES,)),
        Case(("aclnnLeftShift",), lambda a, b: a << b, (), extra=(PLACES, PLACES)),
        Case(("aclnnLeftShifts",), lambda a: a << 3, (), extra=(PLACES,)),
        Case(("aclnnRightShift",), lambda a: (a - 2) >> 1, (), extra=(PLACES,)),
    ]


def activations() -> list[Case]:
    """Rows with a gradient of their own."""
    f = torch.nn.functional
    return [
        Case(
            ("aclnnGelu",),
            f.gelu,
            reference=lambda a: f.gelu(a, approximate="tanh"),
            backward=("aclnnGeluBackward",),
        ),
        Case(("aclnnSilu",), f.silu, backward=("aclnnSiluBackward",)),
        Case(("aclnnRelu",), f.relu, backward=("aclnnThresholdBackward",)),
        Case(("aclnnSoftplus",), lambda a: f.softplus(a, 2.0), backward=("aclnnSoftplusBackward",)),
        Case(("aclnnTanh",), torch.tanh, backward=("aclnnTanhBackward",)),
        Case(("aclnnSigmoid",), torch.sigmoid, backward=("aclnnSigmoidBackward",)),
        Case(("aclnnSoftmax",), lambda a: f.softmax(a, -1), backward=("aclnnSoftmaxBackward",)),
        Case(
            ("aclnnLogSoftmax",),
            lambda a: f.log_softmax(a, -1),
            backward=("aclnnLogSoftmaxBackward",),
        ),
        Case(
            ("aclnnLayerNorm",),
            lambda a, w, b: f.layer_norm(a, (8,), w, b),
            ((3, 8), (8,), (8,)),
            backward=("aclnnLayerNormBackward",),
            units=24,
        ),
        Case(
            ("aclnnEmbedding",),
            lambda w, i: f.embedding(i, w),
            ((7, 4),),
            backward=("aclnnEmbeddingDenseBackward",),
            extra=(torch.tensor([[1, 6, 1], [0, 2, 1]]),),
        ),
    ]


def losses() -> list[Case]:
    """Rows of torch's own losses."""
    f = torch.nn.functional
    return [
        Case(
            ("aclnnMseLoss",),
            lambda a, b: f.mse_loss(a, b),
            TWO,
            backward=("aclnnMseLossBackward",),
        ),
        Case(
            ("aclnnBinaryCrossEntropy",),
            lambda a, t: f.binary_cross_entropy(a / 4, t.to(a.dtype), reduction="sum"),
            backward=("aclnnBinaryCrossEntropyBackward",),
            low=0.25,
            extra=(MASK,),
            units=24,
        ),
        *(
            Case(
                ("aclnnBinaryCrossEntropyWithLogits",),
                with_logits(reduction, is_weighted),
                backward=("aclnnBinaryCrossEntropyWithLogitsBackward",),
                extra=(MASK,),
                units=24,
            )
            for reduction, is_weighted in (("mean", False), ("sum", True))
        ),
        Case(
            ("aclnnLogSoftmax", "aclnnNLLLoss"),
            lambda a, t: f.cross_entropy(a, t, ignore_index=2),
            backward=("aclnnNLLLossBackward", "aclnnLogSoftmaxBackward"),
            extra=(torch.tensor([1, 2, 4]),),
        ),
    ]


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
    picture, back = (2, 4, 7, 6), ("aclnnConvolutionBackward",)

    def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # It moves the running statistics; the second call uses them.
        mean, var = (torch.full((4,), v, device=x.device, dtype=w.dtype) for v in (0.5, 2.0))
        first = f.batch_norm(x, mean, var, w, b, training=True, momentum=0.25)
        return torch.cat((first, f.batch_norm(x, mean, var, w, b)))

    return [
        Case(("aclnnConvolution",), lambda x, w, b: f.conv2d(x, w, b, 2, 1, groups=2),
             (picture, (6, 2, 3, 3), (6,)), backward=back, units=24),
        Case(("aclnnConvolution",), lambda x, w: f.conv_transpose2d(x, w, dilation=2),
             (picture, (4, 3, 3, 2)), backward=back, units=24),
        Case(("aclnnMaxPool2dWithMask",), lambda x: f.max_pool2d(x, 3, 2, 1), (picture,),
             backward=("aclnnMaxPool2dWithMaskBackward",)),
        Case(("aclnnAvgPool2d",), lambda x: f.avg_pool2d(x, 2, padding=1, count_include_pad=False),
             (picture,), backward=("aclnnAvgPool2dBackward",)),
        Case(("aclnnAdaptiveAvgPool2d",), lambda x: f.adaptive_avg_pool2d(x, (3, 2)), (picture,),
             backward=("aclnnAdaptiveAvgPool2dBackward",)),
        Case(("aclnnBatchNorm",), batch_norm, (picture, (4,), (4,)),
             backward=("aclnnBatchNormBackward",), units=32),
        Case(("aclnnGroupNorm",), lambda x, w, b: f.group_norm(x, 2, w, b), (picture, (4,), (4,)),
             backward=("aclnnGroupNormBackward",), units=32),
    ]  # fmt: skip


def products() -> list[Case]:
    """Rows of matrices."""
    return [
        Case(("aclnnMm",), torch.mm, ((4, 6), (6, 3)), backward=("aclnnMm",)),
        Case(("aclnnDot",), torch.dot, ((6,), (6,))),
        Case(("aclnnMv",), torch.mv, ((4, 6), (6,))),
        Case(("aclnnMatmul",), torch.matmul, ((2, 4, 6), (6, 3))),
        Case(("aclnnBatchMatMul",), torch.bmm, ((2, 4, 6), (2, 6, 3))),
        Case(("aclnnAddmm",), torch.addmm, ((3,), (4, 6), (6, 3))),
        Case(("aclnnBaddbmm",), torch.baddbmm, ((2, 4, 3), (2, 4, 6), (2, 6, 3))),
    ]


def shaping() -> list[Case]:
    """Rows that copy, fill, mask and join."""
    return [
        Case(("aclnnInplaceCopy",), lambda a: a.t().contiguous()),
        Case(("aclnnInplaceZero",), in_place("zero_")),
        Case(("aclnnInplaceOne",), lambda a: torch.ones(3, device=a.device)),
        Case(
            ("aclnnInplaceFillTensor",),
            lambda a, v: in_place("fill_", v)(a),
            extra=(torch.tensor(2.5),),
        ),
        Case(
            ("aclnnInplaceMaskedFillTensor",),
            lambda a, m, v: in_place("masked_fill_", m, v.to(a.dtype))(a),
            extra=(MASK, torch.tensor(2.0)),
        ),
        Case(
            ("aclnnCast",),
            lambda a: torch_npu().npu_dtype_cast(a, torch.float32),
            reference=lambda a: a,
            dtypes=FLOATS[1:],
        ),
        Case(("aclnnChunkCat",), chunked),
        Case(("aclnnInplaceFillScalar",), in_place("fill_", 2.5)),
        Case(("aclnnArange",), lambda a: torch.arange(2, 9, 3, device=a.device)),
        Case(("aclnnLinspace",), lambda a: torch.linspace(-1, 2, 7, device=a.device)),
        Case(("aclnnEye",), lambda a: torch.eye(3, 4, device=a.device)),
        Case(("aclnnCat",), lambda a, b: torch.cat([a, b], 1), TWO),
        Case(("aclnnStack",), lambda a, b: torch.stack([a, b], 1), TWO),
        Case(("aclnnConstantPadNd",), lambda a: torch.nn.functional.pad(a, (1, 2), value=3.0)),
        Case(("aclnnRepeat",), lambda a: a.repeat(2, 1, 3)),
        Case(("aclnnFlip",), lambda a: a.flip(1)),
        Case(("aclnnTril",), lambda a: a.tril(1)),
        Case(("aclnnTriu",), lambda a: a.triu(1)),
        Case(("aclnnInplaceTril",), in_place("tril_", 1)),
        Case(("aclnnInplaceTriu",), in_place("triu_", 1)),
        Case(("aclnnInplaceMaskedFillScalar",), in_place("masked_fill_", 2.0), extra=(MASK,)),
        Case(("aclnnMaskedSelect",), torch.masked_select, extra=(MASK,)),
        Case(("aclnnNonzero",), torch.nonzero, (), extra=(MASK,)),
    ]


def indexing() -> list[Case]:
    """Rows that select and place by indices, and that sort."""
    return [
        Case(("aclnnIndex",), lambda a, i: a[i], extra=(INDEX[:2],)),
        Case(
            ("aclnnIndexPutImpl",),
            lambda a, i: in_place("index_put_", (i,), a[:2])(a),
            extra=(INDEX[:2],),
        ),
        Case(("aclnnIndexSelect",), lambda a, i: a.index_select(0, i), extra=(INDEX,)),
        Case(("aclnnGather",), lambda a, i: a.gather(1, i), extra=(PLACES,)),
        Case(("aclnnScatter",), lambda a, b, i: a.scatter(1, i, b), TWO, extra=(COLUMNS,)),
        Case(
            ("aclnnInplaceScatter",),
            lambda a, b, i: in_place("scatter_", 1, i, b)(a),
            TWO,
            extra=(COLUMNS,),
        ),
        Case(("aclnnScatterValue",), lambda a, i: a.scatter(1, i, 2.5), extra=(COLUMNS[:, :2],)),
        Case(
            ("aclnnInplaceScatterValue",),
            lambda a, i: in_place("scatter_", 1, i, 2.5)(a),
            extra=(COLUMNS[:, :2],),
        ),
        Case(
            ("aclnnIndexAdd",),
            lambda a, b, i: a.index_add(0, i, b, alpha=2),
            TWO,
            extra=(torch.tensor([1, 1, 0]),),
        ),
        Case(
            ("aclnnSearchSorted",),
            lambda e, i: torch.searchsorted(e, i, right=True),
            (),
            extra=(torch.tensor([0, 2, 2, 5]), PLACES),
        ),
        Case(("aclnnRepeatInterleaveIntWithDim",), lambda a: a.repeat_interleave(2, dim=1)),
        Case(("aclnnScatterAdd",), lambda a, b, i: a.scatter_add(1, i, b), TWO, extra=(PLACES,)),
        Case(("aclnnTopk",), lambda a: tuple(a.topk(2)), dtypes=FLOATS[:1]),
        Case(("aclnnSort",), lambda a: tuple(a.sort(descending=True)), dtypes=FLOATS[:1]),
    ]


def chunked(a: torch.Tensor) -> torch.Tensor:
    """Two tensors, each in two chunks of rows, side by side."""
    return torch._chunk_cat([a, a * 2], 0, 2)


def reductions() -> list[Case]:
    """Rows that make fewer numbers of many."""
    return [
        Case(("aclnnReduceSum",), lambda a: a.sum(1)),
        Case(("aclnnMean",), lambda a: a.mean(1)),
        Case(("aclnnLinalgVectorNorm",), lambda a: torch.linalg.vector_norm(a)),
        Case(("aclnnLogSumExp",), lambda a: torch.logsumexp(a, 1)),
        Case(("aclnnAmax",), lambda a: a.amax(1)),
        Case(("aclnnAminmax",), lambda a: torch.stack(a.aminmax(dim=1))),
        Case(("aclnnAmin",), lambda a: a.amin(1)),
        Case(("aclnnMax",), lambda a: a.max()),
        Case(("aclnnMin",), lambda a: a.min()),
        Case(("aclnnMaxDim",), lambda a: tuple(a.max(1)), dtypes=FLOATS[:1]),
        Case(("aclnnArgMax",), lambda a: a.argmax(1), dtypes=FLOATS[:1]),
        Case(("aclnnCumsum",), lambda a: a.cumsum(1)),
        Case(("aclnnVarCorrection",), lambda a: a.var(1), units=24),
        Case(("aclnnStd",), lambda a: a.std(1), units=24),
        Case(("aclnnVarMean",), lambda a: tuple(torch.var_mean(a, 1, correction=0)), units=24),
        Case(("aclnnStdMeanCorrection",), lambda a: tuple(torch.std_mean(a, 0)), units=24),
        Case(("aclnnNorm",), lambda a: torch.ops.aten.norm.ScalarOpt_dim(a, 3, [1]), units=24),
        Case(("aclnnLinalgVectorNorm",), lambda a: torch.linalg.vector_norm(a, 1, dim=0), units=24),
    ]


def lists() -> list[Case]:
    """Rows over lists."""
    t = torch
    return [
        Case(("aclnnForeachSqrt",), listed(t._foreach_sqrt), low=0.1),
        Case(("aclnnForeachReciprocal",), listed(t._foreach_reciprocal), low=0.1),
        Case(("aclnnForeachNeg",), listed(t._foreach_neg)),
        Case(("aclnnForeachNorm",), listed(t._foreach_norm)),
        Case(("aclnnForeachAddScalarV2",), listed(t._foreach_add, 0.5)),
        Case(("aclnnForeachMulScalarV2",), listed(t._foreach_mul, 1.5)),
        Case(("aclnnForeachDivScalarV2",), listed(t._foreach_div, 1.5)),
        Case(("aclnnForeachAddListV2",), listed(t._foreach_add), TWO),
        Case(("aclnnForeachSubListV2",), listed(t._foreach_sub), TWO),
        Case(("aclnnForeachMulList",), listed(t._foreach_mul), TWO),
        Case(("aclnnForeachDivList",), listed(t._foreach_div), TWO, low=0.5),
        Case(("aclnnForeachMaximumList",), listed(t._foreach_maximum), TWO),
        Case(("aclnnForeachAddScalarList",), listed(t._foreach_add, [0.5, 2.0])),
        Case(("aclnnForeachMulScalarList",), listed(t._foreach_mul, [0.5, 3.0])),
        Case(("aclnnForeachDivScalarList",), listed(t._foreach_div, [0.5, 3.0])),
        Case(("aclnnForeachLerpScalar",), listed(t._foreach_lerp, 0.3), TWO),
        Case(("aclnnForeachAddcmulScalarV2",), listed(t._foreach_addcmul, 0.5), THREE),
        Case(("aclnnForeachAddcdivScalarV2",), listed(t._foreach_addcdiv, 0.5), THREE, low=0.5),
        Case(("aclnnForeachCopy",), copied_lists, TWO),
        Case(("aclnnForeachZeroInplace",), zeroed_list),
    ]


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
    *unary(),
    *arithmetic(),
    *bounded(),
    *losses(),
    *comparisons(),
    *activations(),
    *of_pictures(),
    *products(),
    *shaping(),
    *indexing(),
    *reductions(),
    *lists(),
    *norms(),
    *fused(),
    *experts(),
]
